"""What objects refer to can be asked and kept with no harm."""

from __future__ import annotations

import _asyncio
import _functools  # type: ignore[import-not-found]  # no stubs
import gc
import sys
from types import ModuleType

import pytest

from torchdebug_magics.probing.state.attributes import referents


def test_objects_tell_all_that_they_hold() -> None:
    one, other = object(), object()
    assert referents([one], {"name": other}) == gc.get_referents([one], {"name": other})
    assert referents() == []


@pytest.mark.parametrize("module", [_functools, _asyncio, sys, pytest], ids=lambda module: module.__name__)
def test_a_module_tells_its_namespace_alone(module: ModuleType) -> None:
    held = [1, 2]
    assert referents(module) == [vars(module)]
    assert referents(module, held) == [*gc.get_referents(held), vars(module)]
    assert len(gc.get_referents(_functools)) > 1, "this module has no state of its own: the test shows nothing"
