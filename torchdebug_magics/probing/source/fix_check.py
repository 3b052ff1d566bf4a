"""The check of the code in a fix: report -> its fixes -> each `code` parsed and resolved -> code that stands, or words.

Nothing of the user's is called: names are looked up in frames and namespaces, attributes as `inspect.getattr_static` does.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import re
import sys
from collections.abc import Mapping
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, Literal, TypeVar

from torchdebug_magics.format import listed
from torchdebug_magics.probing.source import syntax
from torchdebug_magics.probing.source.user_code import frames_above, is_user_code, local_values, running_shell
from torchdebug_magics.report import Location, Report, changed, parts_of

ReportT = TypeVar("ReportT", bound=Report)
CODE = re.compile(r"`([^`\n]+)`")
_FORMS = ("{}", "{} pass", "{}\ndef _(): pass", "try: pass\n{} pass")
"""What code of a fix may be: statements, the head of a block, a decorator, ``finally:``."""
_PROSE = re.compile(r"[-%!*/\d]|[^(=;]*$|\W+$")
"""A flag, a magic, punctuation, the name of a parameter or of a file: no code, though it is shown as code is."""
_LEAD_IN = re.compile(r"(?:[,:;](?: such as| with| as| or| and)?| such as| \()\s*$")
_CLAUSE_END = re.compile(r"\s*(?:[;,:.)]|$)")
_CLAUSES = re.compile(r"(; (?:or )?|, or )")
_CALLED = re.compile(r"(\w+)\(")
ALIASES = {"torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional", "np": "numpy"}
_HOMES = ("torch", "torch.nn", "torch.nn.functional")
"""Where a name may come from that a fix mentions alone, such as `BCEWithLogitsLoss`."""
_UNKNOWN: Any = object()
"""Stands for a value that cannot be had without running code."""


class _MissingError(Exception):
    """A name, attribute or option that does not exist; `is_name` for a name."""

    def __init__(self, *, is_name: bool) -> None:
        self.is_name = is_name


def checked(report: ReportT, error: BaseException | None = None) -> ReportT:
    """The report, with words in its fixes for code that does not parse, or that uses what does not exist where it would stand.

    `error` is what ended the cell: its frames still hold the variables of the functions that ran. Never raises.
    """
    try:
        fixes = dict.fromkeys(fix for part in parts_of(report) if CODE.search(fix := getattr(part, "fix", None) or ""))
        if not fixes:
            return report
        place = _Place(report, error)
        words = [(fix, new) for fix in fixes if (new := _in_words(fix, place)) != fix]
        # Also where a fix is a part of a longer text.
        new_report: ReportT = changed(report, lambda part: _replaced(part, words) if isinstance(part, str) else part) if words else report
    except Exception:  # noqa: BLE001 - a check of ours that fails must leave the user's cell its report
        return report
    return new_report


def _replaced(text: str, words: list[tuple[str, str]]) -> str:
    for old, new in words:
        text = text.replace(old, new)
    return text


def _in_words(fix: str, place: _Place) -> str:
    """A fix in which only code is shown as code that could stand there."""
    start, bound = 0, {"_"}
    while (match := CODE.search(fix, start)) is not None:
        lacks = _lacks(match[1], place, bound)
        if not lacks:
            start = match.end()
            continue
        before, after = fix[: match.start()], fix[match.end() :]
        words = _words(match[1], place) if lacks == "name" else ""
        fix = f"{before}{words}{after}" if words else _without(before, after, match[1], is_name=lacks == "name")
        start, bound = 0, {"_"}  # what stands before may have changed, too
    return fix


def _without(before: str, after: str, code: str, *, is_name: bool) -> str:
    """A fix without the code that ends a clause and illustrates it, or without the clause, which is wrong if an attribute is missing."""
    parts = _CLAUSES.split(f"{before}\0{after}")
    at = next(number for number, part in enumerate(parts) if "\0" in part)
    lead = _LEAD_IN.search(before)
    illustrates = lead is not None and before[: lead.start()].strip() and _CLAUSE_END.match(after) is not None
    if lead is not None and illustrates and (is_name or len(parts) == 1):
        return before[: lead.start()] + (after.removeprefix(")") if "(" in lead[0] else after)
    if len(parts) == 1:
        names = listed([f"{name}()" for name in dict.fromkeys(_CALLED.findall(code))])
        return f"{before}{names or code}{after}" if before else ""
    del parts[max(0, at - 1) : at + 1 if at else 2]
    return "".join(parts).strip()


def _words(code: str, place: _Place) -> str:
    """Names alone for code whose variables are unknown: ``step()`` for ``optimizer.step()``; nothing for what is more than a call.

    Options keep their names, and what is called for them: ``DataLoader() with sampler=DistributedSampler()``.
    A function that exists by its full name stays code: `zlib.crc32` for ``zlib.crc32(text)``.
    """
    try:
        node = syntax.expression(code)
    except SyntaxError:
        return ""
    call = isinstance(node, ast.Call)
    named = node.func if isinstance(node, ast.Call) else node
    name = syntax.last_name(named)
    if isinstance(named, ast.Attribute) and call and not _lacks(full := ast.unparse(named), place, {"_"}):
        return f"`{full}`"
    options = [f"{option.arg}={_value_words(option.value)}" for option in node.keywords if option.arg] if isinstance(node, ast.Call) else []
    return (f"{name}()" + (f" with {listed(options)}" if options else "")) if name and call else name


def _value_words(node: ast.expr) -> str:
    """A constant as it is, the name of a function that is called, nothing of what else may be."""
    if isinstance(node, ast.Constant):
        return repr(node.value)
    return f"{ast.unparse(node.func)}()" if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else "..."


def _lacks(code: str, place: _Place, bound: set[str]) -> Literal["", "name", "more"]:
    """What keeps the code from standing at a place: a name, or more than that; empty if it could stand there, or is no code.

    `bound` are the names that the code before it in the same fix binds; those of this code are added.
    """
    if place.is_written(code):
        return ""
    code = f"_{code}" if code.startswith(".") else code  # an attribute of anything, as `.detach()`
    tree = next((tree for form in _FORMS if (tree := syntax.parsed(form.replace("{}", code))) is not None), None)
    if tree is None:
        return "" if _PROSE.match(code) else "more"
    try:
        _Resolver(place, bound).run(tree.body)
        bound |= syntax.bound_inside(tree)
    except _MissingError as missing:
        if missing.is_name:
            return "" if place.is_mention(tree.body) else "name"
        return "more"
    except Exception:  # noqa: BLE001 - what cannot be checked is not shown as code
        return "more"
    return ""


class _Resolver:
    """Resolves the names, attributes and options of statements, in the order in which they would run."""

    def __init__(self, place: _Place, bound: set[str]) -> None:
        self._place = place
        self._bound = bound

    def run(self, statements: list[ast.stmt]) -> None:
        """Raises `_MissingError` for the first that does not exist."""
        for statement in statements:
            inside = syntax.bound_inside(statement)
            assigned = syntax.names_in(*syntax.targets_of(statement)) if isinstance(statement, (ast.Assign, ast.AnnAssign)) else set()
            known = self._bound
            self._bound = known | (inside - assigned)
            for child in ast.iter_child_nodes(statement):
                if isinstance(child, ast.stmt):
                    self.run([child])
                else:
                    self._values(child)
            self._bound = known | inside

    def _values(self, node: ast.AST) -> list[Any]:
        """What a node may be, in one scope or another."""
        match node:
            case ast.Name(id=name):
                if isinstance(node.ctx, ast.Store) or name in self._bound:
                    return [_UNKNOWN]
                return self._place.values(name) or _fails(is_name=True)
            case ast.Attribute(value=owner, attr=attribute):
                values = self._values(owner)
                if isinstance(node.ctx, ast.Store):
                    return [_UNKNOWN]
                parts = [part for value in values for part in _attribute(value, attribute)]
                return parts or _fails(is_name=False)
            case ast.Call(func=function):
                values = self._values(function)
                options = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                for argument in (*node.args, *node.keywords):
                    self._values(argument)
                if not any(_takes(value, options) for value in values):
                    _fails(is_name=False)
                return [_UNKNOWN]
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self.run([child])
            else:
                self._values(child)
        return [node.value if isinstance(node, ast.Constant) and node.value is not ... else _UNKNOWN]


def _fails(*, is_name: bool) -> list[Any]:
    raise _MissingError(is_name=is_name)


def _attribute(value: Any, name: str) -> list[Any]:
    """The attribute, if the object has it: a value that is stored, or unknown; nothing if it has none."""
    if value is _UNKNOWN:
        return [_UNKNOWN]
    own = _own(value)
    tables = [own, *(own[part] for part in ("_parameters", "_buffers", "_modules") if isinstance(own.get(part), dict))]
    stored = next((table[name] for table in tables if name in table), _UNKNOWN)
    if stored is not _UNKNOWN:
        return [stored]
    attribute = inspect.getattr_static(value, name, _fails)
    if attribute is not _fails:
        return [attribute if issubclass(type(attribute), (FunctionType, type)) else _UNKNOWN]
    return [_UNKNOWN] if _may_have_more(value, own) else []


def _may_have_more(value: Any, own: Mapping[str, Any]) -> bool:
    """Whether it may have attributes that nothing stores: a lazy module, a class whose objects have them, a class with `__getattr__`."""
    kind = type(value)
    if issubclass(kind, ModuleType):
        return "__getattr__" in own
    of_modules = getattr(getattr(sys.modules.get("torch.nn"), "Module", None), "__getattr__", None)
    return issubclass(kind, type) or inspect.getattr_static(kind, "__getattr__", of_modules) is not of_modules


def _own(value: Any) -> dict[str, Any]:
    """The dict of an object's own attributes, read as `object` does."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes if isinstance(attributes, dict) else {}


