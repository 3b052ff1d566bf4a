"""What the numbers of a cell depend on, worst first."""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import count

import torch

from torchdebug_magics.instrument import Body
from torchdebug_magics.instruments.deterministic.counterfactual.carried_state import carried_by
from torchdebug_magics.instruments.deterministic.counterfactual.effect import Effect, effect_of
from torchdebug_magics.instruments.deterministic.counterfactual.reachable_state import last_line_that_changes, reached
from torchdebug_magics.instruments.deterministic.influences.answers import Answers
from torchdebug_magics.instruments.deterministic.influences.influence import ARRIVAL, LISTING, PROCESS
from torchdebug_magics.instruments.deterministic.ops.digest_recorder import DigestRecorder
from torchdebug_magics.instruments.deterministic.ops.op_recording import Op, Recording, Seen, is_documented, repair
from torchdebug_magics.instruments.deterministic.report import Dependence, Divergence
from torchdebug_magics.instruments.deterministic.ritual.ritual import Ritual
from torchdebug_magics.instruments.deterministic.ritual.status import Seedable
from torchdebug_magics.instruments.deterministic.twice.run_comparison import Difference, results_of
from torchdebug_magics.instruments.deterministic.twice.runs import Runs
from torchdebug_magics.instruments.deterministic.twice.workers import processes_count
from torchdebug_magics.probing.source.syntax import loops_around, nodes, tree_of
from torchdebug_magics.probing.source.user_code import location, writes_of
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


