"""The check of the code in a fix, on reports built by hand: what exists stays code, all else is words; nothing of the user's runs."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from torchdebug_magics.probing.source import fix_check
from torchdebug_magics.probing.source.fix_check import checked
from torchdebug_magics.report import Report


@dataclass(frozen=True, kw_only=True)
class Found:
    fix: str


@dataclass(frozen=True, kw_only=True)
class Reported(Report):
    found: tuple[Found, ...] = ()
    sentence: str = ""

    @property
    def verdict(self) -> str:
        return self.sentence


class Trap:
    """Its property must not be read, and nothing be called."""

    @property
    def loud(self) -> Any:
        raise AssertionError

    def __call__(self, size: int) -> None:
        raise AssertionError


def error_of(function: Any, variables: dict[str, Any]) -> ValueError | None:
    """The error, with the frame of the function alone: this file has the very text of the fixes."""
    try:
        function(**variables)
    except ValueError as error:
        return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
    return None


def shown(fix: str, **variables: Any) -> str:
    """The fix as it is shown after an error in a function that has these variables."""
    function = f"def work({', '.join(variables)}):\n    raise ValueError\n"
    space: dict[str, Any] = {}
    exec(compile(function, "a cell", "exec"), space)
    report = checked(Reported(found=(Found(fix=fix),), sentence=f"It is slow · fix: {fix}"), error_of(space["work"], variables))
    assert report.verdict == f"It is slow · fix: {report.found[0].fix}"
    return report.found[0].fix


NET = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())


@pytest.mark.parametrize(
    "fix",
    [
        "initialize it: `nn.init.zeros_(net[0].weight)`",
        "run `net.training = False`, then `net.eval()`",
        "write `with torch.no_grad(): net[0].weight.zero_()`",
        "use `F.cross_entropy` or `BCEWithLogitsLoss`, and `.detach()` the rest",
        "run it under `with torch.no_grad():`, or end it with `finally:`",
        "decorate it with `@functools.lru_cache(maxsize=100)`; or use `deque(maxlen=100)`",
        "put `%%nanhunt` above the cell, or start it with `--shm-size=1g`; see `0.weight` and `blocks.1.bias`",
        "run `sizes = [one.shape for one in net.parameters()]; print(sizes)`",
        "call `net.register_buffer('n', None, persistent=False)`",
        "pass `dim=-1`",
    ],
)
def test_what_exists_stays_code(fix: str) -> None:
    assert shown(fix, net=NET) == fix


@pytest.mark.parametrize(
    ("fix", "words"),
    [
        ("initialize it again: `net[1].weight.zero_()`, then train", None),  # what is behind an index is not looked at
        ("initialize the model again: `nn.init.zeros_(net.weight)`", "initialize the model again"),
        ("call `net.reset_parameters()`; or create it anew", "create it anew"),
        ("create it anew; or call `net.reset_parameters()`", "create it anew"),
        ("lower the rate, `net.bias.data.zero_()`, and train", "lower the rate, and train"),
        ("call `optimizer.step()` after `loss.backward()`", "call step() after backward()"),
        ("use `math.log(number)` there", "use `math.log` there"),
        ("create `optimizer` with all parameters", "create optimizer with all parameters"),
        ("give both the same shape: `output.squeeze(-1) - target`", "give both the same shape"),
        ("replace both with `(a.zero(); b).backward()`; or wait", "wait"),
        ("run `out = out.detach()` first", "run detach() first"),
        ("freeze it: `net.requires_grad_(value=False)`", "freeze it"),
        ("store it (`net.cache`), and go on", "store it, and go on"),
        ("`for group in optimizer.param_groups: group['lr'] = 1`", ""),
    ],
)
def test_what_does_not_exist_is_words(fix: str, words: str | None) -> None:
    assert shown(fix, net=NET) == (fix if words is None else words)


def test_nothing_of_the_users_is_called() -> None:
    assert shown("call `trap(size=3)` or read `trap.loud.name`", trap=Trap()) == "call `trap(size=3)` or read `trap.loud.name`"
    assert shown("read it: `trap.quiet`", trap=Trap()) == "read it"


def test_a_report_without_code_is_the_same_object() -> None:
    report = Reported(found=(Found(fix="wait for the lock"),))
    assert checked(report) is report


def test_a_failure_of_the_check_leaves_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(fix_check, "_attribute", fails)
    assert shown("stop it: `net.eval()`", net=NET) == "stop it"


def test_nothing_is_kept_alive() -> None:
    big = torch.ones(1000)
    dead = weakref.ref(big)
    gc.disable()
    try:
        assert shown("free it: `big.nothing()`", big=big) == "free it"
        del big
        assert dead() is None
    finally:
        gc.enable()
