"""The fix for a leak: what to write instead, by the path of the variable that keeps the memory."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.probing.holders import Owner


_ROOT = re.compile(r"(?:.* local ')?([^\[.{ ']+)")
_LOCAL = re.compile(r".*\(\) local '([^']*)'(?: in thread '[^']*')?")
_INSIDE = re.compile(r"[^\[{]*\.<(closure|default) (\w+)>")
_PLACE = re.compile(r"\[-?\d+\]|\[\.\.\.\]|\{\.\.\.\}|\.grad_fn| -> |\.<")
"""Where in a path the collection ends, and one of the many things in it begins."""
_ENTRY = re.compile(r"\[(?:-?\d+|\.\.\.)\]\['(\w+)'\]\.grad_fn")
"""Behind a collection of dicts: where in one of them a tensor is."""
_RECORD = re.compile(r"\[(?:-?\d+|\.\.\.)\]\.(?!grad_fn\b)\w")
"""Behind a collection of objects: an attribute of one of them."""
_CHILD = re.compile(r"\.(\d+)(?=\.|\[|$)")
_PLAIN = re.compile(r"\w+(?:\.\w+|\[(?:-?\d+|'\w+')\])*$")
_STATE = re.compile(r"\.state\[\.\.\.\]\['(exp_avg|exp_avg_sq|step|momentum_buffer|square_avg)'\]$")
_IN_TRACEBACK = re.compile(r" -> \w+:\d+")
_GRADIENT = ".grad"
_FUNCTION_CACHE = ".<cache>"
_KNOWN = (
    (("_hooks",), "call `.remove()` on the handle that registering the hook returned; or store only what is needed in the hook"),
    (("Out[",), "end the line with `;`, or free it with `%memclean --free out`"),
    (("sys.last", "InteractiveTB"), "free it with `%memclean --free exception`"),
)
_ADDS = frozenset({"append", "appendleft", "add", "put"})
_SIMPLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def root(path: str) -> str:
    """The name that a path begins with."""
    found = _ROOT.match(path)
    if found is None or path.startswith(("Out[", "sys.")):
        return path.split(" ", 1)[0]
    return found[1]


def collection(path: str) -> str:
    """The collection at the start of a path, as written in code: `trainer.history` of ``trainer.history[0].grad_fn``."""
    inside = _INSIDE.match(path)
    if inside is not None:
        return inside[2]
    path = _LOCAL.sub(r"\1", path, count=1)
    return _PLACE.split(path, maxsplit=1)[0]


def as_code(path: str) -> str:
    """A path as Python has it: ``net[1].x`` for ``net.1.x``."""
    return _CHILD.sub(r"[\1]", path)


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


def fix(path: str, cause: Cause) -> str:
    """The fix for a variable, at `path`, that keeps more with every iteration."""
    known = next((text for words, text in _KNOWN if any(word in path for word in words)), None)
    if known is not None or not path:
        return known or ""
    kept = as_code(collection(path))
    if _IN_TRACEBACK.search(path) is not None:
        return f"store `str(error)` in `{kept}`, or `error.with_traceback(None)`: a traceback keeps the variables of every call in it"
    if cause.swells:
        return _swelling(as_code(_LOCAL.sub(r"\1", path, count=1)), cause)
    if cause.keeps_graph:
        return _of_graph(path, kept, cause)
    if cause.slices:
        copied = ".copy()" if path.endswith(".base") else ".clone()"
        return f"store a copy in `{kept}`, with `{copied}`: a slice keeps the whole tensor alive"
    return _of_data(path, kept, cause)


def _of_data(path: str, kept: str, cause: Cause) -> str:
    inside = _INSIDE.match(path)
    if inside is not None and inside[1] == "default":
        return f"write `{kept}=None`, and create the value in the function: a default is created once and shared by all calls"
    if "cache" in path.lower():
        return _of_cache(path, kept)
    if cause.is_attribute and (name := target(cause.line)):
        return f"delete it after use, `del {name}`, or set it to None: each object in `{kept}` keeps its own"
    if ".state[" in path and not kept.endswith(".state"):
        return f"create the optimizer once, before the loop, or keep only the latest: each one in `{kept}` has state for every parameter"
    if cause.empties:
        return f"call `{cause.empties}` after reading its result, such as after each epoch: until then it keeps everything it is given"
    if not is_in_collection(path):
        kept = root(path)  # many objects, each with one: the modules of a model, or a chain of records
    bound = "bound it with `deque(maxlen=100)`" if ".append(" in cause.line else "keep only the latest"
    return f"keep in `{kept}` only what is needed, such as a number or a mean; or clear it after use, `{kept}.clear()`; or {bound}"


def graph_fix(path: str, *, is_collection: bool, is_number: bool, line: str = "", entry: str = "", cure: str = ".detach()") -> str:
    """What to write where the graph itself grows.

    `is_collection`: whether `path` is a list or the like, of tensors with a graph, or of dicts that hold one as their `entry`.
    """
    kept = as_code(collection(path))
    if kept.endswith(_GRADIENT):
        return of_gradients()
    better = rewritten(line, cure, entry)
    if better:
        number = (
            f"; `{rewritten(line, '.item()', entry)}` if only the number is needed"
            if is_number and (is_collection or adds_a_number(line))
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
    bound = f"bound it, such as `{path} = {path}[{':, ' * cause.dim}-1000:]`; or " if cause.dim is not None and _PLAIN.match(path) else ""
    return f"{bound}append to a list and concatenate it once, after the loop{detached}"


def of_gradients() -> str:
    """Where gradients hold the graph that made them."""
    return (
        "`backward(create_graph=True)` leaves a graph in every gradient: compute the derivatives with "
        "`torch.autograd.grad(..., create_graph=True)`, or set each `.grad` to None after the step, as `optimizer.zero_grad()` does"
    )


def _of_graph(path: str, kept: str, cause: Cause) -> str:
    if kept.endswith(_GRADIENT):
        return of_gradients()
    in_dict = _ENTRY.match(path.removeprefix(collection(path)))
    entry = "" if in_dict is None else in_dict[1]
    better = "" if _RECORD.match(path.removeprefix(collection(path))) else rewritten(cause.line, ".detach()", entry)
    if cause.trains_later:
        return f"call `backward()` in each iteration: until it is called, `{kept}` keeps the graph of every iteration"
    if not cause.trains:
        why = f"it never calls `backward()`, and `{kept}` keeps the graph of every iteration"
        return f"run the loop under `with torch.no_grad():`: {why}"
    if better:
        number = f"; or `{rewritten(cause.line, '.item()', entry)}` if only the number is needed"
        return f"write `{better}`: `{kept}` keeps the graph of every iteration{number}"
    if is_in_collection(path):
        return f"store `.item()` (a number) or `.detach()` (a tensor) in `{kept}`: it keeps the graph of every iteration"
    return f"detach it, `{kept} = {kept}.detach()`, or add `.item()`: the graph then ends with each iteration"


def is_made_once(path: str) -> bool:
    """Whether the first step makes it, once: a gradient, or the state of an optimizer, unless that is one of many in a list."""
    return path.endswith(_GRADIENT) or (_STATE.search(path) is not None and collection(path).endswith(".state"))


def is_hidden(path: str) -> bool:
    """Whether a cache, a closure or a default value holds it, and no variable that one sees."""
    return ".<" in path or "cache" in path.lower()


def emptied(owner: Owner | None) -> str:
    """How to empty the object whose attribute holds it, where it has a method for that."""
    return f"{as_code(owner.path)}.{owner.empties}()" if owner is not None and owner.empties else ""


def is_part(path: str) -> bool:
    """Whether it is the path of attributes alone, as ``model.blocks.1.weight``, and not of one thing of many."""
    return _PLACE.search(_LOCAL.sub(r"\1", path, count=1)) is None


def is_local(path: str) -> bool:
    """Whether it begins with the local of a call that ran, and may be over."""
    return _LOCAL.match(path) is not None


def is_in_collection(path: str) -> bool:
    """Whether it is the path of one of many things in a list or the like."""
    found = _PLACE.search(_LOCAL.sub(r"\1", path, count=1))
    return found is not None and found[0][0] in "[{"


def _of_cache(path: str, kept: str) -> str:
    if _FUNCTION_CACHE in path:
        return f"bound the cache of `{kept}` with `@lru_cache(maxsize=100)`, or clear it: `{kept}.cache_clear()`"
    return f"bound the cache, or clear it: `{_up_to_cache(path)}`"


def _up_to_cache(path: str) -> str:
    found = re.match(r".*?cache\w*", path, re.IGNORECASE)
    return path if found is None else found[0]


def rewritten(source: str, cure: str, entry: str = "") -> str:
    """The line with `cure`, such as ``.detach()``, behind what it puts somewhere, or behind the `entry` of the dict that it puts there.

    Empty where it is not one plain statement.
    """
    statement = _statement(source)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, (ast.Add, ast.Sub)):
        statement.value = _cured(statement.value, cure)
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1 and not isinstance(statement.targets[0], (ast.Tuple, ast.List)):
        if isinstance(statement.value, (ast.List, ast.Dict, ast.Tuple, ast.ListComp, ast.DictComp)):
            return ""
        statement.value = _cured(statement.value, cure)
    elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
        is_put = isinstance(call.func, ast.Attribute) and call.func.attr in _ADDS
        if not is_put or len(call.args) != 1 or call.keywords:
            return ""
        value = _with_entry(call.args[0], cure, entry) if entry else call.args[0]
        if value is None or not (entry or isinstance(value, (*_SIMPLE, ast.BinOp))):
            return ""
        call.args[0] = value if entry else _cured(value, cure)
    else:
        return ""
    return ast.unparse(statement)


def target(source: str) -> str:
    """The attribute that the line sets, such as ``module.input``; empty where it sets none."""
    statement = _statement(source)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Attribute):
        return ""
    return ast.unparse(statement.targets[0])


def adds_a_number(source: str) -> bool:
    """Whether the line is of the kind ``total += loss``."""
    return isinstance(_statement(source), ast.AugAssign)


def _statement(source: str) -> ast.stmt | None:
    try:
        body = ast.parse(source.strip()).body
    except (SyntaxError, ValueError):
        return None
    return body[0] if len(body) == 1 else None


def _with_entry(value: ast.expr, cure: str, entry: str) -> ast.expr | None:
    """A dict, written out or by its name, whose `entry` is cured; None of anything else."""
    if isinstance(value, ast.Name):
        return ast.parse(f"{{**{value.id}, {entry!r}: {value.id}[{entry!r}]{cure}}}", mode="eval").body
    if isinstance(value, ast.Dict) and any(isinstance(key, ast.Constant) and key.value == entry for key in value.keys):
        pairs = zip(value.keys, value.values, strict=True)
        cured = [_cured(part, cure) if isinstance(key, ast.Constant) and key.value == entry else part for key, part in pairs]
        return ast.Dict(value.keys, cured)
    return None


def _cured(value: ast.expr, cure: str) -> ast.expr:
    text = ast.unparse(value)
    return ast.parse(f"{text}{cure}" if isinstance(value, _SIMPLE) else f"({text}){cure}", mode="eval").body
