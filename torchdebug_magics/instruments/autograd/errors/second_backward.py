"""*Backward through the graph a second time*: what two backward passes share, and how."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchdebug_magics.format import byte_size, listed, plural
from torchdebug_magics.instruments.autograd.errors.raised import Raised, parts_of_value
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import carried_names, edited, loop_around, simple_statements, statement_at
from torchdebug_magics.instruments.autograd.tape import Backward, OptimizerStep, RecordedOp
from torchdebug_magics.probing.graphs import is_graph_leaf, upstream
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.source.call_sites import attribute_assignment, function_node
from torchdebug_magics.probing.source.edited_source import Source, exchanging, statements
from torchdebug_magics.probing.source.syntax import (
    FUNCTIONS,
    LOOPS,
    Loop,
    as_atom,
    blocks,
    bound_inside,
    bound_names,
    covers,
    dotted,
    enclosing,
    expression,
    names_in,
    nodes,
    parsed,
    read_names,
    targets_of,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.probing.steps import parameters_of
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Edit, Location

_PARTS = ("part", "inner", "innermost")
"""The variables of the comprehensions, one in the other."""
_CONTAINERS: dict[type, str] = {
    list: "[{0} for {1} in {2}]", tuple: "tuple({0} for {1} in {2})", dict: "{{key: {0} for key, {1} in {2}.items()}}",
}  # fmt: skip


def second_time(raised: Raised) -> AutogradFinding:
    """The ops that an earlier backward() went through are those that the two share."""
    graph = [op for root in raised.roots for op in raised.tape.ancestors(id(root), in_graph=True)]
    ops = {op.index for op in graph}
    passed = [event for event in raised.course.events if isinstance(event, Backward) and event.ops & ops and not event.failed]
    first = max(passed, key=lambda one: len(one.ops & ops), default=None)
    if first is None:
        return _read_from_text(raised)
    shared = [op for op in graph if op.index in first.ops]
    made, consumer, here = graph[0], None, raised.here
    if made.index not in first.ops:
        edges = [(maker, op) for op in graph if op.index not in first.ops for use, maker in op.sources if use.requires_grad]
        made, consumer = max((edge for edge in edges if edge[0].index in first.ops), key=lambda edge: edge[0].index)
    is_same_line = first.where is not None and here is not None and (first.where.file, first.where.line) == (here.file, here.line)
    more: dict[str, Any] = {"op": made.name, "module": made.module, "first_backward_at": first.where, "shared_from": made.where}
    if consumer is None:
        return _whole(raised, raised.root_name, is_in_loop=is_same_line, **more)
    if (trained := _trained_by_another(raised, graph, frozenset[int]().union(*(event.ops for event in passed)), **more)) is not None:
        return trained
    names = _shared_names(made.where, consumer)
    if is_same_line and any(op.index >= first.index for op in graph):  # else both losses were there before the first call
        carried, loop = [name for name, _ in carried_graphs(raised)], loop_around(here)
        is_of_loop = loop is not None and any(
            here is not None and line.file == here.file and covers(loop, line.line) for line in made.calls
        )
        known = [name for name in names if name in carried or "." in name or not is_of_loop]
        is_of_module = not carried and all("." in name for name in known or names)
        if is_of_module and (kept := _kept_by_module(raised, **more)) is not None:
            return kept
        return carried_over(raised, known or carried or names, is_made_before=loop is not None and not is_of_loop, **more)
    after = raised.course.events[raised.course.events.index(first) + 1 :]
    used = {use.tensor for op in shared for use in op.reads if use.is_leaf}
    trains_another = any(isinstance(one, OptimizerStep) and one.parameters and not one.parameters & used for one in after)
    return _shared(raised, names, _saved_bytes(shared), is_same_line=is_same_line, is_between_models=trains_another, **more)


def _trained_by_another(raised: Raised, graph: list[RecordedOp], passed: frozenset[int], **more: Any) -> AutogradFinding | None:
    """What other losses have trained, by optimizers of their own, and this one only reads, as an actor's loss reads the advantage."""
    outside = [op for op in graph if op.index not in passed]
    own, used = (
        {use.tensor for op in ops for use in op.reads if use.is_leaf and use.requires_grad}
        for ops in (outside, (op for op in graph if op.index in passed))
    )
    events = raised.course.events
    first = next((at for at, event in enumerate(events) if isinstance(event, Backward) and event.ops & passed), len(events))
    steps = [event.parameters for event in events[first:] if isinstance(event, OptimizerStep) and event.parameters & used]
    if not own or not used <= frozenset[int]().union(*steps) or any(own & parameters for parameters in steps):
        return None
    for optimizer in live(torch.optim.Optimizer):
        held = set(map(id, parameters_of(optimizer)))
        if held & own and held & used:
            return None  # the loss is to train both
    entering = [op for op in outside if any(use.requires_grad and maker.index in passed for use, maker in op.sources)]
    where, statement = entering[0].where, statement_at(entering[0].where)
    beside = [op for op in outside if op.line is entering[0].line]
    known = passed | {op.index for op in beside}
    read = [(use, maker) for op in beside for use, maker in op.sources if use.requires_grad]
    is_whole = all(maker.index in known for _, maker in read) and not any(
        use.is_leaf and use.requires_grad for op in beside for use in op.reads
    )
    if any(op.line is not entering[0].line for op in entering) or not isinstance(statement, ast.Assign):
        return None
    constant, name = statement.value, ast.unparse(statement.targets[0])
    if not is_whole:  # beside what is trained here, such as a discriminator's answer
        shared = max((maker for op in entering for use, maker in op.sources if maker.index in passed), key=lambda op: op.index)
        names = _shared_names(shared.where, entering[0])
        places = [node for node in nodes((ast.Name, ast.Attribute), statement.value) if ast.unparse(node) in names]
        if len(places) != 1:
            return None
        constant, name = places[0], ast.unparse(places[0])
    return raised.finding(
        f"`{name}` keeps the graph of another loss, which has been through backward()",
        "",
        where,
        edits=exchanging(where, constant, expression(f"{as_atom(constant)}.detach()")),
        tensor=name,
        explanation="what it is computed from is trained by another optimizer: for this loss, it is a constant",
        **more,
    )


