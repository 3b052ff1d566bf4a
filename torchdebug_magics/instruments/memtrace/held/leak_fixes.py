"""The fix for a leak: what to write instead, by the path of the variable that keeps the memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from torchdebug_magics.memory.paths import HolderPath
from torchdebug_magics.probing.source import syntax
from torchdebug_magics.probing.source.edited_source import Source, cells
from torchdebug_magics.probing.source.syntax import as_atom, called, copied, dotted, expression, method, nodes, parsed, tree_of
from torchdebug_magics.report import Edit, Location

_ADDS = frozenset({"append", "appendleft", "add", "put"})
_FILLS = frozenset({"append", "appendleft", "extend", "insert"})
_SIMPLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a variable keeps more and more."""

    keeps_graph: bool
    trains: bool
    """Whether a backward pass runs in the loop."""
    trains_later: bool = False
    """Whether one is still to run, as the code says, on what the loop adds up."""
    swells: bool = False
    """Whether it is one tensor that gets larger."""
    dim: int | None = None
    """Along which; None where that is not known."""
    line: str = ""
    """The text of the line that puts it there."""
    is_attribute: bool = False
    """Whether each of many objects has one, in an attribute."""
    empties: str = ""
    """How to empty what holds it, as one would write it: ``metric.reset()``."""
    slices: bool = False
    """Whether each tensor is kept for the sake of a part of it."""


def fix(path: HolderPath, cause: Cause) -> str:  # noqa: PLR0911 - one for each kind of holder
    """The fix for a variable, at `path`, that keeps more with every iteration."""
    if not path:
        return ""
    kept = path.variable
    if path.through_hook:
        return "call `.remove()` on the handle that registering the hook returned; or store only what is needed in the hook"
    if path.label == "Out":
        return "end the line with `;`, or free it with `%memclean --free out`"
    if path.label.startswith(("sys.last", "InteractiveTB")):
        return "free it with `%memclean --free exception`"
    if path.in_traceback:
        return f"store `str(error)` in `{kept}`, or `error.with_traceback(None)`: a traceback keeps the variables of every call in it"
    if cause.swells:
        return _swelling(path.as_code, cause)
    if cause.keeps_graph:
        return _of_graph(path, kept, cause)
    if cause.slices:
        copied = ".copy()" if path.pieces[-1:] == (".base",) else ".clone()"
        return f"store a copy in `{kept}`, with `{copied}`: a slice keeps the whole tensor alive"
    return _of_data(path, kept, cause)


def _of_data(path: HolderPath, kept: str, cause: Cause) -> str:  # noqa: PLR0911 - the same
    if path.closed_over[0] == "default":
        return f"write `{kept}=None`, and create the value in the function: a default is created once and shared by all calls"
    if path.in_function_cache:
        return f"bound the cache of `{kept}` with `@lru_cache(maxsize=100)`, or clear it: `{kept}.cache_clear()`"
    if path.through_cache:
        return f"bound the cache, or clear it: `{path.through_cache}`"
    match _statement(cause.line):
        case ast.Assign(targets=[ast.Attribute() as attribute, *_]) if cause.is_attribute:
            return f"delete it after use, `del {ast.unparse(attribute)}`, or set it to None: each object in `{kept}` keeps its own"
    if ".state" in path.inside:
        return f"create the optimizer once, before the loop, or keep only the latest: each one in `{kept}` has state for every parameter"
    if cause.empties:
        return f"call `{cause.empties}` after reading its result, such as after each epoch: until then it keeps everything it is given"
    if not path.place:
        kept = path.root  # many objects, each with one: the modules of a model, or a chain of records
    bound = "bound it with `deque(maxlen=100)`" if ".append(" in cause.line else "keep only the latest"
    return f"keep in `{kept}` only what is needed, such as a number or a mean; or clear it after use, `{kept}.clear()`; or {bound}"


