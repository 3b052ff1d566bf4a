"""The error that ended a cell, as a finding: one function for each kind."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FunctionType, GeneratorType
from typing import Any

import torch

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.autograd.errors.cut import CHECKPOINT, cut_graph, freezing_line
from torchdebug_magics.instruments.autograd.errors.inplace import modified_in_place, nodes_of
from torchdebug_magics.instruments.autograd.errors.raised import Raised, missing_gradient_of, parts_of_value
from torchdebug_magics.instruments.autograd.errors.second_backward import second_time
from torchdebug_magics.instruments.autograd.errors.to_numpy import WORDS, unread_by_numpy
from torchdebug_magics.instruments.autograd.faults.forgotten import WHY_HIDDEN, hidden_parameters, registering
from torchdebug_magics.instruments.autograd.report import AutogradFinding, Kind
from torchdebug_magics.instruments.autograd.source_readings import (
    attribute_line,
    edited,
    loop_around,
    named_members,
    out_of_place,
    statement_at,
    through_the_base,
    user_function,
    with_option,
)
from torchdebug_magics.instruments.autograd.tape import EventCourse, Tape
from torchdebug_magics.probing.graphs import is_graph_leaf
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.source.call_sites import function_node
from torchdebug_magics.probing.source.edited_source import Source, exchanging
from torchdebug_magics.probing.source.syntax import as_atom, called, dotted, expression, nodes, tree_of
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.report import Edit, Location

_SHAPES = re.compile(r"has a shape of torch\.Size\(\[([\d, ]*)\]\)")
_NO_REDUCTION = re.compile(r"reduction\s*=\s*['\"]none['\"]")
_OF_SEVERAL = "a write to one of several views would have to change the gradient of all"
_OF_HOOK = "an in-place write would replace the backward of the hook or custom Function"
_WRITTEN = (
    (r"view of a leaf", "a view of a leaf that requires grad", ""),
    (r"no_grad|inference", "a view created with gradients off", "gradients were off when the view was created"),
    (r"(?s)BackwardHook.*custom Function", "the output of a full backward hook", _OF_HOOK),
    (r"custom Function", "", _OF_HOOK),
    (
        r"leaf [Vv]ariable",
        "a leaf that requires grad",
        "the gradient of a leaf belongs to its original value, which an in-place write would lose",
    ),
)
"""What is written, by the message, and why it may not be; "" for a view of which the message says no more."""
_OTHER_FIXES = (
    (WORDS, "`.detach().cpu()` the tensor before NumPy reads it"),
    (r"graph leaves", "use `copy.deepcopy(tensor.detach())`, or delete the attribute that holds the computed tensor before the copy"),
    (r"requires_grad flags of leaf", "`.detach()` the tensor, or set `requires_grad` on the leaf that it was computed from"),
    (
        r"can't retain_grad|register a hook",
        "call this on a tensor that requires a gradient; `%autograd NAME` shows where the graph of a tensor was cut",
    ),
    (r"assigned grad has data|attempting to assign a gradient", "assign a tensor with the parameter's shape, dtype and device to `.grad`"),
    (r"has changed the", "return a gradient of the same shape, dtype and device from the hook, or None"),
    (
        r"invalid gradient at index|size of tensor a",
        "set `.grad = None` after you assign `.data` of another shape, dtype or device, and run the forward again",
    ),
)


def explained(error: BaseException, tape: Tape | None = None, course: EventCourse | None = None) -> AutogradFinding | None:
    """Of an error, or of one while which it was raised; None where autograd raised none. Nothing of the user's runs again."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        if (raised := Raised.of(inner, tape or Tape(), course or EventCourse())) is not None:
            return _BY_KIND.get(raised.kind, _other_error)(raised)
        inner = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)
    return None


def _not_inplace(raised: Raised) -> str:
    """The fix for a module created with ``inplace=True``; empty for any other."""
    writer = raised.modules[0] if raised.modules else None
    if getattr(writer, "inplace", False) is not True:
        return ""
    return f"use `{type(writer).__name__}(inplace=False)` for {f'module `{raised.module}`' if raised.module else 'the module'}"


