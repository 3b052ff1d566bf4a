"""RNN, LSTM, GRU and their cells: features, dimensions, and the hidden state."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import CallEdit, Change, Edit, method, on_operand, together
from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.earlier import earlier, with_size
from torchdebug_magics.instruments.shapes.repair.rules.inputs_and_indices import created
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, gets, named, producer_edits, reordered, turned
from torchdebug_magics.instruments.shapes.repair.size_history import maker


def recurrent(facts: Facts) -> Diagnosis | None:
    """Diagnose recurrent layers and cells: RNN, LSTM, GRU."""
    module = facts.module
    if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)) or not facts.given:
        return None
    facts = replace(facts, operands=facts.given)  # the op has the weights among its own
    x, states = facts.given[0], facts.given[1:]
    whole = isinstance(module, nn.RNNBase)
    fits = (2, 3) if whole else (1, 2)
    if len(x.sizes) not in fits:
        return _dimensions(facts, x, fits)
    if x.sizes[-1] != module.input_size:
        return _features(facts, x, module)
    return hidden(facts, x, states, module)


def _dimensions(facts: Facts, x: Operand, fits: tuple[int, int]) -> Diagnosis:
    words = "(steps, batch, features)" if fits[1] == 3 else "(batch, features)"
    if getattr(facts.module, "batch_first", False):
        words = "(batch, steps, features)"
    sentence = f"{facts.who} expects {fits[0]} or {fits[1]} dimensions {words}, gets {len(x.sizes)}: {shape(x.sizes)}"
    module: Any = facts.module
    edits: list[Edit] = []
    if len(x.sizes) == fits[0] - 1 and module.input_size == 1:
        edits += on_operand(facts, 0, method("unsqueeze", -1), rank=3, why="one feature")
    edits += _columns(facts, x, module)
    if len(x.sizes) > fits[1]:
        edits += on_operand(facts, 0, method("flatten", 2), rank=6, why="one dimension of features")
        if 1 in x.sizes:
            edits += on_operand(facts, 0, method("squeeze", x.sizes.index(1)), rank=4, why="without the dimension of size 1")
    return Diagnosis(sentence, tuple(edits), x)


def _columns(facts: Facts, x: Operand, module: Any) -> list[Edit]:
    """The columns, or the rows, of a picture one step after the other, each with all its channels."""
    edits: list[Edit] = []
    for steps, rest in ((3, 2), (2, 3)) if len(x.sizes) == 4 and isinstance(module, nn.RNNBase) else ():
        if x.sizes[1] * x.sizes[rest] == module.input_size:
            order = (0, steps, 1, rest) if module.batch_first else (steps, 0, 1, rest)
            edits += on_operand(
                facts, 0, _steps_first(order), rank=2, why=f"{x.sizes[steps]} steps of {x.sizes[1]} x {x.sizes[rest]} features"
            )
    return edits


def _steps_first(order: tuple[int, ...]) -> Change:
    return Change(lambda name: f"{name}.permute{order}.flatten(2)", lambda one: one.permute(order).flatten(2))


def _features(facts: Facts, x: Operand, module: Any) -> Diagnosis:
    got, wanted = x.sizes[-1], module.input_size
    sentence = f"{facts.who} expects {wanted} features (input_size), gets {gets(x, got)}"
    if found := earlier(facts, x, wanted):
        return Diagnosis(sentence + found.words, with_size(facts, found, wanted, "input_size"), x)
    edits = reordered(facts, 0, -1, wanted)
    if wanted == 1:
        edits += on_operand(facts, 0, method("unsqueeze", -1), rank=3, why="one feature")
    edits += rebuilt_module(module, facts.path, input_size=got)
    edits += producer_edits(facts, x, got, wanted)
    return Diagnosis(sentence, tuple(edits), x)


def hidden(facts: Facts, x: Operand, states: tuple[Operand, ...], module: Any) -> Diagnosis | None:
    """A state that is not the one tensor, or the pair, that the module takes."""
    wanted = _state_sizes(x, module)
    if isinstance(module, (nn.LSTM, nn.LSTMCell)) and len(states) == 1 and _takes_tensor(facts):
        sentence = f"{facts.who} expects its state as two tensors (h, c) of {shape(wanted[0])}, gets one tensor of {shape(states[0].sizes)}"
        return Diagnosis(sentence, tuple(_pair(facts) if states[0].sizes == wanted[0] == wanted[1] else ()))
    for at, (state, sizes) in enumerate(zip(states, wanted, strict=False), 1):
        if state.sizes != sizes:
            words = (
                "layers x batch x hidden" if len(sizes) == 3 else "layers x hidden" if isinstance(module, nn.RNNBase) else "batch x hidden"
            )
            sentence = f"{facts.who} expects a hidden state of {shape(sizes)} ({words}), gets {shape(state.sizes)}"
            if not module_batch_first(module) and _fits_batch_first(x, states, module):
                sentence += f": it reads {shape(x.sizes)} as steps x batch x features"
            edits = [
                *_first_rows(facts, x, states, wanted),
                *_state_edits(facts, at, state, sizes, module),
                *_made_anew(facts, states, wanted),
            ]
            return Diagnosis(sentence, tuple(edits), state)
    return None


def _pair(facts: Facts) -> list[Edit]:
    """The one tensor as h, and zeros as c."""

    def changed(args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args[0], (args[1], torch.zeros_like(args[1])), *args[2:]), kwargs

    return _state_written(facts, lambda h: f"({h}, torch.zeros_like({h}))", changed, rank=3, why="a cell state of zeros beside it")


def _first_rows(facts: Facts, x: Operand, states: tuple[Operand, ...], wanted: list[tuple[int, ...]]) -> list[Edit]:
    """A state of a larger batch, as that of all batches but the last one is, cut to the rows of this one."""
    pairs = list(zip(states, wanted, strict=False))
    if not pairs or any(len(sizes) != 3 or (one.sizes[0], *one.sizes[2:]) != (sizes[0], *sizes[2:]) for one, sizes in pairs):
        return []
    rows = wanted[0][1]
    if any(one.sizes[1] <= rows for one, _ in pairs) or not rows:
        return []
    size = f"{x.name or 'x'}.size({0 if module_batch_first(facts.module) else 1})"
    many = len(states) > 1

    def cut(value: Any) -> Any:
        return tuple(one[:, :rows].contiguous() for one in value) if many else value[:, :rows].contiguous()

    def changed(args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args[0], cut(args[1]), *args[2:]), kwargs

    def text(h: str) -> str:
        return f"tuple(h[:, :{size}].contiguous() for h in {h})" if many else f"{h}[:, :{size}].contiguous()"

    why = (
        f"a batch of {rows} after those of {pairs[0][0].sizes[1]}, as the last one of a loader is: or `drop_last=True` in the `DataLoader`"
    )
    return _state_written(facts, text, changed, rank=2, why=why)


def _state_written(
    facts: Facts, text: Callable[[str], str], changed: Callable[[Any, Any], tuple[Any, Any]], *, rank: int, why: str
) -> list[Edit]:
    """The state changed in the user's own call of the module, where it is the second argument."""
    site = facts.site if facts.direct else None
    written = facts.caller.site if site is None and not facts.path and facts.caller is not None else site
    call = written.expression if written is not None else None
    if written is None or facts.path is None or not isinstance(call, ast.Call) or len(call.args) < 2:
        return []
    if any(isinstance(one, ast.Starred) for one in call.args):
        return []
    return [Edit(written.changed(call.args[1], text), why, rank, calls=(CallEdit(facts.path, site, changed),))]


