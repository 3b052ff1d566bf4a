"""Code for a fix: the step is run again with it, and it counts only where the step is then finite and all else is as it was."""

from __future__ import annotations

import ast
import contextlib
import linecache
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from types import CodeType, FunctionType
from typing import TypeAlias

import torch

from torchdebug_magics.fixes import dedented
from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence
from torchdebug_magics.instruments.nanhunt.remedies import Sources, remedies
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op, Trace
from torchdebug_magics.instruments.nanhunt.report import NanFinding
from torchdebug_magics.instruments.nanhunt.rerun.attempt import Replayed
from torchdebug_magics.instruments.nanhunt.walk.birth_walk import walk
from torchdebug_magics.instruments.nanhunt.walk.blamed_inputs import with_slope
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.modules import live
from torchdebug_magics.probing.ops import is_pointwise
from torchdebug_magics.probing.source.edited_source import SIMPLE, Source
from torchdebug_magics.probing.source.syntax import EDITED, Edited, nodes, parsed, tree_of
from torchdebug_magics.probing.source.user_code import location, owner, span
from torchdebug_magics.probing.tensors import largest
from torchdebug_magics.report import Edit, FixState

Again: TypeAlias = "Callable[[], Replayed]"
"""Runs the bad step once more."""
Next: TypeAlias = "Callable[[Replayed], Evidence | None]"
"""The birth of what is bad in a replay; None where nothing is."""
_MOST_S = 5.0
_MOST_RUNS = 8
_MOST_BIRTHS = 3
_MOST_SHOWN = 400
"""Characters of a statement."""
_ROUNDING = 8
"""Times the precision of a dtype: so far results that are the same may differ."""
_EPSILON_EFFECT = 1e-3
"""The relative change that an epsilon in the fix may make to results that were finite."""
_CHOICES = frozenset({"where", "masked_fill", "masked_fill_"})
_CURABLE = frozenset(
    [
        "all_ignored", "degenerate_matrix", "div_zero", "exp_overflow", "bf16_overflow", "fp16_overflow", "infeasible_ctc",
        "log_negative", "log_zero", "mask_sign", "masked_row", "no_slope_at_zero", "pole", "pow_negative", "pow_zero", "sqrt_negative",
        "sqrt_zero", "where_trap", "zero_variance",
    ]
)  # fmt: skip
"""Causes that lie in the expression itself. A run that diverged is not repaired where it happened to leave the range."""


class Search:
    """Runs a bad step again, each time with the user's sources changed in one place; what stays bad is changed in turn.

    `again` runs the step once more, `birth` gives the birth of what is bad in that; None where nothing is.
    """

    def __init__(self, again: Again, birth: Next) -> None:
        self._again, self._birth = again, birth
        self._functions = [one for one in live(FunctionType) if owner(one.__code__.co_filename) == "user"]
        self.merely_finite: tuple[Sources, str] | None = None
        """The first sources with which nothing is bad, and what is not as it was."""
        self._runs = 0
        self._until = time.process_time() + _MOST_S

    def cure(self, births: tuple[Evidence, ...], sources: Sources) -> Sources | None:
        """Sources with which nothing is bad, and the last of these births is none; the others are none with `sources`."""
        for changed in islice(remedies(births[-1], sources), _MOST_RUNS):
            if self._runs >= _MOST_RUNS or time.process_time() > self._until:
                return None
            self._runs += 1
            try:
                with _in_force(changed, self._functions):
                    replayed = self._again()
            except (SyntaxError, ValueError):
                continue
            behind = self._birth(replayed) if replayed.finished else births[-1]
            if behind is None:
                flaw = _flaw(births, replayed)
                if not flaw:
                    return changed
                self.merely_finite = self.merely_finite or (changed, flaw)
            elif _site(behind) != _site(births[-1]) and len(births) < _MOST_BIRTHS:
                cured = self.cure((*births, behind), changed)
                if cured is not None:
                    return cured
        return None


def _flaw(births: tuple[Evidence, ...], replayed: Replayed) -> str:
    """Why a finite step is not right: what was finite is not the same, an infinity is left inside, or the gradients are dead."""
    trace, gradients = replayed.observer, list(replayed.gradients.values())
    with modes_aside():  # the comparison is not shown to a dispatch mode of the user's
        everything = any(birth.birth.mask is None or bool(birth.birth.mask.all()) for birth in births)
        if gradients and not everything and largest(gradients) == 0:
            return "no gradient is left"
        if not all(_is_the_same(birth, trace) for birth in births):
            return "other values change"
        return "an inf is left inside" if _is_left_inside(births[0], trace) else ""


def _is_the_same(evidence: Evidence, after: Trace) -> bool:
    """Whether the elements that were finite, with their derivatives, are what they were, to rounding; also where that cannot be told."""
    op = evidence.known
    if op is None or op.backward or op.written or not is_pointwise(op.func):
        return True
    pairs = zip(_alike(op, evidence.trace), _alike(op, after), strict=False)
    twin = next((there for here, there in pairs if here is op), None)
    before, now = with_slope(op), None if twin is None else with_slope(twin)
    if before is None or now is None or before[0].shape != now[0].shape:
        return True
    healthy, precision = torch.isfinite(before[0]) & torch.isfinite(before[1]), max(torch.finfo(one[0].dtype).eps for one in (before, now))
    kind = torch.promote_types(before[0].dtype, now[0].dtype)
    difference, size = (now[0].to(kind) - before[0].to(kind)).abs(), before[0].to(kind).abs() + before[1].to(kind)
    return not bool((difference > max(_ROUNDING * precision, _EPSILON_EFFECT) * size)[healthy].any())


