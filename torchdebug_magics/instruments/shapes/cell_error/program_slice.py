"""The program slice that led to a failing line: the statements from the models to the op, run again without data as one forward.

A loss that does not fit is the fault of whatever made one of its sides, lines or modules above it. The frame of the error still holds the
inputs of those lines; only statements whose inputs are unchanged, and that call nothing but modules, functions of torch's and functions of
the user's that keep quiet, are taken.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import traceback
from collections.abc import Mapping
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torchdebug_magics.instruments.shapes.repair.source import site_of
from torchdebug_magics.probing.dry_runs.inputs import named_tensors
from torchdebug_magics.probing.source.syntax import (
    SIMPLE,
    backward_slice,
    bound_names,
    copied,
    lists_around,
    nodes,
    read_names,
    targets_of,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import is_user_code

_PLAIN = frozenset(["abs", "bool", "dict", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min", "range", "sum", "tuple"])
_OF_DICTS = frozenset(["get", "items", "keys", "values"])
_CHANGES = {
    *("train", "eval", "to", "cuda", "cpu", "float", "half", "double", "bfloat16", "zero_grad", "load_state_dict", "compile", "apply"),
    *("backward", "step", "register_hook", "retain_grad", "numpy", "tolist", "register_forward_hook", "append", "extend", "insert"),
    *("pop", "remove", "clear", "update", "write", "send", "put", "save", "load", "log", "add_scalar", "manual_seed", "seed", "print"),
}
"""Names of functions and methods that leave something behind, or need data."""
_OF_TENSORS = _CHANGES - {"to", "cuda", "cpu", "float", "half", "double", "bfloat16"}
_STORES = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "DELETE_", "IMPORT_NAME", "YIELD_VALUE")
_DEEP = 3
"""How far functions of the user's that call each other are read."""
_BETWEEN = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
"""They wait, or bind, in the middle of an expression."""
UNKNOWN = object()

_NAMES: WeakKeyDictionary[SourceLines, tuple[CodeType, dict[str, Any]]]


