"""The user's source and models: a finding at a line, who makes what, the lines that cut a graph, what a statement writes in place."""

from __future__ import annotations

import ast
import gc
import linecache
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, Literal

import torch

from torchdebug_magics.instruments.autograd.report import AutogradFinding, Cut, Kind
from torchdebug_magics.instruments.autograd.tape import RecordedOp
from torchdebug_magics.probing.modules import live_modules, parts_of, unwrapped
from torchdebug_magics.probing.source import syntax
from torchdebug_magics.probing.source.call_sites import attribute_assignment, function_node
from torchdebug_magics.probing.source.edited_source import Source, calls, made_as
from torchdebug_magics.probing.source.syntax import (
    called,
    copied,
    dotted,
    enclosing,
    exchanged,
    expression,
    method,
    names_in,
    nodes,
    parsed,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import excerpt, is_user_code, location
from torchdebug_magics.report import Edit, Location

_CALLS = {
    "detach": "detach", "item": "_local_scalar_dense", "tolist": "_local_scalar_dense", "numpy": "detach", "argmax": "argmax",
    "argmin": "argmin", "tensor": "lift_fresh", "as_tensor": "lift_fresh", "from_numpy": "lift_fresh", "round": "round", "long": "_to_copy",
    "int": "_to_copy", "bool": "_to_copy", "sign": "sign",
}  # fmt: skip
_OFF = ("no_grad", "inference_mode", "set_grad_enabled(False)")
_DEEPEST = 6
_MODULES = frozenset({"torch", "nn", "F", "functional", "init"})
_KEPT = frozenset({"requires_grad_", "retain_grad_", "_"})
_SIMPLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant)
_AUGMENTED = {ast.Add: "add_", ast.Sub: "sub_", ast.Mult: "mul_", ast.Div: "div_", ast.Pow: "pow_"}
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "clamp_min_", "index_copy_"})


def finding(
    kind: Kind,
    headline: str,
    where: Location | None,
    advice: str = "",
    *,
    fix: str = "",
    edits: tuple[Edit, ...] = (),
    op: RecordedOp | str | None = None,
    **more: Any,
) -> AutogradFinding:
    """A finding at the line to change, with the lines around it and the op at fault; advice is given where no edits are the fix."""
    known = {"raised": False, "module": op.module if isinstance(op, RecordedOp) else None, **more}
    return AutogradFinding(
        kind=kind,
        headline=headline,
        location=where,
        fix=fix or " and ".join(f"`{edit.new}`" for edit in edits) or advice,
        edits=edits,
        fix_state="compiles" if edits else "advice",
        excerpt=excerpt(where) if where is not None else (),
        op=op.name if isinstance(op, RecordedOp) else op,
        **known,
    )


def edited(
    where: Location | None, new: str, how: Literal["replacing", "before", "after"] = "replacing", statement: ast.stmt | None = None
) -> tuple[Edit, ...]:
    """The statement at a line, or a given one of its file, replaced by code, or with that before or after it.

    None where the text is missing, or where a line without a given statement has several.
    """
    tree = None if where is None else tree_of(where.file)
    source = None if where is None or tree is None else Source(where, tree)
    if source is None or source.statement is None or (statement is None and not source.is_alone(source.statement)):
        return ()
    change: Callable[[ast.stmt, str], Edit] = getattr(source, how)
    return source.merged((change(statement or source.statement, new),))


def cell_files() -> list[str]:
    """The names under which IPython has compiled cells, the oldest first."""
    return [file for file in linecache.cache if "ipykernel" in file or file.startswith("<ipython")]


def statement_at(where: Location | None, column: int | None = None) -> ast.stmt | None:
    """The innermost statement around a line, and around a column of it."""
    around = [] if where is None else list(enclosing(tree_of(where.file), where.line))
    of_line = [one for one in around if column is not None and where is not None and one.lineno == where.line == one.end_lineno]
    at = [one for one in of_line if column is not None and one.col_offset <= column < (one.end_col_offset or 0)]
    return next(reversed(at or around), None)


