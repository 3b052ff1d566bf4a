"""``torchdebug_magics.verify(function)``: what ``%%deterministic --verify`` does, of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.deterministic.probe import DeterministicProbe
from torchdebug_magics.instruments.deterministic.twice.body import FunctionBody
from torchdebug_magics.session import Session

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.report import DeterministicReport

__all__ = ["verify"]


def verify(
    function: Callable[[], object],
    *,
    seed: int = 42,
    strict: bool = False,
    keep_rng: bool = False,
    cost: bool = False,
    anyway: bool = False,
) -> DeterministicReport:
    """Call `function`, without arguments, twice from the same start; what it raises is raised. Afterwards all is as after one call.

    If it does what cannot be undone, such as a request, it is called once and `report.not_verified` says so; `anyway` calls it again.
    """
    if not callable(function):
        msg = f"verify() takes a function and calls it: `verify(step)`, not `verify(step())`; got a {type(function).__name__}"
        raise TypeError(msg)
    body = FunctionBody(function)
    session = Session(DeterministicProbe(seed=seed, strict=strict, keep_rng=keep_rng, verify=True, cost=cost, anyway=anyway, body=body))
    with session:
        body.run()
    return session.report
