"""What every report promises: a sentence, plain data, strict JSON, and nothing that pins memory."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from dataclasses import dataclass

import pytest

from torchdebug_magics.report import Location, Report, short_title

CELL = Location(cell=4, file="/tmp/ipykernel_1/2.py", line=7, function="<module>", source="y = x.log()")


@dataclass(frozen=True, kw_only=True)
class Sample(Report):
    values: tuple[object, ...] = ()
    where: Location | None = None

    @property
    def verdict(self) -> str:
        return "all is well"


@pytest.mark.parametrize(
    ("location", "text"),
    [
        (CELL, "In[4] line 7"),
        (dataclasses.replace(CELL, cell=None, file="/home/me/model.py", line=31, function="forward"), "model.py:31 in forward"),
        (dataclasses.replace(CELL, cell=None, file="C:\\me\\model.py", line=31), "model.py:31"),
    ],
)
def test_a_location_is_written_as_the_user_knows_it(location, text):
    assert str(location) == text


def test_a_report_prints_as_its_verdict():
    assert str(Sample()) == "all is well"


def test_the_base_has_no_verdict():
    with pytest.raises(NotImplementedError):
        _ = Report().verdict


def test_to_dict_begins_with_the_verdict_and_is_plain_all_the_way_down():
    # Given a report that holds mappings, sets, tuples and another dataclass
    report = Sample(values=({"a": (1, 2)}, {3}, "text", None), where=CELL, problems=("one",))
    # When it becomes a dict
    data = report.to_dict()
    # Then it is made of dicts, lists, strings and numbers
    assert list(data) == ["verdict", "problems", "notes", "cut_short", "values", "where", "fix", "edits", "fix_state", "status", "title"]
    assert data["values"] == [{"a": [1, 2]}, [3], "text", None]
    assert data["where"]["line"] == 7


def test_json_is_strict_and_keeps_what_is_not_finite_as_words():
    report = Sample(values=(math.nan, math.inf, -math.inf, 1.5, ({"x": math.nan},)))
    data = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["values"] == ["nan", "inf", "-inf", 1.5, [{"x": "nan"}]]


def test_json_keeps_letters_of_every_language():
    assert "größe" in Sample(values=("größe",)).to_json()


def test_a_report_is_frozen_and_pickles():
    report = Sample(values=(1,), where=CELL)
    assert pickle.loads(pickle.dumps(report)) == report
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.problems = ()


WORDS = "`linear` ran under `torch.inference_mode(mode=True)`: the loss has no graph, and backward() needs one"
LONG_NAME = Location(cell=None, file=f"{'a_long_name_' * 7}.py", line=7, function="<module>", source="y = x.log()")


@pytest.mark.parametrize("chars", range(12, len(WORDS) + 1))
@pytest.mark.parametrize("location", [CELL, LONG_NAME], ids=["cell", "file"])
def test_a_title_is_cut_to_its_limit_and_no_quotation_stays_open(location: Location, chars: int) -> None:
    headline = WORDS[:chars].rstrip(" `")
    headline += "`" * (headline.count("`") % 2)
    title, _, source = short_title(headline, location).rpartition(": `")
    assert len(title) <= 90
    assert source == "y = x.log()`"
    assert title.count("`") % 2 == 0
    assert title.startswith(headline[:24].rstrip(" `"))
    assert "…" not in title.partition(" · ")[0] or ":" not in headline[25:75]
    assert title.startswith(headline) or len(f"{headline} · {location}") > 90
