"""``%autograd loss``: what a loss can reach, read from its graph; bare, the error of autograd that ended the previous cell."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import byte_size, listed, plural
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.autograd.errors.explained import explained
from torchdebug_magics.instruments.autograd.errors.upstream import other_losses
from torchdebug_magics.instruments.autograd.report import AutogradFinding, AutogradReport, Cut, GraphReport, Reach, verdict
from torchdebug_magics.instruments.autograd.source_readings import (
    cell_files,
    cuts_in_forward,
    cuts_toward,
    finding,
    named_members,
    root_modules,
)
from torchdebug_magics.probing.graphs import MOST_NODES, saved_by
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.names import user_names, variable_of
from torchdebug_magics.probing.storages import gathered_for, local_of, shards_note, storages

_WITHOUT_TAPE = "read from the error and the graph; `%%torchdebug` above the cell also records the line of every op"


def examine(context: CellContext, *losses: object, every_step: bool = False) -> GraphReport | AutogradReport | None:
    """A report on the graph of one or more tensors; without any, on the previous cell's error, if autograd raised it."""
    del every_step
    if not losses:
        error = context.last_error
        raised = None if error is None else explained(error)
        if error is None or raised is None:
            return None
        return verdict(AutogradReport(findings=(raised,), alternatives=other_losses(raised, error), problems=(_WITHOUT_TAPE,)))
    tensors = [loss for loss in losses if isinstance(loss, torch.Tensor)]
    if len(tensors) < len(losses):
        other = next(loss for loss in losses if not isinstance(loss, torch.Tensor))
        msg = f"%autograd takes tensors, not {type(other).__name__}: write `%autograd loss`"
        raise TorchDebugError(msg)
    distances = _distances(tensors)
    gathered = gathered_for(live_modules())
    ends = ((node.variable, steps) for node, steps in distances.items() if hasattr(node, "variable"))
    leaves = {id(leaf): (leaf, steps) for leaf, steps in ((gathered.get(id(one), one), steps) for one, steps in ends)}
    roots = root_modules()
    members = [(name, one) for name, one in named_members(roots) if isinstance(one, torch.nn.Parameter) and id(one) not in gathered]
    owners = {id(one): name.rpartition(".")[0] for name, one in members}
    # The parameters of the models of which the loss reaches one, and where it reaches none, of all.
    touched = [root for root in roots if any(id(parameter) in leaves for parameter in root.parameters())]
    wanted = {id(parameter) for root in touched or roots for parameter in root.parameters()}
    named = [(name, one) for name, one in members if id(one) in wanted]
    named += [(variable_of(leaf) or f"a leaf of shape {list(leaf.shape)}", leaf) for leaf, _ in leaves.values() if id(leaf) not in owners]
    reaches = tuple(_reach(name, one, leaves[id(one)][1] if id(one) in leaves else None) for name, one in named)
    inner = [node for node in distances if not hasattr(node, "variable")]
    sizes, is_freed = _saved(inner, owners)
    problems = [f"the graph has more than {MOST_NODES:,} nodes: the rest was not read"] if len(distances) >= MOST_NODES else []
    problems += ["backward() has freed the saved tensors of this graph: their memory is not counted"] if is_freed else []
    problems += filter(None, [shards_note((leaf for leaf, _ in leaves.values()), "gradient norms are")])
    names = (*context.names, *["the tensor"] * len(tensors))
    without = [name for name, tensor in zip(names, tensors, strict=False) if not tensor.requires_grad]
    cuts = _cuts(reaches, set(without))
    report = GraphReport(
        findings=tuple(_without_graph(name, cuts) for name in without[:1]),
        reaches=reaches,
        nodes_count=len(inner),
        saved_bytes=sum(sizes.values()),
        cuts=cuts,
        modules=_modules(inner, owners),
        problems=tuple(problems),
    )
    return replace(report, sentence=_sentence(report))


