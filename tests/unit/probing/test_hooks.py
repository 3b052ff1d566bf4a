"""Hooks know their owner, come off in any order, and a copy of a hooked module carries nothing of ours that acts."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import weakref
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchdebug_magics.probing.dispatch import OpListener, modes, take_off
from torchdebug_magics.probing.hooks import Hooks

BACKWARD = torch.autograd.backward
NEXT = _BaseDataLoaderIter.__next__


class Watcher:
    """Every kind of hook at once, and what it was told."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.hooks, self.seen, self.stack = module, Hooks(), [], ExitStack()
        note = self.seen.append
        self.hooks.optimizer_steps(self.stack, lambda *_: note("before step"), lambda *_: note("after step"))
        self.hooks.module_calls(self.stack, lambda *_: note("enter"), lambda *_: note("leave"))
        self.hooks.own_calls(self.stack, module, lambda *_: note("own enter"), lambda *_: note("own leave"))
        self.hooks.module_birth(self.stack, lambda _: note("born"), lambda _: note("adopted"))
        self.hooks.autograd_calls(self.stack, "backward", self._around)
        self.hooks.autograd_calls(self.stack, "grad", self._around)
        self.hooks.loader_batches(self.stack, self._fetch)

    def _fetch(self, original: Any, iterator: Any) -> Any:
        self.seen.append("batch")
        return original(iterator)

    def _around(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append("sink")
        return original(*args, **kwargs)

    def told(self) -> set[str]:
        said = set(self.seen)
        self.seen.clear()
        return said


ALL = {"before step", "after step", "enter", "leave", "own enter", "own leave", "born", "adopted", "sink", "batch"}


def work(module: torch.nn.Module) -> None:
    torch.nn.Sequential(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert [batch.item() for batch in torch.utils.data.DataLoader(torch.arange(3))] == [0, 1, 2]
    torch.autograd.grad(module(torch.ones(1, 2)).sum(), list(module.parameters()))


def test_everything_is_told_until_the_stack_closes() -> None:
    module = torch.nn.Linear(2, 1)
    one = Watcher(module)
    work(module)
    assert one.told() == ALL
    one.stack.close()
    work(module)
    assert one.told() == set()


@pytest.mark.parametrize("first", [0, 1])
def test_a_sweep_leaves_the_other_sessions_hooks(first: int) -> None:
    module = torch.nn.Linear(2, 1)
    pair = [Watcher(module), Watcher(module)]
    swept, other = pair[first], pair[1 - first]
    assert swept.hooks.sweep([module]) == 12
    work(module)
    assert swept.told() == set()
    assert other.told() == ALL
    assert swept.hooks.sweep([module]) == 0
    swept.stack.close()
    work(module)
    assert other.told() == ALL
    other.stack.close()
    assert torch.autograd.backward is BACKWARD
    assert _BaseDataLoaderIter.__next__ is NEXT
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_a_sweep_leaves_the_users_hooks() -> None:
    module, seen = torch.nn.Linear(2, 1), []
    with (
        module.register_forward_hook(lambda *_: seen.append("mine")),
        torch_module.register_module_forward_hook(lambda *_: seen.append("all")),
    ):
        one = Watcher(module)
        one.hooks.sweep([module])
        one.stack.close()
        module(torch.ones(1, 2))
    assert sorted(seen) == ["all", "mine"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_chain_of_wrappers_is_unwound_in_any_order(order: tuple[int, ...]) -> None:
    seen: list[int] = []
    stacks = [ExitStack() for _ in range(3)]

    def around(number: int) -> Any:
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(number)
            return original(*args, **kwargs)

        return call

    for number, stack in enumerate(stacks):
        Hooks().autograd_calls(stack, "backward", around(number))
    left = set(range(3))
    for number in order:
        stacks[number].close()
        left.discard(number)
        seen.clear()
        torch.ones(1, requires_grad=True).sum().backward()
        assert seen == sorted(left, reverse=True)
    assert torch.autograd.backward is BACKWARD


def test_a_wrapper_that_somebody_kept_is_only_a_longer_way() -> None:
    seen: list[str] = []

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append("ours")
        return original(*args, **kwargs)

    with ExitStack() as stack:
        Hooks().autograd_calls(stack, "backward", around)
        kept = torch.autograd.backward
    leaf = torch.ones(1, requires_grad=True)
    kept(leaf.sum())
    assert seen == []
    assert leaf.grad is not None


def test_a_wrapper_that_somebody_kept_holds_no_probe() -> None:
    class Probe:
        def around(self, original: Any, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

    probe = Probe()
    with ExitStack() as stack:
        Hooks().autograd_calls(stack, "backward", probe.around)
        kept = torch.autograd.backward
    alive = weakref.ref(probe)
    del probe
    assert alive() is None
    leaf = torch.ones(1, requires_grad=True)
    kept(leaf.sum())
    assert leaf.grad is not None


def test_a_third_party_on_top_of_us_stays_and_works() -> None:
    seen: list[str] = []

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append("ours")
        return original(*args, **kwargs)

    try:
        with ExitStack() as stack:
            Hooks().autograd_calls(stack, "backward", around)
            below = torch.autograd.backward

            def theirs(*args: Any, **kwargs: Any) -> Any:
                seen.append("theirs")
                return below(*args, **kwargs)

            torch.autograd.backward = theirs
            torch.ones(1, requires_grad=True).sum().backward()
        assert torch.autograd.backward is theirs
        torch.ones(1, requires_grad=True).sum().backward()
        assert seen == ["theirs", "ours", "theirs"]
    finally:
        torch.autograd.backward = BACKWARD


def copies(module: torch.nn.Module) -> dict[str, Any]:
    def saved() -> torch.nn.Module:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    return {"deepcopy": lambda: copy.deepcopy(module), "pickle": lambda: pickle.loads(pickle.dumps(module)), "torch.save": saved}


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_hooked_module_works_and_tells_nothing(way: str) -> None:
    module = torch.nn.Linear(2, 1)
    one = Watcher(module)
    with one.stack:
        twin = copies(module)[way]()
        one.seen.clear()
        assert torch.equal(twin(torch.ones(1, 2)), module(torch.ones(1, 2)))
        assert one.seen.count("own enter") == 1
    assert torch.equal(twin(torch.ones(1, 2)), module(torch.ones(1, 2)))
    twin(torch.ones(1, 2)).sum().backward()
    assert pickle.loads(pickle.dumps(twin))(torch.ones(1, 2)).shape == (1, 1)


def test_whoever_loads_a_pickled_module_needs_no_package_of_ours() -> None:
    module = torch.nn.Linear(2, 1)
    with Watcher(module).stack:
        assert b"torchdebug_magics" not in pickle.dumps(module)


def test_the_wrapper_of_a_function_of_torchs_pickles_as_that_function() -> None:
    with ExitStack() as stack:
        Hooks().autograd_calls(stack, "backward", lambda original, *args: original(*args))
        data = pickle.dumps(torch.autograd.backward)
    assert pickle.loads(data) is BACKWARD


def test_a_deep_copy_of_what_holds_a_function_of_torchs_still_calls_it() -> None:
    with ExitStack() as stack:
        Hooks().autograd_calls(stack, "grad", lambda original, *args: original(*args))
        twin = copy.deepcopy({"differentiate": torch.autograd.grad})["differentiate"]
    leaf = torch.ones(1, requires_grad=True)
    assert twin((leaf * 3).sum(), leaf)[0].item() == 3.0


def test_own_hooks_stand_first_and_last() -> None:
    module, order = torch.nn.Linear(2, 1), []
    module.register_forward_pre_hook(lambda *_: order.append("user pre"))
    with ExitStack() as stack:
        Hooks().own_calls(stack, module, lambda *_: order.append("before"), lambda *_: order.append("after"))
        module.register_forward_pre_hook(lambda *_: order.append("user pre 2"))
        module(torch.ones(1, 2))
    assert order == ["before", "user pre", "user pre 2", "after"]


def test_a_call_that_raises_is_left_all_the_same() -> None:
    module, order = torch.nn.Linear(2, 1), []
    with ExitStack() as stack:
        Hooks().own_calls(stack, module, lambda *_: order.append("before"), lambda *_: order.append("after"))
        with pytest.raises(RuntimeError):
            module(torch.ones(1, 3))
    assert order == ["before", "after"]


def test_a_sweep_takes_a_mode_of_ours_from_below_a_users() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    hooks = Hooks()
    OpListener(lambda _f, _a, _k, run: run(), hooks).__enter__()
    with FlopCounterMode(display=False) as counter:
        above = modes()[-1]
        assert hooks.sweep() == 1
        assert modes() == [above]
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert counter.get_total_flops() == 16
    assert not modes()
    assert not is_in_torch_dispatch_mode()


def test_a_sweep_leaves_a_users_mode() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        assert Hooks().sweep() == 0
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert counter.get_total_flops() == 16


def test_a_sweep_of_one_session_leaves_the_mode_of_another() -> None:
    # The inner session ends while the outer one is in the middle of a replay.
    outer = OpListener(lambda _f, _a, _k, run: run(), Hooks())
    outer.__enter__()
    try:
        Hooks().sweep()
        assert modes() == [outer]
    finally:
        take_off(outer)


def test_an_error_of_a_data_set_passes_a_watched_loader() -> None:
    class Broken(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, place: int) -> int:
            return 1 // (1 - place)

    with ExitStack() as stack:
        Hooks().loader_batches(stack, lambda original, iterator: original(iterator))
        batches = iter(torch.utils.data.DataLoader(Broken()))
        assert next(batches).item() == 1
        with pytest.raises(ZeroDivisionError):
            next(batches)
        assert pickle.loads(pickle.dumps(_BaseDataLoaderIter.__next__)) is _BaseDataLoaderIter.__next__
    assert _BaseDataLoaderIter.__next__ is NEXT


@pytest.mark.parametrize("name", ["zeroed_gradients", "clipped_gradients", "loader_batches", "ends_of_saving"])
def test_what_stands_in_the_place_of_a_function_is_found_by_the_sweep(name: str) -> None:
    """As after an interrupt, when the stack is lost."""
    hooks, lost = Hooks(), ExitStack()
    getattr(hooks, name)(lost, lambda original, *args, **kwargs: original(*args, **kwargs))
    lost.pop_all()
    assert hooks.sweep()
    assert not hooks.sweep()
