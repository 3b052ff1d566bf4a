"""Reference cycles, and what a deleted name does not free."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tests.plants.memtrace.loops import SETUP, UNCOLLECTED, plant
from tests.plants.plant import between, has, starts

if TYPE_CHECKING:
    from collections.abc import Callable

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


def _cycle(name: str, fix: str) -> Callable[[str], Plant]:
    """Make a plant in which cycles are what stays."""
    expect = {"kept_by_cycles.count": between(3, math.inf), "kept_by_cycles.fix": has(fix), "verdict": has("stayed in reference cycles")}
    return plant(name, expect, setup=UNCOLLECTED)


PLANTS = (
    _cycle("an-output-on-ctx", "ctx.save_for_backward")("""
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
    """),
    _cycle("a-hook-that-closes-over-the-module", "`this = weakref.ref(self)`")("""
        class Leaky(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(100, 100)
                def hook(module, given, out):
                    self.seen = True
                self.register_forward_hook(hook)  # <- here
        for _ in range(12):
            Leaky()
    """),
    _cycle("a-method-in-an-attribute", "weakref.WeakMethod")("""
        class Picks(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(100, 100)
                self.act = self.fast  # <- here
            def fast(self, a):
                return a
        for _ in range(12):
            Picks()
    """),
    _cycle("a-reentrant-checkpoint", "use_reentrant=False")("""
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
    """),
    _cycle("an-error-that-is-kept", "del last")(_ERROR_KEPT),
    plant("cycles-that-are-small-beside-the-rest", {"kept_by_cycles": None})(
        f"large = torch.randn(1000, 1000)\n{_ERROR_KEPT.strip()}".replace("  # <- here", "")
    ),
    plant(
        "a-deleted-model-that-a-cache-holds",
        {"undeleted.name": "model", "undeleted.holder": has("<cache>"), "verdict": starts("`del model` freed none of its")},
        repair=(("    @functools.lru_cache(maxsize=8)\n", ""),),
        door="magic",  # at the other, the `with` stands in another file than the `del`
    )("""
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
    """),
    plant(
        "a-deleted-model-that-another-name-holds",
        {"undeleted.name": "big", "undeleted.holder": "kept['best'].weight", "undeleted.fix": "also delete what holds it: `del kept`"},
        setup=f"{SETUP}big = nn.Linear(200, 200)\nkept = {{'best': big}}",
        door="magic",
    )("del big"),
    plant(
        "an-error-that-is-handled-holds-the-failed-call",
        {
            "undeleted.live_bytes": between(512 * 4096 * 4, math.inf),
            "undeleted.holder": has("-> forward:"),
            "undeleted.fix": has("after the `except` block"),
            "verdict": starts("8.0 MiB of the failed call stay allocated while its error is handled"),
        },
        repair=(("        return large(a[:64])  # <- here", "        pass\n    return large(a[:64])"),),
    )("""
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
    """),
    plant(
        "a-refusal-while-an-error-is-handled",
        {"oom.kind": "handled error", "oom.best.what": has("after the `except` block")},
        raises="OutOfMemoryError",
    )("""
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
    """),
)
