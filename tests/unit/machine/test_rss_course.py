"""Samples over any length of time, in few points that keep every peak."""

from __future__ import annotations

from torchdebug_magics.machine.process import RssCourse


def course(*samples: int, most: int = 8) -> tuple[int, ...]:
    made = RssCourse(most)
    for one in samples:
        made.add(one)
    return made.points


def test_few_samples_are_kept_as_they_are():
    assert course() == ()
    assert course(3, 1, 2) == (3, 1, 2)


def test_many_are_few_points_that_rise_with_them():
    points = course(*range(1000))
    assert 4 <= len(points) <= 9
    assert list(points) == sorted(points)
    assert points[-1] == 999


def test_a_single_peak_is_never_lost():
    samples = [1] * 777
    samples[300] = 50
    assert max(course(*samples)) == 50
