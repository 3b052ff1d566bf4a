"""What a report says, made by hand."""

from __future__ import annotations

import pytest

from torchdebug_magics.html import markup, plain
from torchdebug_magics.html.page import Fold
from torchdebug_magics.instruments.memclean.report import Freed, Holding, MemcleanReport
from torchdebug_magics.instruments.memclean.view import page

MIB = 1 << 20


def holding(name: str, held: int, alone: int | None = None, *, others: tuple[str, ...] = ()) -> Holding:
    part = "exception" if name == "exception" else "out"
    return Holding(
        name=name,
        part=part,
        what="the error of In[7]" if part == "exception" else f"`{name}`",
        held_bytes=held,
        alone_bytes=held if alone is None else alone,
        devices=("cpu",),
        cost="`%debug` will no longer work on that error" if part == "exception" else f"`{name}` will be gone",
        others=others,
    )


def report(*holdings: Holding, together: int | None = None, **named: object) -> MemcleanReport:
    by_part: dict[str, int] = {}
    for one in holdings:
        if one.alone_bytes:
            by_part[one.part] = by_part.get(one.part, 0) + one.alone_bytes
    total = sum(one.alone_bytes for one in holdings) if together is None else together
    return MemcleanReport(holdings=holdings, together_bytes=total, by_part=by_part, **named)  # type: ignore[arg-type]


ERROR, OUT3, OUT5 = holding("exception", 512 * MIB), holding("Out[3]", 8 * MIB), holding("Out[5]", 2 * MIB)
VERDICTS = {
    "Nothing to clean: no old error, output or debugger holds a tensor": report(),
    "The error of In[7] holds 512.0 MiB · fix: `%memclean --free exception` · cost: `%debug` will no longer work on that error": (
        report(ERROR)
    ),
    "`Out[3]` and `Out[5]` hold 10.0 MiB · fix: `%memclean --free out` · cost: `Out[3]` and `Out[5]` will be gone": (report(OUT3, OUT5)),
    "The error of In[7] and `Out[3]` hold 520.0 MiB · fix: `%memclean --free` · cost: `%debug` will no longer work on that error "
    "and `Out[3]` will be gone": report(ERROR, OUT3),
    "4 outputs (`Out[3]` the most) hold 8.0 MiB · fix: `%memclean --free out` · cost: the outputs will be gone": report(
        *(holding(f"Out[{number}]", 2 * MIB) for number in (3, 4, 5, 6))
    ),
    "Nothing worth freeing: old errors and outputs hold 4 B of tensors": report(holding("Out[3]", 4)),
    "Nothing to gain: your variables hold everything that old errors and outputs hold": report(holding("Out[3]", MIB, 0, others=("x",))),
    "Freed exception 512.0 MiB, heap 3.0 MiB · cost: `%debug` has no error to work on now": report(
        asked=("exception", "heap"),
        freed=(
            Freed(name="exception", freed_bytes=512 * MIB, rss_bytes=MIB, cost="`%debug` has no error to work on now"),
            Freed(name="heap", freed_bytes=3 * MIB, rss_bytes=3 * MIB),
        ),
    ),
    "Nothing was freed: `x` still holds the tensors": report(
        holding("exception", MIB, 0, others=("x",)), asked=("out",), freed=(Freed(name="out", freed_bytes=0, rss_bytes=0),)
    ),
    "Nothing was freed": report(asked=("out",), freed=(Freed(name="out", freed_bytes=0, rss_bytes=0),)),
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_verdict_names_who_holds_what_and_what_freeing_costs(verdict: str) -> None:
    assert VERDICTS[verdict].verdict == verdict


def test_what_two_hold_together_is_freed_with_both() -> None:
    both = report(holding("exception", MIB, 0), holding("Out[3]", MIB, 0), together=MIB)
    assert "The error of In[7] and `Out[3]` hold 1.0 MiB · fix: `%memclean --free`" in both.verdict


@pytest.mark.parametrize("verdict", VERDICTS)
def test_it_is_shown_as_text_and_as_html(verdict: str) -> None:
    made = VERDICTS[verdict]
    text = " ".join(plain.render(page(made)).split())
    assert made.title in text
    assert made.command in text
    assert markup.render(page(made))


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_command_and_its_cost_have_rows_of_their_own(verdict: str) -> None:
    made = VERDICTS[verdict]
    assert "--free" not in made.title
    facts = dict(page(made).blocks[0].rows) if made.command else {}  # type: ignore[union-attr]
    assert facts == ({"fix": f"`{made.command}`", "cost": made.cost} if made.command else {})
    assert isinstance(page(made).blocks[-1], Fold)


def test_the_bytes_of_the_heap_are_no_tensors() -> None:
    assert VERDICTS["Freed exception 512.0 MiB, heap 3.0 MiB · cost: `%debug` has no error to work on now"].freed_bytes == 512 * MIB