def _read_from_text(raised: Raised) -> AutogradFinding:
    """From the source: what the loop carries over, or an earlier call of backward()."""
    here = raised.here
    if here is None:
        return _shared(raised, [], 0)
    loop = loop_around(here)
    if carried := carried_graphs(raised):
        where = location(here.file, carried[0][1], here.function)
        return carried_over(raised, [name for name, _ in carried], where, first_backward_at=here, shared_from=where)
    if loop is not None and (made := _made_before(raised, loop)) is not None:
        return made
    if (kept := _kept_by_module(raised)) is not None:
        return kept
    before = (statement for statement in simple_statements(tree_of(here.file)) if statement.lineno < here.line)
    calls = [statement.lineno for statement in before if ".backward(" in ast.unparse(statement)]
    earlier = location(here.file, calls[-1], here.function) if calls else None
    is_in_loop = loop is not None and (earlier is None or earlier.line < loop.lineno)
    first_at = here if is_in_loop else earlier
    if is_in_loop or earlier is None or _loss_of(earlier) == _loss_of(here):
        return _whole(raised, raised.root_name, is_in_loop=is_in_loop, first_backward_at=first_at)
    return _shared(raised, [], 0, first_backward_at=first_at)


def _made_before(raised: Raised, loop: Loop) -> AutogradFinding | None:
    """A tensor with a graph that was made before the loop, and that each loss is computed from."""
    passed = {id(node): node for node in upstream(root.grad_fn for root in raised.roots)}
    roots, inside, loop_file = set(map(id, raised.roots)), bound_names(loop), raised.here.file if raised.here is not None else ""
    for name, value in raised.variables():
        is_inner = isinstance(value, torch.Tensor) and id(value) not in roots and not is_graph_leaf(value)
        if name in inside or not is_inner or id(value.grad_fn) not in passed:
            continue
        leaves = {id(node.variable) for node in upstream([value.grad_fn]) if hasattr(node, "variable")}
        trained = {id(parameter) for optimizer in live(torch.optim.Optimizer) for parameter in parameters_of(optimizer)}
        again, why = f"compute `{name}` inside the loop, before each backward()", "the first backward() has freed the graph behind it"
        if leaves & trained or not trained:
            edits = _made_in_loop(raised, _last_bound(name, loop_file, loop))
            headline = f"`{name}` was computed once, before the loop, from what is trained"
            return raised.finding(headline, "", fix=again, edits=edits, tensor=name, explanation=why)
        where = _last_bound(name, loop_file, loop)
        detached = f"{name} = {name}.detach()"
        return raised.finding(
            f"`{name}` has a graph that was made before the loop",
            f"run `{detached}` once, where it is made",
            where,
            edits=edited(where, detached, "after"),
            tensor=name,
            first_backward_at=raised.here,
            explanation=f"{why}, and no optimizer trains what it was computed from",
        )
    return None


