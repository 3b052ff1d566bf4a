"""Which of the findings of many looks a report keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torchdebug_magics.instruments.hangwatch import watcher
from torchdebug_magics.instruments.hangwatch.main_thread.loop_rate import OutputMeter
from torchdebug_magics.instruments.hangwatch.report import HangFinding, Wait
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.ranks.launching import Children
from torchdebug_magics.report import Location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.report import State

pytestmark = pytest.mark.waits


def finding(cause: str, line: int, since_s: float, state: State = "slow") -> HangFinding:
    location = Location(cell=None, file="a.py", line=line, function="f", source="")
    root = Wait(who="main", pid=1, location=location, kind="python", waits_for=None, what="")
    return HangFinding(state=state, cause=cause, headline=f"{cause} at {line}", location=location, root=root, since_s=since_s)


@pytest.mark.parametrize(
    ("looks", "kept"),
    [
        ([finding("sleep", 9, 2.0), finding("sleep", 9, 2.2), finding("compute", 10, 2.4)], ("sleep", 9, 2.4)),
        ([finding("sleep", 9, 2.0), finding("compute", 10, 2.2), finding("compute", 10, 2.4)], ("compute", 10, 2.4)),
        ([finding("sleep", 9, 2.0), finding("lock", 10, 2.2, "stuck")], ("sleep", 9, 2.0)),
        ([finding("sleep", 9, 2.0), finding("lock", 10, 2.2, "stuck"), finding("lock", 10, 2.4, "stuck")], ("lock", 10, 2.4)),
    ],
    ids=["the-last-look-met-the-line-behind-the-wait", "another-reason-twice", "stuck-once", "stuck-twice"],
)
def test_one_look_that_says_otherwise_is_not_kept(
    looks: list[HangFinding], kept: tuple[str, int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watcher.Watcher(2.0, Children(), OutputMeter(), Guard(), stops=False)
    said = iter(looks)
    monkeypatch.setattr(watcher, "judged", lambda *_: next(said))
    monkeypatch.setattr(watcher, "running_shell", object)
    for look in looks:
        watch._judge(None, look.since_s)
    found = watch.finding
    assert found is not None
    assert found.location is not None
    assert (found.cause, found.location.line, found.since_s) == kept
