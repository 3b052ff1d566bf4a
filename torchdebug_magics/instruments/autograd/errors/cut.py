"""*Does not require grad*: where the chain from the parameters to the loss was cut, and by what."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.autograd.errors.cut_words import cut_words, words_for_text
from torchdebug_magics.instruments.autograd.errors.dropped_gradient import dropped_on_the_way
from torchdebug_magics.instruments.autograd.errors.raised import Raised, named_members, statement_at
from torchdebug_magics.instruments.autograd.from_text.cuts import cuts_toward
from torchdebug_magics.instruments.autograd.named import cell_files
from torchdebug_magics.instruments.autograd.report import Finding
from torchdebug_magics.probing.source.call_sites import tree_of
from torchdebug_magics.probing.where import excerpt, location

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.instruments.autograd.recording.tape import RecordedOp
    from torchdebug_magics.instruments.autograd.report import Cut
    from torchdebug_magics.report import Location

__all__ = ["cut_graph", "freezing_line"]


def cut_graph(raised: Raised) -> Finding:
    """Names the op nearest to the loss that cut the graph."""
    dropped = None
    passed: list[RecordedOp] = []
    for root in raised.roots:
        if not root.requires_grad:
            dropped, passed = dropped_on_the_way(raised.tape, id(root))
            break
    if dropped is None:
        return _without_cut(raised, passed)
    op = dropped.op
    line = op.line.location if op.line is not None else None
    headline, fix, where = cut_words(dropped)
    return Finding(
        kind="cut",
        raised=True,
        headline=headline,
        location=where,
        op=op.name,
        module=op.module,
        saved_at=line if where != line else None,
        fix=fix,
        explanation="backward() starts at a tensor without a graph: no parameter can get a gradient",
        excerpt=excerpt(where) if where is not None else (),
    )


def _without_cut(raised: Raised, passed: list[RecordedOp]) -> Finding:
    """Explains a loss whose graph no op cut: all parameters are frozen, or the loss does not depend on the model."""
    used = {use.memory for op in passed for use in op.reads}
    members = [(name, held) for name, held in named_members() if any(raised.memory_is(held, number) for number in used if number)]
    frozen = tuple(name for name, held in members if not held.requires_grad and (held.is_floating_point() or held.is_complex()))
    line = next((op.line.location for op in passed if op.line is not None), None)
    if frozen and not any(held.requires_grad for _, held in members):
        return _frozen(raised, frozen, line)
    cut = next(_cuts_in_text(raised), None) if not raised.tape.ops else None
    where = (cut.location if cut is not None else None) or line or raised.here
    if cut is not None:
        headline, fix = words_for_text(cut.op, where)
    elif raised.tape.ops and not members:
        headline, fix = "the loss was computed without any parameter", "compute the loss from the output of the model"
    else:
        headline, fix = (
            "the loss has no graph",
            "put `%%autograd` above the cell and run the cell again: the report names the line that cut the graph",
        )
    return Finding(
        kind="cut",
        raised=True,
        headline=headline,
        location=where,
        op=cut.op if cut is not None else passed[0].name if passed else None,
        module=cut.module if cut is not None else None,
        fix=fix,
        excerpt=excerpt(where) if where is not None else (),
    )


def _cuts_in_text(raised: Raised) -> Iterator[Cut]:
    """The cuts on the way to the loss, in the frame that called backward()."""
    statement = statement_at(raised.here)
    if statement is None or raised.here is None or not raised.frames:
        return
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    frame = raised.frames[0]
    yield from cuts_toward(names, raised.here.file, raised.here.line, frame.f_code.co_name, dict(reversed(list(raised.variables()))))


def _frozen(raised: Raised, frozen: tuple[str, ...], line: Location | None) -> Finding:
    where = freezing_line(raised) or line or raised.here
    return Finding(
        kind="cut",
        raised=True,
        headline="all parameters that the loss uses are frozen",
        location=where,
        op="requires_grad_",
        parameters=frozen,
        fix=f"set `requires_grad = True` for the parameters to train, such as `{frozen[-1]}`",
        explanation="a graph is only built where an input requires a gradient",
        excerpt=excerpt(where) if where is not None else (),
    )


def freezing_line(raised: Raised) -> Location | None:
    """The first that sets ``requires_grad`` to False, in the code that ran or else in the latest cell that does."""
    files = [place.file for place in raised.places]
    for file in dict.fromkeys([*files, *reversed(cell_files())]):
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, (ast.Assign, ast.Expr)) and re.search(r"requires_grad(_\(False\)| = False)", ast.unparse(node)):
                return location(file, node.lineno, raised.places[0].function)
    return None
