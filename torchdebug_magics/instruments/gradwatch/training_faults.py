"""The faults of a training, each a rule: what must be true of the record, then the headline, the fix and the reason."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, groupby, islice

from torchdebug_magics.format import listed, number, plural, share
from torchdebug_magics.instruments.gradwatch import record as kept
from torchdebug_magics.instruments.gradwatch import repairs, schedules
from torchdebug_magics.instruments.gradwatch.ablations import ablations, other_rates, other_settings, scaled_inputs
from torchdebug_magics.instruments.gradwatch.loss_faults import (
    FEW_LOSSES,
    NO_DROP,
    NOT_CONVERGED,
    ascending,
    boundless,
    divergence,
    fall_of,
    falls,
    guesses,
    level_of,
    plateau,
    slow_level,
    stands,
)
from torchdebug_magics.instruments.gradwatch.record import GradientHistory, GradientStep, ModuleSeries, ParameterSteps, RunRecord
from torchdebug_magics.instruments.gradwatch.repairs import finding, modules, named, rounded, source_of, title
from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradKind
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.source.edited_source import made_as, made_later
from torchdebug_magics.probing.steps import Link, zeroed_too_early

_EXPLAINED_BY: dict[GradKind, frozenset[GradKind]] = {
    "exploding_spike": frozenset({"ascending", "diverging"}),
    "too_fast": frozenset({"ascending", "diverging"}),
    "diverging": frozenset({"ascending"}),
    "vanishing": frozenset({"dead", "diverging", "too_fast"}),
    "dead": frozenset({"diverging", "not_learning"}),
    "plateau_at_chance": frozenset({"decayed", "dead", "vanishing", "too_fast", "not_learning", "diverging", "exploding_spike"}),
    "clipped_always": frozenset({"diverging"}),
    "not_learning": frozenset({"remade"}),
}
"""What a fault follows from, where both are found in one run."""
_SATURATING = frozenset({"Hardtanh", "LogSigmoid", "Sigmoid", "Softsign", "Tanh"})
_DEAD_STEPS = 8
_HALF = 2
"""Bytes of a float16 or bfloat16."""
_FADED, _FEW_STEPS, _FEW_LAYERS, _SMALLEST = 1e-5, 5, 4, 1e-45
_IN_ORDER = 0.8
"""Share of the pairs of layers in which the later one has the larger gradient."""
_FAST_STEPS, _IMPROVED, _THROWN_OFF = 5, 0.9, 1.2
_CLIPPED_STEPS, _CLIPPED_BY = 20, 10.0
_STILL_STEPS, _STILL_SHARE, _TINY_RATE = 20, 1 / 3, 1e-5
_TINY_GRADIENT = 1e-7
"""Norm of a gradient that is too small for a loss that has not converged."""
_GREEDY, _GONE, _LITTLE = 0.01, 3.0, 0.1
"""Share of a weight that weight decay may take in a step; how often, added up, a weight is gone; the fall of a loss that is no progress."""
_LATE = 100
"""The step from which on a fault begins where the first steps of a training, made again, do not show it."""
_SPIKE_OF_USUAL, _SPIKE_OF_ALL = 20.0, 5.0
_SPIKE_STEPS, _MOST_SPIKES = 10, 8


class Judge:
    """Looks at each step when it comes, as later the steps before it are gone, and at all that is known when asked."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._divergences: list[tuple[GradientHistory, GradFinding]] = []
        self._spikes: list[tuple[GradientHistory, GradientStep, GradFinding]] = []

    def look(self, history: GradientHistory, largest: ModuleSeries | None) -> None:
        """After a step; `largest` is the module with the largest share of its norm."""
        if not any(known is history for known, _ in self._divergences):
            self._divergences += [(history, fault) for fault in divergence(history)]
        if len(self._spikes) < _MOST_SPIKES:
            self._spikes += [(history, history.steps[-1], fault) for fault in _spike(history, largest)]

    def findings(self, *, at_end: bool = False) -> tuple[GradFinding, ...]:
        """All faults, the worst first, without those that follow from another one; some are known only when all is over."""
        all_of_them = []
        for history, fault in self._divergences:
            first, last = history.first_losses, [step.loss for step in history.steps][-5:]
            has_recovered = first and all(map(math.isfinite, last)) and min(last) <= max(first)
            all_of_them += [] if has_recovered else [fault]
        confirmed = []
        for (
            history,
            spike,
            fault,
        ) in self._spikes:  # the norm comes back, or the loss is broken: else something else is trained from there on
            after = [step for step in history.steps if step.number > spike.number]
            is_broken = any(not math.isfinite(step.norm) or step.loss > 10 * history.most_loss for step in after[:3])
            if len(after) < 3 or is_broken or any(step.norm < spike.norm / _SPIKE_OF_ALL for step in after[:5]):  # noqa: PLR2004 - too early to say
                confirmed.append(fault)
        for fault in confirmed[:1]:
            many = f" ({len(self._spikes)} such steps)" if len(self._spikes) > 1 else ""
            all_of_them.append(replace(fault, explanation=f"{fault.explanation}{many}"))
        for history in self._record.histories:
            all_of_them += chain.from_iterable(rule(history) for rule in _RULES[: None if history.steps else 1])
        all_of_them += [*_remade(self._record.histories), *schedules.unscheduled(self._record.histories)]
        all_of_them += schedules.mistimed(self._record.histories) if at_end else ()
        found = {(fault.kind, fault.module, fault.step): fault for fault in all_of_them}.values()
        kinds = {fault.kind for fault in found}
        return tuple(fault for fault in found if not _EXPLAINED_BY.get(fault.kind, frozenset()) & kinds)

    def alternatives(self, findings: Sequence[GradFinding], *, is_in_doubt: bool) -> tuple[GradFinding, ...]:
        """What is to be said of each change that may let a loss fall: one that does not fall, or one that has stopped falling."""
        trained = [history for history in self._record.histories if history.steps]
        is_known = any(fault.stage == "fault" or fault.step >= _LATE for fault in findings[:1])
        if len(trained) != 1 or is_known:
            return ()
        if is_in_doubt:
            return *other_rates(trained[0]), *ablations(trained[0])
        level = level_of(self._record.losses, trained[0])
        if level is not None:
            return tuple(other_settings(trained[0], *level))
        slow = slow_level(self._record.losses, trained[0])
        return tuple(scaled_inputs(trained[0], slow)) if slow is not None else ()

    def doubts(self) -> tuple[str, ...]:
        """Why a training without a proven fault is not healthy."""
        trained = [history for history in self._record.histories if history.steps]
        # A schedule may end with one step of rate 0.
        idle = [history.still[0] for history in trained if history.still and {step.rate for step in list(history.steps)[-2:]} == {0}]
        doubts = [f"the learning rate is 0: the updates from step {step} on change nothing" for step in idle[:1]]
        chance = guesses(trained[0]) if len(trained) == 1 else None  # at equilibrium, the discriminator of a GAN guesses
        if chance is not None:
            doubts.append(f"the loss stays at {chance:.3f} = ln {trained[0].last.classes}: it does not beat guessing")
        elif len(trained) == 1 and (standing := stands(trained[0])) is not None:
            first, last = standing
            line = repairs.overfit_line(trained[0])
            doubts.append(f"the loss does not fall, from {number(first)} to {number(last)}: `{line}` tells whether the model can learn")
        return tuple(doubts)


