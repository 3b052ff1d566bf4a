"""Runs a case through the script door, in this process, and compares what came out with the truth."""

from __future__ import annotations

import copy
import importlib
import linecache
import random
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import torchdebug_magics
from tests import leaks
from tests.nan_cases.case import ANY, Case, Expect, Nothing, Problem

__all__ = ["Outcome", "compare", "compare_location", "plain", "purity", "raised", "same", "watch"]


@dataclass
class Outcome:
    """What a run left behind."""

    namespace: dict[str, Any]
    error: BaseException | None = None
    report: dict[str, Any] | None = None
    """None for a plain run."""
    states: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Before each outermost module call, and after the cell: the backward calls so far, and the state."""
    rng: tuple[Any, ...] = ()
    leftovers: list[str] = field(default_factory=list)


def file_name(part: str, case: Case) -> str:
    """The name that the finding must carry."""
    return part if part in case.files else f"<{part}:{case.name}>"


def watch(case: Case, **more: Any) -> Outcome:
    """Under nanhunt."""
    with _world(case) as namespace:
        session = torchdebug_magics.nanhunt(**{**case.options, **more})
        outcome, hooks = Outcome(namespace), hooks_of(namespace)
        before = leaks.snapshot()
        try:
            with session:
                _execute(case, "cell", case.cell, namespace)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome.error = error
        outcome.rng = _rng()
        outcome.states = [(-1, state(namespace))]
        outcome.leftovers = [*leaks.differences(before, leaks.snapshot()), *sorted(hooks_of(namespace) - hooks)]
        outcome.report = session.report.to_dict()
        return outcome


def plain(case: Case) -> Outcome:
    """As if nanhunt did not exist; keeps the states that a finding must have put back."""
    with _world(case) as namespace, _recorded(namespace) as states:
        outcome = Outcome(namespace, states=states)
        try:
            _execute(case, "cell", case.cell, namespace)
        except Exception as error:
            outcome.error = error
        outcome.rng = _rng()
        states.append((-1, state(namespace)))
        return outcome


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
    exec(compile(text, name, "exec", dont_inherit=True), namespace)  # noqa: S102


def _rng() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (torch.get_rng_state(), random.getstate(), () if numpy is None else numpy.random.get_state())


def state(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter, buffer and optimizer state reachable from the namespace, copied."""
    found: dict[str, Any] = {}
    for name, value in list(namespace.items()):
        if isinstance(value, torch.nn.Module):
            tensors = {**dict(value.named_parameters(remove_duplicate=False)), **dict(value.named_buffers(remove_duplicate=False))}
            found.update({f"{name}.{path}": _copy(tensor) for path, tensor in tensors.items()})
        elif isinstance(value, torch.optim.Optimizer):
            found[f"{name}.state"] = copy.deepcopy(value.state_dict()["state"])
        elif isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
            found[name] = _copy(value)
    return found


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


@contextmanager
def _recorded(namespace: dict[str, Any]) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    states: list[tuple[int, dict[str, Any]]] = []
    count = depth = 0
    inside = False
    ordinary = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        nonlocal count, inside
        if inside:  # of a reentrant checkpoint
            ordinary(*args, **kwargs)
            return
        states.append((count, state(namespace)))
        inside = True
        try:
            ordinary(*args, **kwargs)
        finally:
            inside = False
        count += 1

    def enter(_module: Any, _args: Any) -> None:
        nonlocal depth
        if depth == 0:
            states.append((count, state(namespace)))
        depth += 1

    def leave(_module: Any, _args: Any, _output: Any) -> None:
        nonlocal depth
        depth -= 1

    with ExitStack() as stack:
        stack.enter_context(torch.nn.modules.module.register_module_forward_pre_hook(enter))
        stack.enter_context(torch.nn.modules.module.register_module_forward_hook(leave, always_call=True))
        stack.callback(setattr, torch.autograd, "backward", ordinary)
        torch.autograd.backward = backward
        yield states