def code_at(where: Location | None, *words: str, statement: ast.stmt | None = None) -> str:
    """The statement at a line as it stands there, alone: of several, the first that has one of the words; the line where that is more."""
    source, statement = ("" if where is None else where.source), statement or statement_at(where)
    tree = parsed(source)
    if tree is not None and len(tree.body) > 1:
        texts = list(map(ast.unparse, tree.body))
        named = next((text for word in words for text in texts if word in text), None)
        return named or (ast.unparse(statement) if statement is not None else source)
    if (tree is not None and "#" not in source) or statement is None:
        return source
    return source.partition("#")[0].rstrip() if hasattr(statement, "body") else ast.unparse(statement)


def simple_statements(tree: ast.AST | None) -> list[ast.stmt]:
    """The statements without a body in the order of the text; those of functions and classes inside are not among them."""
    return [node for node in syntax.own_nodes(tree) if isinstance(node, ast.stmt) and not hasattr(node, "body")]


def _made_by(tree: ast.AST | None, names: set[str], last_line: int) -> Iterator[ast.stmt]:
    """The statements up to a line that made what these names hold there, the latest first."""
    wanted = set(names)
    for statement in reversed([statement for statement in simple_statements(tree) if statement.lineno <= last_line]):
        if syntax.bound_names(statement) & wanted:
            yield statement
            wanted |= syntax.read_names(statement)


def cuts_toward(names: set[str], file: str, last_line: int, function: str, namespace: Mapping[str, Any]) -> Iterator[Cut]:
    """On the way to what these names hold at a line, the nearest first; also inside the forwards and functions that are called there."""
    functions = (node for node in nodes(syntax.FUNCTIONS, tree_of(file)) if node.name == function and syntax.covers(node, last_line))
    for statement in _made_by(next(functions, tree_of(file)), names, last_line):
        yield from _cuts_of([statement], file, function, None)
        for name in syntax.read_names(statement):
            value = namespace.get(name)
            if isinstance(value, torch.nn.Module):
                yield from cuts_in_forward(value, "")
            elif isinstance(value, FunctionType) and (node := user_function(value)) is not None:
                returned = [statement for statement in simple_statements(node) if isinstance(statement, ast.Return)]
                made = _made_by(node, syntax.read_names(*returned), sys.maxsize)
                yield from _cuts_of([*returned, *made], value.__code__.co_filename, value.__name__, None)


def cuts_in_forward(module: torch.nn.Module, path: str, depth: int = 0) -> Iterator[Cut]:
    """In the forward of a module of the user's, and of those inside it."""
    if (node := user_function(type(module).forward)) is not None:
        code = type(module).forward.__code__
        yield from _cuts_of(simple_statements(node), code.co_filename, code.co_name, path)
    for name, child in module.named_children() if depth < _DEEPEST else ():
        yield from cuts_in_forward(child, f"{path}.{name}".lstrip("."), depth + 1)


def user_function(function: object) -> ast.AST | None:
    """The definition of a function; None where it is not the user's."""
    code: CodeType | None = getattr(function, "__code__", None)
    return function_node(code) if code is not None and is_user_code(code) else None


def _cuts_of(statements: Iterable[ast.stmt], file: str, function: str, module: str | None) -> Iterator[Cut]:
    for statement in statements:
        if (switch := gradient_switch(file, statement.lineno, function, _OFF)) is not None:
            yield Cut(op="no_grad", location=switch, module=module)
        for node in ast.walk(statement):
            name = syntax.called(node)
            first = next(iter(node.args), None) if isinstance(node, ast.Call) and name in {"tensor", "as_tensor"} else None
            op = "detach" if isinstance(node, ast.Attribute) and node.attr == "data" else _CALLS.get(name)
            if op and not isinstance(first, ast.Constant):
                yield Cut(op=op, location=location(file, statement.lineno, function), module=module)


