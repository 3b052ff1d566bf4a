"""Runs a case through the script door, in this process, and compares what came out with the truth."""

from __future__ import annotations

import copy
import importlib
import io
import linecache
import math
import random
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import torchdebug_magics
from tests import leaks
from tests.nan_cases.case import ANY, Case, Expect, Nothing, Problem

__all__ = ["Outcome", "compare", "compare_location", "plain", "purity", "raised", "same", "watch"]

LONG = 200
"""A container with more than that is not compared."""


@dataclass
class State:
    """What the namespace held at one time."""

    backwards: int
    """How many backward calls were over; -1 after the cell."""
    tensors: dict[str, Any]
    """Parameters, buffers, optimizer states."""
    values: dict[str, Any]
    """Plain numbers, strings and containers of them, and those that modules keep as attributes."""
    at_backward: bool = False


@dataclass
class Outcome:
    """What a run left behind."""

    namespace: dict[str, Any]
    error: BaseException | None = None
    report: dict[str, Any] | None = None
    """None for a plain run."""
    states: list[State] = field(default_factory=list)
    """Before each outermost module call and each backward, and after the cell."""
    rng: tuple[Any, ...] = ()
    leftovers: list[str] = field(default_factory=list)
    printed: str = ""


def file_name(part: str, case: Case) -> str:
    """The name that the finding must carry."""
    return part if part in case.files else f"<{part}:{case.name}>"


def watch(case: Case, **more: Any) -> Outcome:
    """Under nanhunt."""
    with _world(case) as namespace, redirect_stdout(io.StringIO()) as printed:
        session = torchdebug_magics.nanhunt(**{**case.options, **more})
        outcome, hooks = Outcome(namespace), hooks_of(namespace)
        before = leaks.snapshot()
        try:
            with session:
                _execute(case, "cell", case.cell, namespace)
        except Exception as error:
            outcome.error = error
        _finish(outcome, printed.getvalue())
        outcome.leftovers = [*leaks.differences(before, leaks.snapshot()), *sorted(hooks_of(namespace) - hooks)]
        outcome.report = session.report.to_dict()
        return outcome


def plain(case: Case) -> Outcome:
    """As if nanhunt did not exist; keeps the states that a finding must have put back."""
    with _world(case) as namespace, _recorded(namespace) as states, redirect_stdout(io.StringIO()) as printed:
        outcome = Outcome(namespace, states=states)
        try:
            _execute(case, "cell", case.cell, namespace)
        except Exception as error:
            outcome.error = error
        _finish(outcome, printed.getvalue())
        return outcome


def _finish(outcome: Outcome, printed: str) -> None:
    numpy = sys.modules.get("numpy")
    outcome.rng = (torch.get_rng_state(), random.getstate(), () if numpy is None else numpy.random.get_state())
    outcome.states.append(_state(-1, outcome.namespace))
    outcome.printed = printed


@contextmanager
def _world(case: Case) -> Iterator[dict[str, Any]]:
    """A namespace after the setup, as a module that classes and dataclasses can find themselves in."""
    module = types.ModuleType(f"nan_case_{case.name}")
    known, threads, formatwarning = set(sys.modules), torch.get_num_threads(), warnings.formatwarning
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, text in case.files.items():
            Path(folder, name).write_text(text)
        sys.modules[module.__name__] = module
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            _execute(case, "prelude", case.prelude, vars(module))
            _execute(case, "setup", case.setup, vars(module))
            yield vars(module)
        finally:
            sys.path.remove(folder)
            for name in {Path(name).stem for name in case.files} - known:
                sys.modules.pop(name, None)
            del sys.modules[module.__name__]
            torch.set_num_threads(threads)
            warnings.formatwarning = formatwarning  # lightning has one of its own
            if "torch._dynamo" in sys.modules:
                sys.modules["torch._dynamo"].reset()  # what one case compiled is no business of the next
            for name in [name for name in linecache.cache if name.startswith((folder, f"<cell:{case.name}", f"<setup:{case.name}"))]:
                del linecache.cache[name]


def _execute(case: Case, part: str, text: str, namespace: dict[str, Any]) -> None:
    name = file_name(part, case)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec", dont_inherit=True), namespace)


