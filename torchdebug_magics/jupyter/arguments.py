"""Parses the line after a magic's name: flags, and the expressions to examine."""

from __future__ import annotations

import argparse
import ast
import difflib
import keyword
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from IPython.core.error import UsageError
from IPython.utils.text import DollarFormatter

from torchdebug_magics.instrument import Instrument, writable_path

_SWITCHES = ("on", "off")
_LITERAL = re.compile(r'"([a-z]+)"')
"""A subject that is always that very word."""
_QUOTED_OR_COMMENT = re.compile(r"""'[^']*'|"[^"]*"|(?:^|(?<=\s))\#.*""")
_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")
# Words up to the next flag; quotes and brackets make an expression, braces are expanded.
_BARE = re.compile(r"""[^\s'"()\[\]-][^'"()\[\]]*?(?=\s+--?[A-Za-z]|\s*$)""")
# What goes on with the value before the blank: `loss - 1`, `mask = mask`, `x if y else z`; `-1`, `*args` and `**batch` begin one.
_GOES_ON = re.compile(r"(?:[-+]|\*\*?)(?=\s|$)|[/%@&|^<>=!,.:)\]}]|(?:if|else|and|or|in|is|not|for)\b")
Values: TypeAlias = tuple[tuple[object, ...], dict[str, object]]
_COLLECT, _CALLED, _DESCRIBED = "_torchdebug_values", "_torchdebug_called", "_torchdebug_described"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A parsed magic line."""

    options: dict[str, Any]
    """The instrument's own options, as keyword arguments."""
    word: str | None = None
    """``"on"`` or ``"off"`` for a lasting session."""
    subjects: tuple[str, ...] = ()
    """Source text of the values to examine, as in a call: ``x``, ``mask=mask``, ``**batch``."""
    output: str | None = None
    quiet: bool = False
    widget: bool = False
    json: Path | None = None
    help: bool = False