def gradient_switch(file: str, line: int, function: str, names: Iterable[str]) -> Location | None:
    """The innermost ``with torch.no_grad():`` or decorator around a line that has one of these names in it."""
    for statement in reversed([*enclosing(tree_of(file), line)]):
        switches = [item.context_expr for item in statement.items] if isinstance(statement, syntax.WITHS) else []
        for switch in statement.decorator_list if isinstance(statement, syntax.FUNCTIONS) else switches:
            if any(name in ast.unparse(switch) for name in names):
                return location(file, switch.lineno, function)
    return None


def loop_around(where: Location | None) -> syntax.Loop | None:
    """The innermost loop around a line, in the same function."""
    return None if where is None else next(reversed(syntax.loops_around(tree_of(where.file), where.line)), None)


def carried_names(loop: syntax.Loop | None) -> list[tuple[str, int]]:
    """(name, line that binds it) of what the body reads before it binds it."""
    unbound: set[str] = set()
    bound: dict[str, int] = {}
    for statement in simple_statements(loop):
        unbound |= syntax.read_names(statement) - bound.keys()
        bound.update(dict.fromkeys(syntax.bound_names(statement), statement.lineno))
    return [(name, line) for name, line in bound.items() if name in unbound]


def assigned_at(name: str | None, files: Iterable[str], before: Location | None = None) -> Location | None:
    """The last assignment to a variable or attribute: in the first of these files that has one, up to a line, else in the latest cell."""
    for file in dict.fromkeys((*files, *reversed(cell_files()))) if name else ():
        for node in sorted(nodes(ast.Assign, tree_of(file)), key=lambda node: -node.lineno):
            is_before = before is None or file != before.file or node.lineno <= before.line
            if is_before and any(name in {ast.unparse(target), syntax.last_name(target)} for target in syntax.targets_of(node)):
                return location(file, node.lineno, "<module>")
    return None


def root_modules(modules: Iterable[torch.nn.Module] | None = None) -> list[torch.nn.Module]:
    """The modules that are no part of another one, of these or of all that are alive."""
    made = [one for one in (live_modules() if modules is None else modules) if "_modules" in getattr(one, "__dict__", ())]
    inner = parts_of(made)
    return [module for module in made if id(module) not in inner]