def _state(backwards: int, namespace: Mapping[str, Any], *, at_backward: bool = False) -> State:
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, value in list(namespace.items()):
        kind = type(value)  # never isinstance: a case may hold objects that answer it with an exception
        if name.startswith("__"):
            continue
        if issubclass(kind, torch.nn.Module):
            owned = {**dict(value.named_parameters(remove_duplicate=False)), **dict(value.named_buffers(remove_duplicate=False))}
            tensors.update({f"{name}.{path}": _copy(tensor) for path, tensor in owned.items()})
            for path, module in value.named_modules():
                values.update(
                    {f"{name}.{path}.{key}": item for key, item in vars(module).items() if _simple(item) and not key.startswith("_")}
                )
        elif issubclass(kind, torch.optim.Optimizer):
            tensors[f"{name}.state"] = copy.deepcopy(value.state_dict()["state"])
        elif issubclass(kind, torch.Tensor):
            if value.requires_grad and value.is_leaf:
                tensors[name] = _copy(value)
        elif _simple(value):
            values[name] = copy.deepcopy(value)
    return State(backwards, tensors, values, at_backward)


def _simple(value: Any) -> bool:
    kind = type(value)
    if kind in {list, tuple, set}:
        return len(value) < LONG and all(map(_simple, value))
    if kind is dict:
        return len(value) < LONG and all(map(_simple, value.values()))
    return kind in {int, float, str, bool, type(None)}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


@contextmanager
def _recorded(namespace: dict[str, Any]) -> Iterator[list[State]]:
    states: list[State] = []
    count = depth = 0
    inside = False
    ordinary, ordinary_grad = torch.autograd.backward, torch.autograd.grad

    def backward(*args: Any, **kwargs: Any) -> None:
        nonlocal count, inside
        if inside:  # of a reentrant checkpoint
            ordinary(*args, **kwargs)
            return
        states.append(_state(count, namespace, at_backward=True))
        inside = True
        try:
            ordinary(*args, **kwargs)
        finally:
            inside = False
        count += 1

    def grad(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        found = ordinary_grad(*args, **kwargs)
        count += not (inside or kwargs.get("create_graph") or any(args[4:5]))  # a part of a loss that is still to come
        return found

    def enter(_module: Any, _args: Any) -> None:
        nonlocal depth
        if depth == 0:
            states.append(_state(count, namespace))
        depth += 1

    def leave(_module: Any, _args: Any, _output: Any) -> None:
        nonlocal depth
        depth -= 1

    with ExitStack() as stack:
        stack.enter_context(torch.nn.modules.module.register_module_forward_pre_hook(enter))
        stack.enter_context(torch.nn.modules.module.register_module_forward_hook(leave, always_call=True))
        stack.callback(setattr, torch.autograd, "backward", ordinary)
        torch.autograd.backward = backward
        stack.callback(setattr, torch.autograd, "grad", ordinary_grad)
        torch.autograd.grad = grad
        yield states


def same(left: Any, right: Any) -> bool:
    """Bit for bit, NaN equal to NaN."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _same_tensor(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    equal = left == right
    return bool(getattr(equal, "all", lambda: equal)())


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device or left.is_meta:
        return left.is_meta and right.is_meta
    if left.is_sparse:
        left, right = left.to_dense(), right.to_dense()
    return bool(torch.equal(torch.nan_to_num(left, 1.5), torch.nan_to_num(right, 1.5)) and torch.equal(left.isnan(), right.isnan()))


def hooks_of(namespace: Mapping[str, Any]) -> set[str]:
    """The hooks on the modules and parameters of the namespace."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return {
        f"{table} of {name}.{path}: {len(hooks)}"
        for name, value in namespace.items()
        if issubclass(type(value), torch.nn.Module)
        for path, owner in [*value.named_modules(), *value.named_parameters()]
        for table in tables
        if (hooks := getattr(owner, table, None))
    }


def compare(case: Case, report: Mapping[str, Any]) -> dict[str, str]:
    """What differs from the truth, by field; empty where nothing does. The line is left to `compare_location`."""
    truth, finding = case.truth, report["finding"]
    if isinstance(truth, Nothing):
        return _compare_nothing(truth, report)
    if finding is None:
        excused = isinstance(truth, Problem) and truth.may_miss and report["problems"]
        return {} if excused else {"found": f"nothing found: {'; '.join(report['problems']) or report['verdict']}"}
    if isinstance(truth, Expect):
        found = {"count": len(report["findings"]), "bad_steps": (finding["step"], *finding["again"])}
        return _unlike({**finding, **found, "reproduced": report["reproduced"]}, truth.fields())
    if report["reproduced"] is None and not report["problems"]:
        return {"problems": "the report does not say what it could not do"}
    wanted = {"kind": truth.kind, "phase": truth.phase, "step": truth.step}
    return _unlike(finding, {**wanted, "op": truth.op} if report["reproduced"] else wanted)


