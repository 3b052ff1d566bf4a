"""``%autograd loss``: what a loss can reach, read from its graph; bare, the error of autograd that ended the previous cell."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import byte_size, listed, plural
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.autograd.errors.explained import explained
from torchdebug_magics.instruments.autograd.errors.inplace import is_packed, saved_names
from torchdebug_magics.instruments.autograd.errors.raised import named_members
from torchdebug_magics.instruments.autograd.named import cell_files
from torchdebug_magics.instruments.autograd.report import AutogradFinding, AutogradReport, Cut, GraphReport, ModuleNodes, Reach, verdict
from torchdebug_magics.instruments.autograd.source_readings import cuts_in_forward, cuts_toward
from torchdebug_magics.probing.graphs import MOST_NODES
from torchdebug_magics.probing.modules import live_modules, parts_of
from torchdebug_magics.probing.names import user_names
from torchdebug_magics.probing.storages import gathered_for, local_of, shards_note, storages
from torchdebug_magics.probing.where import excerpt

_WITHOUT_TAPE = "read from the error and the graph; `%%autograd` above the cell also records the line of every op"


def examine(context: CellContext, *losses: object, every_step: bool = False) -> GraphReport | AutogradReport | None:
    """A report on the graph of one or more tensors; without any, on the previous cell's error, if autograd raised it."""
    del every_step
    if not losses:
        return None if context.last_error is None else after_error(context.last_error)
    for loss in losses:
        if not isinstance(loss, torch.Tensor):
            msg = f"%autograd takes tensors, not {type(loss).__name__}: write `%autograd loss`"
            raise TorchDebugError(msg)
    tensors = [loss for loss in losses if isinstance(loss, torch.Tensor)]
    distance, nodes = _distances(tensors)
    gathered = gathered_for(live_modules())
    leaves = [(gathered.get(id(node.variable), node.variable), steps) for node, steps in nodes if hasattr(node, "variable")]
    reached = {id(leaf): steps for leaf, steps in leaves}
    of_model: list[tuple[str, torch.Tensor]] = [
        (name, one) for name, one in named_members() if isinstance(one, torch.nn.Parameter) and id(one) not in gathered
    ]
    known = {id(one) for _, one in of_model}
    others = [(_name(leaf), leaf) for leaf, _ in leaves if id(leaf) not in known]
    reaches = [_reach(name, one, reached) for name, one in _of_models_reached(of_model, reached)]
    reaches += [_reach(name, one, reached) for name, one in others]
    inner = [node for node, _ in nodes if not hasattr(node, "variable")]
    storage_bytes, is_freed = _saved(inner, known)
    saved = sum(storage_bytes.values())
    problems = [f"the graph has more than {MOST_NODES:,} nodes: the rest was not read"] if distance >= MOST_NODES else []
    problems += ["backward() has freed the saved tensors of this graph: their memory is not counted"] if is_freed else []
    problems += filter(None, [shards_note((leaf for leaf, _ in leaves), "gradient norms are")])
    cuts = _cuts(reaches, tensors, context.names)
    finding = _cut(tensors, context.names, cuts)
    return GraphReport(
        findings=(finding,) if finding is not None else (),
        reaches=tuple(reaches),
        nodes_count=len(inner),
        saved_bytes=saved,
        cuts=cuts,
        modules=_modules(nodes, of_model),
        problems=tuple(problems),
        sentence=_sentence(reaches, len(inner), saved, finding),
    )


def _distances(tensors: Iterable[torch.Tensor]) -> tuple[int, list[tuple[Any, int]]]:
    """(how many nodes were read, each node with the number of edges between it and the nearest of the tensors)."""
    todo = deque((tensor.grad_fn, 0) for tensor in tensors if tensor.grad_fn is not None)
    seen: dict[Any, int] = {}
    while todo and len(seen) < MOST_NODES:
        node, steps = todo.popleft()
        if node in seen:
            continue
        seen[node] = steps
        todo.extend((following, steps + 1) for following, _ in node.next_functions if following is not None)
    return len(seen), list(seen.items())


def _of_models_reached(members: list[tuple[str, torch.Tensor]], reached: dict[int, int]) -> list[tuple[str, torch.Tensor]]:
    """The parameters of the models of which the loss reaches one, and where it reaches none, of all."""
    modules = list(live_modules())
    inner = parts_of(modules)
    roots = [module for module in modules if id(module) not in inner]
    touched = [root for root in roots if any(id(one) in reached for one in root.parameters())]
    wanted = {id(one) for root in touched or roots for one in root.parameters()}
    return [(name, one) for name, one in members if id(one) in wanted]


def _reach(name: str, tensor: torch.Tensor, reached: dict[int, int]) -> Reach:
    norm = (
        float(local_of(tensor.grad).detach().double().norm()) if tensor.grad is not None and tensor.grad.layout is torch.strided else None
    )
    steps = reached.get(id(tensor))
    return Reach(name=name, reached=steps is not None, path_length=steps, grad_norm=norm, is_frozen=not tensor.requires_grad)