def _broken_links(history: GradientHistory) -> Iterator[GradFinding]:
    """What no update has changed: by each link that breaks between the loss and a changed parameter, the first one first."""
    name, line, backward, zeroed = history.name, history.line, history.last.backward_line, history.last.zeroed
    say = partial(finding, history, "not_learning")
    furthest = max((steps.link for steps in history.parameters.values()), default=Link.NONE)
    parts = [steps for steps in history.parameters.values() if steps.steps_count >= kept.FEW_UPDATES and steps.link is not Link.NONE]
    # A part of a model may be frozen, or not used, on purpose; a tensor outside of every module is held to be trained.
    loose = [steps for steps in parts if steps.owner.model < 0 and furthest is Link.NONE and steps.link <= Link.WITHOUT_GRADIENT]
    if frozen := [steps for steps in loose or parts if steps.link is Link.FROZEN and (loose or furthest is Link.FROZEN)]:
        headline = f"{named(history, frozen)} {'is' if len(frozen) == 1 else 'are'} not trained: `requires_grad` is False"
        yield say(
            *repairs.thawed(history, frozen), frozen, headline=headline, why=f"`{name}.step()` changes only tensors that get a gradient"
        )
    if furthest in {Link.WITHOUT_GRADIENT, Link.ZERO_GRADIENT} and zeroed is not None and backward is not None and parts:
        fix = f"move `{source_of(zeroed, 'zero_grad')}` before `{source_of(backward, 'backward')}`"
        yield say(zeroed, fix, parts, headline=zeroed_too_early(name), why="an update without a gradient changes nothing")
    cut = loose or (parts if furthest is Link.WITHOUT_GRADIENT else [])
    if cut and backward is not None:
        made = next((place for place, _ in made_as(history.file, name, history.kind)), None)
        fix, edits = made_later(made, line.line if line is not None else 0)
        fix = fix or "create it after the model has all its parameters; `%%autograd` above this cell names a line that cuts the graph"
        headline = f"`{name}` updates {named(history, cut)}, on which the loss does not depend"
        why = "an optimizer updates the tensors that it was created with, and only those that get a gradient"
        yield say(made, fix, cut, headline=headline, why=why, edits=edits, fix_state="compiles" if edits else "advice")
    zero = [steps for steps in parts if steps.link is Link.ZERO_GRADIENT and steps.is_zero and steps.is_matrix]
    if len(zero) > 1:
        tables = [module._parameters for module in live_modules()]
        known = {id(tensor): key for table in tables for key, tensor in list(table.items())}
        owners = history.record.owners
        paths = [f"{owners.name(steps.owner)}.{known.get(id(steps.parameter()), '')}".strip(".") for steps in zero]
        headline = f"{listed([f'`{path}`' for path in paths])} are all zero, and so are their gradients"
        why = "where tensors are multiplied, the gradient of each has the other as a factor: both stay zero for ever"
        yield say(*repairs.not_zero(history, paths[0]), zero, headline=headline, why=why)
    late = [steps for steps in parts if steps.steps_count >= _STILL_STEPS and not history.is_warming_up]
    if unrated := [steps for steps in late if steps.link is Link.ZERO_RATE]:
        headline = f"weights of {modules(history, unrated)} do not change: {Link.ZERO_RATE.words}"
        yield say(
            *repairs.rated(history, repairs.usual_rate(history, 0.0), 0.0),
            unrated,
            headline=headline,
            why="the gradients are not zero, but each update is",
        )
    if rounding := [steps for steps in late if steps.link is Link.UNMOVED and steps.element_size == _HALF and steps.is_matrix]:
        fix = "convert the weights to float32, and use `torch.autocast` for speed"
        headline = f"weights of {modules(history, rounding)} do not change: {Link.UNMOVED.words}"
        yield say(None, fix, rounding, headline=headline, why="an update below half a unit in the last place of a weight is lost")
    still = [steps for steps in late if steps.link in {Link.UNMOVED, Link.BARELY_MOVED}]
    if still and max((steps.link for steps in history.parameters.values() if steps.is_matrix), default=furthest) is not Link.NONE:
        yield from _barely_moved(history, still)
    yield from _faded(history)