def _overwritten(raised: Raised) -> AutogradFinding:
    """A write in place that autograd refuses at once: into a leaf, or into a view."""
    name, writer_op = raised.writes()
    made = re.search(r"Output \d+ of (\w+?)(?:Backward\d*)? is a view", raised.message)
    maker = next((op for op in reversed(raised.tape.ops) if made is not None and op.name.replace("_", "") == made[1].lower()), None)
    op = maker.name if maker is not None else made[1] if made is not None else None
    what, why = next((words for pattern, *words in _WRITTEN if re.search(pattern, raised.message)), ("", _OF_SEVERAL))
    copied = through_the_base(raised.statement, loop_around(raised.here)) or out_of_place(raised.statement, raised.here)
    fix = f"`{copied}`" if copied else _not_inplace(raised) or f"write into a copy: `{name or 'view'}.clone()`"
    if "a leaf" in what:
        update = f"`with torch.no_grad(): {raised.code}` for a manual update; otherwise write into a copy: "
        fix = _not_inplace(raised) or update + (f"`{name}.clone()`" if name else "`.clone()`")
    return raised.finding(
        f"in-place write to {f'`{name}`' if name else 'a tensor'}, {what or f'a view returned by `{op}`'}",
        fix,
        op=op,
        saved_at=maker.where if maker is not None else None,
        tensor=name,
        writer_op=writer_op,
        module=raised.module,
        explanation=why,
    )


def _of_gradient(raised: Raised) -> AutogradFinding | None:
    """The gradient that is given to ``backward()`` has another shape than what it is the gradient of; None where none is given."""
    call = next((node for node in nodes(ast.Call, raised.statement) if called(node) == "backward"), None)
    shapes = [f"[{shape}]" for shape in _SHAPES.findall(raised.message)]
    given = [] if call is None else [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "gradient")]
    if call is None or len(shapes) != 2 or not given or not isinstance(call.func, ast.Attribute):  # noqa: PLR2004 - given, and asked for
        return None
    loss, gradient = ast.unparse(call.func.value), ast.unparse(given[0])
    sizes = [math.prod(ast.literal_eval(shape)) for shape in shapes]
    fits = f"reshape({loss}.shape)" if sizes[0] == sizes[1] else f"expand_as({loss})" if sizes[0] == 1 else ""
    other = f"pass a gradient of shape {shapes[1]}, or reduce `{loss}` to one number before backward(): `.mean()` or `.sum()`"
    return raised.finding(
        f"`{gradient}`, the gradient given to backward(), has shape {shapes[0]}, and `{loss}` has {shapes[1]}",
        f"`{loss}.backward({as_atom(given[0])}.{fits})`" if fits else other,
        tensor=loss,
        explanation="the gradient of a tensor has its shape",
    )


def _non_scalar(raised: Raised) -> AutogradFinding:
    if (of_gradient := _of_gradient(raised)) is not None:
        return of_gradient
    root, name = next(iter(raised.roots), None), raised.root_name
    made = raised.tape.origin(id(root))
    where = (made.where if made is not None else None) or raised.assigned_at(name) or raised.here
    source, backward = where.source if where is not None else "", raised.code
    fix = "reduce the loss to one number before backward(): `.mean()` or `.sum()`"
    statement, edits = statement_at(where), tuple[Edit, ...]()
    if _NO_REDUCTION.search(source):
        unreduced = [call for call in nodes(ast.Call, statement) if any(option.arg == "reduction" for option in call.keywords)]
        reduced = _NO_REDUCTION.sub('reduction="mean"', source)
        fix = f"`{reduced}`"
        edits = exchanging(where, unreduced[0], with_option(unreduced[0], "reduction", "mean")) if len(unreduced) == 1 else ()
    elif name and f"{name}.backward" in backward:
        fix = f"`{backward.replace(f'{name}.backward', f'{name}.mean().backward')}`"
        edits = exchanging(raised.here, expression(f"{name}.backward"), expression(f"{name}.mean().backward"))
    elif isinstance(statement, (ast.Return, ast.Assign)) and statement.value is not None:
        edits = exchanging(where, statement.value, expression(f"{as_atom(statement.value)}.mean()"))
    shape = f"shape {list(root.shape)}" if root is not None else "several elements"
    return raised.finding(
        f"{f'`{name}`' if name else 'the loss'} has {shape}, and backward() needs a scalar",
        fix,
        where,
        edits=edits,
        op=made,
        first_backward_at=raised.here if where != raised.here else None,
        tensor=name,
    )