def _kept_by_module(raised: Raised, **more: Any) -> AutogradFinding | None:
    """What a module keeps from one step of a loop to the next, with the graph of the step that computed it."""
    passed = {node for node in upstream(root.grad_fn for root in raised.roots) if not hasattr(node, "variable")}
    for frame, place in raised.frames:
        loop = loop_around(place)
        names = {} if loop is None else {**frame.f_globals, **frame.f_locals}
        models = [(name, names[name]) for name in sorted(names_in(loop)) if isinstance(names.get(name), torch.nn.Module)] if loop else []
        parts = [(name, path, module) for name, model in models for path, module in model.named_modules()]
        kinds = {type(module): module for _, _, module in parts}
        meant = [change for module in kinds.values() for change in _meant_parameters(module, passed)]
        if loop is not None and meant:
            attributes = listed([f"`{attribute}`" for attribute, _ in meant])
            return raised.finding(
                f"{attributes} {'is computed' if len(meant) == 1 else 'are computed'} in the constructor alone, and not in each step",
                "",
                fix=" and ".join(f"`{edit.new}`" for _, edit in meant) + ("" if meant[0][1].old else " at the start of `forward`"),
                edits=tuple(edit for _, edit in meant),
                tensor=meant[0][0],
                explanation="the first backward() has freed its graph: the forward computes what depends on a parameter, anew in each step",
                **more,
            )
        changes = {
            code: change
            for name, path, module in parts
            for code, change in _without_graphs(".".join(filter(None, (name, path))), module, passed)
        }
        if loop is not None and changes:
            return raised.finding(
                f"{listed([f'`{code}`' for code in changes])} {'keeps' if len(changes) == 1 else 'keep'} the graph of an earlier step",
                "",
                fix=f"run {listed([f'`{line}`' for line in changes.values()])} at the start of each step",
                edits=edited(place, "\n".join(changes.values()), "before", loop.body[0]),
                tensor=", ".join(changes),
                explanation="the backward() of that step has freed its graph",
                **more,
            )
    return None


def _meant_parameters(module: torch.nn.Module, passed: set[Any]) -> Iterator[tuple[str, Edit]]:
    """(attribute, edit) of each tensor that the constructor alone makes, and whose graph has a node in `passed`.

    Made of parameters, the forward is to make it anew; else it is to be a parameter itself.
    """
    file = type(module).__init__.__code__.co_filename
    tree = tree_of(file)
    bound = [dotted(target) for node in nodes((ast.Assign, ast.AugAssign), tree) for target in targets_of(node)]
    for attribute, value in vars(module).items():
        statement = attribute_assignment(type(module).__init__, attribute)
        is_alone = statement is not None and len(statement.targets) == 1 and bound.count(f"self.{attribute}") == 1
        if tree is None or statement is None or not is_alone or not isinstance(value, torch.Tensor) or value.grad_fn is None:
            continue
        graph = set(upstream([value.grad_fn]))
        ends = [node.variable for node in graph if hasattr(node, "variable")]
        source = Source(location(file, statement.lineno, "__init__"), tree)
        if passed.isdisjoint(graph):
            continue
        if any(isinstance(end, torch.nn.Parameter) for end in ends):
            forward, own = function_node(type(module).forward.__code__), function_node(type(module).__init__.__code__)
            if (
                isinstance(forward, ast.FunctionDef)
                and own is not None
                and not read_names(statement.value) & (bound_inside(own) - {"self"})
            ):
                first = forward.body[ast.get_docstring(forward) is not None]
                if first.lineno > forward.lineno:
                    yield attribute, source.before(first, source.text(statement))
        else:
            home = "nn" if "nn" in read_names(tree) else "torch.nn"
            yield attribute, source.replacing(statement, f"self.{attribute} = {home}.Parameter({ast.unparse(statement.value)})")


