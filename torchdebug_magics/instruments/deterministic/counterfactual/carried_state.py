"""The state that the first run has left, and the same seeds: what the cell finds changed when it is run again."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TypeAlias

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.format import listed
from torchdebug_magics.instruments.deterministic.counterfactual.effect import Effect, effect_of
from torchdebug_magics.instruments.deterministic.counterfactual.reachable_state import (
    OF_GRADIENTS,
    KeptObject,
    StateNow,
    line_that_changes,
)
from torchdebug_magics.instruments.deterministic.ops.op_recording import Recording
from torchdebug_magics.instruments.deterministic.report import Dependence
from torchdebug_magics.instruments.deterministic.twice.body import TooLong
from torchdebug_magics.instruments.deterministic.twice.run_comparison import Difference, raised_at
from torchdebug_magics.instruments.deterministic.twice.runs import Runs
from torchdebug_magics.probing.names import Named, values_found
from torchdebug_magics.probing.source.syntax import enclosing, tree_of
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.state.process_settings import SETTINGS
from torchdebug_magics.report import Location

_MOST_NAMES = 3
_IN = " in "
Sow: TypeAlias = "Callable[[ExitStack], object]"


def carried_by(runs: Runs, earlier: Recording, results: Mapping[str, int], same_seeds: Sow) -> tuple[Dependence | None, tuple[str, ...]]:
    """The dependence, and the names of what the next run finds changed; None and nothing where the next run gives the same."""
    start, ends = StateNow(runs.body), list[StateNow]()

    def at_end(stack: ExitStack) -> None:
        same_seeds(stack)
        ends.append(StateNow(runs.body))

    with runs.otherwise(at_end, from_end=True):
        effect = effect_of(runs, earlier, results, hears=True)
    if effect is None or not ends:
        return None, ()
    changed = start.changed(ends[0])
    places = ends[0].kept | start.kept
    variables = tuple(name for name in changed if not places[name].is_elsewhere)
    if effect.prints is not None and changed:
        return _of_print(runs, effect.prints, variables or changed, places)
    if not variables and not runs.files:  # torch itself sets variables of the environment: it is the last to be named
        variables = changed
    if not effect.reached:
        return _of_error(runs, effect.error, changed)
    begin = min(effect.reached, key=lambda one: one.place)
    known = _named_memory(runs)
    names = _names_of_memory(effect, begin, known)
    at, other = begin.location, _writing(runs, effect, begin)
    if not all(_given(effect, begin, known) for begin in effect.begins):
        gradients = tuple(name for name in variables if name.endswith(OF_GRADIENTS))
        held = gradients if begin.phase == "backward" and gradients else tuple(name for name in variables if name not in gradients)
        other = line_that_changes(runs, places[held[0]]) if held and not names and not gradients else other
        names = tuple(dict.fromkeys((*names, *held)))
    if other is None and begin.kind == "way" and at is not None:  # the branch that the next run takes
        branches = [node for node in enclosing(tree_of(at.file), at.line) if isinstance(node, ast.If)]
        at = location(at.file, branches[-1].lineno, at.function) if branches else at
    what, fix = _of_mode(begin) if not effect.has_backward else ("", "")
    if not what:
        what, fix = _in_words(runs, names[:_MOST_NAMES])
    op = "" if begin.op is None else begin.op.plan.name
    first, second = (at, None) if other is None or other == at else (other, at)
    return Dependence(on="carried_state", op=op, module=begin.module, location=first, other=second, what=what, fix=fix), names or runs.files


def _of_print(
    runs: Runs, printing: Location, names: tuple[str, ...], places: Mapping[str, KeptObject]
) -> tuple[Dependence | None, tuple[str, ...]]:
    """The next run prints another number, and no tensor differs."""
    changing = line_that_changes(runs, places[names[0]])
    what, fix = _in_words(runs, names[:_MOST_NAMES])
    other = printing if changing is not None and changing != printing else None
    return Dependence(on="carried_state", op="", location=changing or printing, other=other, what=what, fix=fix), names


def _of_error(runs: Runs, error: BaseException | None, names: tuple[str, ...]) -> tuple[Dependence | None, tuple[str, ...]]:
    """The next run raises before anything else differs."""
    if not isinstance(error, (Exception, TooLong)):
        return None, ()
    text = (str(error).strip().splitlines() or [""])[0][:120]
    raised = f"raises {type(error).__name__}{f': {text}' if text else ''}"
    what, fix = _in_words(runs, names[:_MOST_NAMES])
    what = f"{what}, so that it does not end" if isinstance(error, TooLong) else f"the next run {raised}"
    return Dependence(on="carried_state", op="", location=raised_at(error), what=what, fix=fix), names or runs.files


def _named_memory(runs: Runs) -> dict[int, str]:
    """Names of tensors that the run has written to, by their storage."""
    names = (Named(name, value) for name, value in runs.body.left().items() if not name.startswith("_"))
    found = reversed(values_found(names, _has_memory))
    return {memory: one.name for one in found if (memory := memory_of(one.value)) in runs.written}


def _has_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not is_lazy(value)


def _names_of_memory(effect: Effect, first: Difference, known: Mapping[int, str]) -> tuple[str, ...]:
    """The user's variables whose tensors reached an op changed, those of what is told of first."""
    ordered = sorted((begin for begin in effect.begins if begin.kind == "given"), key=lambda begin: begin.place != first.place)
    paths = [known[memory] for one in ordered for memory in _given(effect, one, known)]
    return tuple(dict.fromkeys(path.partition(".")[0].partition("[")[0] for path in paths))


