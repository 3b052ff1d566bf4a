"""A row of the catalog: what is made from it, and that it costs nothing until it is called."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import torchdebug_magics
from torchdebug_magics import catalog
from torchdebug_magics.errors import SessionError
from torchdebug_magics.instrument import SCRIPT, CellContext, Instrument, Option
from torchdebug_magics.report import Report
from torchdebug_magics.session import Session


@dataclasses.dataclass
class Recorder:
    """Stands in for a probe and a page: remembers what it was made from."""

    args: tuple[object, ...] = ()
    options: dict[str, object] = dataclasses.field(default_factory=dict)

    def __init__(self, *args: object, **options: object) -> None:
        self.args, self.options = args, options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer(Report):
    values: tuple[object, ...] = ()
    options: dict[str, object] = dataclasses.field(default_factory=dict)
    context: CellContext = SCRIPT


def look(*args: object) -> str:
    return f"looked at {args}"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Instrument]:
    """Makes a row whose package has the parts that are named."""

    look.__module__ = "a_late_package.probe"

    def made(*parts: str, **fields: Any) -> Instrument:
        package = types.ModuleType("a_late_package")
        package.__path__ = []
        monkeypatch.setitem(sys.modules, "a_late_package", package)
        functions: dict[str, dict[str, object]] = {
            "probe": {"watch": Recorder, "look": look},
            "view": {"page": Recorder, "live_page": Recorder},
            "examine": {"examine": lambda context, *values, **options: Answer(values=values, options=options, context=context)},
        }
        for part in parts:
            module = types.ModuleType(f"a_late_package.{part}")
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            vars(module).update(functions[part])
            monkeypatch.setitem(sys.modules, module.__name__, module)
        options = (Option("--keep-going", "go on", {"action": "store_true"}), Option("--depth", "how deep", {"type": int}))
        row = {"name": "toy", "module": "a_late_package", "summary": "a toy", "description": "Only a toy.", "options": options}
        return Instrument(**{**row, **fields})

    return made


@pytest.fixture
def row(toy: Callable[..., Instrument]) -> Instrument:
    return toy("probe", "view", "examine")


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
    assert report.values == (1.5, "two")
    assert report.options == {"depth": 1}


def test_the_context_reaches_what_examines_and_what_watches(row: Instrument) -> None:
    context = CellContext(names=("runs[0]",), last_error=ValueError("bad\nlabel"))
    report: Any = row.examined((1,), {}, context).report
    assert report.context is context
    session: Any = row.session_of_cell({"depth": 1}, context)
    assert session._probe.args == (context,)
    assert context.last_error_line == "ValueError: bad"
    assert (SCRIPT.body(), SCRIPT.earlier_runs(), SCRIPT.last_error_line) == (None, None, "")


def test_named_values_are_apart_from_options(toy: Callable[..., Instrument]) -> None:
    row = toy("examine", subjects="MODEL INPUT NAME=VALUE")
    report: Any = row(1.5, mask="a mask", depth=1)
    assert report.context.keywords == {"mask": "a mask"}
    assert report.options == {"depth": 1}
    with pytest.raises(TypeError, match="has no option 'mask'"):
        toy("examine", subjects="MODEL INPUT")(1.5, mask="a mask")


def test_values_where_none_are_taken_are_an_error_with_the_repair(toy: Callable[..., Instrument]) -> None:
    with pytest.raises(TypeError, match=r"write `with torchdebug_magics\.a_late_package\(\) as session:`"):
        toy("probe", "view")(1.5)


def test_without_a_probe_it_examines_at_once_and_has_no_session(toy: Callable[..., Instrument], row: Instrument) -> None:
    assert row.magic == "%%toy"
    for name in ("probe", "view", "examine"):
        del sys.modules[f"a_late_package.{name}"]
    bare = toy("view", "examine")
    report: Any = bare(depth=1)
    assert (report.values, report.options) == ((), {"depth": 1})
    with pytest.raises(SessionError, match=r"toy looks at once and takes no body: write `%toy` on a line of its own"):
        bare.session()
    assert bare.magic == "%toy"


@pytest.mark.parametrize(
    "call", [lambda row: row(deep=1), lambda row: row.session(deep=1), lambda row: row.examined((1.5,), {"deep": 1}, SCRIPT)]
)
def test_an_unknown_option_is_an_error_that_lists_the_known_ones(row: Instrument, call: Any) -> None:
    with pytest.raises(TypeError, match=r"a_late_package\(\) has no option 'deep'; it has keep_going, depth"):
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
    assert (row.is_live, row.is_followed, row.page_after_cell(None, "snapshot")) == (True, False, None)


def test_further_functions_of_the_probe_are_attributes(row: Instrument) -> None:
    assert row.look(1) == "looked at (1,)"
    for name in ("nosuch", "_nosuch", "__deepcopy__"):
        with pytest.raises(AttributeError, match=name):
            getattr(row, name)


@pytest.mark.parametrize("name", catalog.INSTRUMENTS)
class TestEveryRow:
    def test_its_function_is_its_key_and_the_public_name(self, name: str) -> None:
        assert catalog.instrument(name).function == name
        assert getattr(torchdebug_magics, name) is catalog.instrument(name)
        assert name in torchdebug_magics.__all__
        assert name in dir(torchdebug_magics)

    def test_it_is_described(self, name: str) -> None:
        row = catalog.instrument(name)
        assert row.summary
        assert "\n" not in row.summary
        assert f"%%{row.name}" in row.description or f"%{row.name}" in row.description

    def test_its_options_are_flags_with_a_help(self, name: str) -> None:
        options = catalog.instrument(name).options
        assert len({option.flag for option in options}) == len(options)
        for option in options:
            assert option.flag.startswith("--")
            assert option.help
            assert option.name.isidentifier()

    def test_its_package_has_what_it_is_called_for(self, name: str) -> None:
        row = catalog.instrument(name)
        assert row.module == catalog.INSTRUMENTS[name]
        assert row.watches or row.examines
        assert callable(row._function("view", "page"))
        for part, function in (("probe", "watch"), ("examine", "examine")):
            assert not row._has(part) or callable(row._function(part, function))
        assert bool(row.subjects) <= row.examines


def test_the_catalog_in_order() -> None:
    assert [row.function for row in catalog.instruments()] == list(catalog.INSTRUMENTS)
    assert len({row.name for row in catalog.instruments()}) == len(catalog.INSTRUMENTS)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        _ = torchdebug_magics.nosuch


def test_errors_are_public() -> None:
    from torchdebug_magics import errors

    assert torchdebug_magics.NonFiniteError is errors.NonFiniteError
    own = {name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__}
    assert own <= set(torchdebug_magics.__all__)
