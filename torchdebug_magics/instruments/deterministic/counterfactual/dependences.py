"""What the numbers of a cell depend on, worst first."""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.errors import error_line
from torchdebug_magics.format import listed
from torchdebug_magics.instrument import Body
from torchdebug_magics.instruments.deterministic.counterfactual.reachable_state import (
    IN,
    OF_GRADIENTS,
    KeptObject,
    StateNow,
    line_that_changes,
    reached,
)
from torchdebug_magics.instruments.deterministic.ops.digest_recorder import DigestRecorder
from torchdebug_magics.instruments.deterministic.ops.op_recording import is_documented, repair
from torchdebug_magics.instruments.deterministic.report import Dependence, Divergence, On
from torchdebug_magics.instruments.deterministic.ritual.ritual import Ritual
from torchdebug_magics.instruments.deterministic.ritual.status import Seedable
from torchdebug_magics.instruments.deterministic.twice.answers import ARRIVAL, LISTING, PROCESS, Answers
from torchdebug_magics.instruments.deterministic.twice.body import TooLong, processes_count
from torchdebug_magics.instruments.deterministic.twice.run_comparison import Difference, Effect, effect_of, results_of
from torchdebug_magics.instruments.deterministic.twice.runs import FirstRun, Runs
from torchdebug_magics.probing.names import Named, values_found
from torchdebug_magics.probing.source.syntax import enclosing, loops_around, nodes, tree_of
from torchdebug_magics.probing.source.user_code import location, raised_at, writes_of
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.state.process_settings import SETTINGS
from torchdebug_magics.probing.state.rng import same_state
from torchdebug_magics.report import Location

_FUNCTIONAL = re.compile(r"[\w.]*\b(?:alpha_|feature_)?dropout[123]?d?\b(?=\()")
_FIRST_SEED = 20_011
_DROPPING = {"RReLU": "`RReLU`", "GaussianNoise": "noise"}
_LIBRARY = {"torch": "torch's generator", "numpy.random": "NumPy's global generator", "random": "Python's `random`"}
_MOST_NAMED = 3
_ASKING = frozenset(
    {"listdir", "scandir", "iglob", "glob", "rglob", "iterdir", "walk", "as_completed", "imap_unordered", "getpid", "getppid"}
)


Changed: TypeAlias = Iterator[tuple[Dependence, tuple[str, ...]]]
"""What the numbers depend on, each with the names of what the next run finds changed."""


class DependenceSearch:
    """What the numbers of a cell depend on whose second run agreed; made before the first run. What is found before an interrupt stays."""

    def __init__(self, runs: Runs, ritual: Ritual, *, quick: bool) -> None:
        self._runs = runs
        self._begin = [(seedable, seedable.read()) for seedable in ritual.seedables]
        self._processes = processes_count()
        self._drawn: tuple[Seedable, ...] = ()
        """Generators that the first run has drawn from."""
        self._found: list[tuple[int, Dependence]] = []
        """How bad it is, and what."""
        self.carried: tuple[str, ...] = ()
        """Names of what the next run finds changed."""
        self.unchecked: dict[str, tuple[int, Callable[[], Changed]]]
        """What is still to be tried."""
        self.unchecked = {"other seeds": (0, self._on_seeds)}
        if not quick:
            self.unchecked |= {
                "the determinism settings": (3, lambda: on_settings(runs, ritual)),
                "other orders of files and completed work": (2, lambda: on_arrival(runs)),
                "the next run": (4, lambda: carried_by(runs, self._begin) if runs.can_go_on else iter(())),
            }

    def over(self) -> None:
        """The first run has ended. Processes that it has started may draw from what they were forked with."""
        has_children = processes_count() != self._processes
        self._drawn = tuple(seedable for seedable, state in self._begin if not same_state(seedable.read(), state) or has_children)

    @property
    def depends_on(self) -> tuple[Dependence, ...]:
        """The worst first."""
        return tuple(one for _, one in sorted(self._found, key=operator.itemgetter(0)))

    def run(self, orders: Iterable[Dependence]) -> bool:
        """Whether what was found holds: not if one more run with nothing otherwise differs, too. `orders` are those of sets."""
        self._found = [(1, order) for order in orders]
        is_steady = False
        for name, (badness, look) in list(self.unchecked.items()):
            for found, changed in look():
                if not is_steady:
                    effect = effect_of(self._runs)
                    if effect is not None and effect.reached:
                        self._found.clear()
                        return False
                    is_steady = True
                self._found.append((5 if changed and not badness else badness, found))
                self.carried = (*changed, *self.carried) if badness else (*self.carried, *changed)
            del self.unchecked[name]
        return True

    def _on_seeds(self) -> Changed:
        """One for each generator whose seed moves the results, with its name if the user has seeded it before the cell.

        A run each, and a few more where Python hands the numbers to torch.
        """
        for seed, seedable in enumerate(self._drawn, _FIRST_SEED):
            sow = functools.partial(seedable.sow, seed)
            effect = effect_of(self._runs, lambda _, sow=sow: sow(), hears=True)  # type: ignore[misc]  # the name is bound anew in each round
            if effect is None or not (effect.reached or effect.prints):
                continue
            if effect.prints is not None:
                dependence = _drawn_by(seedable, effect.prints, "the number printed here comes")
            else:
                # An op that draws is surer than what came to torch from Python, be it by way of the same generator.
                begin = effect.first or effect.reached[0]
                earlier = [known for known in effect.beginnings if known.place <= begin.place]
                begin = next((known for known in reversed(earlier) if known.op is not None and known.op.plan.is_random), begin)
                plan = None if begin.op is None else begin.op.plan
                is_op = plan is not None and plan.is_random
                drawn = None if is_op else line_that_changes(self._runs, seedable.read, begin.place)
                drawing = f"`{plan.base}` draws" if plan is not None and is_op else "this line draws"
                dependence = _drawn_by(seedable, drawn or begin.location, drawing, op=begin.op_name, module=begin.module)
                if dependence.on == "seed" and plan is not None and plan.base == "randperm" and seedable.name == "torch":
                    dependence = replace(dependence, fix=f"{dependence.fix}, or pass `generator=torch.Generator().manual_seed(42)`")
                if not effect.has_backward:
                    dependence = _of_dropout(dependence, begin) or unloaded(dependence, effect.differing, self._runs.body) or dependence
            yield dependence, (_LIBRARY.get(seedable.name, seedable.name),) if dependence.on == "carried_state" else ()


