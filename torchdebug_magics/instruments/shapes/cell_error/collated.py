"""A batch that cannot be put together: which part of the samples has unequal shapes, and a `collate_fn` that was tried."""

from __future__ import annotations

import ast
import copy
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, default_collate

from torchdebug_magics.format import shape
from torchdebug_magics.instruments.shapes.explain import edited, refusal
from torchdebug_magics.instruments.shapes.report import Failure, Fix, Shape
from torchdebug_magics.probing.names import user_variables, variable_of
from torchdebug_magics.probing.source.edited_source import cells, exchanging, made_as
from torchdebug_magics.probing.source.syntax import called, expression, names_in, nodes, statement_at, tree_of
from torchdebug_magics.probing.source.user_code import is_user_code, location
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.report import Edit

_SHOWN = 4
_FOR_EVALUATION = re.compile(r"(?:^|_)(?:test|val|valid|validation|eval|dev)(?:$|_|\d)")
_BOXES = range(4, 8)
"""Numbers in a row of what describes one object each: a box, with or without its class."""
_PICTURE = 3
"""Dimensions."""
_NAMES = {"torch": torch, "F": functional, "pad_sequence": pad_sequence, "default_collate": default_collate}
"""What the code of a fix speaks of."""
_IMPORTS = {
    "torch": "import torch",
    "F": "import torch.nn.functional as F",
    "pad_sequence": "from torch.nn.utils.rnn import pad_sequence",
    "default_collate": "from torch.utils.data import default_collate",
}