def graph_fix(path: HolderPath, *, is_collection: bool, is_number: bool, line: str = "", entry: str = "", cure: str = ".detach()") -> str:
    """What to write where the graph itself grows.

    `is_collection`: whether `path` is a list or the like, of tensors with a graph, or of dicts that hold one as their `entry`.
    """
    kept = path.variable
    if kept.endswith(".grad"):
        return of_gradients()
    better = "" if _sets_owner(line, path) else rewritten(line, cure, entry)
    if better:
        number = (
            f"; `{rewritten(line, '.item()', entry)}` if only the number is needed"
            if is_number and (is_collection or isinstance(_statement(line), ast.AugAssign))
            else ""
        )
        return f"write `{better}`: otherwise `{kept}` keeps the graph of every step{number}"
    if is_collection:
        return f"store `.item()` (a number) or `.detach()` (a tensor) in `{kept}`, so that it keeps no graph"
    return f"detach it, `{kept} = {kept}{cure}`; or compute it under `with torch.no_grad():`"


def _swelling(path: str, cause: Cause) -> str:
    if ".resize_(" in cause.line:
        return f"allocate `{path}` at its final size before the loop, or create a new tensor each time: `resize_` releases no memory"
    detached = f"; also detach what is added: `{path}.grad_fn` keeps the graph of every iteration" if cause.keeps_graph else ""
    is_code = "..." not in path and _statement(path) is not None
    bound = f"bound it, such as `{path} = {path}[{':, ' * cause.dim}-1000:]`; or " if cause.dim is not None and is_code else ""
    return f"{bound}append to a list and concatenate it once, after the loop{detached}"


def of_gradients() -> str:
    """Where gradients hold the graph that made them."""
    return (
        "`backward(create_graph=True)` leaves a graph in every gradient: compute the derivatives with "
        "`torch.autograd.grad(..., create_graph=True)`, or set each `.grad` to None after the step, as `optimizer.zero_grad()` does"
    )


def _of_graph(path: HolderPath, kept: str, cause: Cause) -> str:
    is_of_gradient = kept.endswith(".grad")
    if cause.trains_later and not is_of_gradient:
        return f"call `backward()` in each iteration: until it is called, `{kept}` keeps the graph of every iteration"
    if not cause.trains and not is_of_gradient and not _asks_for_gradients():
        why = f"it never calls `backward()`, and `{kept}` keeps the graph of every iteration"
        return f"run the loop under `with torch.no_grad():`: {why}"
    line = "" if path.in_record else cause.line
    return graph_fix(path, is_collection=bool(path.place), is_number=True, line=line, entry=path.entry)


def _asks_for_gradients() -> bool:
    """Whether the notebook calls ``grad``, which needs a graph, be it by a name under which nobody can watch it."""
    return any(called(call) == "grad" for cell in cells() for call in nodes(ast.Call, cell.tree))


def rewritten(source: str, cure: str, entry: str = "") -> str:
    """The line with `cure`, such as ``.detach()``, behind what it puts somewhere, or behind the `entry` of the dict that it puts there.

    Empty where it is not one plain statement, or has that already.
    """
    statement = _statement(source)
    match statement and copied(statement):
        case ast.AugAssign(op=ast.Add() | ast.Sub()) as statement:
            statement.value = _cured(statement.value, cure)
        case ast.Assign(targets=[ast.Name() | ast.Attribute() | ast.Subscript()], value=ast.expr()) as statement:
            if isinstance(statement.value, (ast.List, ast.Dict, ast.Tuple, ast.ListComp, ast.DictComp)):
                return ""
            if functions := list(nodes(ast.Lambda, statement.value)):  # what it makes stores something when it is called
                adds = [call for call in nodes(ast.Call, functions[0].body) if method(call) in _ADDS and len(call.args) == 1]
                if not adds:
                    return ""
                adds[0].args = [_cured(adds[0].args[0], cure)]
            else:
                statement.value = _cured(statement.value, cure)
        case ast.Expr(value=ast.Call(args=[value], keywords=[]) as call) as statement if method(call) in _ADDS or adds_in_place(source):
            cured = _with_entry(value, cure, entry) if entry else _cured(value, cure) if isinstance(value, _SIMPLE) else None
            if cured is None:
                return ""
            call.args[0] = cured
        case _:
            return ""
    code = ast.unparse(statement)
    return "" if f"{cure}{cure}" in code else code


