"""The figures of a trace as named rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, count, plural

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.report import DeviceMemory, MemtraceReport

__all__ = ["change", "figures", "remaining"]

_WORTH_TRIMMING = 16 << 20


def figures(report: MemtraceReport) -> tuple[tuple[str, str], ...]:
    """Names and values of all figures that are known."""
    rows = [
        ("torch memory", f"{byte_size(report.start_bytes)} before the cell, {change(report.net_bytes)} after it"),
        ("held from before, freed", byte_size(report.freed_before_bytes) if report.freed_before_bytes else ""),
        *[(one.device, _device(one)) for one in report.devices if len(report.devices) > 1 or one.reserved_bytes is not None],
        ("this process", _process(report)),
        ("kept by the C library", _kept_by_heap(report)),
        (
            "borrowed",
            f"{byte_size(report.borrowed_bytes)} that other libraries own, such as NumPy (`from_numpy`)" if report.borrowed_bytes else "",
        ),
        ("memory-mapped", f"{byte_size(report.mapped_bytes)} of files" if report.mapped_bytes else ""),
        ("not traced", f"{byte_size(report.untraced_bytes)}" if report.untraced_bytes else ""),
        *[("reference cycles", f"{byte_size(cycle.freed_bytes)}: `{cycle.path}`") for cycle in report.cycles],
        ("traced", _followed(report)),
        ("snapshot", f"`{report.snapshot}`; open it at pytorch.org/memory_viz" if report.snapshot else ""),
    ]
    return tuple((name, text) for name, text in rows if text)


def remaining(report: MemtraceReport) -> list[tuple[str, str]]:
    """What the process kept, what the cell left, and which variable holds most of it."""
    if report.is_light and not report.net_bytes and not report.process_grown_bytes:
        return []
    now = report.start_bytes + report.net_bytes
    held = f"; most of it in `{report.holders[0].variable}`" if report.holders and report.net_bytes > 0 else ""
    loop = ""
    if report.unseen_loop is not None:
        loop = f"; growth was not checked in the loop at {report.unseen_loop}: no training step was recognized there"
    grown = f"{change(report.process_grown_bytes)} of this process, outside of tensors: the variable that keeps it was not found"
    return [
        ("but", grown if report.process_grown_bytes else ""),
        (
            "after the cell",
            f"{change(report.net_bytes)}: torch held {byte_size(report.start_bytes)} before, {byte_size(now)} after{held}{loop}",
        ),
    ]


def change(size_bytes: int) -> str:
    """``+1.5 MiB``."""
    return f"{'+' if size_bytes >= 0 else '-'}{byte_size(abs(size_bytes))}"


def _process(report: MemtraceReport) -> str:
    if report.rss_peak_bytes is None:
        return ""
    said = f"peak {byte_size(report.rss_peak_bytes)}"
    if report.rss_net_bytes is not None:
        said += f", {change(report.rss_net_bytes)} at the end"
    if report.limit_bytes is not None:
        said += f"; the limit is {byte_size(report.limit_bytes)} ({report.limit})"
    return said


def _kept_by_heap(report: MemtraceReport) -> str:
    if report.heap_kept_bytes < _WORTH_TRIMMING:
        return ""
    return f"{byte_size(report.heap_kept_bytes)} of freed memory; `%memclean --free heap` returns it to the system"


def _followed(report: MemtraceReport) -> str:
    """How many steps were traced op by op, and what was done with the others."""
    seen = f"{count(report.ops_count)} operation{'' if report.ops_count == 1 else 's'}"
    if not report.steps_count:
        return seen
    some = "all" if report.followed_count == report.steps_count else f"{report.followed_count:,}"
    rest = (
        "; only the memory of the others was counted, and the picture shows them in sequence"
        if 0 < report.followed_count < report.steps_count
        else ""
    )
    return f"{seen}; {some} of {plural(report.steps_count, 'step')} op by op{rest}"


def _device(one: DeviceMemory) -> str:
    said = f"peak {byte_size(one.peak_bytes)}, {change(one.net_bytes)} at the end"
    if one.allocated_bytes is None or one.reserved_bytes is None:
        return said
    return f"{said}; its allocator: {_counted('MA', one.allocated_bytes, one.allocated_peak_bytes)}, " + _counted(
        "CA", one.reserved_bytes, one.reserved_peak_bytes
    )


def _counted(name: str, now_bytes: int, peak_bytes: int | None) -> str:
    peak = "the peak is from before the cell" if peak_bytes is None else f"peak {byte_size(peak_bytes)}"
    return f"{name} {byte_size(now_bytes)} ({peak})"