def _barely_moved(history: GradientHistory, still: list[ParameterSteps]) -> Iterator[GradFinding]:
    """Updates that change next to nothing, although there are gradients, in a training that does not improve."""
    losses = history.losses()
    if history.is_winding_down or (falls(losses) and fall_of(losses)[0] > NO_DROP * abs(losses[0])):
        return
    rate, ratio = history.steps[-1].rate, max(steps.ratio_max for steps in still)
    change = f"change by at most {ratio:.0e} of their norm per update" if ratio else "do not change"
    say = partial(finding, history, "not_learning", value=ratio)
    headline = f"weights of {modules(history, still)} {change}"
    if rate <= _TINY_RATE:
        why = "the gradients are not zero, but the updates are too small to change the model"
        of_matrices = max((steps.ratio_max for steps in still if steps.is_matrix), default=ratio)
        yield say(*repairs.rated(history, repairs.usual_rate(history, of_matrices)), still, headline=headline, why=why)
    elif losses and abs(losses[0] / history.factor) > NOT_CONVERGED and max(steps.series.norm_max() for steps in still) < _TINY_GRADIENT:
        backward = history.last.backward_line
        where, fix = repairs.unscaled(backward) or (None, "remove what makes the loss small before `backward()`")
        why = f"all gradients are below {_TINY_GRADIENT:.0e}, because the loss is scaled down"
        yield say(where or backward, fix, still, headline=f"{headline}: the gradients are too small", why=why)


