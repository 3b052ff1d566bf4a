"""Suspects in the update: clipping, weight decay, the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchdebug_magics.format import number
from torchdebug_magics.instruments.overfit.training.change import Change, Undo

if TYPE_CHECKING:
    import torch

    from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence

__all__ = ["learning_rates", "never_steps", "suspects"]

_UP, _DOWN = (10.0, 100.0, 1e3, 1e4, 1e5), (0.1, 1e-2, 1e-3, 1e-4)
_DECAY = 0.02
_DECAYED, _SLOWER = 0.3, 0.1
_USUAL = {"SGD": 0.1, "Adagrad": 0.1, "LBFGS": 1.0}


def suspects(seen: Evidence) -> Iterator[Change]:
    """Yields training without clipping, and without weight decay."""
    if seen.base.clipped is not None and not seen.base.is_zeroed:
        before, after = seen.base.clipped
        yield Change(
            suspect="clipping",
            text="no clipping",
            headline=f"Clipping shrinks the gradient norm from {number(before)} to {number(after)}: too small to learn from",
            fix=f"clip at a larger norm, such as `max_norm={max(1.0, _round(before)):g}`, or not at all",
            factor=after / before if before else None,
            keeps_gradients=True,
        )
    if any(decay >= _DECAY for decay in seen.decays):
        yield Change(
            suspect="weight_decay",
            text="weight_decay=0",
            headline=f"Weight decay {max(seen.decays):g} is too large: without it, the model learns {seen.subject}",
            fix=f'`for group in {seen.optimizer}.param_groups: group["weight_decay"] = 0.0`',
            factor=max(seen.decays),
            on_update=_with(weight_decay=lambda _: 0.0),
        )


def never_steps(seen: Evidence) -> Iterator[Change]:
    """Yields a call of `step` for an optimizer of the model's parameters that is never stepped."""
    if seen.base.optimizers or seen.base.error is not None:
        return
    own = {id(one) for one in seen.base.named_parameters().values()}
    optimizer = next((one for one in seen.optimizers if any(id(p) in own for group in one.param_groups for p in group["params"])), None)
    if optimizer is not None:
        yield Change(
            suspect=None,
            text="optimizer.step() at the end of each step",
            headline="The optimizer never steps: no parameter changes",
            fix=f"call `{seen.optimizer}.step()` after `loss.backward()`",
            on_end=optimizer.step,
        )


def _decaying(seen: Evidence) -> Iterator[Change]:
    """Yields slower schedules, where the scheduler lowers the learning rate too early."""
    first, last = max(seen.rates, default=0.0), seen.base.last_rate
    if last is None or not first or last > _DECAYED * first:
        return
    for text, change in (
        (f"learning rate kept at {first:g}", lambda _: first),
        ("learning rate lowered a tenth as fast", lambda now: first * (now / first) ** _SLOWER if now > 0 else 0.0),
    ):
        yield Change(
            suspect="learning_rate",
            text=text,
            headline=f"The scheduler lowers the learning rate from {first:g} to {last:.2g} in {len(seen.base.losses)} steps: too early",
            fix=f"call `scheduler.step()` less often: the learning rate falls to {last:.2g} before the model learns {seen.subject}",
            factor=first / last if last else math.inf,
            on_update=_with(lr=change),
        )


def learning_rates(seen: Evidence) -> Iterator[Change]:
    """Yields learning rates changed by powers of ten, the likelier direction first."""
    yield from _decaying(seen)
    if seen.rates and not any(seen.rates):
        usual = _USUAL.get(type(seen.base.optimizers[0]).__name__, 1e-3)
        yield _rate(
            seen,
            f"lr={usual:g}",
            f"The learning rate is 0: with {usual:g} the model learns {seen.subject}",
            usual,
            math.inf,
            lambda _: usual,
        )
        return
    losses = seen.base.losses
    tail = losses[len(losses) // 2 :]
    rises = not all(map(math.isfinite, losses)) or (len(tail) > 1 and max(tail) > 1.2 * losses[0])
    jumps = len(tail) > 2 and sum(one > other for one, other in zip(tail[1:], tail, strict=False)) > 0.3 * len(tail)  # noqa: PLR2004
    order = (*_DOWN, *_UP) if rises else (10.0, 0.1, 100.0, 0.01, *_UP[2:], *_DOWN[2:]) if jumps else (*_UP, *_DOWN)
    for factor in order:
        if not seen.base.optimizers:
            yield _by_hand(seen, factor)
            continue
        rate = max(seen.rates) if seen.rates else math.nan
        is_low = factor > 1
        new = rate * factor
        word = "small" if is_low else "large"
        headline = f"The learning rate {rate:g} is too {word}: with {new:g} the model learns {seen.subject}"
        yield _rate(seen, f"learning rate x{factor:g}", headline, new, factor, lambda old, by=factor: old * by)


def _by_hand(seen: Evidence, factor: float) -> Change:
    """Where the user's own code updates: for plain gradient descent, larger gradients are a larger learning rate."""
    word = "small" if factor > 1 else "large"
    return Change(
        suspect="learning_rate",
        text=f"learning rate x{factor:g}",
        headline=f"The learning rate is too {word}: multiplied by {factor:g}, the model learns {seen.subject}",
        fix=f"multiply the learning rate by {factor:g}",
        factor=factor,
        backward_scale=factor,
    )


def _rate(seen: Evidence, text: str, headline: str, new: float, factor: float, change: Any) -> Change:
    is_one = len(set(seen.rates)) <= 1
    code = f'group["lr"] = {new:g}' if is_one or not math.isfinite(factor) else f'group["lr"] *= {factor:g}'
    return Change(
        suspect="learning_rate",
        text=text,
        headline=headline,
        fix=f"`for group in {seen.optimizer}.param_groups: {code}`",
        factor=factor,
        on_update=_with(lr=change),
    )


def _with(**settings: Any) -> Any:
    """Every group of parameters with changed settings, for the length of one update."""

    def change(optimizer: torch.optim.Optimizer) -> Undo:
        before = [{name: group[name] for name in settings if name in group} for group in optimizer.param_groups]
        for group, held in zip(optimizer.param_groups, before, strict=True):
            group.update({name: settings[name](value) for name, value in held.items()})

        def undo() -> None:
            for group, held in zip(optimizer.param_groups, before, strict=True):
                group.update(held)

        return undo

    return change


def _round(value: float) -> float:
    return float(f"{2 * value:.1g}")