class MagicParser(argparse.ArgumentParser):
    """Parses the lines of one instrument's magic; an invalid line raises a `UsageError` of one line."""

    def __init__(self, row: Instrument) -> None:
        super().__init__(
            prog=row.magic,
            description=row.description,
            add_help=False,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._row = row
        self.words = (*(_SWITCHES if row.lasting else ()), *_LITERAL.findall(row.subjects))
        """Words allowed on a line of their own, for completion."""
        if self.words:
            self.add_argument("word", nargs="?", metavar="|".join(self.words), help=_on_words(row))
        row.add_options(self)
        self.add_argument("-o", "--output", metavar="NAME", type=_name, help="keep the report in the variable NAME, also after an error")
        self.add_argument("-q", "--quiet", action="store_true", help="show nothing")
        self.add_argument("-w", "--widget", action="store_true", help="leave an interactive view: filter, sort, expand")
        self.add_argument("--json", metavar="PATH", type=writable_path, help="write the report to a file")
        self.add_argument("-h", "--help", action="store_true", help="show this, and run nothing")
        self.flags = tuple(flag for action in self._actions for flag in action.option_strings)
        """All flags, for completion."""

    @property
    def help(self) -> str:
        """The instrument's description and every flag."""
        return self.format_help()

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """Each word and flag as written, such as ``--seed N``, with its help."""
        return tuple((_written(action), (action.help or "").replace("%%", "%")) for action in self._actions)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError, of which `parse` makes one line."""
        raise ValueError(message)

    def parse(self, line: str, *, subjects: bool = False, names: Mapping[str, object] | None = None) -> Arguments:
        """Parse `line`; expressions are allowed if `subjects` is true.

        ``$name`` and ``{expression}`` stand for what they have among `names`, as in IPython's own magics; an expression to examine is
        Python as it is, where braces are a dict.
        """
        line = without_comment(line)
        typed = f"%{self._row.name}" if subjects else self._row.magic
        expressions: list[str] = []
        try:
            if subjects and self._row.examines and self._row.subjects:
                words, expressions = self._split(line, names or {})
                words = [_expanded(word, names) for word in words]
            else:
                words = _words(_expanded(line, names))
            values = self._values(words, expressions, alone=subjects)
        except ValueError as wrong:
            msg = f"{typed}: {wrong}; {typed}? lists what it takes"
            raise UsageError(msg) from None
        common = {name: values.pop(name) for name in ("output", "quiet", "widget", "json", "help")}
        return Arguments(options=values, word=values.pop("word", None), subjects=tuple(expressions), **common)

    def _values(self, words: list[str], expressions: list[str], *, alone: bool) -> dict[str, Any]:
        found, unknown = self.parse_known_args(words)
        if unknown:
            self.error(_unknown(self._row, unknown[0], self.words) + _nearest(unknown[0], self.flags))
        word = getattr(found, "word", None)
        if word is not None and (expressions or not alone or word not in self.words):
            wrong = expressions[0].strip("'") if alone and word in self.words else word
            self.error(_unknown(self._row, wrong, self.words))
        return vars(found)

    def _split(self, line: str, names: Mapping[str, object]) -> tuple[list[str], list[str]]:
        words: list[str] = []
        expressions: list[str] = []
        rest = line
        valued = {flag for action in self._actions if action.nargs != 0 for flag in action.option_strings}
        while rest:
            word = rest.split(None, 1)[0]
            flag = word.partition("=")[0]
            if flag in self.flags or flag.startswith("--"):
                for _ in range(2 if flag in valued and not rest.startswith(f"{flag}=") else 1):
                    quoted = match[0] if (match := _WORD.match(rest)) else rest
                    words += _words(quoted)
                    rest = rest[len(quoted) :].lstrip()
            elif not expressions and word in self.words:
                words += [word] if word in _SWITCHES else []
                expressions += [] if word in _SWITCHES else [repr(word)]
                rest = rest[len(word) :].lstrip()
            elif self._row.takes_words and (bare := _BARE.match(rest)) and _is_bare(bare[0], names):
                expressions.append(repr(_expanded(bare[0], names)))
                rest = rest[bare.end() :].lstrip()
            else:
                expression, rest = self._expression(rest)
                expressions.append(expression.rstrip().removesuffix(","))
        return words, expressions

    def _expression(self, text: str) -> tuple[str, str]:
        """The first expression of `text`, and the rest: split at the first blank where both sides parse."""
        for blank in re.finditer(r"\s+|$", text):
            expression, rest = text[: blank.start()], text[blank.end() :]
            follows_flag = rest.split(" ", 1)[0].partition("=")[0] in self.flags
            ended = expression if rest else f"{expression}\n"  # a comment goes on to the end of the line
            if (follows_flag or not _GOES_ON.match(rest)) and as_argument(ended) is not None:
                return expression, rest
        msg = f"cannot read {text!r} as an expression: put parentheses around each"
        raise UsageError(msg)


def _written(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar}"
    return ", ".join(f"{flag}{value}" for flag in action.option_strings) or str(action.metavar)


def without_comment(line: str) -> str:
    """`line` up to a ``#`` that follows a blank and stands outside quotes."""
    for match in _QUOTED_OR_COMMENT.finditer(line):
        if match[0].startswith("#"):
            return line[: match.start()].rstrip()
    return line.strip()


def _expanded(text: str, names: Mapping[str, object] | None) -> str:
    """Expand variables as IPython does: if one is undefined, the text is left unchanged."""
    if not names or not {"$", "{"} & set(text):
        return text
    try:
        return DollarFormatter().vformat(text, (), dict(names))  # IPython before 8 takes nothing but a dict
    except Exception:  # noqa: BLE001 - whatever an expression of the user's raises
        return text


def _is_bare(text: str, names: Mapping[str, object]) -> bool:
    """Whether words stand for themselves: they are no expression of known variables, nor the name of a text or a number."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return True
    if isinstance(tree, ast.Name):
        return not issubclass(type(names.get(tree.id)), (str, int, float))
    return any(isinstance(node, ast.Name) and node.id not in names for node in ast.walk(tree))


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""  # a backslash is a part of a path
    return list(lexer)


def _on_words(row: Instrument) -> str:
    on = f"%{row.name}, or %{row.name} on" if row.lasting == "line" else f"%{row.name} on"
    lasts = [f"{on}: from now on, over all cells, until %{row.name} off"] if row.lasting else []
    words = [f"%{row.name} {word}: a report at once" for word in _LITERAL.findall(row.subjects)]
    return "; ".join([*lasts, *words]).replace("%", "%%")


def _unknown(row: Instrument, word: str, words: tuple[str, ...]) -> str:
    if words and not word.startswith("-"):
        *others, last = (f"`%{row.name} {word}`" for word in words)
        return f"takes no value such as {word!r}; on a line of its own, {', '.join(others)} and {last}"
    if not word.startswith("-"):
        alone = f"; without a body, %{row.name} {row.subjects} does" if row.examines and row.subjects else ""
        return f"takes no value such as {word!r}{alone}"
    return f"there is no option {word!r}"


def _nearest(word: str, flags: Sequence[str]) -> str:
    near = difflib.get_close_matches(word.partition("=")[0], flags, 1) if word.startswith("-") else []
    begun = [flag for flag in flags if word.startswith("--") and flag.startswith(word)]
    return f" (did you mean `{(begun or near)[0]}`?)" if begun or near else ""


def _name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        msg = f"{text!r} is not a name for a variable"
        raise argparse.ArgumentTypeError(msg)
    return text


def evaluated(
    sources: tuple[str, ...], user_ns: dict[str, Any], local_ns: Mapping[str, Any], subject_of: Callable[[object], object | None]
) -> Values:
    """``(values, named values)``.

    A single call such as ``model(x, mask=m)`` of what `subject_of` knows is not made: its subject and its arguments are the values.
    """
    names = {**local_ns, _COLLECT: _collect, _DESCRIBED: slice}
    tree = _read(sources)
    only = tree.body.args[0] if isinstance(tree.body, ast.Call) and len(tree.body.args) == 1 and not tree.body.keywords else None
    if isinstance(only, ast.Call):
        names[_CALLED] = _run(ast.Expression(only.func), user_ns, names)
        only.func = ast.copy_location(ast.Name(_CALLED, ast.Load()), only.func)
        subject = subject_of(names[_CALLED])
        if subject is not None:
            names[_CALLED] = subject
            tree.body = ast.Call(ast.Name(_COLLECT, ast.Load()), [only.func, *only.args], only.keywords)
    values: Values = _run(tree, user_ns, names)
    return values


def as_argument(source: str) -> str | None:
    """The source of a value, to stand among the arguments of a call; ``(3, 4):int64`` is a slice, as in a subscript. None for neither.

    Either may have a name: ``mask=(3, 4):bool``.
    """
    try:
        ast.parse(f"f({source})", mode="eval")
    except SyntaxError:
        name, equals, value = source.partition("=")
        described = _as_slice(value if equals else source)
        return f"{name}={described}" if equals and described is not None and name.strip().isidentifier() else described
    return source


def _as_slice(source: str) -> str | None:
    try:
        found = ast.parse(f"_[{source}\n]", mode="eval").body
    except SyntaxError:
        return None
    part = found.slice if isinstance(found, ast.Subscript) else None
    if not isinstance(part, ast.Slice) or not isinstance(part.lower, ast.Tuple) or part.upper is None or part.step is not None:
        return None
    called = ast.Call(ast.Name(_DESCRIBED, ast.Load()), [part.lower, ast.Constant(ast.unparse(part.upper))], [])
    return ast.unparse(called)


def _read(sources: tuple[str, ...]) -> ast.Expression:
    separated = ",\n".join(as_argument(source) or source for source in sources)
    try:
        tree = ast.parse(f"{_COLLECT}({separated}\n)", mode="eval")
        compile(tree, "<magic line>", "eval")  # finds what the grammar allows and a call does not, such as a name given twice
    except SyntaxError as error:
        msg = f"cannot read {' '.join(sources)!r} as the arguments of a call: {error.msg}"
        raise UsageError(msg) from None
    return tree


def _run(tree: ast.Expression, user_ns: dict[str, Any], names: Mapping[str, Any]) -> Any:
    code = compile(ast.fix_missing_locations(tree), "<magic line>", "eval")
    try:
        return eval(code, user_ns, names)  # noqa: S307 - the user's own words
    except NameError as error:
        trace = error.__traceback__
        if trace is None or trace.tb_next is None or trace.tb_next.tb_next is not None:
            raise  # in what the line calls
        msg = f'there is no variable `{error.name}`: define it first, or write "{error.name}" in quotes if it is meant as a text'
        raise UsageError(msg) from None


def _collect(*values: object, **named: object) -> Values:
    return values, named


# So that Python's own words on wrong arguments (`**3`) name a call, and nothing of ours.
_collect.__module__, _collect.__qualname__ = "builtins", "call"