def _faded(history: GradientHistory) -> Iterator[GradFinding]:
    """A learning rate that has fallen to next to nothing long before the end, in a training that has not come to its end by itself."""
    start, before = history.still or (0, history.steps_count)
    count, losses = history.steps_count - before, history.losses()
    if count < _STILL_STEPS or count <= _STILL_SHARE * history.steps_count or not losses:
        return
    if abs(losses[-1]) <= NOT_CONVERGED * abs(history.first_losses[0]) or (repair := repairs.kept_rate(history)) is None:
        return
    rate = history.steps[-1].rate
    headline = f"the learning rate falls to {number(rate)}: from step {start} on, the updates change nothing"
    why = f"the last {count:,} of {history.steps_count:,} steps change each weight by less than {kept.STILL:.0e} of it; "
    why += f"the learning rate was {number(history.most_rate)}"
    yield finding(history, "not_learning", *repair, step=start, value=rate, headline=headline, why=why)


def _clips_nothing(history: GradientHistory) -> Iterator[GradFinding]:
    """Clipping after an update or before the backward pass, of gradients that no update uses any more; and clipping of no parameters."""
    clip, backward, clips = history.lost_clip, history.last.backward_line, history.clips
    say = partial(finding, history, "clipped_never", value=float(clips["steps"]))
    if clip is None or clips["steps"] < kept.FEW_UPDATES:
        return
    if clips["early"] == clips["steps"]:
        is_before = backward is not None and backward.file == clip.file and clip.line < backward.line
        headline = f"clipping has no effect: it is called {'before backward()' if is_before else f'after `{history.name}.step()`'}"
        fix = f"move `{source_of(clip, 'clip')}` before `{source_of(history.line, 'step')}`"
        why = "it belongs between backward() and the update: there alone it changes the gradients that the update uses"
        yield say(clip, fix, headline=headline, why=why)
    elif clips["empty"] >= clips["steps"] - 1:  # the first call may have used up what it was given
        why = "what it is given is empty; of a generator, such as `parameters()`, the first reader, such as the optimizer, leaves nothing"
        yield say(*repairs.listed_parameters(clip), headline="clipping has no effect: it is given no parameters", why=why)


def _decayed(history: GradientHistory) -> Iterator[GradFinding]:
    """Weights of which each step takes a share, in a training that does not improve."""
    losses = history.losses()
    if history.decay < _GREEDY or history.decay * history.steps_count < _GONE or len(losses) < FEW_LOSSES:
        return
    if falls(losses) and fall_of(losses)[0] > _LITTLE * abs(losses[0]):
        return
    headline = f"weight decay takes {share(history.decay)} of each weight per step"
    why = f"after {plural(history.steps_count, 'step')}, nothing but what the gradients add is left, and the loss does not decrease"
    yield finding(history, "decayed", *repairs.decaying_less(history), value=history.decay, headline=headline, why=why)


def _remade(histories: Sequence[GradientHistory]) -> Iterator[GradFinding]:
    """Optimizers of the same parameters and the same line that make one step each, and lose what they keep for the next."""
    single = [history for history in histories if history.steps_count == 1 and history.keeps_state and history.line is not None]
    for _, group in groupby(sorted(single, key=lambda history: history.name), key=lambda history: (history.name, history.kind)):
        first, *others = group
        same = [history for history in others if history.line is first.line and history.parameters.keys() == first.parameters.keys()]
        made = repairs.made_once(first) if len(same) + 1 >= _FAST_STEPS else None
        if made is not None:
            where, fix, edits = made
            headline = f"`{first.name}` is made anew in each step"
            why = f"{first.kind} keeps a mean of the gradients of the steps before, and loses it with the optimizer"
            state = "compiles" if edits else "advice"
            yield finding(first, "remade", where, fix, value=len(same) + 1, headline=headline, why=why, edits=edits, fix_state=state)


