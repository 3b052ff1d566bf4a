"""Every byte: against the profiler's allocations in a first step, against zero in a second, and against a count by hand after each op."""

from __future__ import annotations

import gc
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it
from torch.utils.checkpoint import checkpoint

import torchdebug_magics
from tests.plain_first import refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.doors import Door

CATEGORIES = {"parameter", "gradient", "optimizer state", "activation", "buffer", "temporary", "other"}


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))


def rows(*size: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*size)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "checkpointed": (lambda: Checkpointed(reentrant=False), rows(16, 64)),
    "checkpointed, reentrant": (lambda: Checkpointed(reentrant=True), rows(16, 64)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda ps: torch.optim.Adam(ps, fused=True),
}


class Training:
    """One step at a time; nothing of it is left in a name."""

    def __init__(self, model: nn.Module, make: Callable[[], torch.Tensor], optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model, self.optimizer = model, optimizer(model.parameters())
        self.x, self.y = make(), torch.randint(10, (16,))
        self.autocast = False

    def step(self) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = F.cross_entropy(self.model(self.x).float(), self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def profiled_bytes(work: Callable[[], object]) -> int:
    """Allocated less freed, by torch's own allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    return sum(event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")


def traced(work: Callable[[], object]) -> Any:
    with torchdebug_magics.memtrace() as session:
        work()
    assert session.report.problems == ()
    return session.report


def check(report: Any) -> None:
    assert sum(report.peak.by_category.values()) == report.peak_bytes
    assert set(report.peak.by_category) <= CATEGORIES
    assert {site.category for site in report.sites} <= CATEGORIES
    assert sum(site.live_bytes for site in report.sites) == report.net_bytes + report.freed_before_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("model", MODELS)
def test_the_first_step_is_the_profilers_and_the_second_is_nothing(model: str, autocast: bool) -> None:
    make, x = MODELS[model]
    fresh: list[Training] = []
    for _ in range(2):
        torch.manual_seed(0)
        fresh.append(Training(make(), x, torch.optim.AdamW))
        fresh[-1].autocast = autocast
    Training(make(), x, torch.optim.AdamW).step()  # what torch makes once and keeps
    gc.collect()
    if autocast and (refused := refusal(fresh[0].step)):
        with pytest.raises(RuntimeError, match=re.escape(refused)):
            traced(fresh[1].step)
        return
    if autocast:
        fresh[0] = Training(make(), x, torch.optim.AdamW)
        fresh[0].autocast = True
    wanted = profiled_bytes(fresh[0].step)
    first = traced(fresh[1].step)
    assert first.net_bytes == wanted
    check(first)
    second = traced(fresh[1].step)
    assert second.net_bytes == 0
    check(second)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str) -> None:
    fresh = [Training(mlp(), rows(16, 64), OPTIMIZERS[optimizer]) for _ in range(2)]
    wanted = profiled_bytes(fresh[0].step)
    first = traced(fresh[1].step)
    assert first.net_bytes == wanted
    states = sum(one.nbytes for state in fresh[1].optimizer.state.values() for one in state.values() if one is not None)
    gradients = sum(one.grad.nbytes for one in fresh[1].model.parameters())
    assert first.net_bytes == states + gradients
    assert traced(fresh[1].step).net_bytes == 0


def test_lbfgs() -> None:
    model, x = nn.Linear(8, 1), torch.randn(16, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    report = traced(lambda: optimizer.step(closure))
    check(report)
    assert report.growth is None


def live_bytes() -> int:
    """By hand: each storage that a tensor alive stands for, once."""
    found = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            storage = one.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def test_the_peak_is_the_largest_live_set() -> None:
    # Ops whose every tensor has a name, so that a count by hand sees them all.
    torch.manual_seed(0)
    plan = torch.randint(0, 5, (60,)).tolist()
    sizes = torch.randint(1, 5000, (60,)).tolist()
    gc.collect()
    counts: list[int] = []
    with torchdebug_magics.memtrace() as session:
        counts.append(live_bytes())
        kept: list[torch.Tensor] = []
        for kind, size in zip(plan, sizes, strict=True):
            if kind == 0 and kept:
                kept.pop(0)
            elif kind == 1 and kept:
                kept.append(kept[-1][: max(1, size % (len(kept[-1]) + 1))])
            elif kind == 2 and kept:
                kept[-1] = kept[-1].clone()
            elif kind == 3 and kept:
                kept[-1].add_(1)
            else:
                kept.append(torch.empty(size))
            counts.append(live_bytes())
    report = session.report
    assert report.peak_bytes - report.start_bytes == max(counts) - counts[0]
    assert report.net_bytes == counts[-1] - counts[0]
    assert sum(report.peak.by_category.values()) == report.peak_bytes


def test_views_and_tied_weights_count_once() -> None:
    kept: list[Any] = []

    def work() -> None:
        a = torch.zeros(100, 10)
        kept.extend([a, a[3:], a.T, a.view(-1), a.detach(), a.unbind(0), a.split(7), a.real])

    assert traced(work).net_bytes == 4000


@pytest.mark.filterwarnings("ignore")
def test_sparse_ones_count_their_parts() -> None:
    kept: list[Any] = []

    def work() -> None:
        kept.append(torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (3, 3)))
        kept.append(torch.eye(4).to_sparse_csr())
        kept.append(torch.eye(4).to_sparse())
        kept.append(kept[-1] @ torch.ones(4, 1))

    report = traced(work)
    coo, other = kept[0], kept[2]
    csr = kept[1]
    parts = [coo._indices(), coo._values(), csr.crow_indices(), csr.col_indices(), csr.values(), other._indices(), other._values(), kept[3]]
    assert report.net_bytes == sum({part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}.values())


@pytest.mark.filterwarnings("ignore")
def test_borrowed_and_mapped_memory_are_apart(tmp_path: Any) -> None:
    import numpy as np

    array, held = np.zeros(1000, dtype=np.float32), bytearray(800)
    torch.save({"a": torch.zeros(2000)}, tmp_path / "a.pt")
    kept: list[Any] = []

    def work() -> None:
        kept.append(torch.from_numpy(array))
        kept.append(torch.frombuffer(held, dtype=torch.uint8))
        kept.append(torch.load(tmp_path / "a.pt", mmap=True)["a"])
        kept.append(kept[0] + 1)
        kept.append(torch.from_file(str(tmp_path / "raw"), shared=True, size=3000))

    (tmp_path / "raw").write_bytes(bytes(12_000))
    report = traced(work)
    assert report.net_bytes == 4000 + 8000 + 12_000
    assert report.borrowed_bytes == 4800
    assert report.mapped_bytes == 8000 + 12_000


def test_what_torch_load_reads_is_torchs(tmp_path: Any) -> None:
    torch.save({"a": torch.zeros(2000)}, tmp_path / "a.pt")
    kept: list[Any] = []
    report = traced(lambda: kept.append(torch.load(tmp_path / "a.pt")))
    assert (report.net_bytes, report.borrowed_bytes, report.mapped_bytes) == (8000, 0, 0)


@pytest.mark.parametrize("load", ["torch.load(file)", "torch.load(file, mmap=True)"])
def test_kept_shards_of_a_checkpoint_are_growth(observe: Door, tmp_path: Any, load: str) -> None:
    torch.save({"w": torch.randn(64, 2048)}, tmp_path / "shard.pt")
    names = {"torch": torch, "file": str(tmp_path / "shard.pt"), "net": torch.nn.Linear(8, 8)}
    body = f"""cache = []
for i in range(24):
    cache.append({load})
    net(torch.randn(4, 8)).sum().backward()
"""
    observe.plain("")  # a script with variables of its own
    report = observe("memtrace", body, namespace=names).report
    assert report.growth is not None
    assert report.growth.holder.startswith("cache")
    assert report.growth.location.line == 4
    assert report.growth.bytes_per_iteration == 64 * 2048 * 4


def test_arrays_that_are_only_lent_are_no_growth(observe: Door) -> None:
    import numpy as np

    names = {"torch": torch, "np": np, "net": torch.nn.Linear(8, 8), "memory": np.ones(64 * 2048)}
    body = """cache = []
for i in range(24):
    cache.append((torch.from_numpy(memory), torch.frombuffer(memory), torch.from_dlpack(memory)))
    net(torch.randn(4, 8)).sum().backward()
"""
    observe.plain("")  # a script with variables of its own
    report = observe("memtrace", body, namespace=names).report
    assert report.growth is None
    assert report.borrowed_bytes >= 64 * 2048 * 8


def test_memory_that_processes_share_is_torchs() -> None:
    kept = [torch.ones(1000)]
    report = traced(lambda: kept.append(torch.zeros(500).share_memory_()))
    assert (report.net_bytes, report.mapped_bytes) == (2000, 0)


class Wrapper(torch.Tensor):
    """As a user's own: it has a size, and its memory is another tensor's."""

    inner: torch.Tensor

    @classmethod
    def of(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [one.inner if isinstance(one, Wrapper) else one for one in args]
        return cls.of(func(*plain, **(kwargs or {})))


def test_a_wrapper_has_the_bytes_of_what_it_wraps() -> None:
    kept: list[torch.Tensor] = []

    def work() -> None:
        kept.append(Wrapper.of(torch.ones(1000)))
        kept.append(kept[0] + kept[0])

    assert traced(work).net_bytes == 8000


def test_no_code_of_ours_runs_when_a_tensor_dies() -> None:
    # An interrupt that came in it would be swallowed, as every error in the callback of a weak reference is.
    calls: list[str] = []
    with torchdebug_magics.memtrace() as session:
        kept = [torch.ones(1000) for _ in range(8)]
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, _arg: calls.append(frame.f_code.co_name) if event == "call" else None)
        kept.clear()
        sys.setprofile(before)
    assert calls == []
    assert session.report.net_bytes == 0


def test_a_storage_that_is_resized() -> None:
    kept = [torch.zeros(1000)]

    def work() -> None:
        kept.append(torch.ones(500))
        kept[1].untyped_storage().resize_(0)
        kept[0].untyped_storage().resize_(0)

    report = traced(work)
    assert report.net_bytes == -4000
    kept[0].untyped_storage().resize_(4000)
    report = traced(lambda: kept[1].untyped_storage().resize_(2000))
    assert report.net_bytes == 2000


def test_out_and_in_place() -> None:
    a, out = torch.ones(10, 10), torch.empty(10, 10)
    assert traced(lambda: (a.add_(1), torch.mm(a, a, out=out), out.relu_())).net_bytes == 0
    swelling = torch.empty(0)
    report = traced(lambda: torch.add(a, a, out=swelling))
    assert report.net_bytes == 400


def test_of_other_threads() -> None:
    import threading

    kept: list[torch.Tensor] = []

    def work() -> None:
        thread = threading.Thread(target=lambda: kept.append(torch.zeros(1000)))
        thread.start()
        thread.join()

    report = traced(work)
    assert (report.net_bytes, report.untraced_bytes) == (4000, 4000)