def _name(tensor: torch.Tensor) -> str:
    return next((one.name for one in user_names(sys._getframe(1)) if one.value is tensor), f"a leaf of shape {list(tensor.shape)}")


def _saved(nodes: list[Any], parameters: set[int]) -> tuple[dict[int, int], bool]:
    """(bytes by storage of the tensors that the nodes hold, parameters apart; whether backward() has freed them)."""
    held: dict[int, int] = {}
    is_freed = False
    for node in nodes:
        for name in saved_names(node):
            if is_packed(node, name):
                continue
            try:
                saved = getattr(node, name)
            except RuntimeError as error:
                is_freed |= "freed" in str(error)
                continue
            for tensor in saved if isinstance(saved, (tuple, list)) else (saved,):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in parameters:
                    held.update({storage._cdata: storage.nbytes() for storage in storages(tensor)})
    return held, is_freed and not held


def _modules(nodes: list[tuple[Any, int]], of_model: list[tuple[str, torch.Tensor]]) -> tuple[ModuleNodes, ...]:
    """A node belongs to the module whose parameter is the nearest one before it; from the input to the loss. A storage counts once."""
    owner = {id(one): name.rpartition(".")[0] for name, one in of_model}
    module_of: dict[Any, str] = {}
    counts: dict[str, ModuleNodes] = {}
    counted: set[int] = set()
    for node, _ in sorted((one for one in nodes if not hasattr(one[0], "variable")), key=lambda one: _number(one[0])):
        before = [inner for inner, _ in node.next_functions if inner is not None]
        own = [owner.get(id(inner.variable), "") for inner in before if hasattr(inner, "variable")]
        latest = max((inner for inner in before if inner in module_of), key=_number, default=None)
        name = module_of[node] = next(filter(None, own), module_of[latest] if latest is not None else "")
        known = counts.get(name, ModuleNodes(module=name, nodes_count=0, saved_bytes=0, reached_count=0))
        held, _ = _saved([node], set(owner))
        saved = sum(size for storage, size in held.items() if storage not in counted)
        counted.update(held)
        counts[name] = replace(
            known, nodes_count=known.nodes_count + 1, saved_bytes=known.saved_bytes + saved, reached_count=known.reached_count + len(own)
        )
    return tuple(counts.values())


def _number(node: Any) -> int:
    number: int = node._sequence_nr()
    return number


def _cuts(reaches: list[Reach], tensors: list[torch.Tensor], names: Sequence[str]) -> tuple[Cut, ...]:
    """Read from the source: of the models of which the loss misses a part, and of the lines that made a loss without a graph."""
    missed = any(not one.reached and not one.is_frozen for one in reaches)
    without = {names[place] for place, tensor in enumerate(tensors) if not tensor.requires_grad and place < len(names)}
    if not missed and not without:
        return ()
    found: list[Cut] = []
    spaces = {one.name: one.value for one in user_names(sys._getframe(1))}
    for file in reversed(cell_files()) if without else ():
        found += cuts_toward(without, file, sys.maxsize, "<module>", spaces)
        if found:
            break
    if missed and not found:
        found = [cut for value in spaces.values() if isinstance(value, torch.nn.Module) for cut in cuts_in_forward(value, "")]
    return tuple(dict.fromkeys(found))


def _cut(tensors: list[torch.Tensor], names: Sequence[str], cuts: tuple[Cut, ...]) -> AutogradFinding | None:
    first = next(iter(cuts), None)
    for place, tensor in enumerate(tensors):
        if not tensor.requires_grad:
            name = names[place] if place < len(names) else "the tensor"
            return AutogradFinding(
                kind="cut",
                raised=False,
                headline=f"`{name}` has no graph and does not require grad",
                tensor=name,
                op=first.op if first is not None else None,
                location=first.location if first is not None else None,
                fix="put `%%autograd` above the cell that computes it, and call backward() there, to see the line that cut the graph",
                excerpt=excerpt(first.location) if first is not None and first.location is not None else (),
            )
    return None


def _sentence(reaches: list[Reach], nodes: int, saved: int, finding: AutogradFinding | None) -> str:
    if finding is not None:
        return finding.sentence()
    missed = [one.name for one in reaches if not one.reached and not one.is_frozen]
    reached = sum(one.reached for one in reaches)
    frozen = sum(one.is_frozen for one in reaches)
    parts = [
        f"reaches {reached} of {len(reaches) - frozen} trainable tensors",
        plural(nodes, "graph node"),
        f"{byte_size(saved)} saved for backward",
    ]
    lost = f" · not reached: {listed(missed)}" if missed else ""
    return f"The loss {', '.join(parts)}{lost}"


def after_error(error: BaseException) -> AutogradReport | None:
    """None for an error that autograd did not raise."""
    finding = explained(error)
    if finding is None:
        return None
    report = AutogradReport(findings=(finding,), problems=(_WITHOUT_TAPE,))
    return verdict(report)