def same(left: Any, right: Any) -> bool:
    """Bit for bit, NaN equal to NaN."""
    if isinstance(left, torch.Tensor):
        if not isinstance(right, torch.Tensor) or left.shape != right.shape or left.dtype != right.dtype:
            return False
        if left.is_meta:
            return right.is_meta
        if left.is_sparse:
            left, right = left.to_dense(), right.to_dense()
        return bool(torch.equal(torch.nan_to_num(left, 1.5), torch.nan_to_num(right, 1.5)) and torch.equal(left.isnan(), right.isnan()))
    if isinstance(left, Mapping):
        return isinstance(right, Mapping) and left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return isinstance(right, (list, tuple)) and len(left) == len(right) and all(map(same, left, right))
    return bool(left is right or (left == right) is True or getattr(left == right, "all", lambda: False)())


def hooks_of(namespace: Mapping[str, Any]) -> set[str]:
    """The hooks on the modules and parameters of the namespace."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return {
        f"{table} of {name}.{path}: {len(hooks)}"
        for name, value in namespace.items()
        if isinstance(value, torch.nn.Module)
        for path, owner in [*value.named_modules(), *value.named_parameters()]
        for table in tables
        if (hooks := getattr(owner, table, None))
    }


def compare(case: Case, report: Mapping[str, Any]) -> dict[str, str]:
    """What differs from the truth, by field; empty where nothing does. The line is left to `compare_location`."""
    finding = report["finding"]
    match case.truth:
        case Nothing() as truth:
            differs = {} if finding is None else {"found": f"nothing is wrong; reported: {report['verdict']}"}
            counts = {"overflow_steps_count": truth.overflow_steps, "steps_count": truth.steps, "backward_count": truth.backwards}
            for name, wanted in counts.items():
                if wanted is not None and not _fits(report[name], wanted):
                    differs[name] = f"{report[name]}, not {wanted}"
            if finding is None and report["problems"] and not truth.problems:
                differs["problems"] = "; ".join(report["problems"])
            return differs
        case Problem(may_miss=True) if finding is None and report["problems"]:
            return {}
        case _ if finding is None:
            return {"found": f"nothing found: {'; '.join(report['problems']) or report['verdict']}"}
        case Expect() as truth:
            got = {**finding, "reproduced": report["reproduced"]}
            return {name: f"{got[name]!r}, not {_shown(wanted)}" for name, wanted in truth.fields().items() if not _fits(got[name], wanted)}
        case Problem() as truth:
            wanted_fields = {"kind": truth.kind, "phase": truth.phase, "step": truth.step}
            if report["reproduced"]:
                wanted_fields["op"] = truth.op
            elif not report["problems"] and report["reproduced"] is None:
                return {"problems": "the report does not say what it could not do"}
            return {name: f"{finding[name]!r}, not {_shown(wanted)}" for name, wanted in wanted_fields.items() if not _fits(finding[name], wanted)}
    msg = f"{case.name}: no such truth"
    raise TypeError(msg)


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
        return {"line": f"{got['file']}:{got['line']} `{got['source']}`, not {place.part} line {place.line}: `{place.source}`"}
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
    differs = {}
    if outcome.leftovers:
        differs["leftovers"] = "; ".join(outcome.leftovers)
    if not case.pure or outcome.report is None:
        return differs
    finding = outcome.report["finding"]
    ended = outcome.states[-1][1]
    stopped = isinstance(outcome.error, torchdebug_magics.NonFiniteError)
    if not stopped:
        differs |= _differing("state after the cell", ended, measure.states[-1][1])
        if not same(outcome.rng, measure.rng):
            differs["rng"] = "the random state after the cell differs from a plain run's"
    elif finding is not None and (finding["phase"] != "optimizer" or "untouched" in finding["weights"]):
        wanted = finding["backward"] - (finding["phase"] == "optimizer")
        before = next((state for count, state in measure.states if count == wanted), None)
        if before is not None:
            differs |= _differing(f"state before backward {wanted}", ended, before)
    return differs


def _differing(what: str, got: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, str]:
    names = [name for name in wanted if name in got and not same(got[name], wanted[name])]
    return {"state": f"{what} differs: {', '.join(names[:5])}"} if names else {}


def raised(case: Case, outcome: Outcome) -> dict[str, str]:
    """Whether the right exception, or none, came out."""
    wanted = case.truth.raises if isinstance(case.truth, Nothing) else None if case.options.get("keep_going") else "NonFiniteError"
    got = None if outcome.error is None else type(outcome.error).__name__
    return {} if got == wanted else {"raised": f"{got} ({outcome.error}), not {wanted}"}