def _inference(raised: Raised) -> AutogradFinding:
    made = next((op for op in reversed(raised.tape.ops) if op.inference and op.makes), None)
    # The outermost line: where it comes in from outside.
    read = next((one for one in reversed(raised.reads()) if isinstance(one.value, torch.Tensor) and one.value.is_inference()), None)
    name = read.name if read is not None else None
    return raised.finding(
        f"{f'`{name}`' if name else 'a tensor'} is an inference tensor and cannot be used in training",
        f"run `{name} = {name}.clone()` before this line, or compute `{name}` under `torch.no_grad()`"
        if name
        else "compute the tensor under `torch.no_grad()` in place of `torch.inference_mode()`, or `.clone()` it",
        read.place if read is not None else None,
        saved_at=made.where if made is not None else None,
        op=made.name if made is not None else None,
        tensor=name,
        module=raised.module,
        explanation="a tensor created under `torch.inference_mode()` has no version counter, which autograd needs",
    )


def _unused(raised: Raised) -> AutogradFinding:
    index = re.search(r"[Tt]ensor at index (\d+)", raised.message)
    place = int(index[1]) if index is not None else 0
    calls = nodes(ast.Call, raised.statement)
    given = next((call.args[1] for call in calls if called(call).endswith("grad") and len(call.args) > 1), None)
    is_list = isinstance(given, (ast.List, ast.Tuple))
    members = list(given.elts) if isinstance(given, (ast.List, ast.Tuple)) else [given] if given is not None else []
    reached = {id(node.variable) for node in nodes_of(raised.roots) if hasattr(node, "variable")}
    unused = {id(tensor) for tensor in raised.inputs if tensor.is_leaf and id(tensor) not in reached}
    parameters = tuple(name for name, one in named_members() if id(one) in unused)
    if len(members) == len(raised.inputs):
        place = next((number for number, one in enumerate(raised.inputs) if id(one) in unused), place)
    name = ast.unparse(members[place]) if place < len(members) and (is_list or not parameters) else next(iter(parameters), None)
    return raised.finding(
        f"{f'`{name}`' if name else f'input {place}'} was not used to compute the outputs",
        "pass the tensor that the outputs were computed from, or `allow_unused=True` to get None for it",
        tensor=name,
        parameters=parameters,
        explanation=f"a view, a copy or a `.detach()` of `{name}` is a different tensor to autograd" if name and not parameters else "",
    )


def _integer(raised: Raised) -> AutogradFinding:
    source = raised.here.source if raised.here is not None else ""
    in_call = r"torch\.tensor\(([^()]*\[[^\]]*\][^()]*?)(, *requires_grad *= *True)\)"
    fixed = re.sub(in_call, r"torch.tensor(\1, dtype=torch.float32\2)", source)
    fixed = fixed if fixed != source else re.sub(r"(\w+)\.requires_grad_\(", r"\1.float().requires_grad_(", source)
    # ``ids`` of ``ids.requires_grad_()``, of ``ids.requires_grad = True`` and of ``ids = torch.tensor(..., requires_grad=True)``
    attributes = (node.value for node in nodes(ast.Attribute, raised.statement) if node.attr in {"requires_grad_", "requires_grad"})
    name = next((ast.unparse(attribute) for attribute in (*attributes, *getattr(raised.statement, "targets", ()))), None)
    return raised.finding(
        "an integer tensor cannot require a gradient",
        f"`{fixed}`" if fixed != source else "make the tensor floating point first: `.float()` or `dtype=torch.float32`",
        tensor=name,
        explanation="only floating-point and complex tensors can have gradients",
    )