def _distances(tensors: Iterable[torch.Tensor]) -> dict[Any, int]:
    """The nodes of the graph, with the number of edges between each and the nearest of the tensors."""
    todo = deque((tensor.grad_fn, 0) for tensor in tensors if tensor.grad_fn is not None)
    seen: dict[Any, int] = {}
    while todo and len(seen) < MOST_NODES:
        node, steps = todo.popleft()
        if node not in seen:
            seen[node] = steps
            todo.extend((following, steps + 1) for following, _ in node.next_functions if following is not None)
    return seen


def _reach(name: str, tensor: torch.Tensor, steps: int | None) -> Reach:
    has_norm = tensor.grad is not None and tensor.grad.layout is torch.strided
    norm = float(local_of(tensor.grad).detach().double().norm()) if has_norm and tensor.grad is not None else None
    return Reach(name=name, reached=steps is not None, path_length=steps, grad_norm=norm, is_frozen=not tensor.requires_grad)


def _saved(nodes: Iterable[Any], parameters: Container[int]) -> tuple[dict[int, int], bool]:
    """(bytes by storage of the tensors that the nodes hold, parameters apart; whether backward() has freed them)."""
    sizes: dict[int, int] = {}
    is_freed = False
    for _, held in (saved for node in nodes for saved in saved_by(node)):
        if isinstance(held, str):
            is_freed |= "freed" in held
        elif id(held) not in parameters:
            sizes.update({storage._cdata: storage.nbytes() for storage in storages(held)})
    return sizes, is_freed and not sizes


def _modules(nodes: Sequence[Any], owners: Mapping[int, str]) -> tuple[tuple[str, int], ...]:
    """A node belongs to the module whose parameter is the nearest one before it; from the input to the loss. A storage counts once."""
    module_of: dict[Any, str] = {}
    saved: dict[str, int] = {}
    counted: set[int] = set()
    for node in sorted(nodes, key=lambda node: int(node._sequence_nr())):
        before = [inner for inner, _ in node.next_functions if inner is not None]
        own = [owners.get(id(inner.variable), "") for inner in before if hasattr(inner, "variable")]
        latest = max((inner for inner in before if inner in module_of), key=lambda inner: int(inner._sequence_nr()), default=None)
        name = module_of[node] = next(filter(None, own), module_of[latest] if latest is not None else "")
        sizes, _ = _saved([node], owners)
        saved[name] = saved.get(name, 0) + sum(size for storage, size in sizes.items() if storage not in counted)
        counted.update(sizes)
    return tuple(saved.items())


def _cuts(reaches: Iterable[Reach], without: set[str]) -> tuple[Cut, ...]:
    """Read from the source: of the models of which the loss misses a part, and of the lines that made a loss without a graph."""
    missed = any(reach.is_missed for reach in reaches)
    spaces = {variable.name: variable.value for variable in user_names(sys._getframe(1))} if missed or without else {}
    found: list[Cut] = []
    for file in reversed(cell_files()) if without else ():
        found = found or list(cuts_toward(without, file, sys.maxsize, "<module>", spaces))
    if missed and not found:
        found = [cut for value in spaces.values() if isinstance(value, torch.nn.Module) for cut in cuts_in_forward(value, "")]
    return tuple(dict.fromkeys(found))


def _without_graph(name: str, cuts: Sequence[Cut]) -> AutogradFinding:
    first = next(iter(cuts), None)
    return finding(
        "cut",
        (f"`{name}`" if name != "the tensor" else name) + " has no graph and does not require grad",
        first.location if first is not None else None,
        "put `%%torchdebug` above the cell that computes it, and call backward() there, to see the line that cut the graph",
        tensor=name,
        op=first.op if first is not None else None,
    )


def _sentence(report: GraphReport) -> str:
    if report.finding is not None:
        return report.finding.sentence()
    missed = [reach.name for reach in report.reaches if reach.is_missed]
    trainable = sum(not reach.is_frozen for reach in report.reaches)
    reached = f"reaches {sum(reach.reached for reach in report.reaches)} of {trainable} trainable tensors"
    lost = f" · not reached: {listed(missed)}" if missed else ""
    return f"The loss {reached}, {plural(report.nodes_count, 'graph node')}, {byte_size(report.saved_bytes)} saved for backward{lost}"