def _without_graphs(owner: str, module: torch.nn.Module, passed: set[Any]) -> Iterator[tuple[str, str]]:
    """(attribute of a module, statement that cuts it off) of each that its code reads, and whose graph has a node in `passed`."""
    tree = tree_of(type(module).forward.__code__.co_filename)
    read = {node.attr for node in nodes(ast.Attribute, tree) if isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "self"}
    tests = [*map(ast.unparse, nodes(ast.Compare, tree))]
    empty = {ast.unparse(node) for node in nodes(ast.Assign, tree)}
    for attribute, value in vars(module).items():
        graph = upstream(tensor.grad_fn for tensor in parts_of_value(value) if tensor.grad_fn is not None)
        if attribute in read and not passed.isdisjoint(graph):
            code = f"{owner}.{attribute}"
            is_cache = any(text.startswith((f"self.{attribute} is None", f"self.{attribute} is not None")) for text in tests)
            made = _without_graph(code, value) or f"{code}.detach()"
            made = f"None if {code} is None else {made}" if f"self.{attribute} = None" in empty else made
            yield code, f"{code} = None" if is_cache else f"{code} = {made}"


def _last_bound(name: str, file: str, loop: Loop) -> Location | None:
    """The last statement before the loop, or of an earlier cell, that binds the name outside of any function."""
    for where, statement in statements(file):
        is_before = where.file != file or statement.lineno < loop.lineno
        in_function = any(isinstance(node, FUNCTIONS) for node in enclosing(tree_of(where.file), where.line))
        if is_before and not in_function and name in bound_names(statement):
            return where
    return None


def carried_graphs(raised: Raised) -> list[tuple[str, int]]:
    """(name, line that binds it) of what the loop around backward() carries over with a graph."""
    values = raised.values()
    carried = carried_names(loop_around(raised.here))
    return [one for one in carried if any(tensor.grad_fn is not None for tensor in parts_of_value(values.get(one[0])))]


def _whole(raised: Raised, name: str | None, *, is_in_loop: bool, **more: Any) -> AutogradFinding:
    """The same loss."""
    called = f"`{name}`" if name else "the same loss"
    again = f"compute {called} inside the loop, before each backward()"
    fix = again if is_in_loop else "delete the second call, or compute the loss again before it"
    why = "the first call has freed the tensors that the graph had saved"
    here, first = raised.here, more.get("first_backward_at")
    tree = tree_of(here.file) if here is not None and first is not None and not is_in_loop else None
    source = None if here is None or tree is None else Source(here, tree)
    edits: tuple[Edit, ...] = ()
    if source is not None and isinstance(source.statement, ast.Expr) and len(source.block_of(source.statement)) > 1:
        edits = source.merged((source.replacing(source.statement, ""),))
    return raised.finding(f"backward() was called twice on {called}", fix, tensor=name, edits=edits, explanation=why, **more)