class DependenceSearch:
    """What the numbers of a cell depend on whose second run agreed. What is found before an interrupt stays."""

    def __init__(
        self,
        runs: Runs,
        earlier: Recording,
        results: Mapping[str, int],
        draws: Draws,
        ritual: Ritual,
        orders: Iterable[Dependence],
        *,
        quick: bool,
    ) -> None:
        self._runs, self._earlier, self._results = runs, earlier, results
        self._draws = draws
        self._found = [(1, order) for order in orders]
        """How bad it is, and what; `orders` are those of sets."""
        self._carried: tuple[str, ...] = ()
        self._looks: dict[str, tuple[int, Callable[[], Iterable[Dependence | None]]]]
        self._looks = {"other seeds": (0, lambda: draws.dependences(runs, earlier, results))}
        if not quick:
            self._looks |= {
                "the determinism settings": (3, lambda: [on_settings(runs, earlier, ritual)]),
                "other orders of files and completed work": (2, lambda: [on_arrival(runs, earlier, results)]),
                "the next run": (4, self._of_the_next_run),
            }

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What is still to be tried."""
        return tuple(self._looks)

    @property
    def depends_on(self) -> tuple[Dependence, ...]:
        """The worst first."""
        return tuple(one for _, one in sorted(self._found, key=operator.itemgetter(0)))

    @property
    def carried(self) -> tuple[str, ...]:
        """Names of what the next run finds changed."""
        return (*self._carried, *self._draws.carried)

    def run(self) -> bool:
        """Whether what was found holds: not if one more run with nothing otherwise differs, too."""
        is_steady = False
        for name, (badness, look) in list(self._looks.items()):
            for found in filter(None, look()):
                if not is_steady:
                    effect = effect_of(self._runs, self._earlier, self._results)
                    if effect is not None and effect.reached:
                        self._found.clear()
                        return False
                    is_steady = True
                self._found.append((5 if not badness and found.on == "carried_state" else badness, found))
            del self._looks[name]
        return True

    def _of_the_next_run(self) -> Iterator[Dependence | None]:
        if self._runs.can_go_on:
            found, names = carried_by(self._runs, self._earlier, self._results, self._draws.sow_as_before)
            yield found
            self._carried = names if found is not None else ()


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


def on_settings(runs: Runs, earlier: Recording, ritual: Ritual) -> Dependence | None:
    """The first op that differs between them; no run where the first one has had no op that the settings are for."""
    if not any(map(_is_set, earlier.ops)):
        return None
    recording, results = earlier.another(), dict[str, int]()

    def add(seen: Seen, _op: Op) -> None:
        recording.add(seen)

    with ritual.left_off():
        recorder = DigestRecorder(recording, add, runs.guard, runs.hooks)
        error = runs.again(recorder, lambda: results.update(results_of(runs.body, recorder.is_unwritten)))
        effect = effect_of(runs, recording, results) if error is None and not recorder.has_failed else None
    if effect is None or not effect.reached:
        return None
    begin = min(effect.reached, key=lambda one: one.place)
    if begin.op is None or not _is_set(begin.op.plan.name):
        return None  # by chance in these two runs and not in the others: no setting does anything for it
    op = begin.op.plan
    return Dependence(
        on="settings",
        op=op.name,
        module=begin.module,
        location=begin.location,
        what=f"without the determinism settings, `{op.base}` adds in an order that varies",
        fix="call `torch.use_deterministic_algorithms(True)` before this line",
    )


def on_arrival(runs: Runs, earlier: Recording, results: Mapping[str, int]) -> Dependence | None:
    """With folders listed and work finished in another order, and another process number; no run where nothing reached asks for one."""
    if not _asks(runs):
        return None
    answers = Answers(runs.body.namespace, turned=None)
    with runs.otherwise(answers.attach):
        effect = effect_of(runs, earlier, results)
    if effect is None or not effect.reached:
        return None
    begin = min(effect.reached, key=lambda one: one.place)
    asked = [one for one in answers.given if one.influence in {ARRIVAL, LISTING, PROCESS}]
    for one in asked if len(asked) > 1 else ():
        with runs.otherwise(Answers(runs.body.namespace, turned=frozenset({one})).attach):
            alone = effect_of(runs, earlier, results)
        if alone is not None and alone.reached:
            asked = [one]
            break
    if not asked:
        return None
    return replace(asked[0].dependence, op="" if begin.op is None else begin.op.plan.name, module=begin.module)


def _asks(runs: Runs) -> bool:
    _, codes = reached(runs.body)
    in_body = {word for statement in runs.body.statements for word in re.findall(r"\w+", ast.unparse(statement))}
    return bool(_ASKING & in_body) or any(_ASKING & (written.loaded | written.loaded_attributes) for written in map(writes_of, codes))


def _is_set(op: str) -> bool:
    """Whether the settings decide how an op of that name is computed, on a device in use."""
    base = op.split(".")[1]
    return is_documented(base) or (torch.cuda.is_initialized() and bool(repair(base)))


class Draws:
    """Which generators the first run has drawn from, and what changes when each of them has another seed."""

    def __init__(self, seedables: tuple[Seedable, ...]) -> None:
        self._begin = [(seedable, seedable.read()) for seedable in seedables]
        self._processes = processes_count()
        self._drawn: tuple[Seedable, ...] = ()
        self._seeds = count(_FIRST_SEED)
        self.carried: tuple[str, ...] = ()
        """Generators that the user has seeded before the cell, and that the next run finds further on."""

    def over(self) -> None:
        """The first run has ended. Processes that it has started may draw from what they were forked with."""
        has_children = processes_count() != self._processes
        self._drawn = tuple(one for one, state in self._begin if not same_state(one.read(), state) or has_children)

    def sow_as_before(self, _stack: ExitStack) -> None:
        """Let each generator stand where the first run found it."""
        for one, state in self._begin:
            one.write(state)

    def dependences(self, runs: Runs, earlier: Recording, results: Mapping[str, int]) -> Iterator[Dependence]:
        """One for each generator whose seed moves the results; a run each, and a few more where Python hands the numbers to torch."""
        for one in self._drawn:
            seed = next(self._seeds)
            with runs.otherwise(lambda _, one=one, seed=seed: one.sow(seed)):  # type: ignore[misc]  # the names are bound anew in each round
                effect = effect_of(runs, earlier, results, hears=True)
            if effect is None or not (effect.reached or effect.prints):
                continue
            if effect.prints is not None:
                found = _seeded(one, effect.prints, "the number printed here comes")
            else:
                begin = _begin_of(effect)
                is_op = begin.op is not None and begin.op.plan.is_random
                found = _dependence(one, begin, None if is_op else last_line_that_changes(runs, one.read, begin.place))
                if not effect.has_backward:
                    found = _of_dropout(found, begin) or unloaded(found, effect.differing, runs.body) or found
            if found.on == "carried_state":
                self.carried += (_LIBRARY.get(one.name, one.name),)
            yield found


def _begin_of(effect: Effect) -> Difference:
    """Where the numbers are drawn: an op that draws is surer than what came to torch from Python, be it by way of the same generator."""
    first = min(effect.reached, key=lambda one: one.place)
    if first.op is not None and first.op.plan.is_random:
        return first
    drawn = [begin for begin in effect.begins if begin.op is not None and begin.op.plan.is_random and begin.place < first.place]
    return drawn[-1] if drawn else first


def _dependence(generator: Seedable, begin: Difference, drawn: Location | None) -> Dependence:
    plan = None if begin.op is None else begin.op.plan
    drawing = f"`{plan.base}` draws" if plan is not None and plan.is_random else "this line draws"
    found = replace(_seeded(generator, drawn or begin.location, drawing), op="" if plan is None else plan.name, module=begin.module)
    if found.on == "seed" and plan is not None and plan.base == "randperm" and generator.name == "torch":
        return replace(found, fix=f"{found.fix}, or pass `generator=torch.Generator().manual_seed(42)`")
    return found


def _seeded(generator: Seedable, at: Location | None, drawing: str) -> Dependence:
    """By whom the generator was seeded."""
    whose = _LIBRARY.get(generator.name, f"`{generator.name}`")
    if generator.seeded in {"hand", "default", "ritual"} or (generator.seeded == "unknown" and not generator.is_global):
        what = f"{drawing} from {whose}, which was seeded before this cell and continues from where the last run left off"
        return Dependence(on="carried_state", op="", location=at, what=what, fix=f"add `{generator.fix}` at the top of this cell")
    what = f"{drawing} from {whose}, which is not seeded"
    return Dependence(on="seed", op="", location=at, what=what, fix=f"add `{generator.fix}` {_before_all_draws(at)}")


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
    for call, is_dropped in _calls(body):
        if not isinstance(call.func, ast.Attribute):
            continue
        model, method = ast.unparse(call.func.value), call.func.attr
        left = [name for name in differing if name.startswith(f"{model}.")]
        if not left:
            continue
        names = ", ".join(f"`{name}`" for name in left[:_MOST_NAMED]) + (f" and {len(left) - _MOST_NAMED} more" * (len(left) > _MOST_NAMED))
        what = f"{names} still hold their random initial weights, although this line loads weights"
        at = location(body.file, call.lineno, "<module>")
        if is_dropped and isinstance(inspect.getattr_static(differing[left[0]], method, None), classmethod):
            why = f"{what}: `{method}` returns a new model, which is discarded"
            return replace(found, op="", location=at, what=why, fix=f"assign the result: `{model} = {ast.unparse(call)}`")
        if method == "load_state_dict" and any(
            keyword.arg == "strict" and ast.unparse(keyword.value) == "False" for keyword in call.keywords
        ):
            fix = "check the `missing_keys` that `load_state_dict` returns, and rename the saved keys; `strict=True` raises for them"
            return replace(found, op="", location=at, what=what, fix=fix)
    return None


def _calls(body: Body) -> Iterator[tuple[ast.Call, bool]]:
    """The calls in the cell's own lines, and whether nothing is done with what they return."""
    dropped = {id(node.value) for node in nodes(ast.Expr, *body.statements)}
    return ((node, id(node) in dropped) for node in nodes(ast.Call, *body.statements))