def _alike(op: Op, trace: Trace) -> list[Op]:
    return [one for one in trace.ops if (one.name, one.line) == (op.name, op.line) and not one.backward]


def _is_left_inside(evidence: Evidence, after: Trace) -> bool:
    """Whether an op still makes what is not finite, other than one that did no harm in the bad step."""
    reaching = {(birth.op.name, birth.op.line) for birth in evidence.births if birth.op is not None}
    harmless = {(op.name, op.line) for op in evidence.trace.ops if op.is_bad} - reaching
    # A choice leaves out what is bad: `zero_infinity` of a CTC loss is such a one.
    chosen = [op for op in after.ops if op.name in _CHOICES and not op.is_bad]
    harmless |= {(after.ops[parent].name, after.ops[parent].line) for op in chosen for parent in op.parents}
    births = walk(after, [output for op in after.ops if op.is_bad for output in op.outputs])
    return any(birth.op is not None and not birth.on_purpose and (birth.op.name, birth.op.line) not in harmless for birth in births)


def with_verified_fix(finding: NanFinding, evidence: Evidence, again: Again, birth: Next, what: str) -> NanFinding:
    """The finding with code that was tried; as it was where none of what was tried ends it."""
    if finding.diagnosis not in _CURABLE:
        return finding

    try:
        search = Search(again, birth)
        sound = search.cure((evidence,), {})
    except Exception:  # noqa: BLE001 - the finding stands without code for its fix
        return finding
    cured, flaw = (sound, "") if sound is not None else search.merely_finite or (None, "")
    edits = () if cured is None else _changed_statements(cured)
    code = _code_of(edits, finding)
    is_clamped = finding.diagnosis.endswith("_negative") and ".sign()" not in code
    sign = "; also check why it is negative" if is_clamped else ""
    but = f", but {flaw}" if flaw else ""
    state: FixState = "compiles" if but else "verified"
    fix = f"write {code}: rerun with it, {what} is finite{but}{sign}"
    return replace(finding, fix=fix, edits=edits, fix_state=state) if code else finding


def _code_of(edits: tuple[Edit, ...], finding: NanFinding) -> str:
    """The changed statements for a sentence, with the lines that are not the finding's; empty where they are none, or too long."""
    here = finding.location.line if finding.location is not None else 0
    texts = [(edit.line, ast.unparse(ast.parse(edit.new)) if "\n" in edit.new else edit.new) for edit in edits]
    if any(len(text) > _MOST_SHOWN for _, text in texts):
        return ""
    return " and ".join(f"`{text}`" + (f" in line {line}" if line != here or len(texts) > 1 else "") for line, text in texts)


def _site(evidence: Evidence) -> tuple[object, ...]:
    op = evidence.known
    if op is None:
        return ()
    where = span(*op.place) if op.place is not None else None
    return op.name, op.line, where and where[:2], op.call.path if op.call is not None else None


def _changed_lines(file: str, text: str) -> list[int]:
    """The numbers of the lines that differ from what the user wrote."""
    pairs = zip(linecache.getlines(file), text.splitlines(keepends=True), strict=False)
    return [number for number, (old, new) in enumerate(pairs, 1) if old.rstrip() != new.rstrip()]


def _changed_statements(sources: Sources) -> tuple[Edit, ...]:
    """Each statement that differs from what the user wrote, as an edit; none where a head of a block differs."""
    edits: dict[tuple[str, int, int], Edit] = {}
    for file, number in [(name, number) for name, text in sources.items() for number in _changed_lines(name, text)]:
        old, new = tree_of(file), parsed(sources[file])
        source = None if old is None else Source(location(file, number, ""), old)
        node = None if source is None else source.statement
        if source is None or node is None or not isinstance(node, SIMPLE):
            return ()
        place = node.lineno, node.col_offset
        text = next(
            ast.get_source_segment(sources[file], changed)
            for changed in nodes(ast.stmt, new)
            if (changed.lineno, changed.col_offset) == place
        )
        first, *rest = (text or "").split("\n")
        edits[file, *place] = source.replacing(node, "\n".join([first, *(dedented(line, node.col_offset) for line in rest)]))
    return tuple(edits.values())


@contextlib.contextmanager
def _in_force(sources: Sources, functions: list[FunctionType]) -> Iterator[None]:
    """While open, the changed ones of these functions run as changed, and the statements of a step are those of the changed text."""
    trees = {file: ast.parse(text) for file, text in sources.items()}
    codes: dict[tuple[str, str, int], CodeType | None] = {}
    for file, tree in trees.items():
        for code in _inner(compile(tree, file, "exec", dont_inherit=True)):
            key = (file, code.co_name, code.co_firstlineno)
            codes[key] = None if key in codes else code  # of two on one line nobody knows which
    before: list[tuple[FunctionType, CodeType]] = []
    EDITED.update({file: Edited(tree, frozenset(_changed_lines(file, sources[file]))) for file, tree in trees.items()})
    try:
        for function in functions:
            old = function.__code__
            new = codes.get((old.co_filename, old.co_name, old.co_firstlineno))
            if new is not None and new.co_freevars == old.co_freevars:
                before.append((function, old))
                function.__code__ = new
        yield
    finally:
        for file in trees:
            EDITED.pop(file, None)
        for function, old in before:
            function.__code__ = old


def _inner(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner(constant)
