"""What a module returns beside its output, taken for a tensor with it: ``fc(out)``, ``x + h``, ``out[:, -1]``, ``out.mean(1)``."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.repair.edit import CallEdit, Edit, as_typed
from torchdebug_magics.instruments.shapes.repair.rules.rule_parts import Diagnosis
from torchdebug_magics.instruments.shapes.repair.source import assignments
from torchdebug_magics.probing.dry_runs.leaves import named_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.instruments.shapes.repair.failure_facts import Facts
    from torchdebug_magics.instruments.shapes.repair.source import Site

__all__ = ["called", "tuples", "unpacked"]

_RETURN_TUPLES = (torch.nn.RNNBase, torch.nn.MultiheadAttention)
_PAIR = 2
_SAID = re.compile(r"tuple indices must be|unsupported operand type.*'tuple'|'tuple' object has no attribute|can only concatenate tuple")


def unpacked(facts: Facts) -> Diagnosis | None:
    """``out`` is what ``rnn`` returns: (output, state)."""
    site = facts.site
    if site is None or site.statement is None or not _SAID.search(facts.text):
        return None
    for node in ast.walk(site.statement):
        if isinstance(node, ast.Name) and isinstance(site.names.get(node.id), tuple):
            for assigned in assignments(site, node.id):
                value = site.names[node.id]
                if (found := called(facts, site, assigned.value)) is not None and value and isinstance(value[0], torch.Tensor):
                    call = ast.unparse(assigned.value)
                    code = f"{node.id}, _ = {call}" if len(value) == _PAIR else f"{node.id} = {call}[0]"
                    return _told(facts, found, f"`{node.id}`", code, value)
        if isinstance(node, ast.expr) and (found := called(facts, site, node)) and isinstance(facts.modules[found], _RETURN_TUPLES):
            return _told(facts, found, f"`{ast.unparse(node)}`", f"{ast.unparse(node)}[0]", None)
    return None


def called(facts: Facts, site: Site, node: ast.expr) -> str | None:
    """The path of the module that the expression calls."""
    if not isinstance(node, ast.Call):
        return None
    module: Any = site.names.get(next(_names(node.func), ""))
    for name in list(_names(node.func))[1:]:
        module = getattr(module, name, None)
    return next((path for path, one in facts.modules.items() if one is module), None)


def _names(node: ast.expr) -> Iterator[str]:
    """``self``, ``rnn`` of ``self.rnn``."""
    if isinstance(node, ast.Attribute):
        yield from _names(node.value)
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id


def _told(facts: Facts, path: str, what: str, code: str, value: object) -> Diagnosis:
    module = facts.modules[path]
    parts = [shape(tuple(one.shape)) for _, one in named_tensors(value)]
    of = f" of {' and '.join(parts[:3])}" if parts else ""
    if isinstance(module, _RETURN_TUPLES):
        rest = "state" if isinstance(module, torch.nn.RNNBase) else "weights"
        of = f": (output, {rest}){f'; the output is {parts[0]}' if parts else ''}"
    sentence = f"{what} is the tuple that `{path}` returns{of}"
    first = CallEdit(path, None, lambda args, kwargs: (args, kwargs), lambda output: output[0])
    return Diagnosis(sentence, (Edit(code, "only the output", 2, calls=(first,)),))


def tuples(facts: Facts) -> Diagnosis | None:
    """The (output, state) of a recurrent module, or any tuple, where a tensor is wanted."""
    found = re.match(r"(?P<op>\w+)\(\): argument '(?P<name>\w+)' \(position \d+\) must be Tensor, not (?P<kind>[\w.]+)", facts.text)
    if found is None or (facts.call is None and facts.module is None):
        return None
    given = facts.call.args[0] if facts.call is not None and facts.call.args else None
    what = f"a {found['kind']}"
    makers = [path for path, one in facts.modules.items() if isinstance(one, (torch.nn.RNNBase, torch.nn.MultiheadAttention))]
    if parts := _parts(given):
        shapes = ", ".join(f"`{name}` {shape(tuple(part.shape))}" for name, part in list(parts.items())[:4])
        return Diagnosis(f"{facts.who} expects a tensor, gets {what}, which holds {shapes}", tuple(_one_of(facts, given, parts)))
    if isinstance(given, tuple) and isinstance(values := getattr(given, "values", None), torch.Tensor):  # as of `torch.max` along one
        what = f"two tensors: `values` of {shape(tuple(values.shape))} and their `indices`"
        return Diagnosis(f"{facts.who} expects a tensor, gets {what}", tuple(_first_of(facts, ".values")))
    if isinstance(given, tuple) and given and not makers and all(isinstance(one, torch.Tensor) for one in given):
        what = f"a tuple of {' and '.join(shape(tuple(one.shape)) for one in given[:3])}"
        return Diagnosis(f"{facts.who} expects a tensor, gets {what}", tuple(_first_of(facts)))
    if not isinstance(given, tuple) or not makers:
        return Diagnosis(f"{facts.who} expects a tensor, gets {what}")
    what = f"a tuple, as `{makers[-1]}` returns it: (output, {'state' if _is_recurrent(facts, makers[-1]) else 'weights'})"
    return Diagnosis(f"{facts.who} expects a tensor, gets {what}", (*_first_of(facts), *_hooked(facts, makers[-1])))


def _is_recurrent(facts: Facts, path: str) -> bool:
    return isinstance(facts.modules[path], torch.nn.RNNBase)


def _first_of(facts: Facts, taken: str = "[0]") -> list[Edit]:
    """The first of the tuple, in the user's call."""
    site, call = facts.site, facts.written_call
    if site is None or facts.path is None or call is None or not call.args or isinstance(call.args[0], ast.Starred):
        return []
    code = site.changed(call.args[0], lambda text: f"{text}{taken}")
    first = CallEdit(facts.path, site, lambda args, kwargs: ((args[0][0], *args[1:]), kwargs))
    return [Edit(code, "only the output", 2, calls=(first,))]