def _takes(value: Any, options: set[str]) -> bool:
    """Whether a callable takes these keyword arguments, as far as its signature says."""
    function = inspect.getattr_static(value, "__init__", None) if issubclass(type(value), type) else value
    if not options or type(function) is not FunctionType:
        return True
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()) or options <= parameters.keys()


class _Place:
    """What exists where a fix of a report would stand; of several scopes, a name of any of them counts."""

    def __init__(self, report: Report, error: BaseException | None) -> None:
        of_error = _frames_of(error)
        places = dict.fromkeys(part for part in parts_of(report) if isinstance(part, Location))
        around = next((frame for frame in frames_above(sys._getframe(1)) if is_user_code(frame.f_code)), None)
        is_of_fix = around is not None and (not places or around.f_code.co_filename in {place.file for place in places})
        frames = [*of_error, *([around] if around is not None and is_of_fix else [])]
        self._scopes: list[Mapping[str, Any]] = []
        for frame in frames:
            self._scopes += [local_values(frame), frame.f_globals]
        self._scopes += [getattr(running_shell(), "user_ns", {}), vars(sys.modules["__main__"])]
        self._alive = {(frame.f_code.co_filename, frame.f_code.co_name) for frame in frames}
        self._over = set[str]()
        """Names of functions that have returned, whose values are gone."""
        self._seen = set[str]()
        """Names in the text of a cell or file that a location is in, outside of other functions."""
        files = dict.fromkeys([*(place.file for place in places), *(frame.f_code.co_filename for frame in of_error)])
        self._names = {line for part in parts_of(report) if isinstance(part, str) for line in part.splitlines()}
        """As of parameters and modules, which are no code."""
        self._text = "\n".join("".join(linecache.getlines(file)) for file in files)
        for file, line in {(place.file, place.line) for place in places}:
            self._read(file, line)

    def _read(self, file: str, line: int) -> None:
        tree = syntax.tree_of(file)
        if tree is None:
            return
        around = [node for node in syntax.enclosing(tree, line) if isinstance(node, syntax.SCOPES)]
        for scope in around:
            if (file, scope.name) not in self._alive and not isinstance(scope, ast.ClassDef):
                self._over |= syntax.bound_inside(scope)
        self._seen |= _visible(tree, around)

    def values(self, name: str) -> list[Any]:
        """What a name may stand for; nothing if it does not exist."""
        values = [scope[name] for scope in self._scopes if name in scope]
        if name in self._over or (name in self._seen and not values):
            return [_UNKNOWN]
        if not values and name in vars(builtins):
            return [vars(builtins)[name]]
        module = ALIASES.get(name, name if name in sys.stdlib_module_names else "")
        return values or ([sys.modules.get(module, _UNKNOWN)] if module else [])

    def is_written(self, code: str) -> bool:
        """Whether the user wrote that very code, which is then more than a name, or it is a name that the report has elsewhere."""
        if code in self._names:
            return True
        return not code.isidentifier() and re.search(rf"(?<![\w.]){re.escape(code)}(?!\w)", self._text) is not None

    def is_mention(self, body: list[ast.stmt]) -> bool:
        """Whether it is only a name, such as ``clamp``, ``deque(maxlen=100)`` or an attribute of the user's, and no code to run."""
        match body:
            case [ast.Expr(value=ast.Call(func=ast.Name(), args=arguments, keywords=options))]:
                return all(isinstance(argument, ast.Constant) for argument in (*arguments, *(option.value for option in options)))
            case [ast.Expr(value=ast.Name(id=name))]:
                of_torch = any(name in vars(sys.modules[home]) for home in _HOMES if home in sys.modules)
                return of_torch or re.search(rf"\.{name}\b", self._text) is not None
        return False


def _visible(node: ast.AST, around: list[Any]) -> set[str]:
    """Names that a text reads or binds, without the insides of functions other than those `around` a line."""
    names = set[str]()
    for child in ast.iter_child_nodes(node):
        names.update([child.id] if isinstance(child, ast.Name) else syntax.binding(child))
        if not isinstance(child, syntax.SCOPES) or child in around:
            names |= _visible(child, around)
    return names


def _frames_of(error: BaseException | None) -> list[FrameType]:
    """The user's frames that an error passed, the innermost first."""
    step: TracebackType | None = None if error is None else error.__traceback__
    frames = []
    while step is not None:
        frames.append(step.tb_frame)
        step = step.tb_next
    return [frame for frame in reversed(frames) if is_user_code(frame.f_code)]
