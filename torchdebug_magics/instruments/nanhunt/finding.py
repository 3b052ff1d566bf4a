"""A `Finding` from the evidence about a source op."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.nanhunt.causes.diagnose import diagnose
from torchdebug_magics.instruments.nanhunt.causes.evidence import Context, Evidence, bad_rows, first_bad
from torchdebug_magics.instruments.nanhunt.causes.op_table import Diagnosis
from torchdebug_magics.instruments.nanhunt.causes.tensor_names import owner_of, shares_memory, variable_name
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op
from torchdebug_magics.instruments.nanhunt.report import Kind, NanFinding, PathStep, Phase, Sink
from torchdebug_magics.instruments.nanhunt.rerun.attempt import Position
from torchdebug_magics.instruments.nanhunt.rerun.step_slice import is_given
from torchdebug_magics.instruments.nanhunt.walk.birth_walk import Birth
from torchdebug_magics.instruments.nanhunt.walk.blamed_inputs import overlap
from torchdebug_magics.probing.modules import Call, unwrapped
from torchdebug_magics.probing.source import syntax
from torchdebug_magics.probing.source.call_sites import function_node
from torchdebug_magics.probing.source.user_code import excerpt, is_user_code, locate, location, part_of_line, user_frame
from torchdebug_magics.probing.tensors import NAN, bad_mask, kind_of, sizes_of, tensors_in
from torchdebug_magics.report import Location

_MOST_ROWS = 20
_MOST_PATH = 60
_CALLED_ON = frozenset({"load_state_dict", "apply"})
_UNFILLED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "Tensor", "FloatTensor", "HalfTensor", "DoubleTensor"})


def write(evidence: Evidence) -> NanFinding:
    """The finding that a person reads."""
    birth, context = evidence.birth, evidence.context
    phase, tensor = _phase(evidence)
    cause = _explain(evidence, phase, tensor)
    op = evidence.known or next(iter(birth.via), None)
    place = None if op is None or op.line is None or phase == "parameter" else location(*op.line)
    if phase == "parameter" and (made := made_uninitialized(evidence.birth.tensor, context.roots)) is not None:
        place, name = made, (tensor or "").rpartition(".")[2]
        cause = Diagnosis(
            "uninitialized_parameter",
            f"{tensor} was never initialized: it contains whatever was in its memory",
            f"fill it after that line: `nn.init.normal_(self.{name}, std=0.02)`",
        )
    call = None if phase in {"data", "parameter", "optimizer"} else _call(evidence)
    finding = surfaced(
        birth.tensor,
        phase,
        context.sink,
        place,
        context,
        cause,
        kind="nan" if evidence.kind & NAN else "inf",
        op=evidence.name if birth.op is not None else None,
        module=None if call is None else call.path,
        call=None if call is None else call.number,
        operands=evidence.operands(),
        tensor=tensor,
        path=_path(evidence),
        model=_model_of(evidence) if phase == "parameter" else "" if call is None else _model_name(call.root, context),
        spoilt_here=phase == "parameter" and _became_bad(evidence),
        sink_kind=context.sink_kind,
        weights="weights poisoned" if phase == "optimizer" and birth.op is None else "" if phase == "parameter" else "weights untouched",
        underlined=None if birth.op is None else _expression(op, place),
    )
    return marked(finding, *written_into(birth))


def surfaced(
    value: torch.Tensor, phase: Phase, sink: Sink, place: Location | None, context: Context, cause: Diagnosis, **known: Any
) -> NanFinding:
    """A bad tensor where it is met, and what is `known` besides."""
    kind = kind_word(value)
    finding = NanFinding(
        kind=kind,
        phase=phase,
        location=place,
        excerpt=excerpt(place) if place is not None else (),
        step=context.step,
        backward=context.backward,
        sink=sink,
        sink_kind=kind,
        weights="weights untouched",
        diagnosis=cause.slug,
        explanation=cause.explanation,
        fix=cause.fix,
    )
    return replace(finding, **known)


def _phase(evidence: Evidence) -> tuple[Phase, str | None]:
    op, context = evidence.op, evidence.context
    if op is None:
        tensor = evidence.birth.tensor
        owner = owner_of(tensor, context.roots)
        if owner is not None:
            # On a CPU a bad update is seen as it happens: what is found bad only now was written by something else.
            parameters = (parameter for root in context.roots for parameter in root.parameters() if shares_memory(parameter, tensor))
            is_trained = any(parameter.requires_grad for parameter in parameters)
            changed = tensor.device.type != "cpu" and context.step > 0 and is_trained and not context.beginning.was_bad(tensor)
            return "optimizer" if changed else "parameter", owner[1]
        given = any(tensor is one for entry in context.entries for one in tensors_in((entry.args, entry.kwargs)))
        phase: Phase = "parameter" if tensor.is_leaf and tensor.requires_grad and not given else "data"
        return phase, variable_name(tensor, context.variables, context.entries)
    if op.late:
        return "optimizer", context.sink.name
    if op.backward or evidence.derivative:
        return "backward", None
    return ("loss" if _call(evidence) is None else "forward"), None


def _call(evidence: Evidence) -> Call | None:
    """The module call it belongs to. A criterion such as ``nn.CrossEntropyLoss`` is not a part of the model."""
    op = evidence.op if evidence.op is None or not evidence.op.backward else evidence.trace.forward_of(evidence.op)
    call = None if op is None else op.call
    if call is not None and isinstance(call.root, torch.nn.modules.loss._Loss):
        return None
    return call


def _expression(op: Op | None, place: Location | None) -> tuple[int, int] | None:
    """The characters of the reported line that the op was computed by; None for all of the line."""
    text = "" if place is None else dict(excerpt(place)).get(place.line, "")
    if op is None or op.place is None or op.line is None or not text:
        return None
    positions = syntax.span_as_written(*op.place, op.line[1])
    part, indent = None if positions is None else part_of_line(text, op.line[1], positions), len(text) - len(text.lstrip())
    return None if part is None else (part[0] + indent, part[1] + indent)


def _explain(evidence: Evidence, phase: Phase, tensor: str | None) -> Diagnosis:
    if phase == "parameter" and diagnose(evidence).slug != "bad_embedding_row":
        if _became_bad(evidence):
            model = _model_of(evidence)
            lines = writers_of(model, evidence.context.chain) if model else []
            where = f"check {lines[0]}, `{lines[0].source}`, which writes to it" if len(lines) == 1 else "check the code that writes to it"
            return Diagnosis(
                "bad_parameter",
                f"{tensor} became non-finite in this cell, and not in an optimizer step",
                f"{where} (a moving average, an initialization, `.data`), then create the model again",
            )
        return Diagnosis(
            "bad_parameter",
            f"{tensor} was non-finite before this cell's first step",
            "create the model again or load a good checkpoint: an earlier run corrupted it; put `%%nanhunt` above that cell",
        )
    if phase == "optimizer" and evidence.op is not None:
        return Diagnosis(
            "clip_inf",
            f"the gradient of {tensor} was finite after backward(); `{evidence.name}` changed it before the update",
            "check the code that scales or clips gradients on this line: an infinite or zero norm, a division by a count of 0",
        )
    if phase == "optimizer":
        return Diagnosis(
            "exploding_parameter",
            f"{tensor} was finite when the cell began, and is non-finite after an update",
            "lower the learning rate or clip the gradients; then create the model again, as its weights are lost",
        )
    return diagnose(evidence)


def _became_bad(evidence: Evidence) -> bool:
    """Whether it is a model's: of other tensors nobody knows how they began."""
    held, context = evidence.birth.tensor, evidence.context
    return owner_of(held, context.roots) is not None and context.beginning.is_known and not context.beginning.was_bad(held)


