"""The guard over words can fail, and leaves the user's own code alone."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from tests import plain_words
from torchdebug_magics.instruments.deterministic.report import DeterministicReport
from torchdebug_magics.instruments.memmark.report import MarksReport


@pytest.mark.parametrize("text", ["the slope of a root", "born in the forward", "`x` is no view", "refused at once: too large"])
def test_a_banned_phrase_is_seen(text):
    assert plain_words.complaints(text)


@pytest.mark.parametrize("text", ["`slope = born.at_once()`", "there is no GPU", "it was turned off", "the derivative is infinite"])
def test_plain_words_and_code_pass(text):
    assert plain_words.complaints(text) == []


def test_every_report_is_read(plain_words_guard, monkeypatch):
    report = DeterministicReport(seed=42, problems=("the slope is steep",))
    assert [one for one in plain_words_guard if one is report]
    monkeypatch.setattr(plain_words, "READ", frozenset({"deterministic"}))
    assert any("derivative" in line for line in plain_words.read(plain_words_guard, "here"))
    plain_words_guard.clear()  # else the guard reads it, too


def test_a_title_that_is_too_long_is_seen(plain_words_guard):
    DeterministicReport(seed=42, verified=True, ops_count=10**60)
    assert any("at most 90" in line for line in plain_words.read(plain_words_guard, "here"))
    plain_words_guard.clear()


def test_a_headline_that_is_too_long_is_seen():
    assert list(plain_words._too_long("x" * 91))
    assert list(plain_words._too_long(f"{'x' * 91}: `y = 1`"))
    assert not list(plain_words._too_long(f"{'x' * 90}: `{'y' * 200}`"))


def test_a_report_is_made_as_before():
    assert MarksReport(marks=()) == MarksReport(marks=())
    assert dataclasses.replace(MarksReport(marks=()), problems=("one",)).problems == ("one",)
    assert pickle.loads(pickle.dumps(MarksReport(marks=()))) == MarksReport(marks=())
