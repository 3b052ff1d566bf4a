"""``stale_value`` as a finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.instruments.autograd.errors.raised import statement_at
from torchdebug_magics.instruments.autograd.errors.writes import writes_to
from torchdebug_magics.instruments.autograd.report import Finding
from torchdebug_magics.probing.where import excerpt

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.silences.alive import Alive
    from torchdebug_magics.instruments.autograd.silences.watched import Watched

__all__ = ["stale_values"]


def stale_values(watched: Watched, alive: Alive) -> list[Finding]:
    """The first tensor overwritten unnoticed, as a finding."""
    for saver, writer, memory, ratio in [watched.stale] if watched.stale is not None else []:
        where = writer.line.location if writer.line is not None else None
        members = [name for name, held in alive.members() if watched.recorder.tape.numbers.of(held) == memory]
        statement = statement_at(where)
        name = members[0] if members else next(writes_to(statement), None) if statement is not None else None
        is_update = writer.in_optimizer or writer.name.startswith("_fused_")
        source = where.source if where is not None else "the write"
        return [
            Finding(
                kind="stale_value",
                raised=False,
                headline=f"{f'`{name}`' if name else 'a tensor'} was overwritten after `{saver.name}` saved it for backward",
                location=where,
                op=saver.name,
                saved_at=saver.line.location if saver.line is not None else None,
                writer_op=writer.name,
                tensor=name,
                module=saver.module,
                parameters=tuple(members),
                error_ratio=ratio,
                fix=f"move `{source}` below the last backward() of the step"
                if is_update
                else f"move `{source}` below backward(), or write into a copy (`.clone()`)",
                explanation="PyTorch's version check does not see this write, so backward() used the new values and raised nothing",
                excerpt=excerpt(where) if where is not None else (),
            )
        ]
    return []