def _model_of(evidence: Evidence) -> str:
    """The variable of the model that holds the bad tensor."""
    root = next((root for root in evidence.context.roots if owner_of(evidence.birth.tensor, (root,))), None)
    return "" if root is None else _model_name(root, evidence.context)


def _path(evidence: Evidence) -> tuple[PathStep, ...]:
    steps: list[PathStep] = []
    for op in filter(None, (evidence.op, *evidence.birth.via)):
        known = (evidence.trace.forward_of(op) if op.backward else op) or op
        line, module = op.line or known.line, None if known.call is None else known.call.path
        phase: Phase = "backward" if op.backward else "loss" if module is None else "forward"
        step = PathStep(op=known.name, phase=phase, module=module, location=None if line is None else location(*line))
        # What adds a gradient to `.grad` belongs to no line and no module.
        if (step.location is not None or step.module is not None) and (not steps or steps[-1] != step):
            steps.append(step)
    if len(steps) > _MOST_PATH:
        steps = [*steps[: _MOST_PATH // 2], *steps[-_MOST_PATH // 2 :]]
    return tuple(steps)


def _model_name(root: torch.nn.Module, context: Context) -> str:
    for name, value in context.variables.items():
        if not name.startswith("_") and issubclass(type(value), torch.nn.Module) and unwrapped(value) is root:
            return name
    return ""


def kind_word(tensor: torch.Tensor) -> Kind:
    """``"nan"`` where there is one, else ``"inf"``."""
    return "nan" if kind_of(tensor) & NAN else "inf"


def marked(finding: NanFinding, tensor: torch.Tensor, mask: torch.Tensor | None = None) -> NanFinding:
    """The finding with where in a tensor it is bad: rows, first index, counts, shape and dtype."""
    if tensor.is_nested:  # its shape holds no plain numbers
        return replace(finding, dtype=str(tensor.dtype).removeprefix("torch."))
    mask = bad_mask(tensor) if mask is None else mask
    rows = bad_rows(mask)
    return replace(
        finding,
        rows=rows[:_MOST_ROWS],
        row_count=len(rows),
        index=first_bad(mask),
        bad_count=0 if mask is None else int(mask.sum()),
        element_count=tensor.numel(),
        shape=sizes_of(tensor),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def here(frame: FrameType | None = None) -> Location | None:
    """The user's line that is running now, or in which a frame stands or was called."""
    frame = user_frame(frame or sys._getframe(1))
    return None if frame is None else locate(frame)


def written_into(birth: Birth) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensor whose rows the user knows, and where it is bad: of a row that was written in place, what it is a row of."""
    part, mask = birth.tensor, birth.mask if birth.mask is not None else bad_mask(birth.tensor)
    if birth.op is None or not birth.op.written or not birth.via or mask is None or part.layout is not torch.strided:
        return part, mask
    # ``x[2] /= 0`` divides a view of a row, and then writes that view into its own place.
    reader = next((op for op in birth.via if not op.written), birth.via[-1])
    wholes = (tensor for tensor in reader.inputs() if tensor.dim() > part.dim() and shares_memory(tensor, part))
    whole = next(wholes, part)
    return whole, mask if whole is part else overlap(part, mask, whole)[1]


def writers_of(variable: str, chain: tuple[Position, ...]) -> list[Location]:
    """In the functions (or the cell) that run now, the lines that write into the model of that name."""
    for position in chain:
        code, names = position.frame.f_code, {variable}
        lists = syntax.lists_around(syntax.tree_of(code.co_filename), (position.line, -1, position.line, -1))
        body = lists[-1][0] if lists else []
        for loop in syntax.nodes(ast.For, *body):
            if syntax.mentions(loop.iter, names):
                names |= syntax.bound_names(loop.target)
        lines = sorted({node.lineno for node in syntax.nodes(ast.stmt, *body) if _writes(node, names)})
        if lines:
            return [location(code.co_filename, line, code.co_name) for line in lines]
    return []


def _writes(statement: ast.stmt, names: set[str]) -> bool:
    if not isinstance(statement, syntax.SIMPLE):
        return False
    called_on = [call.func for call in syntax.nodes(ast.Call, statement) if syntax.method(call) in _CALLED_ON]
    given = syntax.writes_into(statement, names) or is_given(statement, names)
    return given or any(syntax.mentions(function, names) for function in called_on)


def made_uninitialized(tensor: torch.Tensor, roots: Iterable[torch.nn.Module]) -> Location | None:
    """The line that made it, where that line fills nothing in and no other line of its class does."""
    for root in roots:
        for module in root.modules():
            name = next((name for name, one in module._parameters.items() if one is tensor), None)
            init = getattr(type(module).__init__, "__code__", None)
            if name is not None and init is not None and is_user_code(init):
                bound = syntax.nodes((ast.Assign, ast.AnnAssign), function_node(init))
                makers = [node for node in bound if any(ast.unparse(target).endswith(f".{name}") for target in syntax.targets_of(node))]
                around = [
                    node
                    for node in syntax.enclosing(syntax.tree_of(init.co_filename), init.co_firstlineno)
                    if isinstance(node, ast.ClassDef)
                ]
                is_filled = any(_fills(node, name) for node in syntax.nodes(ast.Call, *around[-1:]))
                is_bare = len(makers) == 1 and not is_filled and any(map(_is_unfilled, syntax.nodes(ast.Call, makers[0])))
                return location(init.co_filename, makers[0].lineno, "__init__") if is_bare else None
    return None


def _is_unfilled(node: ast.Call) -> bool:
    name = syntax.called(node)
    return name in _UNFILLED and not any(
        isinstance(argument, (ast.List, ast.Tuple)) for argument in node.args[:1] if name.endswith("Tensor")
    )


def _fills(node: ast.Call, name: str) -> bool:
    """``nn.init.normal_(self.w)``, ``self.w.data.fill_(0)``, and ``self.parameters()``, which may be for anything."""
    function = syntax.method(node)
    if function in {"parameters", "named_parameters", "apply"}:
        return True
    writes = function.endswith("_") and not function.endswith("__")
    return writes and any(node.attr == name for node in syntax.nodes(ast.Attribute, node))