def _given(effect: Effect, begin: Difference, known: Mapping[int, str]) -> list[int]:
    """Storages that the op was given and the first run had changed."""
    return sorted(one for one in effect.suspects.get(begin.place, ()) if one in known)


def _writing(runs: Runs, effect: Effect, begin: Difference) -> Location | None:
    """The line of the first run that wrote to what the op was given."""
    lines = (runs.writers.get(memory) for memory in effect.suspects.get(begin.place, ()))
    return next((line.location for line in lines if line is not None), None)


def _of_mode(begin: Difference) -> tuple[str, str]:
    """Running statistics that move where nothing is trained: the mode is the fault."""
    if begin.module_kind is None or not issubclass(begin.module_kind, torch.nn.modules.batchnorm._NormBase):
        return "", ""
    what = f"`{begin.module or begin.module_kind.__name__}` is in training mode and updates its running statistics in each run"
    return what, "call `.eval()` on the model before the forward pass"


def _in_words(runs: Runs, names: tuple[str, ...]) -> tuple[str, str]:
    if not names and runs.files:
        files = listed([f"`{name}`" for name in runs.files[:_MOST_NAMES]])
        return (
            f"the next run starts with {files} as this run left it",
            f"delete {files} at the top of this cell, or write it in another cell",
        )
    if not names:
        return "the next run starts from state that this run changed", "create the objects that the cell changes in the cell itself"
    values = runs.body.left()
    gradients = [name for name in names if name.endswith(OF_GRADIENTS)]
    if gradients:
        model = gradients[0].removesuffix(OF_GRADIENTS)
        return f"the next run adds to the gradients that this run left in `{model}`", f"`{model}.zero_grad()` before `backward()`"
    quoted = listed([_quoted(name) for name in names])
    if all(isinstance(values.get(name), (torch.nn.Module, torch.optim.Optimizer)) for name in names):
        return f"the next run starts with {quoted} as this run left it", f"create {quoted} in this cell"
    return f"this run changes {quoted}, and the next run starts from that", _fix_of(names[0], values.get(names[0]), quoted)


def _fix_of(name: str, value: object, quoted: str) -> str:
    if (setting := SETTINGS.get(name)) is not None:
        return f"call `{setting.line.format(setting.read())}` at the top of this cell"
    if _IN in name:
        return f"define `{name.rpartition(_IN)[2]}` in this cell"
    if callable(value) or isinstance(value, (int, float, str, bool, type(None))):
        return f"set {quoted} at the top of this cell"
    copied = f"{name}.clone()" if isinstance(value, torch.Tensor) else f"copy.deepcopy({name})"
    return f"work on a copy, `{copied}`, or create {quoted} in this cell"


def _quoted(name: str) -> str:
    variable, _, function = name.partition(_IN)
    return f"`{variable}` in `{function}`" if function else name if name in SETTINGS else f"`{name}`"