def _hooked(facts: Facts, maker: str) -> list[Edit]:
    """In an nn.Sequential nobody's line stands between the two: a hook passes the output on alone."""
    parent, _, name = (facts.path or "").rpartition(".")
    before, _, place = maker.rpartition(".")
    in_row = parent == before and name.isdigit() and place.isdigit() and int(place) < int(name)
    if not in_row or type(facts.modules.get(parent)) is not torch.nn.Sequential:
        return []
    code = f"{as_typed(maker)}.register_forward_hook(lambda module, args, output: output[0])"
    call = CallEdit(maker, None, lambda args, kwargs: (args, kwargs), lambda output: output[0])
    return [Edit(code, "keeps only the output", 5, calls=(call,))]


def _parts(given: object) -> dict[str, torch.Tensor]:
    """The tensors in a mapping, such as the outputs of transformers."""
    if not isinstance(given, Mapping):
        return {}
    return {key: value for key, value in given.items() if isinstance(key, str) and isinstance(value, torch.Tensor)}


def _one_of(facts: Facts, given: object, parts: Mapping[str, torch.Tensor]) -> list[Edit]:
    """Each of its tensors, in the user's call."""
    site, call = facts.site, facts.written_call
    if site is None or facts.path is None or call is None or not call.args or isinstance(call.args[0], ast.Starred):
        return []
    edits = []
    for rank, (name, part) in enumerate(parts.items()):
        written = "{}." + name if getattr(given, name, None) is part else "{}[" + repr(name) + "]"
        code = site.changed(call.args[0], written.format)
        taken = CallEdit(facts.path, site, partial(_with_part, name))
        edits.append(Edit(code, shape(tuple(part.shape)), 2 + rank, calls=(taken,)))
    return edits


def _with_part(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return (args[0][name], *args[1:]), kwargs