def of_divergence(found: Divergence | None) -> tuple[Dependence, ...]:
    """What it is that differs even with the same start and the same seeds; nothing where that is not known."""
    if found is None or found.on is None:
        return ()
    at, other = found.location, found.other
    if other is not None and found.cause not in {"uninitialized_memory", "control_flow"}:
        at, other = other, at  # the line that makes the number, and the one at which it comes to torch
    return (
        Dependence(on=found.on, op=found.op, module=found.module, location=at, other=other, what=found.explanation, fix=found.fix),
        *found.further,
    )


def on_settings(runs: Runs, ritual: Ritual) -> Changed:
    """The first op that differs between them; no run where the first one has had no op that the settings are for."""
    earlier = runs.first.recording
    if not any(map(_is_set, earlier.ops)):
        return
    first = FirstRun(earlier.another(), {})
    with ritual.left_off():
        recorder = DigestRecorder(first.recording, runs.guard, runs.hooks)
        error = runs.again(recorder, lambda: first.results.update(results_of(runs.body, recorder.is_unwritten)))
        effect = effect_of(runs, first=first) if error is None and not recorder.has_failed else None
    begin = None if effect is None else effect.first
    if begin is None or begin.op is None or not _is_set(begin.op.plan.name):
        return  # by chance in these two runs and not in the others: no setting does anything for it
    op = begin.op.plan
    what = f"without the determinism settings, `{op.base}` adds in an order that varies"
    fix = "call `torch.use_deterministic_algorithms(True)` before this line"
    yield Dependence(on="settings", op=op.name, module=begin.module, location=begin.location, what=what, fix=fix), ()


def on_arrival(runs: Runs) -> Changed:
    """With folders listed and work finished in another order, and another process number; no run where nothing reached asks for one."""
    in_body = {word for statement in runs.body.statements for word in re.findall(r"\w+", ast.unparse(statement))}
    names = (written.loaded | written.loaded_attributes for written in map(writes_of, reached(runs.body)[1]))
    if _ASKING.isdisjoint(in_body.union(*names)):
        return
    answers = Answers(runs.body.namespace, turned=None)
    effect = effect_of(runs, answers.attach)
    asked = [one for one in answers.given if one.influence in {ARRIVAL, LISTING, PROCESS}]
    begin = None if effect is None else effect.first
    if begin is None or not asked:
        return
    for one in asked if len(asked) > 1 else ():
        alone = effect_of(runs, Answers(runs.body.namespace, turned=frozenset({one})).attach)
        if alone is not None and alone.reached:
            asked = [one]
            break
    yield replace(asked[0].dependence, op=begin.op_name, module=begin.module), ()


def _is_set(op: str) -> bool:
    """Whether the settings decide how an op of that name is computed, on a device in use."""
    base = op.split(".")[1]
    return is_documented(base) or (torch.cuda.is_initialized() and bool(repair(base)))


