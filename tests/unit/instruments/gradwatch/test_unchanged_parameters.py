"""The first link that breaks between a loss and a changed parameter is named; its fix, applied by a machine, ends it; nothing else is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.doors import DOORS
from tests.unit.instruments.gradwatch.unchanged_parameters import HEALTHY, UNCHANGED
from torchdebug_magics import fixed_source

if TYPE_CHECKING:
    from tests.doors import Observe
    from tests.unit.instruments.gradwatch.unchanged_parameters import Unchanged


@pytest.mark.parametrize("observe", ["magic"], indirect=True)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in UNCHANGED])
def test_the_link_is_named_and_mended(case: Unchanged, observe: Observe) -> None:
    lines = {number for number, line in enumerate(case.body.splitlines(), start=2) if line.endswith("#> here")}
    for magic in filter(None, ("gradwatch" if case.says else "", "autograd" if case.silence else "")):
        report = observe(magic, case.body).report
        assert report.problems == ()
        assert report.finding is not None, report.verdict
        if magic == "gradwatch":
            assert re.search(case.says, report.verdict), report.verdict
        else:
            assert report.finding.kind == case.silence
        assert report.finding.location.line in lines, report.verdict
        if not case.is_edit:
            assert report.fix
            continue
        (fixed,) = fixed_source(report).values()
        again = observe(magic, fixed.partition("\n")[2]).report
        assert again.findings == (), (report.fix, again.verdict)
        if magic == "gradwatch":
            assert again.losses[-1] < 0.99 * again.losses[0], report.fix


@pytest.mark.parametrize(("name", "observe"), [(name, DOORS[place % 2]) for place, name in enumerate(HEALTHY)], indirect=["observe"])
def test_what_looks_alike_is_healthy(name: str, observe: Observe) -> None:
    assert observe("autograd", HEALTHY[name]).report.findings == ()
    report = observe("gradwatch", HEALTHY[name]).report
    assert report.problems == ()
    assert report.findings == ()
    assert report.verdict.startswith("Gradients and updates look healthy")
    assert report.untrained == (("encoder.0",) if "frozen" in name else ())