def _custom_function(raised: Raised) -> AutogradFinding:
    """Explains a custom Function whose backward returned the wrong number, kind or shape of gradients."""
    message = raised.message
    named = re.search(r"[Ff]unction (\w+?)Backward\b", message)
    functions = (kind for kind in _subclasses(torch.autograd.Function) if named is not None and kind.__name__ == named[1])
    where = _return_of(getattr(next(functions, None), "backward", None)) or raised.here
    counts = re.search(r"expected (\d+), got (\d+)", message)
    shapes = re.search(r"at index (\d+) - got (\[[\d, ]*\]) but expected shape compatible with (\[[\d, ]*\])", message)
    place = re.search(r"position (\d+)", message)
    name = named[1] if named is not None else "the function"
    headline, fix = f"`{name}.backward`: {message.splitlines()[0]}", "return one gradient, or None, for each input of forward"
    returned = next((node.value for node in nodes(ast.Return, statement_at(where)) if node.value is not None), None)
    inputs, saved = _inputs_of(
        next((kind for kind in _subclasses(torch.autograd.Function) if named is not None and kind.__name__ == named[1]), None)
    )
    values, meant = list(returned.elts) if isinstance(returned, ast.Tuple) else [returned], list[Any]()
    if counts is not None:
        lacking = [argument not in saved for argument in inputs[len(values) :]]
        is_padded = len(values) == int(counts[2]) < int(counts[1]) == len(inputs) and all(lacking)
        meant = [*values, *([ast.Constant(None)] * len(lacking))] if is_padded else []
        headline = f"`{name}.backward` returns {plural(int(counts[2]), 'gradient')}, but `forward` takes {plural(int(counts[1]), 'input')}"
        fix = f"return {plural(int(counts[1]), 'value')} from `{name}.backward`, one for each input; `None` where there is no gradient"
    elif shapes is not None:
        headline = f"`{name}.backward` returns shape {shapes[2]} for input {shapes[1]} of shape {shapes[3]}"
        fix = f"return a gradient of the shape of input {shapes[1]}: reduce it with `.sum(dim)`, or reshape it with `.view_as(input)`"
    elif "different than None" in message:
        headline = f"`{name}.backward` returns a gradient for an input that is not a tensor"
        fix = f"return `None` at position {place[1]}" if place else "return `None` for that input"
        wrong = int(place[1]) - 1 if place else len(values)
        none = next((at for at, value in enumerate(values) if isinstance(value, ast.Constant) and value.value is None), wrong)
        if wrong < len(values) == len(inputs) and (none != wrong or inputs[wrong] not in saved):
            meant = list(values)
            meant[none], meant[wrong] = (values[wrong], values[none]) if none != wrong else (ast.Constant(None),) * 2
    edits = exchanging(where, returned, ast.Tuple(meant)) if returned is not None and len(meant) > 1 else ()
    edits = tuple(replace(edit, new=re.sub(r"^return \((.*)\)$", r"return \1", edit.new)) for edit in edits)  # as people write it
    fix = f"`{edits[0].new}`" if edits else fix
    first_backward_at = raised.here if where != raised.here else None
    return raised.finding(headline, fix, where, op=name, first_backward_at=first_backward_at, edits=edits)


def _inputs_of(kind: Any) -> tuple[list[str], set[str]]:
    """The names of what the forward of a function is given, and those of them that it saves for backward, which are tensors."""
    forward = getattr(getattr(kind, "forward", None), "__code__", None)
    function = None if forward is None else function_node(forward)
    names = [argument.arg for argument in function.args.args[1:]] if isinstance(function, ast.FunctionDef) else []
    saving = [call for call in nodes(ast.Call, function) if called(call) == "save_for_backward"]
    return names, {ast.unparse(part) for call in saving for part in call.args}


def _subclasses(kind: type) -> Iterator[type]:
    """The latest first."""
    inner: type
    for inner in reversed(kind.__subclasses__()):
        yield inner
        yield from _subclasses(inner)


def _return_of(function: object) -> Location | None:
    """The last ``return`` of a function."""
    code = getattr(function, "__code__", None)
    lines = [node.lineno for node in nodes(ast.Return, function_node(code))] if code is not None else []
    return location(code.co_filename, lines[-1], code.co_name) if lines and code is not None else None


def _checkpoint_mismatch(raised: Raised) -> AutogradFinding:
    """Explains a checkpointed function that gave different tensors when backward() recomputed it."""
    calls = (line.location for op in raised.tape.ops for line in op.calls if CHECKPOINT.search(line.location.source))
    return raised.finding(
        "recomputing a checkpointed function gave different tensors",
        "make the function depend on its arguments alone: no counters, `training` flags or lists that change between the two runs",
        next(calls, None),
        first_backward_at=raised.here,
        explanation=raised.message.splitlines()[0].removeprefix("torch.utils.checkpoint: "),
    )


