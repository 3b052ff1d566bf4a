"""What a part of a module overwrites in place though its caller reads it once more: no error, and other numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torchdebug_magics.instruments.autograd.faults.watched import TrainingFacts
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, not_in_place
from torchdebug_magics.instruments.autograd.tape import RecordedOp
from torchdebug_magics.probing.source.call_sites import constructor_call
from torchdebug_magics.probing.source.edited_source import exchanging


def overwritten_inputs(facts: TrainingFacts) -> Iterator[AutogradFinding]:
    """A module whose part overwrites in place what it was given, where its caller reads that once more, as for a skip connection."""
    ops, readers = facts.tape.ops, defaultdict[int, list[RecordedOp]](list)
    for op in ops:
        for memory in {use.memory for use in op.reads} - {use.memory for use in op.writes}:
            readers[memory].append(op)
    for writer in ops:
        written = writer.writes[0] if writer.writes and writer.is_forward else None
        if written is None or not writer.module or not written.requires_grad:  # else a statistic, of which there are the module's own
            continue
        makers = {use.memory: maker for use, maker in writer.sources}
        memory = written.memory
        for reader in (op for op in readers[memory] if op.index > writer.index and op.root == writer.root):
            child = _child(reader.module, writer.module)
            maker = makers.get(memory)
            if not child or (maker is not None and _is_within(maker.module, child)) or _is_within(reader.module, child):
                continue
            last = next(op for op in reversed(ops) if op.index < reader.index and _is_within(op.module, child) and op.root == writer.root)
            if any(use.memory == memory for use in last.makes):
                continue  # it is what the module returns
            root = next((root for root in facts.roots if id(root) == writer.root), None)
            parts = {} if root is None else dict(root.named_modules())
            is_torchs = type(parts.get(writer.module)).__module__.startswith("torch.nn")
            made = constructor_call(writer.module, parts.get) if is_torchs else None
            yield finding(
                "overwritten_input",
                f"`{writer.module}` overwrites in place what `{child}` is given, and this line reads it afterwards",
                reader.where,
                f"make `{writer.module}` without `inplace=True`",
                edits=() if made is None else exchanging(*made, not_in_place(made[1])),
                op=writer,
                saved_at=writer.where if writer.where != reader.where else None,
                explanation="the skip connection adds what the activation has left, and not what came in",
                is_hint=True,
            )
            return


def _child(outer: str | None, inner: str) -> str:
    """The part of the outer module in which the inner one lies, where that is a part of a part; empty where it is not."""
    prefix = f"{outer}." if outer else ""
    rest = inner.removeprefix(prefix).split(".") if outer is not None and inner.startswith(prefix) else []
    return prefix + rest[0] if len(rest) > 1 else ""


def _is_within(path: str | None, module: str) -> bool:
    return path is not None and (path == module or path.startswith(f"{module}."))
