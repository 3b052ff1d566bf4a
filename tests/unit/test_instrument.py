"""A row of the catalog: what is made from it, and that it costs nothing until it is called."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import deque
from typing import Any

import pytest

import torchdebug_magics
from torchdebug_magics import catalog
from torchdebug_magics.errors import SessionError
from torchdebug_magics.instrument import Instrument, Option
from torchdebug_magics.report import Report
from torchdebug_magics.session import Session


@dataclasses.dataclass
class Recorder:
    """Stands in for a probe, a view and a post-mortem: remembers what it was called with."""

    args: tuple[object, ...] = ()
    options: dict[str, object] = dataclasses.field(default_factory=dict)

    def __init__(self, *args: object, **options: object) -> None:
        self.args, self.options = args, options


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Instrument:
    module = types.ModuleType("a_late_module")
    module.Made = Recorder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_late_module", module)
    return Instrument(
        name="toy",
        summary="a toy",
        description="Only a toy.",
        options=(Option("--keep-going", "go on", {"action": "store_true"}), Option("--depth", "how deep", {"type": int})),
        probe="a_late_module:Made",
        view="a_late_module:Made",
        live_view="a_late_module:Made",
        examine="a_late_module:Made",
    )


def test_a_flag_is_the_keyword_of_the_same_name() -> None:
    assert Option("--keep-going", "").name == "keep_going"
    assert Option("--layers", "").name == "layers"


def test_called_with_options_it_is_a_session_on_a_probe_made_from_them(row: Instrument) -> None:
    session = row(keep_going=True, depth=3)
    assert isinstance(session, Session)
    assert session._probe.options == {"keep_going": True, "depth": 3}


def test_each_call_makes_a_new_session(row: Instrument) -> None:
    assert row() is not row()


def test_called_with_values_it_examines_them_at_once(row: Instrument) -> None:
    report: Any = row(1.5, "two", depth=1)
    assert report.args == (1.5, "two")
    assert report.options == {"depth": 1}


def test_how_values_are_written_reaches_what_asks_for_it_and_nothing_else(row: Instrument) -> None:
    asks = dataclasses.replace(row, takes_names=True)
    report: Any = asks.report_on((1,), {}, {}, ("runs[0]",)).report
    assert report.options == {"names": ("runs[0]",)}
    assert asks(1).options == {"names": ()}
    assert row(1).options == {}


def test_what_is_remembered_of_a_cell_reaches_the_probe_that_asks_for_it(row: Instrument) -> None:
    runs = deque[object]()
    asks = dataclasses.replace(row, reruns=True)
    assert asks.session_of_cell({"depth": 1}, runs=runs)._probe.options == {"depth": 1, "runs": runs}
    assert asks()._probe.options == {"runs": None}
    assert row.session_of_cell({}, runs=runs)._probe.options == {}
    with pytest.raises(TypeError, match="has no option 'runs'"):
        asks(runs=runs)


def test_values_where_none_are_taken_are_an_error_with_the_repair(row: Instrument) -> None:
    bare = dataclasses.replace(row, examine=None)
    with pytest.raises(TypeError, match=r"write `with torchdebug_magics\.toy\(\) as session:`"):
        bare(1.5)


def test_without_a_probe_it_examines_at_once_and_has_no_session(row: Instrument) -> None:
    bare = dataclasses.replace(row, probe=None)
    report: Any = bare(depth=1)
    assert (report.args, report.options) == ((), {"depth": 1})
    with pytest.raises(SessionError, match=r"toy looks at once and takes no body: write `%toy` on a line of its own"):
        bare.session()
    assert (bare.magic, row.magic) == ("%toy", "%%toy")


@pytest.mark.parametrize(
    "call", [lambda row: row(deep=1), lambda row: row.session(deep=1), lambda row: row.report_on((1.5,), {}, {"deep": 1})]
)
def test_an_unknown_option_is_an_error_that_lists_the_known_ones(row: Instrument, call: Any) -> None:
    with pytest.raises(TypeError, match=r"toy\(\) has no option 'deep'; it has keep_going, depth"):
        call(row)


def test_an_instrument_without_options_says_so(row: Instrument) -> None:
    with pytest.raises(TypeError, match="it has none"):
        dataclasses.replace(row, options=())(deep=1)


def test_views_are_given_what_they_show(row: Instrument) -> None:
    report = Report()
    page: Any = row.page(report)
    live: Any = row.live_page("snapshot")
    assert page.args == (report,)
    assert live.args == ("snapshot",)


@pytest.mark.parametrize("name", catalog.INSTRUMENTS)
class TestEveryRow:
    def test_its_name_is_its_key_and_the_public_name(self, name: str) -> None:
        assert catalog.instrument(name).name == name
        assert getattr(torchdebug_magics, name) is catalog.instrument(name)
        assert name in torchdebug_magics.__all__
        assert name in dir(torchdebug_magics)

    def test_it_is_described(self, name: str) -> None:
        row = catalog.instrument(name)
        assert row.summary
        assert "\n" not in row.summary
        assert f"%%{name}" in row.description or f"%{name}" in row.description

    def test_its_options_are_flags_with_a_help(self, name: str) -> None:
        options = catalog.instrument(name).options
        assert len({option.flag for option in options}) == len(options)
        for option in options:
            assert option.flag.startswith("--")
            assert option.help
            assert option.name.isidentifier()

    @pytest.mark.parametrize("attribute", ["probe", "view", "live_view", "examine"])
    def test_what_it_names_is_there_and_callable(self, name: str, attribute: str) -> None:
        from torchdebug_magics.instrument import _load

        path = getattr(catalog.instrument(name), attribute)
        assert path is None or callable(_load(path))


def test_the_catalog_in_order() -> None:
    assert [row.name for row in catalog.instruments()] == list(catalog.INSTRUMENTS)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        _ = torchdebug_magics.nosuch


def test_errors_are_public() -> None:
    from torchdebug_magics import errors

    assert torchdebug_magics.NonFiniteError is errors.NonFiniteError
    own = {name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__}
    assert own <= set(torchdebug_magics.__all__)
