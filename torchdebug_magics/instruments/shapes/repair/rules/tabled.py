"""Tables that a model holds: causal masks, positions and windows, made for fewer steps, or for other widths, than what meets them."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.repair.edit import Edit, as_typed
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand, Sizes
from torchdebug_magics.instruments.shapes.repair.rebuild import quietly
from torchdebug_magics.instruments.shapes.repair.size_history import of_inputs, steps
from torchdebug_magics.probing.source.code_owner import is_user_code
from torchdebug_magics.probing.where import location

_NUMBER = re.compile(r"\b\d+\b")
_ROTATES = ("cos", "sin", "rot", "rope", "freq")
_MOST = 64
"""How often a module is made to find its numbers."""
_LONGEST_S = 0.5
"""How long that may compute."""
_LARGEST = 1 << 22
"""Elements of all its tables."""
_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda angles: angles,
    ".repeat(1, 2)": lambda angles: angles.repeat(1, 2),
    ".repeat_interleave(2, 1)": lambda angles: angles.repeat_interleave(2, 1),
}
"""One number a pair, or one a feature: the halves side by side, or the two of each pair."""
_READ: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"cos": torch.acos, "sin": torch.asin}
_SLOWEST = 1000
"""The least base: of smaller ones it is not known whether they go with the width."""
_NEAR = 1e-2
"""Of cosines at far steps in single precision."""
_SQUARES: dict[str, Callable[[int], torch.Tensor]] = {
    "torch.tril(torch.ones({0}, {0}))": lambda many: torch.ones(many, many).tril(),
    "torch.triu(torch.ones({0}, {0}), diagonal=1)": lambda many: torch.ones(many, many).triu(1),
    "torch.full(({0}, {0}), float('-inf')).triu(1)": lambda many: torch.full((many, many), float("-inf")).triu(1),
}
_ROWS: dict[str, Callable[[int], torch.Tensor]] = {
    "torch.arange({0})": torch.arange,
    "torch.hann_window({0})": torch.hann_window,
    "torch.hamming_window({0})": torch.hamming_window,
}
_CASTS = {torch.bool: "bool", torch.int64: "long", torch.uint8: "byte", torch.float32: "float", torch.float16: "half"}
_LARGEST_TABLE = 1 << 24
"""Elements."""


def fitted(facts: Facts, table: Operand, got: int, wanted: int, *, rank: int) -> list[Edit]:
    """The table as long, or as wide, as is wanted, where it is known how it was made."""
    if of_inputs(table.made) or not got or not wanted or isinstance(table.tensor, torch.nn.Parameter):
        return []
    edits: list[Edit] = []
    for path, sizes in _holders(table):
        module = facts.modules.get(path)
        held = [(name, one) for name, one in (module._buffers.items() if module is not None else ()) if one is not None]
        whole = [(name, one) for name, one in held if tuple(one.shape) == sizes or f"{path}.{name}".lstrip(".") == table.name]
        found = whole if len(whole) == 1 or table.owned else _named_like(whole, facts)
        edits += [edit for name, one in found for edit in _known(facts, path, name, one, (got, wanted), rank)]
        edits += remade(module, path, got, wanted, rank=rank)
    return edits


def _holders(table: Operand) -> Iterator[tuple[str, Sizes]]:
    """The paths of the modules whose tables it may be, each with the shape of the whole table."""
    if table.owned:
        yield table.name.rpartition(".")[0], table.sizes
        return
    seen: dict[str, Sizes] = {}
    for step in steps(table.made):
        seen[step.module] = step.inputs[0][0] if step.inputs else step.shape
    yield from seen.items()


def _named_like(held: list[tuple[str, torch.Tensor]], facts: Facts) -> list[tuple[str, torch.Tensor]]:
    """Of several tables of one shape, the one of which the failing line speaks, or a line that made its operands."""
    lines = [facts.site.text if facts.site is not None else ""]
    lines += [
        location(step.line[0].co_filename, step.line[1], "").source for one in facts.operands for step in steps(one.made) if step.line
    ]
    spoken = [[(name, one) for name, one in held if re.search(rf"\b{name}\b", line)] for line in lines]
    return next((found for found in spoken if len(found) == 1), [])


def _known(facts: Facts, path: str, name: str, table: torch.Tensor, sizes: tuple[int, int], rank: int) -> list[Edit]:
    """A buffer that is known by its numbers, in all modules alike."""
    got, wanted = sizes
    found = resized(table, got, wanted)
    if found is None:
        return []

    def made(old: torch.Tensor) -> torch.Tensor:
        return found.make().to(old.device)

    paths = _alike(facts, path, name, table)
    code = f"{_each(paths)}.{name} = {found.code}".lstrip(".")
    buffers = dict.fromkeys((f"{one}.{name}".lstrip(".") for one in paths), made)
    return [Edit(code, f"made for {wanted} instead of {got}", rank, buffers=buffers)]


def _alike(facts: Facts, path: str, name: str, table: torch.Tensor) -> list[str]:
    """The paths of this module, and of those in the same list that hold such a table, too."""
    module, root = facts.modules[path], facts.modules.get("")
    every = {} if root is None else {one: part for one, part in root.named_modules() if type(part) is type(module)}
    alike = [one for one, part in every.items() if (own := part._buffers.get(name)) is not None and own.shape == table.shape]
    return alike if len({_NUMBER.sub("#", one) for one in alike}) == 1 and path in alike else [path]


def _each(paths: list[str]) -> str:
    """``blocks[0].attn``; of several ``for block in blocks: block.attn``."""
    listed, _, rest = paths[0].partition(".0")
    if len(paths) == 1 or not listed or any(one != f"{listed}.{at}{rest}" for at, one in enumerate(paths)):
        return as_typed(paths[0]) if paths[0] else ""
    return f"for one in {as_typed(listed)}: one{rest}"


def rotary(table: Operand, width: int, wanted: int) -> str:
    """In words, where a table of rotations is as wide as another head; empty elsewhere."""
    names = " ".join([table.name, *(f"{step.module} {step.op}" for step in steps(table.made))]).lower()
    if of_inputs(table.made) or not any(one in names for one in _ROTATES):
        return ""
    what = "pairs of features" if table.tensor.is_complex() else "features"
    return f": it rotates {width} {what}, and a head has {wanted}"


# What it was made with is found by making it: numbers that give the very same tables are those that were given.
def remade(module: torch.nn.Module | None, path: str, got: int, wanted: int, *, rank: int) -> list[Edit]:
    """The edits that make it with another number, so that what is `got` large is as large as `wanted`; none where it is no such module."""
    numbers = _numbers(module) if module is not None and got else None
    if module is None or numbers is None:
        return []
    edits = []
    for name, value in numbers.items():
        new, rest = divmod(value * wanted, got) if type(value) is int else (0, 1)
        changed = {**numbers, name: new}
        if not rest and new not in {0, value} and quietly(functools.partial(type(module), **changed)) is not None:
            code = f"{as_typed(path)} = {_code(type(module), changed)}"
            make = _maker(type(module), changed)
            edits.append(Edit(code, f"{name} of {new} instead of {value}", rank + 2 * (value != got), modules={path: make}))
    return edits


def _numbers(module: torch.nn.Module) -> dict[str, Any] | None:
    """What its class was called with, by name."""
    tables = _tables(module)
    kind = type(module)
    if not tables or next(module.parameters(), None) is not None or not is_user_code(kind.__init__.__code__):
        return None
    if sum(one.numel() for one in tables.values()) > _LARGEST or any(one.is_meta for one in tables.values()):
        return None
    choices = _choices(module, tables)
    if choices is None:
        return None
    until = time.thread_time() + _LONGEST_S
    for values in itertools.islice(itertools.product(*choices.values()), _MOST):
        if time.thread_time() > until:
            return None
        numbers = dict(zip(choices, values, strict=True))
        new = quietly(functools.partial(kind, **numbers))
        if new is not None and _are_same(_tables(new), tables):
            return numbers
    return None


def _tables(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    held = {name: one for name, one in vars(module).items() if isinstance(one, torch.Tensor)}
    return {**held, **dict(module.named_buffers())}


def _are_same(new: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor]) -> bool:
    if new.keys() != old.keys():
        return False
    pairs = ((new[name], old[name].detach().cpu()) for name in old)
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


def _choices(module: torch.nn.Module, tables: Mapping[str, torch.Tensor]) -> dict[str, list[Any]] | None:
    """The values that each argument may have had, the likeliest first; None where one may be anything."""
    found: dict[str, list[Any]] = {}
    sizes = list(dict.fromkeys(size for one in tables.values() for size in reversed(one.shape) if size > 1))  # the width first
    for name, one in list(inspect.signature(type(module).__init__).parameters.items())[1:]:
        if one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD}:
            continue
        kept = vars(module).get(name)
        usual = [] if one.default is one.empty else [one.default]
        if type(kept) in {int, float, bool}:
            found[name] = [kept]
        elif not usual or type(usual[0]) is int:
            found[name] = list(dict.fromkeys([*usual, *sizes, *(2 * size for size in sizes)]))
        else:
            found[name] = usual
    return found if all(found.values()) else None


def _maker(kind: type[torch.nn.Module], numbers: Mapping[str, Any]) -> Callable[[torch.nn.Module], torch.nn.Module]:
    def made(old: torch.nn.Module) -> torch.nn.Module:
        new = kind(**numbers).train(old.training)
        place = next(iter(_tables(old).values())).device
        return new if place.type == "meta" else new.to(place)

    return made


def _code(kind: type[torch.nn.Module], numbers: Mapping[str, Any]) -> str:
    return f"{kind.__name__}({', '.join(_written(kind, numbers))})"


def _written(kind: type[torch.nn.Module], numbers: Mapping[str, Any]) -> Iterator[str]:
    for name, one in inspect.signature(kind.__init__).parameters.items():
        if name in numbers and one.default is one.empty and one.kind is not one.KEYWORD_ONLY:
            yield repr(numbers[name])
        elif name in numbers and numbers[name] != one.default:
            yield f"{name}={numbers[name]!r}"


@dataclass(frozen=True, eq=False)
class Known:
    """A table of other sizes: what to type, and the same thing done."""

    code: str
    make: Callable[[], torch.Tensor]


def resized(table: torch.Tensor, got: int, wanted: int) -> Known | None:
    """The table in which what is `got` large is as large as `wanted`; None where its numbers are not known."""
    if table.numel() > _LARGEST_TABLE or table.is_meta or table.layout is not torch.strided:
        return None
    whole = table.detach().cpu()
    rows, width = (1, 1, *whole.shape)[-2:]
    if any(size != 1 for size in whole.shape[:-2]):
        return None
    if rows == width == got:
        return _of_kind(_SQUARES, whole, got, wanted)
    if width == got and (found := _of_kind(_ROWS, whole, got, wanted)):
        return found
    turned = rotations(whole, got, wanted)
    return Known(*turned) if turned is not None else None


def _of_kind(kinds: dict[str, Callable[[int], torch.Tensor]], table: torch.Tensor, got: int, wanted: int) -> Known | None:
    for code, make in kinds.items():
        one = make(got)
        if one.numel() == table.numel() and torch.equal(one.to(table.dtype).view(table.shape), table):
            sizes = tuple(wanted if size == got else size for size in table.shape)
            cast = f".{_CASTS[table.dtype]}()" if one.dtype != table.dtype and table.dtype in _CASTS else ""
            view = f".view{sizes}" if table.dim() != one.dim() else ""
            return Known(f"{code.format(wanted)}{cast}{view}", _table_maker(make, wanted, table.dtype, sizes))
    return None


def _table_maker(make: Callable[[int], torch.Tensor], many: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    return lambda: make(many).to(dtype).view(sizes)


def rotations(table: torch.Tensor, got: int, wanted: int) -> tuple[str, Callable[[], torch.Tensor]] | None:
    """(what to type, the same thing done) for as many features, or steps; None where the numbers are others."""
    if not (table.is_floating_point() or table.is_complex()):
        return None
    steps, width = (1, *table.shape)[-2:]
    if steps == 1:
        return _speeds(table, got, wanted)
    by_step = steps == got
    new = (wanted, width) if by_step else (steps, width * wanted // got)
    flat = table.view(steps, width)
    for layout, lay in _LAYOUTS.items():
        pairs = width // 2 if layout else width
        for name in ("polar",) if table.is_complex() else _READ:
            first = flat[1].angle() if name == "polar" else _READ[name](flat[1].clamp(-1, 1))
            base = _base(first[::2] if "interleave" in layout else first[:pairs])
            if base and (name != "polar" or not layout) and _is_near(_table(name, lay, steps, pairs, base), flat):
                many, new_pairs = new[0], new[1] // 2 if layout else new[1]
                sizes = tuple(table.shape[:-2]) + new
                code = _table_code(name, layout, many, new_pairs, base) + (f".view{sizes}" if table.dim() != flat.dim() else "")
                return code, _rotation_maker(name, lay, many, new_pairs, base, table.dtype, sizes)
    return None


def _rotation_maker(
    name: str, lay: Callable[[torch.Tensor], torch.Tensor], many: int, pairs: int, base: float, dtype: torch.dtype, sizes: tuple[int, ...]
) -> Callable[[], torch.Tensor]:
    return lambda: _table(name, lay, many, pairs, base).to(dtype).view(sizes)


def _speeds(table: torch.Tensor, got: int, wanted: int) -> tuple[str, Callable[[], torch.Tensor]] | None:
    flat = table.flatten()
    pairs = len(flat) * wanted // got
    base = _base(flat) if not table.is_complex() and pairs else 0
    if not base or len(flat) * wanted % got or not _is_near(_turns(len(flat), base), flat):
        return None
    sizes = (*table.shape[:-1], pairs)
    return _turns_code(pairs, base), lambda: _turns(pairs, base).to(table.dtype).view(sizes)


def _base(speeds: torch.Tensor) -> float:
    """Of the powers by which each pair turns slower than the one before it; 0 where they are none."""
    many = len(speeds)
    if many < 2 or not 0 < float(speeds[1]) < 1 or abs(float(speeds[0]) - 1) > _NEAR:
        return 0.0
    base = float(speeds[1].double()) ** -many
    rounded = float(f"{base:.2g}")
    return 0.0 if base < _SLOWEST else rounded if abs(rounded - base) < _NEAR * base else base


def _turns(pairs: int, base: float) -> torch.Tensor:
    return base ** -(torch.arange(0, 2 * pairs, 2) / (2 * pairs))


def _turns_code(pairs: int, base: float) -> str:
    return f"{base:g} ** -(torch.arange(0, {2 * pairs}, 2) / {2 * pairs})"


def _table(name: str, lay: Callable[[torch.Tensor], torch.Tensor], steps: int, pairs: int, base: float) -> torch.Tensor:
    angles = torch.arange(steps)[:, None] * _turns(pairs, base)
    return torch.polar(torch.ones_like(angles), angles) if name == "polar" else getattr(lay(angles), name)()


def _table_code(name: str, layout: str, steps: int, pairs: int, base: float) -> str:
    angles = f"torch.arange({steps})[:, None] * {_turns_code(pairs, base)}"
    return f"torch.polar(torch.ones({steps}, {pairs}), {angles})" if name == "polar" else f"({angles}){layout}.{name}()"


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(((one - other).abs() < _NEAR).all())