def named_members(roots: Iterable[torch.nn.Module] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of these models, or of all that are alive, by their names in `state_dict`."""
    for root in root_modules() if roots is None else roots:
        if unwrapped(root) is root:
            yield from root.named_parameters()
            yield from root.named_buffers()


def made_at(optimizer: torch.optim.Optimizer, name: str, files: Iterable[str]) -> Location | None:
    """The line that makes an optimizer, in the code that ran or else in earlier cells: the last for its name, or the only one."""
    kind, short, of_run = type(optimizer).__name__, name.rpartition(".")[2], list(dict.fromkeys(files))
    made = (where for file in of_run for known in (short, *held_as(optimizer)) for where, _ in made_as(file, known, kind))
    return next(made, None) or assigned_at(short, of_run)


def held_as(value: object) -> list[str]:
    """The variables and attributes that hold an object."""
    spaces = (referrer if isinstance(referrer, dict) else getattr(referrer, "__dict__", None) for referrer in gc.get_referrers(value))
    names = (key for space in spaces if isinstance(space, dict) for key, held in list(space.items()) if held is value)
    return [name for name in names if isinstance(name, str)]


def calls_of(op: RecordedOp, names: Container[str]) -> list[tuple[Location, ast.Call]]:
    """The calls of such functions in the line of an op; else those that make modules of such classes, in its file or in a cell."""
    if op.where is None:
        return []
    here = [(op.where, call) for call in nodes(ast.Call, statement_at(op.where)) if called(call) in names]
    return here or [(at, call) for at, call in calls(op.where.file) if called(call) in names]


def sequential_at(file: str, place: int, kind: str) -> Iterator[tuple[Location, ast.Call]]:
    """Each ``nn.Sequential`` that is made with a layer of that class at that place."""
    for where, call in calls(file):
        if called(call) == "Sequential" and place < len(call.args) and called(call.args[place]) == kind:
            yield where, call


def with_option(call: ast.Call, name: str, value: bool | str | int | tuple[int, ...] | None) -> ast.Call:
    """The call with that value of an option; without the option for None."""
    others = [keyword for keyword in call.keywords if keyword.arg != name]
    given = [] if value is None else [ast.keyword(name, expression(repr(value)))]
    return ast.Call(call.func, call.args, [*others, *given])


def with_options(node: ast.AST, functions: Container[str], name: str, value: bool | None) -> str:
    """The code of a node in which each call of these functions is given that value of an option."""
    return ast.unparse(
        exchanged(node, lambda part: with_option(part, name, value) if isinstance(part, ast.Call) and called(part) in functions else None)
    )


def not_in_place(call: ast.Call) -> ast.Call:
    """The call of an activation without ``inplace``, by name or as the last argument."""
    given = [argument for argument in call.args if not (isinstance(argument, ast.Constant) and argument.value is True)]
    return ast.Call(call.func, given, with_option(call, "inplace", None).keywords)


def stepped_name(where: Location | None) -> str | None:
    """What the line that calls ``step()`` calls the optimizer: ``self.opt`` of ``self.opt.step()`` and of ``scaler.step(self.opt)``."""
    for node in nodes(ast.Call, statement_at(where)):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "step":
            optimizer = node.args[0] if node.args and "scaler" in ast.unparse(node.func.value).lower() else node.func.value
            return ast.unparse(optimizer) if isinstance(optimizer, (ast.Name, ast.Attribute)) else None
    return None


def attribute_line(owner: torch.nn.Module, attribute: str) -> Location | None:
    """The line in the ``__init__`` of its class that assigns ``self.attribute``."""
    statement = attribute_assignment(type(owner).__init__, attribute)
    return None if statement is None else location(type(owner).__init__.__code__.co_filename, statement.lineno, "__init__")


def writes(statement: ast.stmt | None) -> list[tuple[ast.expr | None, str]]:
    """(what is written, op) of each write in place that the text of a statement shows, in the order in which Python evaluates."""
    shown: list[tuple[ast.expr | None, str]] = [
        (_written_argument(node), f"{method(node).removesuffix('_')}_")
        for node in (_evaluated(statement) if statement is not None else ())
        if isinstance(node, ast.Call) and (_is_in_place(node) or _asks_in_place(node))
    ]
    if isinstance(statement, ast.AugAssign):
        shown.append((statement.target, _AUGMENTED.get(type(statement.op), "")))
    if isinstance(statement, ast.Assign):
        shown += [(target, "copy_") for target in statement.targets if isinstance(target, ast.Subscript)]
    return shown


def written_names(statement: ast.stmt | None) -> list[str]:
    """The names whose tensors a statement writes in place, as far as its text tells."""
    return [ast.unparse(_base(target)) for target, _ in writes(statement) if target is not None]


def out_of_place(statement: ast.stmt | None, where: Location | None) -> str:
    """Code that can be pasted over the statement; empty where its text does not show how."""
    target: ast.expr | None = statement.target if isinstance(statement, ast.AugAssign) else None
    target = statement.targets[0] if isinstance(statement, ast.Assign) else target
    if statement is not None and isinstance(target, ast.Subscript):
        is_of_list = isinstance(target.value, ast.Name) and _is_list(target.value.id, where)
        if not (is_of_list and isinstance(statement, ast.AugAssign)):  # else the place in the list gets a new tensor
            return "" if is_of_list else _after_clone(target, statement)
    if not isinstance(statement, ast.AugAssign):
        return _calls_out_of_place(statement) if statement is not None else ""
    value = ast.unparse(statement.value)
    value = value if isinstance(statement.value, _SIMPLE) else f"({value})"
    name, operator = ast.unparse(statement.target), ast.unparse(ast.BinOp(ast.Name("a"), statement.op, ast.Name("b")))[2:-2]
    return f"{name} = {name} {operator.strip()} {value}"


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """What a node holds, before the node itself."""
    for child in ast.iter_child_nodes(node):
        yield from _evaluated(child)
    yield node


def through_the_base(statement: ast.stmt | None, loop: ast.stmt | None) -> str:
    """The loop and the statement, where that writes to the variable of a loop over a tensor: the same through the tensor, by index."""
    name = next(iter(written_names(statement)), None)
    if statement is None or name is None or not isinstance(loop, ast.For):
        return ""
    targets = list(loop.target.elts) if isinstance(loop.target, ast.Tuple) else [loop.target]
    place = next((number for number, one in enumerate(targets) if isinstance(one, ast.Name) and one.id == name), None)
    sources = loop.iter.args if isinstance(loop.iter, ast.Call) and dotted(loop.iter.func) == "zip" else [loop.iter]
    if place is None or len(sources) != len(targets) or isinstance(sources[place], ast.Starred):
        return ""
    index = "index" if "i" in names_in(loop) else "i"
    part = expression(f"{ast.unparse(sources[place])}[{index}]")
    code = ast.unparse(exchanged(statement, lambda node: part if dotted(node) == name else None))
    target = ast.unparse(loop.target)
    target = f"({target})" if isinstance(loop.target, ast.Tuple) and not target.startswith("(") else target
    return f"for {index}, {target} in enumerate({ast.unparse(loop.iter)}): {code}"


def _is_list(name: str, where: Location | None) -> bool:
    """Whether the function around a line binds a name to a list of its own making."""
    around = [] if where is None else [node for node in enclosing(tree_of(where.file), where.line) if isinstance(node, syntax.FUNCTIONS)]
    bound = [node for node in nodes(ast.Assign, around[-1] if around else None) if any(dotted(target) == name for target in node.targets)]
    return any(isinstance(node.value, (ast.List, ast.ListComp)) or syntax.called(node.value) == "list" for node in bound)


def _after_clone(target: ast.expr, statement: ast.stmt) -> str:
    base = ast.unparse(_base(target))
    return f"{base} = {base}.clone(); {ast.unparse(statement)}"


def _calls_out_of_place(statement: ast.stmt) -> str:
    changed = copied(statement)
    written: list[ast.expr] = []
    for node in nodes(ast.Call, changed):
        if _is_in_place(node) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _OVERWRITING or ".data" in ast.unparse(node.func.value):
                return ""
            written += filter(None, [_written_argument(node)])
            node.func.attr = node.func.attr[:-1]
        elif _asks_in_place(node):
            written += node.args[:1]
            node.keywords = with_option(node, "inplace", None).keywords
    if not written:
        return ""
    if not isinstance(statement, ast.Expr):
        return ast.unparse(changed)
    receiver = written[-1]  # of a chain of calls, the innermost
    if isinstance(receiver, ast.Subscript):
        return _after_clone(receiver, statement)
    return f"{ast.unparse(receiver)} = {ast.unparse(changed)}" if isinstance(receiver, (ast.Name, ast.Attribute)) else ""


def _written_argument(node: ast.Call) -> ast.expr | None:
    """What a call writes: ``x`` of ``x.mul_(2)``, of ``torch.relu_(x)`` and of ``F.relu(x, inplace=True)``."""
    if not isinstance(node.func, ast.Attribute):
        return None
    of_module = ast.unparse(node.func.value).partition(".")[0] in _MODULES
    return next(iter(node.args), None) if of_module else node.func.value if _is_in_place(node) else None


def _is_in_place(node: ast.Call) -> bool:
    name = method(node)
    return name.endswith("_") and not name.startswith("_") and name not in _KEPT


def _asks_in_place(node: ast.Call) -> bool:
    return any(
        keyword.arg == "inplace" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True for keyword in node.keywords
    )


def _base(node: ast.expr) -> ast.expr:
    """``h`` of ``h[0][:, 1]``, of ``h.data`` and of ``h.mul_(2)``; ``self.h`` stays."""
    while True:
        match node:
            case ast.Subscript(inner) | ast.Attribute(inner, "data" | "T"):
                node = inner
            case ast.Call(ast.Attribute(inner)) if _is_in_place(node):
                node = inner
            case _:
                return node