def carried_over(
    raised: Raised,
    names: list[str],
    where: Location | None = None,
    *,
    is_made_before: bool = False,
    why: str = "the previous step's backward() has freed its part of the graph",
    **more: Any,
) -> AutogradFinding:
    """The graph of the step before, bound at a line; or with `is_made_before` one from before the loop."""
    names = [known for name in names for known in _known_here(raised, name)]
    subject = f"`{names[0]}` carries" if len(names) == 1 else f"{plural(len(names), 'variable')} carry" if names else "a variable carries"
    cure = {target: code for name in names for target, code in _detached(name, raised.value(name)).items()}
    fix = f"run `{', '.join(cure)} = {', '.join(cure.values())}` at the end of each step"
    fix = f"compute {listed([f'`{name}`' for name in names])} inside the loop, before each backward()" if is_made_before else fix
    return raised.finding(
        f"{subject} the graph of the previous step into backward()",
        "",
        where,
        fix=fix if cure else "call `.detach()` on what is carried over to the next step",
        edits=_made_in_loop(raised, more.get("shared_from")) if is_made_before and cure else (),
        tensor=", ".join(names) or None,
        explanation=why,
        **more,
    )


def _made_in_loop(raised: Raised, made: Location | None) -> tuple[Edit, ...]:
    """The statement that stands above the loop, as the first one of the loop, where nothing that it reads has a graph itself."""
    loop, statement, tree = loop_around(raised.here), statement_at(made), None if made is None else tree_of(made.file)
    if made is None or tree is None or loop is None or not isinstance(statement, ast.Assign):
        return ()
    values = raised.values()
    read = [part for name in read_names(statement) for part in parts_of_value(values.get(name))]
    block = next((block for node in ast.walk(tree) for block in blocks(node) if statement in block and loop in block), [])
    between = block[block.index(statement) + 1 : block.index(loop)] if block else []
    moves_past = (read_names(*between) | bound_names(*between)) & (bound_names(statement) | read_names(statement))
    if not block or moves_past or any(tensor.grad_fn is not None for tensor in read):
        return ()
    source = Source(made, tree)
    return source.merged((source.replacing(statement, ""), source.before(loop.body[0], source.text(statement))))


def _known_here(raised: Raised, name: str) -> list[str]:
    """A state of modules as the function that calls backward() knows it: ``net[1].state`` for the ``self.state`` of a `forward`."""
    owner, _, attribute = name.rpartition(".")
    states: list[str] = []
    for variable, value in raised.values().items() if owner == "self" else ():
        for path, module in value.named_modules() if isinstance(value, torch.nn.Module) and not states else ():
            held = vars(module).get(attribute, module._buffers.get(attribute))
            if isinstance(held, torch.Tensor) and held.grad_fn is not None:
                parts = path.split(".") if path else []
                states.append("".join((variable, *(f"[{part}]" if part.isdigit() else f".{part}" for part in (*parts, attribute)))))
    return states or [name]


def _shared(
    raised: Raised, names: list[str], kept_bytes: int, *, is_same_line: bool = False, is_between_models: bool = False, **more: Any
) -> AutogradFinding:
    """Two losses of one step; `is_between_models`: between the two, an optimizer updated parameters that the shared part does not use."""
    called = f"`{', '.join(names)}`" if names else "a part of the graph"
    headline = f"two backward calls share {f'the graph of {called}' if names else called}"
    why, edits = "the first call has freed the part that both share", tuple[Edit, ...]()
    losses = [loss for where in (more.get("first_backward_at"), raised.here) if (loss := _loss_of(where))]
    fix = f"replace both calls with `({' + '.join(losses)}).backward()`" if len(losses) > 1 else "add the losses and call backward() once"
    if is_same_line:
        headline, fix = f"several losses share {called}", _all_at_once(raised)
    elif len(losses) > 1 and losses[0] == losses[1]:
        headline = f"`{losses[0]}` still holds the loss of the first backward()"
        fix = f"reset `{losses[0]} = 0` before the next sum, or run `{losses[0]} = {losses[0]}.detach()` to keep its value"
    elif is_between_models and names:
        fix = f"compute {f'`{losses[0]}`' if losses else 'the first loss'} from {', '.join(f'`{name}.detach()`' for name in names)}"
        why = "the first loss trains other parameters, and frees that graph"
        edits = _cut_off(more.get("first_backward_at"), *losses[:1], name=names[0]) if len(names) == 1 else ()
    cost = f" (keeps {byte_size(kept_bytes)} until the second call)" if kept_bytes else ""
    fix += f"; or pass `retain_graph=True` to the first call{cost}"
    if edits:
        more |= {"edits": edits, "fix": fix}
    return raised.finding(headline, fix, tensor=", ".join(names) or None, explanation=why, **more)