def _drawn_by(generator: Seedable, at: Location | None, drawing: str, op: str = "", module: str | None = None) -> Dependence:
    """By whom the generator was seeded."""
    whose = _LIBRARY.get(generator.name, f"`{generator.name}`")
    if generator.seeded in {"hand", "default", "ritual"} or (generator.seeded == "unknown" and not generator.is_global):
        on: On = "carried_state"
        what = f"{drawing} from {whose}, which was seeded before this cell and continues from where the last run left off"
        fix = f"add `{generator.fix}` at the top of this cell"
    else:
        on, what = "seed", f"{drawing} from {whose}, which is not seeded"
        fix = f"add `{generator.fix}` {_before_all_draws(at)}"
    return Dependence(on=on, op=op, module=module, location=at, what=what, fix=fix)


def _before_all_draws(at: Location | None) -> str:
    """Where a seed goes: before a line that runs again, in a function or a loop, each run would draw the same numbers."""
    if at is None or at.function.isidentifier() or ((tree := tree_of(at.file)) is not None and loops_around(tree, at.line)):
        return "at the top of this cell" if at is None or at.cell is not None else "where the program begins"
    return "before this line"


def _of_dropout(found: Dependence, begin: Difference) -> Dependence | None:
    """Dropout where nothing is trained: the mode is the fault, and no seed."""
    kind = begin.module_kind
    if kind is not None and begin.is_training and kind.__module__.startswith("torch.nn."):
        where = f" (`{begin.module}`)" if begin.module else ""
        what = f"{_DROPPING.get(kind.__name__, 'dropout')}{where} is in training mode and random in each run"
        return replace(found, on="seed", what=what, fix="call `.eval()` on the model before the forward pass")
    if found.location is not None and (called := _FUNCTIONAL.search(found.location.source)):
        what = f"`{called[0]}` also drops elements in eval mode: it ignores `model.training`"
        return replace(found, on="seed", what=what, fix=f"write `{called[0]}(..., training=self.training)` and call `.eval()` on the model")
    return None


def unloaded(found: Dependence, differing: Mapping[str, type], body: Body) -> Dependence | None:
    """The line that was to load them; `differing` is what another seed changes, by name, with the type of the variable it is in.

    None where the cell loads nothing into a model whose weights differ.
    """
    discarded = {id(node.value) for node in nodes(ast.Expr, *body.statements)}
    for call in nodes(ast.Call, *body.statements):
        if not isinstance(call.func, ast.Attribute):
            continue
        model, method = ast.unparse(call.func.value), call.func.attr
        left = [name for name in differing if name.startswith(f"{model}.")]
        if not left:
            continue
        names = ", ".join(f"`{name}`" for name in left[:_MOST_NAMED]) + (f" and {len(left) - _MOST_NAMED} more" * (len(left) > _MOST_NAMED))
        what = f"{names} still hold their random initial weights, although this line loads weights"
        fix = ""
        if id(call) in discarded and isinstance(inspect.getattr_static(differing[left[0]], method, None), classmethod):
            what = f"{what}: `{method}` returns a new model, which is discarded"
            fix = f"assign the result: `{model} = {ast.unparse(call)}`"
        elif method == "load_state_dict" and any(word.arg == "strict" and ast.unparse(word.value) == "False" for word in call.keywords):
            fix = "check the `missing_keys` that `load_state_dict` returns, and rename the saved keys; `strict=True` raises for them"
        if fix:
            return replace(found, op="", location=location(body.file, call.lineno, "<module>"), what=what, fix=fix)
    return None


def carried_by(runs: Runs, seeds: Sequence[tuple[Seedable, Any]]) -> Changed:
    """The dependence, and the names of what the next run, with these seeds, finds changed; nothing where it gives the same."""
    start, ends = StateNow(runs.body), list[StateNow]()

    def at_end(_stack: ExitStack) -> None:
        for seedable, state in seeds:
            seedable.write(state)
        ends.append(StateNow(runs.body))

    effect = effect_of(runs, at_end, from_end=True, hears=True)
    if effect is None or not ends:
        return
    changed = start.changed(ends[0])
    places = ends[0].kept | start.kept
    variables = tuple(name for name in changed if not places[name].is_elsewhere)
    if not variables and not runs.outside.changed:  # torch itself sets variables of the environment: it is the last to be named
        variables = changed
    begin, error = effect.first, effect.error
    at, other = effect.prints, None
    if effect.prints is not None and changed:
        names = variables or changed
        other = line_that_changes(runs, places[names[0]].digest)
    elif begin is not None:
        names, other = _reaching(runs, effect, begin, variables, places)
        at = _branch(begin) if other is None and begin.kind == "way" else begin.location
    elif isinstance(error, (Exception, TooLong)):  # before anything else differs
        names, at = changed, raised_at(error)
    else:
        return
    mode = None if begin is None or effect.has_backward else _of_mode(begin)
    what, fix = mode or _in_words(runs, names[:_MOST_NAMED])
    if begin is None and isinstance(error, TooLong):
        what = f"{what}, so that it does not end"
    elif begin is None and error is not None:
        what = f"the next run raises {error_line(error, 120)}"
    op, module = ("", None) if begin is None else (begin.op_name, begin.module)
    first, second = (at, None) if other is None or other == at else (other, at)
    found = Dependence(on="carried_state", op=op, module=module, location=first, other=second, what=what, fix=fix)
    yield found, names or runs.outside.changed