def _dead(history: GradientHistory) -> Iterator[GradFinding]:
    """Modules on which the loss depends, with a gradient of zeros only, up to the end; not of shards, as another may have the rest."""
    modules = history.modules()
    dead = [module for module in modules if module.zero_run >= _DEAD_STEPS and module.is_used and not module.is_sharded]
    is_learned = any(step.loss == 0 for step in history.steps) and any(module.zero_since for module in dead)
    if not dead or history.most_rate == 0 or is_learned:
        return  # nothing is to be learned, or no more: a hinge loss that has reached 0
    last, step = dead[-1], min(module.zero_since for module in dead)
    name = title(history.names([last])[0])
    others = f" and {plural(len(dead) - 1, 'module')} before it" if len(dead) > 1 else ""
    headline = f"zero gradients in {name}{others} from step {step} on"
    fix = f"replace the ReLU at {name} with `nn.LeakyReLU(0.01)`, and {repairs.rated(history, rounded(history.most_rate / 10))[1]}"
    if len(dead) == len(modules) or not any(kind.startswith("ReLU") for kind in last.owner.kinds):
        fix = "check that nothing rounds or saturates the output, or multiplies it by 0; "
        fix += f"`%%autograd` shows whether gradients are zeroed before `{history.name}.step()`"
    why = "the loss depends on it, but a derivative of zero between them blocks every gradient; it does not recover by itself"
    backward, value = history.last.backward_line, float(last.zero_run)
    yield finding(history, "dead", backward, fix, dead, main=last, step=step, value=value, headline=headline, why=why)


def _too_fast(history: GradientHistory) -> Iterator[GradFinding]:
    """Updates as large as the weights, long after the first steps, in a training that does not improve."""
    losses, fast = history.losses(), [module for module in history.modules() if module.is_matrix and len(module.paces) >= _FAST_STEPS]
    if history.has_closure or history.is_winding_down or not losses or not fast:
        return
    improves = statistics.median(losses[-10:]) < _IMPROVED * history.first_losses[0]
    if improves or history.most_loss < _THROWN_OFF * history.first_losses[0]:
        return  # or it stands still, but not because it was thrown off
    fast.sort(key=lambda module: -statistics.median(module.paces))
    pace, step = statistics.median(fast[0].paces), fast[0].first_step + kept.FIRST_STEPS
    headline = f"updates are too large: {share(pace)} of the weight norm in {title(history.names(fast)[0])}"
    why = "0.1% is usual; from about 10% on, each update undoes the previous ones, and the loss does not decrease"
    where, fix = repairs.rated(history, repairs.usual_rate(history, pace))
    yield finding(history, "too_fast", where, fix, fast, step=step, value=pace, headline=headline, why=why)


