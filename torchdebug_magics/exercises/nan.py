"""Plant a NaN and hunt it down."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchdebug_magics.exercises.checking import Exercise, Sealed, UnsolvedError, expect, expect_kind, shown
from torchdebug_magics.instruments.nanhunt.report import NanReport

_QUIET_STEPS = 50
_STEEPEST = 1e4
_FAR = slice(-3, None)
"""Of the distances that are tried, those that are far from 0."""
_STEP = Sealed("nan/step", "a2f448be3ac24583c7a786ff6b0e8a29")
_LAYER = Sealed("nan/layer", "63b24ccae57ea8d0022ccbe611e40ec6")
check = Exercise("All tasks are solved: you can plant a NaN, find it in three ways, and say which of the three to believe.")


@contextmanager
def _at_step(network: nn.Module, step: int) -> Iterator[None]:
    """Let the global counter that the second layer reads be `step`."""
    second = list(network.children())[1]
    names = type(second).forward.__globals__
    before = names.get("step", 0)
    names["step"] = step
    try:
        yield
    finally:
        names["step"] = before


@check.task
def planted(make_network: Callable[[], tuple[nn.Module, Any]]) -> None:
    """All is well during the quiet steps, and not after them."""
    network, _ = make_network()
    x = torch.randn(32, 8)
    with _at_step(network, _QUIET_STEPS):
        expect(network(x).isfinite().all(), f"up to step {_QUIET_STEPS} nothing may go wrong, so ask for `step > {_QUIET_STEPS}` first.")
    with _at_step(network, _QUIET_STEPS + 1):
        first, second, *_ = network.children()
        planted = second(first(x))
        expect(
            not planted.isfinite().all(),
            f"when the global `step` is {_QUIET_STEPS + 1}, the second layer still gives finite numbers; "
            "take the logarithm of the distance to the minimum there.",
        )
        expect(
            planted.isneginf().any() and not planted.isnan().any(),
            f"when the global `step` is {_QUIET_STEPS + 1}, the smallest value should become -inf, the logarithm of 0.",
        )


@check.task
def hooked(assert_finite: Callable[..., object]) -> None:
    """The hook raises for a NaN and for both infinities, and lets all else pass, unchanged."""
    layer, fine = nn.Linear(2, 2), torch.tensor([[0.0, -1.0], [3e38, 3e38]])
    for bad in (float("nan"), float("inf"), float("-inf")):
        expect(
            _refuses(assert_finite, layer, torch.tensor([[0.0, 1.0], [bad, 2.0]])),
            f"the hook lets an output with {bad} pass; let it `assert` that `torch.isfinite` holds for all of the output.",
        )
    expect(not _refuses(assert_finite, layer, fine), "the hook also stops where every number is finite; ask `torch.isfinite` of each one.")
    expect(assert_finite(layer, (), fine) is None, "a hook that returns something replaces the output; return nothing.")


def _refuses(hook: Callable[..., object], layer: nn.Module, output: Tensor) -> bool:
    try:
        hook(layer, (), output)
    except AssertionError:
        return True
    except (ValueError, ArithmeticError) as error:
        msg = f"the hook stopped with {type(error).__name__}; let an `assert` stop it, which is what the loop below waits for."
        raise UnsolvedError(msg) from error
    return False


@check.task
def found_by_hand(make_network: Callable[[], tuple[nn.Module, Any]], first_step: int, first_layer: str, anomaly_names: str) -> None:
    """What the hook and the anomaly mode said."""
    expect(_STEP.fits(first_step), f"{shown(first_step)} is not the step at which the hook fired; it is in the line that the loop printed.")
    expect(_LAYER.fits(first_layer), f"{shown(first_layer)} is not the layer whose hook fired; it is in the line that the loop printed.")
    named = _anomaly(make_network()[0])
    expect(
        re.findall(r"\w+Backward\d*", str(anomaly_names)) == [named],
        f"{shown(anomaly_names)} is not the function that the anomaly mode named; it is the word in quotation marks in its message.",
    )


def _anomaly(network: nn.Module) -> str:
    """The backward function that torch's anomaly mode names: torch's own answer, whatever its version."""
    x = torch.randn(32, 8)
    with _at_step(network, _QUIET_STEPS + 1), torch.autograd.set_detect_anomaly(True):
        try:
            (network(x) - x.sum(1, keepdim=True)).square().mean().backward()
        except RuntimeError as error:
            named = re.search(r"Function '(\w+)'", str(error))
            return named[1] if named else ""
    return ""


@check.task
def hunted(hunt: NanReport, op: str) -> None:
    """What %%nanhunt said."""
    expect(isinstance(hunt, NanReport), "`hunt` is not a report; write `%%nanhunt -o hunt` as the first line of the training cell.")
    expect(hunt.findings, "`hunt` found nothing; does the cell under `%%nanhunt` train the network with the plant?")
    called = str(getattr(op, "__name__", op)).strip(" '\"`").casefold().rpartition(".")[2]  # of `torch.log`, the last part
    expect(
        called == hunt.findings[0].op, f"{shown(op)} is not the operation; the report's first line names it, and so does `hunt.finding.op`."
    )


@check.task
def repaired(safe_log: Callable[[Tensor], Tensor]) -> None:
    """Finite, not too steep, and still a logarithm."""
    distance = torch.cat((torch.zeros(1), torch.logspace(-12, -3, 10), torch.tensor([0.5, 1.0, 20.0]))).requires_grad_()
    value = safe_log(distance * 1)  # not a leaf, which could not be changed in place
    expect_kind(value, Tensor, "`safe_log` should give the logarithm of its bounded input, a tensor")
    expect(value.isfinite().all(), "the logarithm of 0 is still infinite; keep the input away from 0.")
    expect(value.requires_grad, "no gradient comes through `safe_log`, so that nothing before it would learn.")
    value.sum().backward()
    slope = distance.grad
    expect(slope is not None and slope.isfinite().all(), "the value is finite, and its gradient is not; bound the input, not the result.")
    steepest = 0.0 if slope is None else slope.max().item()
    expect(
        steepest <= _STEEPEST,
        f"the value is finite now, but its slope near 0 is {steepest:.0e}, and one update with that throws the weights away; "
        "choose a larger bound.",
    )
    expect(
        torch.allclose(value[_FAR], distance[_FAR].log(), atol=0.05),
        "far from 0 it should be the logarithm as before; compare with `torch.log`.",
    )
