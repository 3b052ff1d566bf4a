"""Reference cycles, and what a deleted name does not free."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tests.plants.memtrace.loops import SETUP, UNCOLLECTED, plant
from tests.plants.plant import between, has, starts

if TYPE_CHECKING:
    from tests.plants.plant import Plant

_ERROR_KEPT = """
def attempt():
    big = torch.randn(100, 100)
    try:
        raise ValueError
    except ValueError as error:
        last = error  # <- here
for _ in range(12):
    attempt()
"""


def _cycle(name: str, cell: str, fix: str) -> Plant:
    """Make a plant in which cycles are what stays."""
    expect = {"kept_by_cycles.count": between(3, math.inf), "kept_by_cycles.fix": has(fix), "verdict": has("stayed in reference cycles")}
    return plant(name, cell, expect, setup=UNCOLLECTED)


PLANTS = (
    _cycle(
        "an-output-on-ctx",
        """
        class Copy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, given):
                ctx.result = given.clone()  # <- here
                return ctx.result
            @staticmethod
            def backward(ctx, grad):
                return grad
        for _ in range(20):
            out = Copy.apply(torch.randn(100, 100, requires_grad=True))
        """,
        "ctx.save_for_backward",
    ),
    _cycle(
        "a-hook-that-closes-over-the-module",
        """
        class Leaky(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(100, 100)
                def hook(module, given, out):
                    self.seen = True
                self.register_forward_hook(hook)  # <- here
        for _ in range(12):
            Leaky()
        """,
        "`this = weakref.ref(self)`",
    ),
    _cycle(
        "a-method-in-an-attribute",
        """
        class Picks(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(100, 100)
                self.act = self.fast  # <- here
            def fast(self, a):
                return a
        for _ in range(12):
            Picks()
        """,
        "weakref.WeakMethod",
    ),
    _cycle(
        "a-reentrant-checkpoint",
        """
        from torch.utils.checkpoint import checkpoint
        def block(x):
            held = {'first': x * 0}
            def run(x):
                held
                return x * 1
            x = checkpoint(run, x, use_reentrant=True)  # <- here
            held['x'] = x
            return x
        x = torch.zeros(100, 100, requires_grad=True)
        for _ in range(12):
            block(x).sum().backward()
        """,
        "use_reentrant=False",
    ),
    _cycle("an-error-that-is-kept", _ERROR_KEPT, "del last"),
    plant(
        "cycles-that-are-small-beside-the-rest",
        f"large = torch.randn(1000, 1000)\n{_ERROR_KEPT.strip()}".replace("  # <- here", ""),
        {"kept_by_cycles": None},
    ),
    plant(
        "cycles-that-went-before-the-cell-ended",
        """
        class Holds(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(600, 600)
                self.act = self.fast  # <- here
            def fast(self, a):
                return a
        for _ in range(16):
            Holds()
        import gc
        gc.collect()
        """,
        {"kept_by_cycles.count": between(3, math.inf), "verdict": has("stayed in reference cycles")},
        setup=UNCOLLECTED,
        repair=(("for _ in", "kept = []\nfor _ in"), ("    Holds()\n", "    kept.append(Holds())\n")),
    ),
    plant(
        "a-deleted-model-that-a-cache-holds",
        """
        import functools
        class Cached(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(200, 200)
            @functools.lru_cache(maxsize=8)
            def table(self, size):
                return torch.arange(size)
            def forward(self, a):
                return self.inner(a) + self.table(200)
        model = Cached()
        out = model(torch.randn(2, 200)).detach()
        del model  # <- here
        """,
        {"undeleted.name": "model", "undeleted.holder": has("<cache>"), "verdict": starts("`del model` freed none of its")},
        repair=(("    @functools.lru_cache(maxsize=8)\n", ""),),
    ),
    plant(
        "a-deleted-model-that-another-name-holds",
        "del big",
        {"undeleted.name": "big", "undeleted.holder": "kept['best'].weight", "undeleted.fix": "also delete what holds it: `del kept`"},
        setup=f"{SETUP}big = nn.Linear(200, 200)\nkept = {{'best': big}}",
    ),
    plant(
        "an-error-that-is-handled-holds-the-failed-call",
        """
        def forward(a):
            h = torch.tanh(a @ torch.randn(64, 4096))
            if len(a) > 64:
                raise RuntimeError('too large')
            return h.sum()
        class Large(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(()))
            def forward(self, a):
                return self.scale * forward(a)
        large = Large()
        def attempt(a):
            try:
                return large(a)
            except RuntimeError:
                return large(a[:64])  # <- here
        attempt(torch.randn(512, 64))
        """,
        {
            "undeleted.live_bytes": between(512 * 4096 * 4, math.inf),
            "undeleted.holder": has("-> forward:"),
            "undeleted.fix": has("after the `except` block"),
            "verdict": starts("8.0 MiB of the failed call stay allocated while its error is handled"),
        },
        repair=(("        return large(a[:64])  # <- here", "        pass\n    return large(a[:64])"),),
    ),
    plant(
        "a-refusal-while-an-error-is-handled",
        """
        def forward(a):
            h = torch.tanh(a @ torch.randn(64, 4096))
            if len(a) > 64:
                raise RuntimeError('too large')
            raise torch.OutOfMemoryError('Tried to allocate 20.00 MiB')
        class Large(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(()))
            def forward(self, a):
                return self.scale * forward(a)
        large = Large()
        def attempt(a):
            try:
                return large(a)
            except RuntimeError:
                return large(a[:64])
        attempt(torch.randn(512, 64))
        """,
        {"oom.kind": "handled error", "oom.best.what": has("after the `except` block")},
        raises="OutOfMemoryError",
    ),
    plant(
        "errors-that-are-kept",
        """
        failed = []
        def check(out):
            raise ValueError
        for a, b in batches(12):
            out = learn(a, b)
            try:
                seen = net(a).detach().repeat(1, 8)
                check(seen)
            except ValueError as error:
                failed.append(error)
        """,
        {"growth.holder": starts("failed[0]"), "growth.fix": has("`error.with_traceback(None)`")},
    ),
)
