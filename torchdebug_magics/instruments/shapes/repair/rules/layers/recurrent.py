"""RNN, LSTM, GRU and their cells: features, dimensions, and the hidden state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import Change, Edit, method, on_operand
from torchdebug_magics.instruments.shapes.repair.rebuild import rebuilt_module
from torchdebug_magics.instruments.shapes.repair.rules.layers.hidden_states import hidden
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis, gets, producer_edits, reordered
from torchdebug_magics.instruments.shapes.repair.rules.steps.earlier import earlier, with_size

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts, Operand

__all__ = ["recurrent"]


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
