"""What the planted broken models are made with, and how each is checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchdebug_magics.instruments.shapes.forward_table import examine_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.shapes.report import Failure

__all__ = ["Case", "Parts", "Planted", "broken", "check"]


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], tuple[Any, ...]]
    module: str | None
    op: str | None
    words: tuple[str, ...]
    fix: str
    """Code of the first fix; empty where there is to be none."""


@dataclass
class Planted:
    """The cases of one test file."""

    cases: list[Case] = field(default_factory=list)

    def case(self, module: str | None, op: str | None, *words: str, fix: str = "") -> Callable[..., Any]:
        def add(build: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
            self.cases.append(Case(build.__name__, build, module, op, words, fix))
            return build

        return add


class Parts(nn.Module):
    """A model of the parts that it is given; a tensor that is no parameter becomes a buffer."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)


def broken(build: Callable[[], tuple[Any, ...]]) -> tuple[nn.Module, Failure]:
    model, *inputs = build()
    keywords = inputs.pop() if inputs and isinstance(inputs[-1], dict) else {}
    failure = examine_model(model, *inputs, keywords=keywords).report.failure
    assert failure is not None
    return model, failure


def check(one: Case) -> None:
    _, failure = broken(one.build)
    assert (failure.module, failure.op) == (one.module, one.op)
    for word in one.words:
        assert word in failure.explanation
    if not one.fix:
        assert not [fix for fix in failure.fixes if fix.verified]
        return
    assert failure.fixes[0].code == one.fix
    assert failure.fixes[0].verified
