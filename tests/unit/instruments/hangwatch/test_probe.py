"""A watched body through both doors: it ends well, with an error, or not at all; alone, nested, and with the probe failing."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import torchdebug_magics
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.hangwatch import watcher
from torchdebug_magics.instruments.hangwatch.probe import HangProbe
from torchdebug_magics.instruments.hangwatch.report import LiveHang

if TYPE_CHECKING:
    from tests.doors import Observe

pytestmark = pytest.mark.waits


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchdebug")]


def test_an_empty_body(observe: Observe) -> None:
    report = observe("hangwatch", "").report
    assert (report.state, report.cause, report.root, report.waits, report.problems) == ("finished", None, None, (), ())
    assert report.verdict.startswith("Finished in ")
    assert report.ended_by == "itself"
    assert threads() == []


def test_an_error_inside_is_the_users_and_the_report_is_there(observe: Observe) -> None:
    observed = observe("hangwatch", "x = 1\n1 / 0")
    assert isinstance(observed.error, ZeroDivisionError)
    assert (observed.report.state, observed.report.ended_by, observed.report.cause) == ("finished", "error", None)
    assert threads() == []


@pytest.mark.parametrize(
    "part",
    [
        "torchdebug_magics.machine.sampler.Sampler.start",
        "torchdebug_magics.ranks.launching.Agent",
        "torchdebug_magics.probing.hooks.Hooks.optimizer_steps",
        "torchdebug_magics.instruments.hangwatch.getting_out.StopPresses.attach",
    ],
)
def test_failing_while_attaching_leaves_nothing(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), torchdebug_magics.hangwatch():
        pytest.fail("the body must not run")
    assert threads() == []


def test_nested_in_itself_and_in_another(observe: Observe) -> None:
    body = (
        "import time, torchdebug_magics\n"
        "with torchdebug_magics.hangwatch(after=0.5) as inner, torchdebug_magics.nanhunt():\n"
        "    print('shown')\n"
        "    time.sleep(2)"
    )
    observed = observe("hangwatch", body, after=0.5)
    for report in (observed.report, observed.namespace["inner"].report):
        assert (report.state, report.cause) == ("slow", None)
        assert "sleeps in time.sleep(2)" in report.headline
        assert report.location.line == 5
    assert threads() == []


def test_a_hook_of_the_users_that_raises(observe: Observe) -> None:
    body = (
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "def hook(*_):\n    raise KeyError('the hook of the user')\n"
        "optimizer.register_step_post_hook(hook)\n"
        "optimizer.step()"
    )
    observed = observe("hangwatch", body)
    assert isinstance(observed.error, KeyError)
    assert observed.report.problems == ()


# What it sees --------------------------------------------------------------------------------------------------------


def test_a_sleep_is_slow_and_has_its_line(observe: Observe) -> None:
    report = observe("hangwatch", "import time\ntime.sleep(2.0)", after=0.5).report
    assert (report.state, report.cause, report.chain) == ("slow", None, ("main",))
    assert (report.location.line, report.location.source) == (3, "time.sleep(2.0)")
    assert (report.root.who, report.root.kind, report.root.waits_for) == ("main", "sleep", None)
    assert 1.2 < report.still_s <= report.elapsed_s < 4


def test_a_lock_of_its_own_is_stuck_and_ended(observe: Observe) -> None:
    observed = observe("hangwatch", "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()", after=0.5, stop=True)
    report = observed.report
    assert isinstance(observed.error, KeyboardInterrupt)
    assert (report.state, report.cause, report.ended_by, report.stopped_count) == ("stuck", "self_deadlock", "--stop", 0)
    assert (report.location.line, report.root.acquired.line, report.root.waits_for) == (5, 4, "main")
    assert report.elapsed_s < 0.5 + 3
    assert threads() == []


def test_one_look_alone_makes_no_cell_stuck(observe: Observe, monkeypatch: pytest.MonkeyPatch) -> None:
    judged, asked = watcher.judged, []

    def doubtful(*evidence: Any) -> Any:
        found = judged(*evidence)
        asked.append(found)
        return replace(found, state="stuck", cause="native_wait") if len(asked) == 1 else found

    monkeypatch.setattr(watcher, "judged", doubtful)
    observed = observe("hangwatch", "import time\ntime.sleep(2)", after=0.5, stop=True)
    assert (observed.error, observed.report.state) == (None, "slow")
    assert len(asked) > 1


def test_two_threads_that_wait_for_each_other(observe: Observe) -> None:
    body = (
        "import threading\n"
        "one, two = threading.Lock(), threading.Lock()\n"
        "def other():\n"
        "    with two:\n"
        "        holds.set()\n"
        "        with one:\n"
        "            pass\n"
        "holds = threading.Event()\n"
        "thread = threading.Thread(target=other, name='other', daemon=True)\n"
        "with one:\n"
        "    thread.start()\n"
        "    holds.wait()\n"
        "    with two:\n"
        "        pass\n"
    )
    observed = observe("hangwatch", body, after=0.5, stop=True)
    report = observed.report
    assert isinstance(observed.error, KeyboardInterrupt)
    assert (report.state, report.cause) == ("stuck", "deadlock")
    assert report.chain == ("main", "thread other", "main")
    assert {one.who: one.waits_for for one in report.waits} == {"main": "thread other", "thread other": "main"}
    observed.namespace["thread"].join(5)


def test_an_endless_loop(observe: Observe) -> None:
    observed = observe("hangwatch", "import time\ndone = False\nwhile not done:\n    time.sleep(0.01)", after=0.5, stop=True)
    assert isinstance(observed.error, KeyboardInterrupt)
    assert (observed.report.state, observed.report.cause) == ("stuck", "infinite_loop")
    assert "while not done" in observed.report.headline


def test_a_loop_that_prints_or_steps_makes_progress(observe: Observe) -> None:
    body = (
        "import time, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(12):\n"
        "    time.sleep(0.15)\n"
        "    optimizer.step()"
    )
    report = observe("hangwatch", body, after=0.8).report
    assert report.state == "finished"
    assert 4 < report.rate < 8
    assert "steps per second" in report.verdict


def test_a_wait_that_ends_by_itself_is_not_ended(observe: Observe) -> None:
    body = "import queue\ntry:\n    queue.Queue().get(timeout=2)\nexcept queue.Empty:\n    done = True"
    observed = observe("hangwatch", body, after=0.5, stop=True)
    assert observed.error is None
    assert observed.namespace["done"]
    assert observed.report.state == "slow"


def test_threads_of_earlier_that_wait_for_ever_are_not_the_root(observe: Observe) -> None:
    end = threading.Event()
    idle = threading.Thread(target=end.wait, name="idle", daemon=True)
    idle.start()
    report = observe("hangwatch", "import time\ntime.sleep(1.8)", after=0.5).report
    assert (report.state, report.root.who) == ("slow", "main")
    end.set()
    idle.join()


def test_the_live_view_and_what_is_written_down() -> None:
    session = torchdebug_magics.hangwatch(after=0.3)
    assert (session.live(), session.standing()) == (None, "")
    with session:
        live = session.live()
        assert isinstance(live, LiveHang)
        assert live.finding is None
        assert session.standing() == ""
        end_s = time.monotonic() + 5
        waited = threading.Event()
        seen: list[str] = []

        def look() -> None:
            while not (said := session.standing()) and time.monotonic() < end_s:
                time.sleep(0.05)
            seen.append(said)
            waited.set()

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        waited.wait(6)
        thread.join()
    assert session.live() is None
    assert session.standing() == ""
    assert seen[0].startswith(("Slow for ", "Stuck for "))
    assert "test_probe.py" in seen[0]


@pytest.mark.parametrize("after", [0, -1, float("nan")])
def test_an_after_that_makes_no_sense_is_refused(after: float) -> None:
    with pytest.raises(TorchDebugError, match="such as 10"):
        HangProbe(after=after)


def test_a_failure_of_ours_is_a_line_and_the_body_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr("torchdebug_magics.instruments.hangwatch.watcher.look_around", fails)
    with torchdebug_magics.hangwatch(after=0.3) as session:
        time.sleep(1.2)
        done = True
    assert done
    assert any("OSError: gone" in problem for problem in session.report.problems)


def test_it_says_where_everything_stands(capsys: pytest.CaptureFixture[str], observe: Observe) -> None:
    body = (
        "import threading, torchdebug_magics\n"
        "lock = threading.Lock()\n"
        "lock.acquire()\n"
        "def wants():\n"
        "    with lock:\n"
        "        pass\n"
        "thread = threading.Thread(target=wants, name='wants', daemon=True)\n"
        "thread.start()\n"
        "while not lock.locked(): pass\n"
        "import time; time.sleep(0.1)\n"
        "torchdebug_magics.hangwatch.look()\n"
        "lock.release()\n"
        "thread.join()"
    )
    observed = observe("hangwatch", body)
    assert observed.error is None
    said = observed.printed or capsys.readouterr().out
    assert "thread wants" in said
    assert "waits for lock" in said
    assert "with lock:" in said
    assert "the main thread" in said


def test_an_instrument_has_the_functions_of_its_row_and_no_others() -> None:
    from torchdebug_magics.catalog import instrument
    from torchdebug_magics.instruments.hangwatch.probe import look

    assert torchdebug_magics.hangwatch.look is look
    with pytest.raises(AttributeError, match="'Instrument' object has no attribute 'gone'"):
        _ = torchdebug_magics.hangwatch.gone
    assert not hasattr(instrument("memgauge"), "look")


def test_a_row_can_be_copied_and_pickled() -> None:
    import copy
    import pickle

    row = torchdebug_magics.hangwatch
    assert copy.copy(row) == row
    assert copy.deepcopy(row) == row
    assert pickle.loads(pickle.dumps(row)) == row


def test_only_the_launcher_of_ranks_stops() -> None:
    """A rank that stops itself ends as if it had finished, and the others then lose their connection to it."""
    told = HangProbe(after=2, stop=True).options_in_rank()
    assert told["after"] == 2
    assert not told.get("stop")