class SourceLines(torch.nn.Module):
    """Statements of the user's as a forward: the modules that they call are its parts, under the names that the user has for them."""

    def __init__(self, code: CodeType, names: dict[str, Any], parts: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        _NAMES[self] = code, names  # out of reach: what a run keeps and puts back are the parts and the inputs, not the whole notebook
        for path, part in parts.items():
            owner: torch.nn.Module = self
            *outer, name = path.split(".")
            for atom in outer:
                if atom not in owner._modules:
                    owner.add_module(atom, torch.nn.Module())
                owner = owner.get_submodule(atom)
            owner.add_module(name, part)

    def forward(self, **given: Any) -> None:
        """Run the statements, with these values for some of their names."""
        code, names = _NAMES[self]
        parts = {name: part for name, part in self._modules.items() if type(part) is not torch.nn.Module}
        exec(code, {**names, **parts, **given})  # noqa: S102 - the user's own statements, as they ran


_NAMES = WeakKeyDictionary()


def lines_to(error: BaseException) -> tuple[SourceLines, dict[str, Any]] | None:
    """The statements from the calls of models to the one that raised, and the tensors that they begin with, by the user's names.

    None where the failing expression depends on no model, or its statements cannot be run again.
    """
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    for at in reversed(range(len(frames))):
        frame, line = frames[at]
        names = {**frame.f_globals, **frame.f_locals}
        parts: dict[str, torch.nn.Module] = {}
        statements = _leading_to(frame.f_code.co_filename, line, names, parts)
        if statements and any(next(part.parameters(), None) is not None for part in parts.values()):
            return _made(frame, statements, names, parts)
        own = next(iter(inspect.getargvalues(frame).locals.values()), None)
        if at and not isinstance(own, torch.nn.Module) and not is_quiet(frame.f_code, frame.f_globals):
            return None  # the function may not be called once more: it leaves something behind
    return None


def expression_of(error: BaseException) -> tuple[SourceLines, dict[str, Any]] | None:
    """The expression that raised, alone, and the tensors that it begins with; None where it cannot be run again."""
    site, depth = site_of(error)
    node = site.expression if site is not None else None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if site is None or site.statement is None or not isinstance(node, (ast.expr, ast.AugAssign)):
        return None
    stores = isinstance(getattr(node, "ctx", None), ast.Store)
    statement = site.statement if stores or isinstance(node, ast.AugAssign) else ast.copy_location(ast.Expr(node), site.statement)
    frame = frames[depth - 1]
    names, parts = {**frame.f_globals, **frame.f_locals}, dict[str, torch.nn.Module]()
    return _made(frame, [statement], names, parts) if may_run(statement, names, parts, in_place=True) else None


def _made(
    frame: FrameType, statements: list[ast.stmt], names: dict[str, Any], parts: Mapping[str, torch.nn.Module]
) -> tuple[SourceLines, dict[str, Any]]:
    values = [(statement, statement.value if isinstance(statement, ast.Return) else None) for statement in statements]
    body = [statement if value is None else ast.copy_location(ast.Expr(value), statement) for statement, value in values]
    tree = ast.fix_missing_locations(ast.Module([copied(statement) for statement in body], []))
    read = sorted(read_names(*statements) & names.keys())
    given = {name: names[name] for name in read if next(named_tensors(names[name]), None) is not None}
    return SourceLines(compile(tree, frame.f_code.co_filename, "exec"), names, parts), given


def _leading_to(filename: str, line: int, names: Mapping[str, Any], parts: dict[str, torch.nn.Module]) -> list[ast.stmt]:
    """The statements from the models to that of a line, this one included; the modules that they call are added to `parts`.

    Only those that call a module, depend on one that does, or make what is overwritten later; whatever else is in the frame.
    """
    lists = lists_around(tree_of(filename), (line, -1, line, -1))
    before = [statement for body, place in reversed(lists) for statement in body[:place]]
    failing = lists[0][0][lists[0][1]] if lists else None
    if failing is None or not _is_simple(failing) or not may_run(failing, names, parts):
        return []

    def may_rerun(statement: ast.stmt) -> bool:
        makes_module = any(isinstance(names.get(name), torch.nn.Module) for name in bound_names(statement))
        return not makes_module and _is_simple(statement) and may_run(statement, names, {})

    kept: list[ast.stmt] = []
    live: set[str] = set()
    for statement in backward_slice(before, read_names(failing), may_rerun)[0]:
        called: dict[str, torch.nn.Module] = {}
        may_run(statement, names, called)
        stored = bound_names(statement)
        if called or live & read_names(statement) or stored & bound_names(*before[before.index(statement) + 1 :]):
            parts |= called
            live |= stored
            kept.append(statement)
    return [*kept, failing]


def _is_simple(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.With):
        return all(map(_is_simple, statement.body))
    plain = all(isinstance(node, (ast.Name, ast.Tuple, ast.List)) for node in nodes(ast.expr, *targets_of(statement)))
    return plain and isinstance(statement, SIMPLE)


def may_run(node: ast.AST, names: Mapping[str, Any], parts: dict[str, torch.nn.Module], *, in_place: bool = False) -> bool:
    """Whether all calls in it leave nothing behind but, where that is allowed, what an op has written to a tensor.

    The modules that they call are added to `parts`.
    """
    every = list(ast.walk(node))
    if any(isinstance(inner, _BETWEEN) or _asks_an_object(inner, names) for inner in every):
        return False
    calls = [inner.func for inner in every if isinstance(inner, ast.Call)]
    return all(_may_call(func, names, parts) or (in_place and _writes_tensor(func, names)) for func in calls)


def _writes_tensor(func: ast.expr, names: Mapping[str, Any]) -> bool:
    if not isinstance(func, ast.Attribute) or func.attr in _OF_TENSORS:
        return False
    method = getattr(torch.Tensor, func.attr, None)
    called = value_named(func, names)
    return method is not None and (called is UNKNOWN or called is method)


def _asks_an_object(node: ast.AST, names: Mapping[str, Any]) -> bool:
    """Whether an item, an attribute or a loop runs code of an object's own: ``dataset[3]``, ``for sample in dataset``, a property."""
    if isinstance(node, ast.Attribute):
        value = value_named(node, names)
        return isinstance(value, property) and _is_of_user(value.fget)
    container = node.value if isinstance(node, ast.Subscript) else node.iter if isinstance(node, ast.comprehension) else None
    value = value_named(container, names) if container is not None else UNKNOWN
    methods = [inspect.getattr_static(type(value), name, None) for name in ("__getitem__", "__iter__")]
    return value is not UNKNOWN and any(map(_is_of_user, methods))


def _is_of_user(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return isinstance(code, CodeType) and is_user_code(code)


def _may_call(func: ast.expr, names: Mapping[str, Any], parts: dict[str, torch.nn.Module]) -> bool:
    if isinstance(func, ast.Call):  # ``nn.MSELoss()(out, y)``
        made = value_named(func.func, names)
        return isinstance(made, type) and issubclass(made, torch.nn.Module)
    called = value_named(func, names)
    if module := _module_in(func, names):
        parts[module[0]] = module[1]
    if isinstance(called, torch.nn.Module):
        return True
    base = value_named(func.value, names) if isinstance(func, ast.Attribute) else UNKNOWN
    if isinstance(func, ast.Attribute) and isinstance(base, torch.nn.Module):
        return called is not UNKNOWN and func.attr not in _CHANGES and not func.attr.endswith("_")
    if called is UNKNOWN:
        return isinstance(func, ast.Attribute) and hasattr(torch.Tensor, func.attr) and _keeps(func.attr)
    name = getattr(called, "__name__", "")
    if getattr(builtins, name, None) is called or isinstance(base, dict):
        return name in (_OF_DICTS if isinstance(base, dict) else _PLAIN)
    return (_is_torchs(called) and _keeps(name) and not name.startswith(("set_", "use_"))) or _is_quiet_function(called)


def _keeps(name: str) -> bool:
    return name not in _OF_TENSORS and not (name.endswith("_") and not name.endswith("__"))


def _is_torchs(called: Any) -> bool:
    if isinstance(called, type) and not issubclass(called, (torch.nn.Module, torch.autograd.Function)):
        return called.__module__ == "torch.autograd.grad_mode" or "autocast" in called.__name__
    if getattr(torch.Tensor, getattr(called, "__name__", ""), None) is called:
        return True
    module = getattr(called, "__module__", None) or ""
    return module == "torch" or module.startswith(("torch.nn", "torch._C", "torch.functional", "torch.autograd", "torch.amp", "torch.fft"))


def _is_quiet_function(called: Any, depth: int = 0) -> bool:
    function = called.__func__ if isinstance(called, MethodType) else called
    return _is_of_user(function) and is_quiet(function.__code__, getattr(function, "__globals__", {}), depth)


def is_quiet(code: CodeType, names: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether a function stores nothing outside its own variables, as far as its code and that of those it names tells."""
    if depth > _DEEP or set(code.co_names) & (_CHANGES - {"to", "float"}):
        return False
    if any(instruction.opname.startswith(_STORES) for instruction in dis.get_instructions(code)):
        return False
    functions = [function for name in code.co_names if isinstance(function := names.get(name), FunctionType)]
    return all(_is_quiet_function(function, depth + 1) for function in functions if _is_of_user(function))


def _module_in(func: ast.expr, names: Mapping[str, Any]) -> tuple[str, torch.nn.Module] | None:
    """The outermost module in ``model``, ``self.net.encode``, with what the user writes for it."""
    inner = _module_in(func.value, names) if isinstance(func, ast.Attribute) else None
    module = value_named(func, names)
    return inner or ((ast.unparse(func), module) if isinstance(module, torch.nn.Module) else None)


def value_named(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a name or a dotted name stands for, without running code of the user's; `UNKNOWN` for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, getattr(builtins, node.id, UNKNOWN))
    own = value_named(node.value, names) if isinstance(node, ast.Attribute) else UNKNOWN
    if own is UNKNOWN or not isinstance(node, ast.Attribute):
        return UNKNOWN
    tables = [getattr(own, "__dict__", {})]
    if isinstance(own, torch.nn.Module):
        tables += [tables[0].get(table) or {} for table in ("_parameters", "_buffers", "_modules")]  # before its `__init__`, it has none
    value = next((table[node.attr] for table in tables if node.attr in table), UNKNOWN)
    return inspect.getattr_static(type(own), node.attr, UNKNOWN) if value is UNKNOWN else value
