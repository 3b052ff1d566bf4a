"""Overfit a single batch as a smoke test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from torchdebug_magics.exercises.checking import Exercise, Sealed, expect, expect_kind, shown
from torchdebug_magics.instruments.overfit.report import OverfitReport

_STEPS = 200
_EVERY = 10
_NEAR_ZERO = 0.05
_WIRINGS = {
    "a": "7f18a3458a01a94e3d7754f2e8a34e5c",
    "b": "63d1fc93ee53c2f1660a1426b311cdaf",
    "c": "95ea6ff80f630c68b973035a4c949261",
    "d": "ba2ea65f71f0b133e4e2c583f4f8f555",
    "e": "4bef138c86bf39f65a6b841c25c4a694",
    "f": "c2ee17627f8bad50cc3339fd1422b6f8",
    "g": "e30bc3189ca6aecff02ef53f3b13f18b",
    "h": "b25550104167683e09224fe260889668",
}
check = Exercise("All tasks are solved: from now on, a model that cannot learn eight pictures by heart is not trained on a million.")


@check.task
def written(overfit: Callable[[Callable[[], float]], Sequence[float]]) -> None:
    """The loop takes as many steps as it should, and notes the loss of every tenth."""
    losses: list[float] = []

    def step() -> float:
        expect(len(losses) < 2 * _STEPS, f"`overfit` does not stop calling `step`, and should call it {_STEPS} times.")
        losses.append(1.0 / (1 + len(losses)))
        return losses[-1]

    curve = overfit(step)
    expect_kind(curve, Sized, "`overfit` should give a list of losses")
    expect(len(losses) == _STEPS, f"`overfit` called `step` {len(losses)} times, and should call it {_STEPS} times.")
    expect(
        list(curve) == losses[::_EVERY],
        f"`overfit` should note the loss of each {_EVERY}th step, beginning with the very first: {_STEPS // _EVERY} numbers.",
    )


@check.task
def plotted(axes: Any, curve: Sequence[float]) -> None:
    """A line through the logged losses, with words on both axes, of a training that came down to nearly nothing."""
    expect(hasattr(axes, "get_xlabel"), "`axes` is not a picture; take what `plt.subplots()` gives as its second value.")
    drawn = [line.get_ydata() for line in axes.lines] + [dots.get_offsets()[:, 1] for dots in axes.collections]
    expect(drawn, "nothing is plotted in `axes` yet.")
    expect_kind(curve, Sized, "`curve` should be what `overfit` gives")
    wanted = [float(value) for value in curve]
    expect(
        any([float(value) for value in one] == wanted for one in drawn), "what is plotted in `axes` does not show the numbers of `curve`."
    )
    expect(curve[-1] < _NEAR_ZERO, f"`curve` ends at {curve[-1]:.2f}, and the healthy wiring comes down to nearly 0; is it that one?")
    expect(axes.get_xlabel() and axes.get_ylabel(), "say in words what the two axes of the picture are: `set_xlabel`, `set_ylabel`.")


@check.task
def diagnosed(diagnosis: Mapping[str, str], causes: str) -> None:
    """The cause of each of the eight."""
    expect(isinstance(diagnosis, Mapping), "`diagnosis` should be a dictionary, with a cause for each letter.")
    opened = [name for name in _WIRINGS if diagnosis.get(name, ...) is ...]
    expect(not opened, f"there is no diagnosis for wiring {', '.join(opened)} yet; choose one of the causes for each.")
    chosen = {name: _chosen(diagnosis[name], causes) for name in _WIRINGS}
    unknown = [shown(diagnosis[name]) for name in _WIRINGS if not chosen[name]]
    expect(not unknown, f"{(unknown or [''])[0]} is none of the causes; write one as it stands in the list.")
    wrong = [name for name, digest in _WIRINGS.items() if not Sealed(f"overfit/{name}", digest).fits(chosen[name])]
    expect(
        not wrong,
        f"{len(_WIRINGS) - len(wrong)} of {len(_WIRINGS)} are right; of the others, look again at wiring {', '.join(wrong[:1])}: "
        "where does its curve begin, and where does it stop?",
    )


@check.task
def confirmed(reports: Mapping[str, OverfitReport], passed: Iterable[str]) -> None:
    """A report of each wiring, and the letters of those that pass."""
    expect_kind(reports, Mapping, "`reports` should be a dictionary, with a report for each letter")
    missing = [name for name in _WIRINGS if name not in reports]
    expect(not missing, f"there is no report of wiring {', '.join(missing)} yet.")
    for name in _WIRINGS:
        expect_kind(reports[name], OverfitReport, f"`reports[{name!r}]` should be what `torchdebug_magics.overfit` gives")
    causes = {reports[name].cause for name in _WIRINGS}
    expect(len(causes) > len(_WIRINGS) // 2, "the reports are much alike; is each of them that of its own wiring?")
    expect_kind(passed, Iterable, "`passed` should be a list of letters")
    learned, listed = {name for name in _WIRINGS if reports[name].passed}, set(passed)
    expect(listed == learned, "`passed` should hold the letters whose `report.passed` is True, and no others.")


def _chosen(answer: object, causes: str) -> str:
    """The cause that is meant, without what the list says of it, however it is spaced; empty where it is none of the list."""
    known = [" ".join(line.partition("  ")[0].split()) for line in causes.strip().splitlines()]
    said = " ".join(str(answer).split()).casefold()
    return next((cause for cause in known if said.startswith(cause)), "")