def _vanishing(history: GradientHistory) -> Iterator[GradFinding]:
    """Gradients that shrink from layer to layer towards the input, by a factor that no optimizer was made for."""
    for _, group in groupby(history.modules(), key=lambda module: module.owner.model):
        layers = [module for module in group if module.is_matrix and len(module.recent_norms) >= _FEW_STEPS]
        if len(layers) < _FEW_LAYERS:
            continue
        sizes = [statistics.median(layer.recent_norms) / math.sqrt(layer.count) for layer in layers]
        alive = [size for size in sizes if size > 0]
        largest = max(sizes[-max(1, len(sizes) // 3) :])
        if len(alive) < _FEW_LAYERS - 1 or not sizes[0] < _FADED * largest or not alive[0] < 1e-2 * largest or not math.isfinite(largest):
            continue
        pairs = [later > earlier for earlier, later in combinations(sizes, 2)]
        if sum(pairs) < _IN_ORDER * len(pairs):
            continue
        faded = [layer for layer, size in zip(layers, sizes, strict=True) if size < _FADED * largest]
        value, step = max(sizes[0], _SMALLEST) / largest, faded[0].first_step
        used = listed([f"`nn.{kind}()`" for kind in sorted(faded[0].owner.kinds & _SATURATING)])
        headline = f"gradients vanish: at {title(history.names(faded)[0])}, {value:.0e} of those at the output"
        fix = "add skip connections, `x + layer(x)`, or normalization, `nn.LayerNorm(width)`, between the layers"
        fix = f"replace {used} with `nn.ReLU()`; or add skip connections or normalization" if used else fix
        why = "each layer multiplies the gradient by a factor below 1, so the layers near the input barely train"
        backward = history.last.backward_line
        yield finding(history, "vanishing", backward, fix, faded, step=step, value=value, headline=headline, why=why)
        return


def _clipped(history: GradientHistory) -> Iterator[GradFinding]:
    """Clipping of gradients that still have a GradScaler's factor, or that cuts them at each step and by a lot."""
    count, clip, step = history.clips["calls"], history.clip, history.steps[0].number
    if clip is None or not clip.max_norm > 0 or not count:
        return
    usual = statistics.median(step.clipped_from for step in history.steps if step.clipped_from is not None)
    times = usual / clip.max_norm
    say = partial(finding, history, "clipped_always", clip.line, step=step, value=times)
    if count > kept.FEW_UPDATES and not history.clips["unscaled"]:
        scaler = source_of(history.line, ".step(").partition(".step(")[0] or "scaler"
        yield say(
            f"call `{scaler}.unscale_({history.name})` before `{source_of(clip.line, 'clip')}`",
            headline=f"what is clipped, of norm {number(usual)}, is still multiplied by the GradScaler",
            why=f"its factor is divided out in `{scaler}.step()`: the gradients are clipped to much less than {clip.max_norm:g}",
        )
    elif count >= _CLIPPED_STEPS and not history.clips["unclipped"] and _CLIPPED_BY <= times < math.inf:
        yield say(
            f"use `max_norm={rounded(usual):g}`",
            headline=f"all {count:,} gradients are clipped, from norm {number(usual)} to {number(clip.max_norm)}",
            why="clipping is meant for rare large gradients; here it gives all of them the same norm, like a smaller learning rate",
        )


_RULES: tuple[Callable[[GradientHistory], Iterable[GradFinding]], ...] = (
    lambda history: islice(_broken_links(history), 1),
    ascending,
    boundless,
    _clips_nothing,
    _decayed,
    _dead,
    _too_fast,
    _vanishing,
    plateau,
    _clipped,
)


def _spike(history: GradientHistory, largest: ModuleSeries | None) -> Iterator[GradFinding]:
    """Whether the last step's norm is far above the usual and above any before."""
    last, is_early = history.steps[-1], history.since <= _SPIKE_STEPS or history.has_closure
    if is_early or last.norm <= _SPIKE_OF_ALL * history.steps[-2].norm:
        return
    before = [step.norm for step in list(history.steps)[-history.since : -1] if math.isfinite(step.norm)]
    if not max(history.most_norm, _SPIKE_OF_ALL * max(before, default=0.0)) < last.norm < math.inf:
        return
    usual = statistics.median(step.norm for step in list(history.steps)[-50:-1])
    if not last.norm > _SPIKE_OF_USUAL * usual > 0:
        return
    times, batch = last.norm / usual, "" if last.events.batch is None else ", batch {1} of epoch {0}".format(*last.events.batch)
    headline = f"gradient norm spike in step {last.number}{batch}: {times:,.0f}x the usual"
    group = f'[p for group in {history.name}.param_groups for p in group["params"]]'
    fix = f"clip: call `torch.nn.utils.clip_grad_norm_({group}, max_norm={rounded(2 * usual):g})` before `{history.name}.step()`"
    why = f"the norm is {number(last.norm)}, usually {number(usual)}: inspect the inputs and labels of this batch"
    yield finding(
        history, "exploding_spike", history.last.backward_line, fix, main=largest, step=last.number, value=times, headline=headline, why=why
    )
