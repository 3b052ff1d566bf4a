"""Which variables hold the most: tensors, plain objects, and what shares a storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchdebug_magics.memory.found import largest_holders

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

MIB = 2**20


def test_tensors_and_plain_objects_by_the_variable_that_holds_them(shell: InteractiveShell):
    shell.user_ns |= {
        "hoard": [torch.ones(MIB) for _ in range(4)],
        "rows": [bytearray(64 << 10) for _ in range(96)],
        "few": torch.ones(4),
        "nowhere": torch.empty(1 << 40, device="meta"),
    }
    shell.user_ns["again"] = shell.user_ns["hoard"][0]
    found = dict(largest_holders(most=1000))
    assert found["hoard"] + found.get("again", 0) == 16 * MIB
    assert abs(found["rows"] - 6 * MIB) < MIB
    assert found["few"] == 16
    assert "nowhere" not in found


def test_at_most_so_many_and_the_largest_first(shell: InteractiveShell):
    shell.user_ns |= {f"x{number}": torch.ones(MIB * number) for number in range(1, 9)}
    found = largest_holders(most=3)
    assert len(found) == 3
    assert [size for _, size in found] == sorted((size for _, size in found), reverse=True)
    assert found[0][1] >= 32 * MIB


def test_an_error_in_flight_holds_what_its_calls_held(shell: InteractiveShell):
    error = ValueError("held")
    error.kept = torch.ones(3 * MIB)  # type: ignore[attr-defined]
    held = dict(largest_holders([("the interrupted call", error)], most=50))
    assert held.get("the interrupted call", 0) >= 12 * MIB or held.get("error", 0) >= 12 * MIB or any("error" in name for name in held)