def unequal_samples(error: BaseException) -> Failure | None:
    """What is wrong with the samples that torch's default collation was given; None where it did not fail."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    samples, indices, dataset = collated_batch(frames)
    if not isinstance(samples, list):
        return None
    if isinstance(dataset, tuple) and len(dataset) == 1 and (comma := _comma_behind(type(dataset[0]).__name__)):
        return edited(error, "the dataset is a tuple of one: a comma ends the line that makes it", comma)
    if (refused := _no_numbers(error, samples, indices, dataset)) is not None:
        return refused
    if (part := next((part for part in _parts((), samples) if len(set(part.shapes)) > 1), None)) is None:
        return None
    which = f"`{part.of}` of " if part.path else ""
    shapes = [shape(sizes) or "a scalar" for sizes in part.shapes[:_SHOWN]]
    at = next(at for at, sizes in enumerate(part.shapes) if sizes != part.shapes[0])
    is_known = isinstance(indices, list) and at < len(indices) and type(indices[at]) is int
    first = f": `dataset[{indices[at]}]` is the first that differs" if is_known else ""
    sentence = f"samples of a batch must have one shape, and {which}these have {', '.join(shapes)}{first}"
    return refusal(error, sentence, op="stack", sizes=part.shapes[:_SHOWN], fixes=other_batches(samples, part, frames))


def _comma_behind(kind: str) -> tuple[Edit, ...]:
    """The edit of the only line that makes an object of that class, and a tuple of it."""
    made = [(cell, node, node.value) for cell in cells() for node in nodes(ast.Assign, cell.tree)]
    tuples = [(cell, node) for cell, node, value in made if isinstance(value, ast.Tuple) and [*map(called, value.elts)] == [kind]]
    edits = [cell.replacing(node, text.rstrip(", ")) for cell, node in tuples if (text := cell.text(node)).endswith(",")]
    return tuple(edits) if len(edits) == 1 else ()


def collated_batch(frames: list[FrameType]) -> tuple[Any, Any, Any]:
    """(the samples that torch's default collation was given, their indices, the dataset), as far as these frames know them."""
    collating = next((frame for frame in frames if frame.f_code is default_collate.__code__), None)
    fetching = next((frame for frame in frames if "possibly_batched_index" in frame.f_code.co_varnames), None)
    if collating is None:
        return None, None, None
    names = fetching.f_locals if fetching is not None else {}
    return collating.f_locals.get("batch"), names.get("possibly_batched_index"), getattr(names.get("self"), "dataset", None)


def _no_numbers(error: BaseException, samples: list[Any], indices: Any, dataset: Any) -> Failure | None:
    """A sample that is None, or a part of all samples that torch makes no batch of; None where there is none."""
    missing = [at for at, sample in enumerate(samples) if sample is None]
    if missing:
        which = f"`dataset[{indices[missing[0]]}]`" if isinstance(indices, list) and len(indices) == len(samples) else "a sample"
        rest = "torch.utils.data.default_collate([sample for sample in batch if sample is not None])"
        present = [sample for sample in samples if sample is not None]
        is_tried = bool(present) and _works(default_collate, present)
        fixes = [Fix(code=f"collate_fn=lambda batch: {rest}", verified=is_tried, why="leaves such samples out")]
        return refusal(error, f"{which} is None: the dataset's `__getitem__` returned nothing", op="stack", fixes=fixes)
    for part in _parts((), samples):
        value = part.values[0]
        if hasattr(value, "getbands") and hasattr(value, "mode"):
            where = f"`{part.of}`" if part.path else "each sample"
            words = "turn it into a tensor in the dataset: `torchvision.transforms.functional.to_tensor(image)`"
            if edits := _with_transform(dataset, value):
                return edited(error, f"{where} is a PIL image: the dataset is made without a transform", edits)
            sentence = f"{where} is a PIL image, and a batch is made of tensors, arrays and numbers"
            return refusal(error, sentence, op="stack", fixes=[Fix(code=words, verified=False)])
    return None


def _with_transform(dataset: Any, image: Any) -> tuple[Edit, ...]:
    """The call that makes the dataset, with what the image lacks: as another one of its class has it, or by the option's name."""
    kind: Any = type(dataset)
    without = [name for name, value in getattr(dataset, "__dict__", {}).items() if value is None and "transform" in name]
    assigned = [(cell, node, node.value) for cell in cells() for node in nodes(ast.Assign, cell.tree)]
    calls = [(cell, node, call) for cell, node, call in assigned if isinstance(call, ast.Call) and called(call) == kind.__name__]
    own = variable_of(dataset)
    mine = [(cell, call) for cell, node, call in calls if own in [ast.unparse(target) for target in node.targets]]
    for name in without if len(mine) == 1 else ():
        others = [option.value for _, _, call in calls for option in call.keywords if option.arg == name]
        named = [ast.Name(variable) for variable, _ in user_variables() if name in variable]
        is_evaluated = _FOR_EVALUATION.search(own or "") is not None  # it is given the transform for evaluation, where there is one
        for value in sorted([*others, *named], key=lambda node: bool(_FOR_EVALUATION.search(ast.unparse(node))) != is_evaluated):
            made = dict(user_variables()).get(ast.unparse(value))
            cell, call = mine[0]
            if callable(made) and _works(lambda batch, made=made: torch.stack([copy.deepcopy(made)(part) for part in batch]), [image]):  # type: ignore[misc]
                new = ast.Call(call.func, call.args, [*call.keywords, ast.keyword(name, value)])
                return exchanging(location(cell.where.file, call.lineno, "<module>"), call, new)
    return ()


def other_batches(samples: list[Any], part: Part, frames: list[FrameType]) -> list[Fix]:
    """A function of the user's that was made for this, then one that makes this part alone otherwise."""
    names = [value for frame in frames if is_user_code(frame.f_code) for value in frame.f_globals.values()]
    functions = (value for value in names if isinstance(value, FunctionType) and "collate" in value.__name__)
    own = [value for value in functions if is_user_code(value.__code__) and value.__code__.co_argcount == 1]
    tried: list[tuple[str, Callable[[list[Any]], Any], str]]
    tried = [(f"collate_fn={collate.__name__}", collate, "of your own") for collate in {id(collate): collate for collate in own}.values()]
    parts = [other for other in _parts((), samples) if len(set(other.shapes)) > 1]
    items = {part.path: "{}" if all(isinstance(value, torch.Tensor) for value in part.values) else "torch.as_tensor({})" for part in parts}
    code = _written({other.path: (_otherwise(other)[0], items[other.path]) for other in parts}, samples[0])
    why = _otherwise(part)[1]
    tried.append((f"collate_fn={code}", lambda batch: eval(code, dict(_NAMES))(batch), why))  # noqa: PLW0108, S307 - the code that is shown, which may not compile
    return [Fix(code=code, verified=True, why=why, changes=_in_loader(code, frames)) for code, run, why in tried if _works(run, samples)]


def _in_loader(code: str, frames: list[FrameType]) -> tuple[Edit, ...]:
    """The option in the call that made the loader whose batches the user's line takes; none where no line does, or of another's names."""
    option = ast.keyword("collate_fn", expression(code.removeprefix("collate_fn=")))
    for frame in reversed([frame for frame in frames if is_user_code(frame.f_code)]):
        statement = statement_at(tree_of(frame.f_code.co_filename), frame.f_lineno)
        names = {**frame.f_globals, **frame.f_locals}
        for name in sorted(names_in(getattr(statement, "iter", statement))):
            made = made_as(frame.f_code.co_filename, name, "DataLoader") if isinstance(names.get(name), DataLoader) else []
            for where, call in made[:1]:
                imports = [text for word, text in _IMPORTS.items() if word in names_in(option) - names.keys()]
                edits = exchanging(where, call, ast.Call(call.func, call.args, [*call.keywords, option]))
                return tuple(replace(edit, new="\n".join([*imports, edit.new])) for edit in edits)
    return ()


def _works(run: Callable[[list[Any]], Any], samples: list[Any]) -> bool:
    try:
        with RandomState.kept():
            return run(copy.deepcopy(samples)) is not None
    except Exception:  # noqa: BLE001 - whatever a function says to samples that it was not made for
        return False


def _otherwise(part: Part) -> tuple[str, str]:
    """(what a batch makes of this part: an expression with a place for the list of them, why)."""
    shapes = part.shapes
    ranks = {len(sizes) for sizes in shapes}
    many = ranks.pop() if len(ranks) == 1 else 0
    differ = [dim for dim, sizes in enumerate(zip(*shapes, strict=False)) if len(set(sizes)) > 1]
    if many == _PICTURE and differ == [0] and 1 in {sizes[0] for sizes in shapes}:
        channels = max(sizes[0] for sizes in shapes)
        why = "grayscale images among those in color; or `.convert('RGB')` where they are loaded"
        return f"torch.stack([x.expand({channels}, -1, -1) for x in {{0}}])", why
    if many == _PICTURE and 0 not in differ and shapes[0][0] in {1, 3, 4}:
        size = shapes[0][1:]
        why = "images of one size; or resize them where they are loaded"
        return f"torch.stack([F.interpolate(x[None], size={size})[0] for x in {{0}}])", why
    if differ == [0] and not (many > 1 and shapes[0][-1] in _BOXES):
        return "pad_sequence({0}, batch_first=True)", "padded"
    if many > 1 and differ == [many - 1]:
        return "torch.stack([F.pad(x, (0, max(y.shape[-1] for y in {0}) - x.shape[-1])) for x in {0}])", "padded at the end"
    return "{0}", "kept in a list"


def _written(texts: Mapping[tuple[Any, ...], tuple[str, str]], sample: Any) -> str:
    """A `collate_fn` that makes the text of a part of it, and of the rest what torch makes of it."""

    def written(value: Any, item: str, path: tuple[Any, ...]) -> str:
        if path in texts:
            text, as_tensor = texts[path]
            own = as_tensor.format(item)
            return text.format("batch" if own == "s" else f"[{own} for s in batch]")
        below = {other[len(path)] for other in texts if other[: len(path)] == path and len(other) > len(path)}
        if not below:
            return f"default_collate([{item} for s in batch])"
        if isinstance(value, Mapping):
            own_parts = [f"{as_key(key)}: {written(value[key], f'{item}[{as_key(key)}]', (*path, key))}" for key in value if key in below]
            unlike = " and ".join(f"k != {as_key(key)}" for key in value if key in below)
            rest = f"**default_collate([{{k: v for k, v in {item}.items() if {unlike}}} for s in batch])"
            return f"{{{', '.join([*([rest] if len(value) > len(below) else []), *own_parts])}}}"
        return f"[{', '.join(written(value[at], f'{item}[{at}]', (*path, at)) for at in range(len(value)))}]"

    return f"lambda batch: {written(sample, 's', ())}"


@dataclass(frozen=True)
class Part:
    """One part of every sample."""

    path: tuple[Any, ...]
    """Keys of mappings and places in tuples, the outermost first; empty where a sample is nothing else."""
    values: Sequence[Any]

    @property
    def shapes(self) -> list[Shape]:
        """The shape that this part has in each sample."""
        return [_shape(value) for value in self.values]

    @property
    def of(self) -> str:
        """``sample["targets"]``."""
        return "sample" + "".join(f"[{as_key(key)}]" for key in self.path)


def as_key(key: object) -> str:
    """A key as it is written in brackets."""
    return json.dumps(key, ensure_ascii=False) if isinstance(key, str) else repr(key)


def _shape(value: Any) -> Shape:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, (tuple, list)) else ()


def _is_part(value: Any) -> bool:
    """Whether it is more than a number: what has a shape, or a picture."""
    return bool(_shape(value)) or hasattr(value, "getbands")


def _parts(path: tuple[Any, ...], values: list[Any]) -> Iterator[Part]:
    """The parts of all samples, in the order in which torch puts a batch together."""
    first = values[0] if values else None
    if isinstance(first, Mapping):
        for key in first:
            yield from _parts((*path, key), [value[key] for value in values if isinstance(value, Mapping) and key in value])
    elif isinstance(first, (tuple, list)) and len({_shape(value) for value in values}) == 1 and any(map(_is_part, first)):
        for at in range(len(first)):
            yield from _parts((*path, at), [value[at] for value in values])
    else:
        yield Part(path, values)