def _reaching(
    runs: Runs, effect: Effect, begin: Difference, variables: tuple[str, ...], places: Mapping[str, KeptObject]
) -> tuple[tuple[str, ...], Location | None]:
    """The user's variables that reached an op changed, those of the op at which all begins first; and the line that changed them."""
    tensors = (Named(name, value) for name, value in runs.body.left().items() if not name.startswith("_"))
    found = reversed(values_found(tensors, lambda value: isinstance(value, torch.Tensor) and not is_lazy(value)))
    known = {memory: one.name for one in found if (memory := memory_of(one.value)) in runs.written}
    given = {one.place: sorted(effect.suspects.get(one.place, frozenset()) & known.keys()) for one in effect.beginnings}
    ordered = sorted((one for one in effect.beginnings if one.kind == "given"), key=lambda one: one.place != begin.place)
    paths = [known[memory] for one in ordered for memory in given[one.place]]
    names = tuple(dict.fromkeys(path.partition(".")[0].partition("[")[0] for path in paths))
    lines = (runs.writers.get(memory) for memory in effect.suspects.get(begin.place, ()))
    other = next((line.location for line in lines if line is not None), None)
    if all(given.values()):
        return names, other
    gradients = tuple(name for name in variables if name.endswith(OF_GRADIENTS))
    held = gradients if begin.phase == "backward" and gradients else tuple(name for name in variables if name not in gradients)
    if held and not names and not gradients:
        other = line_that_changes(runs, places[held[0]].digest)
    return tuple(dict.fromkeys((*names, *held))), other


def _branch(begin: Difference) -> Location | None:
    """The innermost `if` around the line where the next run goes another way; else the line."""
    if (at := begin.location) is None:
        return None
    branches = [node.lineno for node in enclosing(tree_of(at.file), at.line) if isinstance(node, ast.If)]
    return location(at.file, branches[-1], at.function) if branches else at


def _of_mode(begin: Difference) -> tuple[str, str] | None:
    """Running statistics that move where nothing is trained: the mode is the fault."""
    if begin.module_kind is None or not issubclass(begin.module_kind, torch.nn.modules.batchnorm._NormBase):
        return None
    what = f"`{begin.module or begin.module_kind.__name__}` is in training mode and updates its running statistics in each run"
    return what, "call `.eval()` on the model before the forward pass"


def _in_words(runs: Runs, names: tuple[str, ...]) -> tuple[str, str]:
    if not names and runs.outside.changed:
        files = listed([f"`{name}`" for name in runs.outside.changed[:_MOST_NAMED]])
        fix = f"delete {files} at the top of this cell, or write it in another cell"
        return f"the next run starts with {files} as this run left it", fix
    if not names:
        return "the next run starts from state that this run changed", "create the objects that the cell changes in the cell itself"
    values = runs.body.left()
    gradients = [name for name in names if name.endswith(OF_GRADIENTS)]
    if gradients:
        model = gradients[0].removesuffix(OF_GRADIENTS)
        return f"the next run adds to the gradients that this run left in `{model}`", f"`{model}.zero_grad()` before `backward()`"
    parts = ((name, *name.partition(IN)) for name in names)
    quoted = listed([f"`{var}` in `{holder}`" if holder else name if name in SETTINGS else f"`{var}`" for name, var, _, holder in parts])
    if all(isinstance(values.get(name), (torch.nn.Module, torch.optim.Optimizer)) for name in names):
        return f"the next run starts with {quoted} as this run left it", f"create {quoted} in this cell"
    return f"this run changes {quoted}, and the next run starts from that", _fix_of(names[0], values.get(names[0]), quoted)


def _fix_of(name: str, value: object, quoted: str) -> str:
    if (setting := SETTINGS.get(name)) is not None:
        return f"call `{setting.line.format(setting.read())}` at the top of this cell"
    if IN in name:
        return f"define `{name.rpartition(IN)[2]}` in this cell"
    if callable(value) or isinstance(value, (int, float, str, bool, type(None))):
        return f"set {quoted} at the top of this cell"
    copied = f"{name}.clone()" if isinstance(value, torch.Tensor) else f"copy.deepcopy({name})"
    return f"work on a copy, `{copied}`, or create {quoted} in this cell"