def _no_double_backward(raised: Raised) -> AutogradFinding:
    """Explains an op or function without a second derivative."""
    named = re.search(r"derivative for '?(?:aten::)?(\w+)", raised.message)
    op = named[1] if named is not None else None
    attention = op is not None and "scaled_dot_product" in op
    return raised.finding(
        f"`{op or 'the function'}` cannot be differentiated twice",
        "put `with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):` around the forward"
        if attention
        else f"drop `create_graph=True` where no second derivative is needed, or replace `{op}` with ops that can be differentiated twice"
        if op
        else "remove `@once_differentiable` and write backward() with differentiable ops",
        op=op,
    )


def _other_error(raised: Raised) -> AutogradFinding:
    """Any other autograd error, with the fix for its message."""
    first = raised.message.splitlines()[0].rstrip(".")
    missing = missing_gradient_of(raised.statement, raised.frames[0][0]) if raised.frames else None
    if missing is not None and "NoneType" in first:
        return _missing(raised, *missing)
    if "empty parameter list" in first:
        return _empty_optimizer(raised)
    if "can't optimize a non-leaf" in first:
        return _not_a_leaf(raised)
    if "graph leaves" in first and (kept := _kept_by_a_module(raised)) is not None:
        return kept
    if re.search(WORDS, first) and (unread := unread_by_numpy(raised)) is not None:
        return unread
    fix = next((fix for pattern, fix in _OTHER_FIXES if re.search(pattern, raised.message)), "")
    name = next((one.name for one in raised.reads() if fix and one.place == raised.here and isinstance(one.value, torch.Tensor)), None)
    hook = re.search(r"hook '(\w+)' has changed", first)
    hooks = (value for _, value in raised.variables() if type(value) is FunctionType and hook is not None and value.__name__ == hook[1])
    where = _return_of(next(hooks, None))
    return raised.finding(first, fix, where, tensor=name, first_backward_at=raised.here if where is not None else None)


def _kept_by_a_module(raised: Raised) -> AutogradFinding | None:
    """Explains the copy of a model of which a module has kept a tensor with a graph; at the line that keeps it."""
    for name, model in ((read.name, read.value) for read in raised.reads() if isinstance(read.value, torch.nn.Module)):
        for path, part in model.named_modules():
            kept = next((key for key, value in vars(part).items() if isinstance(value, torch.Tensor) and not is_graph_leaf(value)), None)
            if kept is None:
                continue
            full = f"{path}.{kept}".lstrip(".")
            headline = f"`{name}` cannot be copied: `{full}` is a computed tensor, which holds its graph"
            methods = [value for kind in type(part).__mro__ for value in vars(kind).values() if isinstance(value, FunctionType)]
            using = {function: node for function in methods if (node := user_function(function)) is not None and _uses(node, kept)}
            for function, node in using.items():
                stores = [one for one in nodes(ast.Assign, node) if any(dotted(target) == f"self.{kept}" for target in one.targets)]
                if not stores:
                    continue
                where, value = location(function.__code__.co_filename, stores[0].lineno, function.__name__), stores[0].value
                own = f"use a variable of `{function.__name__}` in its place: `{kept} = {ast.unparse(value)}`"
                return raised.finding(
                    headline, own if len(using) == 1 else f"`self.{kept} = {as_atom(value)}.detach()`", where, tensor=full
                )
            return raised.finding(headline, f"delete `{name}.{full}` before the copy", tensor=full)
    return None


def _uses(node: ast.AST, attribute: str) -> bool:
    return any(dotted(part) == f"self.{attribute}" for part in nodes(ast.Attribute, node))


def _not_a_leaf(raised: Raised) -> AutogradFinding:
    """Explains an optimizer that received the output of an op."""
    read = ((one.name, part) for one in raised.reads() for part in parts_of_value(one.value))
    name, tensor = next(((name, part) for name, part in read if not part.is_leaf), ("the tensor", None))
    made = raised.tape.origin(id(tensor))
    op = made.name if made is not None else None
    return raised.finding(
        f"`{name}` is not a leaf, and cannot be optimized",
        f"run `{name} = {name}.detach().requires_grad_()` before creating the optimizer",
        (made.where if made is not None else None) or raised.assigned_at(name),
        op=op,
        tensor=name,
        explanation=f"{f'`{op}`' if op else 'an op'} computed it; backward() stores gradients in leaves only, so its `.grad` stays None",
    )


