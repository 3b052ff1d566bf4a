"""The guard that watches every test can itself fail."""

from __future__ import annotations

import multiprocessing
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests import leaks


class Plants:
    """One leak each; what undoes it is registered on the stack."""

    @staticmethod
    def trace(stack: ExitStack) -> None:
        stack.callback(sys.settrace, sys.gettrace())
        sys.settrace(lambda *_: None)

    @staticmethod
    def profile(stack: ExitStack) -> None:
        stack.callback(sys.setprofile, sys.getprofile())
        sys.setprofile(lambda *_: None)

    @staticmethod
    def formatwarning(stack: ExitStack) -> None:
        stack.callback(setattr, warnings, "formatwarning", warnings.formatwarning)
        warnings.formatwarning = lambda *_, **__: ""

    @staticmethod
    def thread(stack: ExitStack) -> None:
        end = threading.Event()
        thread = threading.Thread(target=end.wait)
        stack.callback(thread.join)
        stack.callback(end.set)
        thread.start()

    @staticmethod
    def process(stack: ExitStack) -> None:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), name="left behind")
        child.start()
        stack.callback(child.join)
        stack.callback(child.kill)

    @staticmethod
    def command(stack: ExitStack) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        stack.callback(child.wait)
        stack.callback(child.kill)

    @staticmethod
    def process_start(stack: ExitStack) -> None:
        stack.callback(setattr, BaseProcess, "start", BaseProcess.start)
        BaseProcess.start = lambda *_: None

    @staticmethod
    def agent(stack: ExitStack) -> None:
        from torchdebug_magics.ranks.agent import Agent

        stack.callback([Agent("nowhere")].clear)

    @staticmethod
    def signal_handler(stack: ExitStack) -> None:
        stack.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, signal.SIG_IGN))

    @staticmethod
    def wakeup(stack: ExitStack) -> None:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        theirs.setblocking(False)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(theirs.fileno()))
        assert ours

    @staticmethod
    def output(stack: ExitStack) -> None:
        stack.callback(vars(sys.stdout).pop, "write")
        vars(sys.stdout)["write"] = lambda text: len(text)  # noqa: PLW0108 - a function that is none of the stream's

    @staticmethod
    def rng(stack: ExitStack) -> None:
        stack.callback(random.setstate, random.getstate())
        random.random()

    @staticmethod
    def module_hook(stack: ExitStack) -> None:
        from torch.nn.modules.module import register_module_forward_hook

        stack.enter_context(register_module_forward_hook(lambda *_: None))

    @staticmethod
    def optimizer_hook(stack: ExitStack) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        stack.callback(register_optimizer_step_pre_hook(lambda *_: None).remove)

    @staticmethod
    def backward(stack: ExitStack) -> None:
        import torch

        stack.callback(setattr, torch.autograd, "backward", torch.autograd.backward)
        torch.autograd.backward = lambda *_, **__: None

    @staticmethod
    def dispatch_mode(stack: ExitStack) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        stack.enter_context(FlopCounterMode(display=False))

    @staticmethod
    def mode_notes(stack: ExitStack) -> None:
        from torch.utils import _python_dispatch

        stack.callback(setattr, _python_dispatch, "_is_in_torch_dispatch_mode", False)
        _python_dispatch._is_in_torch_dispatch_mode = True

    @staticmethod
    def function_mode(stack: ExitStack) -> None:
        from torch.overrides import BaseTorchFunctionMode

        stack.enter_context(BaseTorchFunctionMode())

    @staticmethod
    def saved_tensors_hooks(stack: ExitStack) -> None:
        import torch

        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))

    @staticmethod
    def anomaly(stack: ExitStack) -> None:
        import torch

        stack.enter_context(torch.autograd.set_detect_anomaly(mode=True))

    @staticmethod
    def deterministic(stack: ExitStack) -> None:
        import torch

        stack.callback(torch.use_deterministic_algorithms, mode=False)
        torch.use_deterministic_algorithms(mode=True)

    @staticmethod
    def default_dtype(stack: ExitStack) -> None:
        import torch

        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)

    @staticmethod
    def default_device(stack: ExitStack) -> None:
        import torch

        stack.enter_context(torch.device("meta"))

    @staticmethod
    def grad_mode(stack: ExitStack) -> None:
        import torch

        stack.enter_context(torch.no_grad())

    @staticmethod
    def torch_rng(stack: ExitStack) -> None:
        import torch

        stack.enter_context(torch.random.fork_rng(devices=()))
        torch.rand(1)


NAMED = {
    "trace": "sys.gettrace()",
    "profile": "sys.getprofile()",
    "formatwarning": "warnings.formatwarning",
    "thread": "a thread still runs",
    "process": "a process still runs: left behind",
    "command": "a process still runs: ",
    "process_start": "BaseProcess.start",
    "agent": "agents that a fork would wake",
    "signal_handler": "what SIGUSR1 does",
    "wakeup": "signal.set_wakeup_fd()",
    "output": "the `write` of sys.stdout",
    "rng": "random's state",
    "module_hook": "_global_forward_hooks",
    "optimizer_hook": "_global_optimizer_pre_hooks",
    "backward": "torch.autograd.backward",
    "dispatch_mode": "the dispatch modes",
    "mode_notes": "what torch notes of its dispatch modes",
    "function_mode": "the function modes",
    "saved_tensors_hooks": "the saved-tensors hooks",
    "anomaly": "anomaly mode",
    "deterministic": "deterministic algorithms",
    "default_dtype": "the default dtype",
    "default_device": "the default device",
    "grad_mode": "grad mode",
    "torch_rng": "torch's RNG state",
}


@pytest.mark.parametrize("plant", NAMED)
def test_each_leak_is_named(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: F401 - so that both snapshots look at it

    monkeypatch.setattr(leaks._still_runs, "__kwdefaults__", {"grace_s": 0.05})
    before = leaks.snapshot(rng=True)
    with ExitStack() as stack:
        getattr(Plants, plant)(stack)
        found = leaks.differences(before, leaks.snapshot(rng=True))
    assert any(NAMED[plant] in line for line in found), found
    assert leaks.differences(before, leaks.snapshot(rng=True)) == []


LEAKY_TESTS = """
import warnings
import pytest

def test_file():
    open("left.txt", "w").close()

def test_filter():
    warnings.simplefilter("ignore", ResourceWarning)

def test_clean():
    pass

def test_skipped():
    pytest.skip("no browser")

@pytest.mark.gpu
def test_gpu():
    pytest.skip("no device")

@pytest.mark.xfail
def test_known():
    assert False
"""


def test_a_leak_fails_the_test_that_leaks_and_a_skip_is_a_failure(pytester: pytest.Pytester, root: Path) -> None:
    pytester.makeconftest((root / "tests/conftest.py").read_text())
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\nmarkers = ['gpu', 'keeps_rng']")
    pytester.makepyfile(LEAKY_TESTS)
    result = pytester.runpytest_inprocess("--no-skips", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=2, errors=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines_random(["*file was left in the working folder: left.txt"])
    result.stdout.fnmatch_lines_random(["*warnings.filters*", "*test_skipped was skipped*"])


def test_a_folder_skipped_whole_is_a_failure(pytester: pytest.Pytester, root: Path) -> None:
    pytester.makeconftest((root / "tests/conftest.py").read_text())
    pytester.makepyfile("import pytest\npytest.importorskip('no_such_browser')")
    assert pytester.runpytest_inprocess("--no-skips", "-p", "no:cacheprovider").ret != pytest.ExitCode.OK