def _compare_nothing(truth: Nothing, report: Mapping[str, Any]) -> dict[str, str]:
    counts = {"overflow_steps_count": truth.overflow_steps, "steps_count": truth.steps, "backward_count": truth.backwards}
    differs = _unlike(report, {name: wanted for name, wanted in counts.items() if wanted is not None})
    if report["finding"] is not None:
        differs["found"] = f"nothing is wrong; reported: {report['verdict']}"
    elif report["problems"] and not truth.problems:
        differs["problems"] = "; ".join(report["problems"])
    return differs


def _unlike(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{got[name]!r}, not {_shown(value)}" for name, value in wanted.items() if not _fits(got[name], value)}


def compare_location(case: Case, report: Mapping[str, Any], *, cells: Mapping[str, tuple[int, int]] | None = None) -> dict[str, str]:
    """Whether the finding names the marked line. `cells` has, for a notebook, the cell number and first line of each part."""
    finding, place = report["finding"], case.place()
    if finding is None or place is None or isinstance(case.truth, Nothing) or case.truth.line is ANY:
        return {}
    got = finding["location"]
    if got is None:
        return {"line": f"no location, not {place.part} line {place.line}: `{place.source}`"}
    if cells is not None and place.part in cells:
        cell, first = cells[place.part]
        right = got["cell"] == cell and got["line"] == place.line + first - 1
    else:
        right = Path(got["file"]).name == file_name(place.part, case) and got["line"] == place.line
    if not right:
        cell = "" if cells is None else f" (In[{got['cell']}], not {cells.get(place.part)})"
        return {"line": f"{got['file']}:{got['line']}{cell} `{got['source']}`, not {place.part} line {place.line}: `{place.source}`"}
    return {} if got["source"] == place.source else {"source": f"`{got['source']}`, not `{place.source}`"}


def _fits(got: Any, wanted: Any) -> bool:
    if wanted is ANY:
        return True
    if isinstance(wanted, frozenset):
        return any(_fits(got, one) for one in wanted)
    return bool(list(got) == list(wanted)) if isinstance(wanted, tuple) else bool(got == wanted)


def _shown(wanted: Any) -> str:
    return " or ".join(sorted(map(repr, wanted))) if isinstance(wanted, frozenset) else repr(wanted)


def purity(case: Case, outcome: Outcome, measure: Outcome) -> dict[str, str]:
    """What the session changed that it must not, against a plain run from the same seed."""
    differs = {"leftovers": "; ".join(outcome.leftovers)} if outcome.leftovers else {}
    if case.pure and isinstance(outcome.error, torchdebug_magics.NonFiniteError):
        differs |= _stopped(outcome, measure)
    elif case.pure:
        differs |= _ran_on(outcome, measure)
    return differs


def _ran_on(outcome: Outcome, measure: Outcome) -> dict[str, str]:
    ended, last = outcome.states[-1], measure.states[-1]
    differs = _differing("state", "after the cell", ended.tensors, last.tensors)
    differs |= _differing("values", "after the cell", ended.values, last.values)
    if not same(outcome.rng, measure.rng):
        differs["rng"] = "the random state after the cell differs from a plain run's"
    if outcome.printed != measure.printed:
        differs["printed"] = f"{outcome.printed!r}, not {measure.printed!r}"
    return differs


def _stopped(outcome: Outcome, measure: Outcome) -> dict[str, str]:
    assert outcome.report is not None
    finding, ended = outcome.report["finding"], outcome.states[-1]
    differs = {}
    if not measure.printed.startswith(outcome.printed):
        differs["printed"] = f"{outcome.printed!r} is no beginning of {measure.printed!r}"
    at = finding["backward"] - (finding["phase"] == "optimizer")
    here = [one for one in measure.states if one.backwards == at]
    if here and "poisoned" not in finding["weights"]:
        differs |= _differing("state", f"before backward {at}", ended.tensors, here[0].tensors)
    if here and here[-1].at_backward and finding["phase"] in {"forward", "loss", "backward"}:
        differs |= _differing("values", f"at backward {at}", ended.values, here[-1].values)
    return differs


def _differing(field_: str, when: str, got: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, str]:
    names = [name for name in wanted if name in got and not same(got[name], wanted[name])]
    return {field_: f"{when} differ: {', '.join(names[:5])}"} if names else {}


def raised(case: Case, outcome: Outcome) -> dict[str, str]:
    """Whether the right exception, or none, came out."""
    wanted = case.truth.raises if isinstance(case.truth, Nothing) else None if case.options.get("keep_going") else "NonFiniteError"
    got = None if outcome.error is None else type(outcome.error).__name__
    return {} if got == wanted else {"raised": f"{got} ({outcome.error}), not {wanted}"}