def _made_anew(facts: Facts, states: tuple[Operand, ...], wanted: list[tuple[int, ...]]) -> list[Edit]:
    """All states that do not fit, made of the right sizes where the user's code makes them."""
    wrong = [(state, sizes) for state, sizes in zip(states, wanted, strict=False) if state.sizes != sizes]
    wide = any(state.sizes[-1:] != sizes[-1:] for state, sizes in wrong)  # it may be the layer that is as wide as was meant
    each = [created(facts, state, sizes, rank=21 if wide else 6) for state, sizes in wrong]
    if not all(each):
        return []
    edit = functools.reduce(together, (edits[0] for edits in each))
    # The second direction forgotten in both is one mistake.
    return [replace(edit, many=1) if all(2 * state.sizes[0] == sizes[0] for state, sizes in wrong) else edit]


def module_batch_first(module: Any) -> bool:
    """Whether the batch comes first."""
    return bool(getattr(module, "batch_first", False))


def _takes_tensor(facts: Facts) -> bool:
    given = facts.call.args[1:2] if facts.call is not None else ()
    return bool(given) and isinstance(given[0], torch.Tensor)


def _state_sizes(x: Operand, module: Any) -> list[tuple[int, ...]]:
    if isinstance(module, nn.RNNCellBase):
        return [(*x.sizes[:-1], module.hidden_size)] * 2
    layers = module.num_layers * (2 if module.bidirectional else 1)
    batch = () if len(x.sizes) == 2 else (x.sizes[0 if module.batch_first else 1],)
    return [(layers, *batch, getattr(module, "proj_size", 0) or module.hidden_size), (layers, *batch, module.hidden_size)]