def adds_in_place(source: str) -> bool:
    """Whether the line is a call such as ``total.add_(loss)``."""
    match _statement(source):
        case ast.Expr(ast.Call(args=[_], keywords=[]) as call):
            return method(call) in {"add_", "sub_"}
    return False


def _sets_owner(source: str, path: HolderPath) -> bool:
    """Whether the line makes the object in an attribute of which it is kept, as ``optimizer = SGD(...)`` does, and not what is kept."""
    match _statement(source):
        case ast.Assign(targets=[ast.Name(name)]):
            return path.name == name and path.collection.startswith(f"{name}.")
    return False


def _statement(source: str) -> ast.stmt | None:
    tree = parsed(source.strip())
    return tree.body[0] if tree is not None and len(tree.body) == 1 else None


def _with_entry(value: ast.expr, cure: str, entry: str) -> ast.expr | None:
    """A dict, written out or by its name, whose `entry` is cured; None of anything else."""
    if isinstance(value, ast.Name):
        return expression(f"{{**{value.id}, {entry!r}: {value.id}[{entry!r}]{cure}}}")
    is_entry = [isinstance(key, ast.Constant) and key.value == entry for key in value.keys] if isinstance(value, ast.Dict) else []
    if not isinstance(value, ast.Dict) or not any(is_entry):
        return None
    return ast.Dict(value.keys, [_cured(part, cure) if cured else part for part, cured in zip(value.values, is_entry, strict=True)])


def _cured(value: ast.expr, cure: str) -> ast.expr:
    return expression(f"{as_atom(value)}{cure}")


def cleared_where_read(path: HolderPath, added_at: Location | None) -> tuple[str, tuple[Edit, ...]]:
    """What to write, and the edit; empty where it is not read like that by one method alone, or is emptied somewhere."""
    attribute = path.collection.rpartition(".")[2]
    tree = None if added_at is None else tree_of(added_at.file)
    if added_at is None or tree is None or not attribute.isidentifier() or path.collection == attribute:
        return "", ()
    source, name = Source(added_at, tree), f"self.{attribute}"
    kind = next((node for node in nodes(ast.ClassDef, tree) if syntax.covers(node, source.line)), None)
    methods = [node for node in nodes(syntax.FUNCTIONS, kind) if node.name != "__init__"]
    if any(name in map(dotted, syntax.targets_of(node)) for function in methods for node in nodes(ast.stmt, function)):
        return "", ()
    readers = [(function, statement) for function in methods for statement in _reading(function, name)]
    others = [node for function in methods for node in _taken_apart(function, name)]
    functions = {function.name for function, _ in readers}
    inside = {id(node) for node in nodes(ast.Attribute, kind)}
    others += [node for cell in cells() for node in nodes(ast.Attribute, cell.tree) if node.attr == attribute and id(node) not in inside]
    if len(functions) != 1 or others or syntax.covers(readers[0][0], source.line) or isinstance(readers[-1][1], ast.Return):
        return "", ()
    clear = f"{name}.clear()"
    last = readers[-1][1]
    whole = source.text(last, whole=True)
    return f"run `{clear}` in `{readers[0][0].name}`, after it was read", (source.replacing(last, f"{whole}\n{clear}", whole),)


def _reading(function: ast.AST, name: str) -> Iterator[ast.stmt]:
    """The loops of a method's own block that do away with each item: ``for handle in self.handles: handle.remove()``."""
    for statement in getattr(function, "body", ()):
        match statement:
            case ast.For(ast.Name(item), iterable, [ast.Expr(ast.Call(ast.Attribute(ast.Name(owner), _), []))]) if owner == item:
                if dotted(iterable) == name:
                    yield statement


def _taken_apart(function: ast.AST, name: str) -> Iterator[ast.AST]:
    """Where single items are read, or it is emptied, or handed out."""
    yield from (node for node in nodes(ast.Subscript, function) if dotted(node.value) == name)
    yield from (node for node in nodes(ast.Return, function) if dotted(node.value) == name)
    yield from (call for call in nodes(ast.Call, function) if name in map(dotted, call.args) and called(call) not in {"len", "print"})
    calls = [call for call in nodes(ast.Call, function) if isinstance(call.func, ast.Attribute) and dotted(call.func.value) == name]
    yield from (call for call in calls if method(call) not in _FILLS)
