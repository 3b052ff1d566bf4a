"""Which samples of a batch each recorded op depends on: the op runs again on copies in which one sample is exchanged for another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from torchdebug_magics.instruments.autograd.tape import RecordedOp, Tape
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.ops import argument_of, written_by
from torchdebug_magics.probing.tensors import tensors_in

_MOST_RUNS = 4_000
_MOST_BYTES = 1 << 27
_MOST_COMPARED = 64
"""Samples, until one differs from the first."""
_ROUNDED = 1e-6
"""Of the largest element, what rounding may change in any."""
_TABLE = 2
_VALUELESS = ("empty", "zeros", "ones", "full", "rand", "new_")


class Begun(NamedTuple):
    """An op that is about to run, with the arguments of both twins."""

    func: Any
    first: tuple[Any, Any]
    second: tuple[Any, Any]


class SampleTwins:
    """Runs beside the user's ops, on memory of its own: in the first twin sample 0 of the batch is another one, in the second the reverse.

    An element that differs from the user's in both twins depends on both samples. Nothing of the user's is written, no random number is
    drawn. Gives up, without an answer, where that would take more than 4,000 ops or 128 MiB, or where an op cannot be run like that.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.samples_count = 0
        self.input_shape: tuple[int, ...] = ()
        """Of the first input of a model that holds the batch."""
        self.has_steps = False
        """Whether that input may have time steps beside samples: a row of tokens, or of vectors."""
        self._is_over = False
        self._other = 1
        """The first sample that differs from sample 0 in the first input."""
        self._twins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._members: dict[int, frozenset[int]] = {}
        self._mixed: list[tuple[RecordedOp, torch.Tensor]] = []
        self._runs_count = self._made_bytes = 0

    def give_up(self) -> None:
        """Look at no further op; what is known is dropped."""
        self._is_over = True
        self._twins = WeakTensorKeyDictionary()
        self._mixed = []

    def mixing(self) -> list[RecordedOp]:
        """The ops with an output element that depends on both samples, in order."""
        with modes_aside():
            return [op for op, is_mixed in self._mixed if bool(is_mixed)]

    def before(self, tape: Tape, op: RecordedOp, root: torch.nn.Module | None, func: Any, given: tuple[Any, Any]) -> Begun | None:
        """The twins' arguments; None for an op that no sample reaches."""
        if self._is_over or op.in_backward or op.in_optimizer or op.initializes or not (op.grad_enabled or self.samples_count):
            return None
        try:
            with modes_aside(), torch.no_grad():
                if root is not None:
                    self._meet_inputs(tape, op, root, given)
                tensors = list(tensors_in(given))
                if not any(tensor in self._twins for tensor in tensors):
                    return None
                unknown = [one for one in written_by(func, *given) if one not in self._twins]
                if self._is_affordable(unknown):
                    for one in unknown:
                        self._twins[one] = one.detach().clone(), one.detach().clone()
                return None if self._is_over else Begun(func, self._of_twin(given, 0), self._of_twin(given, 1))
        except Exception:  # noqa: BLE001 - then there is no answer
            self.give_up()
            return None

    def after(self, op: RecordedOp, begun: Begun, given: tuple[Any, ...], result: Any) -> None:
        """Run the op for both twins."""
        made = tree_leaves(result)
        self._runs_count += 1
        if self._is_over or not any(isinstance(one, torch.Tensor) for one in made) or op.name.startswith(_VALUELESS):
            return
        if not self._is_affordable(one for one in made if isinstance(one, torch.Tensor)):
            return
        try:
            with modes_aside(), torch.no_grad():
                for one, first, second in zip(made, *self._run(op, begun, given, made), strict=True):
                    if isinstance(one, torch.Tensor) and first is not None and second is not None:  # of some outputs there is none
                        self._twins[one] = first, second
                        self._mixed.append((op, (differs(first, one) & differs(second, one)).any()))
        except Exception:  # noqa: BLE001 - as above
            self.give_up()

    def _is_affordable(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether twins of these may be made; else it gives up."""
        self._made_bytes += 2 * sum(tensor.nbytes for tensor in tensors)
        if self._runs_count > _MOST_RUNS or self._made_bytes > _MOST_BYTES:
            self.give_up()
        return not self._is_over

    def _meet_inputs(self, tape: Tape, op: RecordedOp, root: torch.nn.Module, given: tuple[Any, Any]) -> None:
        """Inputs of a model with as many samples as the first one."""
        for tensor, use in zip(tensors_in(given), op.reads, strict=False):
            maker = tape.maker(use)
            if tensor in self._twins or type(tensor) is not torch.Tensor or (maker is not None and maker.root == op.root):
                continue
            if id(root) not in self._members:
                self._members[id(root)] = frozenset(id(parameter) for parameter in (*root.parameters(), *root.buffers()))
            if id(tensor) in self._members[id(root)] or tensor.ndim <= self.dimension:
                continue
            count, is_first = tensor.shape[self.dimension], not self.samples_count
            if count < 2 or not (tensor.ndim > 1 if is_first else count == self.samples_count):  # noqa: PLR2004 - one sample meets no other
                continue
            is_table = tensor.ndim <= _TABLE and tensor.is_floating_point()
            if list(tensor.shape).count(count) > 1 or (is_first and is_table and self.dimension):
                self.give_up()  # which of its dimensions holds the samples cannot be told, or the first one does
                return
            if not self._is_affordable([tensor]):
                return
            if is_first:
                self.samples_count, self.input_shape, self.has_steps = count, tuple(tensor.shape), not is_table
                others = (
                    at
                    for at in range(1, min(count, _MOST_COMPARED))
                    if not torch.equal(tensor.select(self.dimension, at), tensor.select(self.dimension, 0))
                )
                self._other = next(others, 1)
            first, second = tensor.detach().clone(), tensor.detach().clone()
            first.select(self.dimension, 0).copy_(tensor.select(self.dimension, self._other))
            second.select(self.dimension, self._other).copy_(tensor.select(self.dimension, 0))
            self._twins[tensor] = first, second

    def _of_twin(self, given: tuple[Any, Any], which: int) -> tuple[Any, Any]:
        def of_twin(leaf: Any) -> Any:
            return self._twins[leaf][which] if isinstance(leaf, torch.Tensor) and leaf in self._twins else leaf

        args, kwargs = tree_map(of_twin, given)
        return args, kwargs

    def _run(self, op: RecordedOp, begun: Begun, given: tuple[Any, ...], made: list[Any]) -> list[list[Any]]:
        twins = (begun.first, begun.second)
        if "batch_norm" in op.name or op.name == "native_dropout":  # each element by itself: what a batch has in common is meant
            actual = given[0]
            return [[made[0] + (args[0] - actual).to(made[0].dtype), *made[1:]] for args, _ in twins]
        if begun.func.namespace != "aten" or _draws(begun.func, *begun.first):
            message = f"{op.name} cannot be run twice"
            raise NotImplementedError(message)
        return [tree_leaves(begun.func(*args, **kwargs)) for args, kwargs in twins]


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the op draws random numbers in this call."""
    return torch.Tag.nondeterministic_seeded in func.tags and argument_of(func, args, kwargs, "dropout_p") != 0


def differs(changed: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Element by element, by more than the order of a sum may make."""
    if changed.is_floating_point() or changed.is_complex():
        scale = other.abs().nan_to_num(posinf=0.0).amax() if other.numel() else 0.0  # without a gradient, a fused op may round otherwise
        return ~(torch.isclose(changed, other, rtol=1e-5, equal_nan=True) | ((changed - other).abs() < _ROUNDED * scale))
    return changed != other