def _fits_batch_first(x: Operand, states: tuple[Operand, ...], module: Any) -> bool:
    return (
        len(x.sizes) == 3 and all(len(one.sizes) == 3 and one.sizes[1] == x.sizes[0] for one in states) and isinstance(module, nn.RNNBase)
    )


def _state_edits(facts: Facts, at: int, state: Operand, wanted: tuple[int, ...], module: Any) -> list[Edit]:
    edits: list[Edit] = []
    have = state.sizes
    if isinstance(module, nn.RNNBase) and len(have) == 3 and len(wanted) == 3 and have[0] == wanted[0] and have[2] == wanted[2]:
        x = facts.given[0]
        if x.sizes[1 if module.batch_first else 0] == have[1]:
            edits += rebuilt_module(
                module,
                facts.path,
                batch_first=not module.batch_first,
                rank=5,
                why=f"{named(x)} has its batch {'second' if module.batch_first else 'first'}",
            )
            edits += turned(facts, 0, (1, 0, 2), rank=15)
    return edits + _state_turned(facts, at, have, wanted) + _other_sizes(facts, state, wanted, module)


def _state_turned(facts: Facts, at: int, have: tuple[int, ...], wanted: tuple[int, ...]) -> list[Edit]:
    """The state itself with other dimensions."""
    edits: list[Edit] = []
    for dim in range(len(wanted)):
        if have == wanted[:dim] + wanted[dim + 1 :] and wanted[dim] == 1:
            edits += on_operand(facts, at, method("unsqueeze", dim), rank=4)
        if have[:dim] + have[dim + 1 :] == wanted and dim < len(have) and have[dim] == 1:
            edits += on_operand(facts, at, method("squeeze", dim), rank=4)
    if len(have) == len(wanted) + 1 and have[0] == 1 and have[1:] == wanted:
        edits += on_operand(facts, at, method("squeeze", 0), rank=4)
    if len(have) == 3 and len(wanted) == 3 and (have[1], have[0], have[2]) == wanted:
        edits += turned(facts, at, (1, 0, 2), rank=4)
    return edits


def _has_directions(facts: Facts, state: Operand, module: nn.RNNBase) -> bool:
    """Whether the state is that of as many layers, and of two directions where this module has one, or with the operands swapped."""
    source = _recurrent(facts, state)
    return source is not None and source[1].num_layers == module.num_layers and source[1].bidirectional != module.bidirectional


def _recurrent(facts: Facts, state: Operand) -> tuple[str, nn.RNNBase] | None:
    """The module whose state it is, and its path."""
    step = maker(state.made)
    module = facts.modules.get(step.module) if step is not None else None
    return (step.module, module) if step is not None and isinstance(module, nn.RNNBase) and step.shape == state.sizes else None


def _one_way(facts: Facts, state: Operand, module: nn.RNNBase) -> list[Edit]:
    """What made the state, going one way as this module does."""
    source = _recurrent(facts, state)
    if source is None or not source[1].bidirectional or not _has_directions(facts, state, module):
        return []
    return rebuilt_module(source[1], source[0], bidirectional=False, rank=19, why=f"one direction, as {facts.who} has")


def _other_sizes(facts: Facts, state: Operand, wanted: tuple[int, ...], module: Any) -> list[Edit]:
    """The module made for such a state, or what made the state."""
    edits: list[Edit] = []
    have = state.sizes
    if len(have) == len(wanted) and have[1:] == wanted[1:] and isinstance(module, nn.RNNBase):
        layers = have[0] // (2 if module.bidirectional else 1)
        if have[0] == 2 * wanted[0] and not module.bidirectional:
            edits += rebuilt_module(module, facts.path, bidirectional=True, rank=21, why="both directions, as the state has")
        edits += _one_way(facts, state, module)
        if layers and not _has_directions(facts, state, module):
            edits += rebuilt_module(module, facts.path, num_layers=layers, rank=20, why=f"{layers} layers, as the state has")
    if have and wanted and have[:-1] == wanted[:-1] and have[-1] != wanted[-1] and not getattr(module, "proj_size", 0):
        edits += rebuilt_module(module, facts.path, hidden_size=have[-1], rank=20, why=f"{have[-1]} hidden features, as the state has")
        edits += producer_edits(facts, state, have[-1], wanted[-1], rank=22)
    return edits