def _missing(raised: Raised, name: str, tensor: torch.Tensor) -> AutogradFinding:
    headline, why = f"`{name}.grad` is None: `{name}` is not a leaf", "backward() stores gradients in leaves only"
    fix = f"call `{name}.retain_grad()` where it is made"
    edits = () if tensor.is_leaf else edited(raised.assigned_at(name), f"{name}.retain_grad()", "after")
    if tensor.is_leaf:
        headline, why = f"`{name}.grad` is None: no backward() has reached it", ""
        fix = f"call backward() on a loss that uses `{name}` before this line"
        fix = fix if tensor.requires_grad else f"call `{name}.requires_grad_()` before its first use"
    return raised.finding(headline, fix, edits=edits, tensor=name, explanation=why)


def _empty_optimizer(raised: Raised) -> AutogradFinding:
    """Explains an empty parameter list from the names on the line that creates the optimizer."""
    read = [(one.name, one.value) for one in raised.reads() if one.place == raised.here]
    for name, model in read:
        if not isinstance(model, torch.nn.Module):
            continue
        if hidden := list(hidden_parameters(model)):
            kept = hidden[0].attribute
            is_tensor = isinstance(getattr(hidden[0].owner, kept, None), torch.Tensor)
            why = f"`{hidden[0].name}` is a plain tensor" if is_tensor else f"its modules are in the container `{kept}`"
            return raised.finding(
                f"`{name}` has no parameters: {why}",
                registering(hidden),
                attribute_line(hidden[0].owner, kept),
                parameters=tuple(one.name for one in hidden),
                tensor=hidden[0].name,
                explanation=WHY_HIDDEN,
            )
        if frozen := tuple(path for path, one in model.named_parameters() if not one.requires_grad):
            fix = f"set `requires_grad = True` for the parameters to train, such as `{frozen[-1]}`"
            return raised.finding(f"all parameters of `{name}` are frozen", fix, freezing_line(raised), parameters=frozen)
    for name, value in read:
        if isinstance(value, GeneratorType) and value.gi_frame is None:
            made = raised.assigned_at(name)
            source = f" (`{made.source}`)" if made is not None else ""
            fix = f"pass the optimizer a new list, such as `list(model.parameters())`, not the generator `{name}`{source}"
            return raised.finding(f"`{name}` is a generator that is already exhausted", fix)
    return _without_constructor(raised) or raised.finding(
        "the optimizer received no parameters", "pass the parameters of the model to train: `model.parameters()`"
    )


def _without_constructor(raised: Raised) -> AutogradFinding | None:
    """A class of which `__init__` is mistyped, as ``_init_``, so that an instance has no layers."""
    for kind in {type(module) for module in live(torch.nn.Module) if not any(True for _ in module.parameters())}:
        name = next((name for name in vars(kind) if name.strip("_") == "init" and name != "__init__"), "")
        code = getattr(vars(kind).get(name), "__code__", None)
        tree = None if code is None else tree_of(code.co_filename)
        if code is not None and tree is not None:
            where = location(code.co_filename, code.co_firstlineno, name)
            source = Source(where, tree)
            old = "" if source.statement is None else source.text(source.statement, whole=True)
            new = re.sub(rf"(def |\.){name}\(", r"\1__init__(", old)
            edits = () if source.statement is None else (source.replacing(source.statement, new, old),)
            headline = f"the optimizer received no parameters: `{kind.__name__}.{name}` should be `__init__`"
            return raised.finding(headline, "rename it to `__init__`, also where it calls `super()`", where, edits=edits)
    return None


_BY_KIND: dict[Kind, Callable[[Raised], AutogradFinding]] = {
    "inplace": modified_in_place,
    "second_backward": second_time,
    "cut": cut_graph,
    "leaf_inplace": _overwritten,
    "view_inplace": _overwritten,
    "non_scalar": _non_scalar,
    "inference_tensor": _inference,
    "unused_input": _unused,
    "integer_grad": _integer,
    "custom_function": _custom_function,
    "checkpoint_mismatch": _checkpoint_mismatch,
    "no_double_backward": _no_double_backward,
}
