"""What each magic's report answers: where, which op, which module, what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torchdebug_magics.report import Location

__all__ = ["ANSWERS", "Answer"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Of one report, whichever magic gave it."""

    found: bool
    places: tuple[tuple[int | None, int], ...] = ()
    """(In[n], line) that the report names first; no list of all that could be."""
    ops: tuple[str, ...] = ()
    modules: tuple[str | None, ...] = ()
    fix: str = ""
    text: str = ""
    """Explanations and tables that stand beside the verdict."""
    others: tuple[tuple[str, tuple[tuple[int | None, int], ...]], ...] = ()
    """Places that are named besides, such as where the tensor was saved; by the name of their marker."""


def _places(locations: Iterable[Location | None]) -> tuple[tuple[int | None, int], ...]:
    return tuple((location.cell, location.line) for location in locations if location is not None)


def _of_nanhunt(report: Any) -> Answer:
    finding = report.finding
    if finding is None:
        return Answer(found=False)
    return Answer(
        found=True,
        places=_places((finding.location,)),
        ops=(finding.op,) if finding.op else (),
        modules=(finding.module,),
        fix=finding.fix,
        text=finding.explanation,
    )


def _of_shapes(report: Any) -> Answer:
    failure = report.failure or report.suspect
    if failure is None:
        return Answer(found=False)
    best = next((fix for fix in failure.fixes if fix.verified), next(iter(failure.fixes), None))
    return Answer(
        found=True,
        places=_places((failure.location,)),
        ops=(failure.op,) if failure.op else (),
        modules=(failure.module,),
        fix=f"{best.code}\n{best.why}" if best is not None else "",
        text=failure.explanation,
    )


def _of_memtrace(report: Any) -> Answer:
    findings = (report.kept_by_cycles, report.growth, report.rerun_growth, report.graph_growth, report.undeleted)
    found = [one for one in findings if one is not None]
    leading = next((one for one in found if f"fix: {one.fix}" in report.verdict), found[0] if found else None)
    return Answer(
        found=leading is not None or report.oom is not None,
        places=_places((getattr(leading, "kept_at", None), getattr(leading, "location", None))),
        fix="" if leading is None else leading.fix,
        text=getattr(leading, "holder", ""),
    )


def _of_deterministic(report: Any) -> Answer:
    dependences = getattr(report, "depends_on", ())
    first = dependences[0] if dependences else report.divergence
    if first is None:
        return Answer(found=False)
    explanation = first.what if dependences else first.explanation
    return Answer(
        found=True,
        places=_places((first.location,)),
        ops=(first.op, *first.op.split(".")),
        fix=first.fix,
        text="\n".join(filter(None, (explanation, ", ".join(getattr(report, "carried", ()))))),
    )


def _of_autograd(report: Any) -> Answer:
    finding = report.finding
    if finding is None:
        return Answer(found=False)
    facts = {"kind": finding.kind, "tensor": finding.tensor, "writer": finding.writer_op, "parameters": ", ".join(finding.parameters)}
    others = {"saved": finding.saved_at, "first": finding.first_backward_at, "shared": finding.shared_from}
    return Answer(
        found=True,
        places=_places((finding.location,)),
        ops=(finding.op,) if finding.op else (),
        modules=(finding.module,),
        fix=finding.fix,
        text="\n".join([*(f"{name} {fact}" for name, fact in facts.items() if fact), finding.explanation]),
        others=tuple((name, _places((place,))) for name, place in others.items()),
    )


def _of_overfit(report: Any) -> Answer:
    if not report.headline:
        return Answer(found=False)
    return Answer(
        found=True,
        places=_places((report.location,)),
        modules=(report.module,),
        fix=report.fix,
        text=f"cause {report.cause}\nparameters {', '.join(report.parameters)}\nrows {report.rows}",
    )


ANSWERS: Mapping[str, Callable[[Any], Answer]] = {
    "nanhunt": _of_nanhunt,
    "shapes": _of_shapes,
    "memtrace": _of_memtrace,
    "deterministic": _of_deterministic,
    "autograd": _of_autograd,
    "overfit": _of_overfit,
}