def _cut_off(backward: Location | None, *losses: str, name: str) -> tuple[Edit, ...]:
    """The statement that computes a loss before its backward(), from the detached tensor."""
    for where, statement in statements(backward.file) if backward is not None else ():
        is_before = backward is not None and (where.file, where.line) <= (backward.file, backward.line)
        if is_before and {*losses} & bound_names(statement):
            return exchanging(where, ast.Name(name), expression(f"{name}.detach()"))
    return ()


def _loss_of(where: Location | None) -> str:
    """What a line calls backward() on; empty where that is not its own text."""
    functions = (call.func for call in nodes(ast.Call, parsed(where.source) if where is not None else None))
    return next(
        (ast.unparse(function.value) for function in functions if isinstance(function, ast.Attribute) and function.attr == "backward"), ""
    )


def _detached(name: str, value: object) -> dict[str, str]:
    """What is assigned to a variable to cut it off its graph, by what it holds; for a dataclass, to its fields."""
    if dataclasses.is_dataclass(value):
        fields = {f"{name}.{field.name}": getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return {field: code for field, held in fields.items() if [*parts_of_value(held)] for code in _detached(field, held).values()}
    if code := _without_graph(name, value):
        return {name: code}
    leaves = sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))  # else it holds objects that PyTorch does not know
    is_tree = leaves == len([*tensors_in(value)])
    return {name: f"torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, {name})"} if is_tree else {}


def _without_graph(code: str, value: object, depth: int = 0) -> str:
    """The same structure of detached tensors; empty where its parts are not alike."""
    if (form := _CONTAINERS.get(type(value))) is None:
        return f"{code}.detach()" if value is None or hasattr(value, "detach") else ""
    part = _PARTS[min(depth, len(_PARTS) - 1)]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    inner = {_without_graph(part, one, depth + 1) if one is not None else "" for one in parts}
    if len(inner) != 1 or "" in inner or depth >= len(_PARTS):
        return ""
    return form.format(inner.pop(), part, code)


def _all_at_once(raised: Raised) -> str:
    """One call for all losses that a loop goes through."""
    name, inner = raised.root_name, nodes(ast.comprehension, raised.statement)
    looped = [(one.target, one.iter) for one in (*inner, loop_around(raised.here)) if isinstance(one, (ast.comprehension, ast.For))]
    losses = next((ast.unparse(whole) for target, whole in looped if ast.unparse(target) == name), None)
    return f"replace the loop with `sum({losses}).backward()`" if losses else "add the losses and call backward() once"


def _shared_names(shared_from: Location | None, consumer: RecordedOp) -> list[str]:
    """The variables that the one line binds and the other reads."""
    made, used = statement_at(shared_from), statement_at(consumer.where)
    targets = targets_of(made) if made is not None and not isinstance(made, LOOPS) else []
    whole = [ast.unparse(node) for kind in (ast.Name, ast.Attribute) for node in nodes(kind, *targets)]
    bound = [name for name in whole if not any(other.startswith(f"{name}.") for other in whole)]
    read = {ast.unparse(node) for node in nodes((ast.Name, ast.Attribute), used) if isinstance(node.ctx, ast.Load)}
    both = [name for name in bound if name in read]
    carried = {name for name, _ in carried_names(loop_around(shared_from))}
    return [name for name in both if name in carried or "." in name] or both or (bound if len(bound) == 1 else [])


def _saved_bytes(ops: Iterable[RecordedOp]) -> int:
    """Memory of the inputs and outputs of the shared ops, without leaves."""
    spans: dict[int, int] = {}
    for op in ops:
        for use in (*(one for one in op.reads if not one.is_leaf), *op.makes):
            spans[use.memory] = max(spans.get(use.memory, 0), use.span[1])
    return sum(spans.values())
