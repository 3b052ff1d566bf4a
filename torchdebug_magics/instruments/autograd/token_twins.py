"""Whether a model of sequences sees what it is to predict: which steps depend on which token, and which token is the target of each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torchdebug_magics.instruments.autograd.sample_twins import Begun, SampleTwins, differs
from torchdebug_magics.instruments.autograd.tape import RecordedOp, Tape
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.tensors import tensors_in

_TABLE, _FEW_STEPS = 2, 3
_LOSSES = frozenset({"nll_loss_forward", "nll_loss2d_forward"})


class Answer(NamedTuple):
    """What the loss compares the model's output with."""

    loss: RecordedOp
    is_ahead: bool
    """Whether the target of a step is the next token, and not that of the step itself."""
    steps: tuple[int, ...]
    """The numbers of steps of the input and of the output."""


class TokenTwins(SampleTwins):
    """Of the last row of tokens that a model was given: another token at one step, seen in the output of which steps."""

    def __init__(self) -> None:
        super().__init__(dimension=1)
        self.answer: Answer | None = None
        """Of the first loss whose targets the model sees."""
        self._tokens: torch.Tensor | None = None

    def after(self, op: RecordedOp, begun: Begun, given: tuple[Any, ...], result: Any) -> None:
        """Run the op for both twins; of a loss, note what it compares."""
        if op.name in _LOSSES and self.answer is None and len(given) > _TABLE:
            with modes_aside(), torch.no_grad():
                self.answer = self._answer(op, given[0], given[1], given[-1])
        super().after(op, begun, given, result)

    def _meet_inputs(self, tape: Tape, op: RecordedOp, root: torch.nn.Module, given: tuple[Any, Any]) -> None:  # noqa: ARG002 - as in the base
        for tensor, use in zip(tensors_in(given), op.reads, strict=False):
            maker = tape.maker(use)
            is_whole = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool
            is_row = tensor.ndim == _TABLE and is_whole and tensor.shape[1] >= _FEW_STEPS
            if tensor in self._twins or type(tensor) is not torch.Tensor or not is_row or (maker is not None and maker.root == op.root):
                continue
            others = [at for at in range(1, tensor.shape[1]) if not torch.equal(tensor[:, at], tensor[:, 0])]
            if not others:
                continue
            self._twins = WeakTensorKeyDictionary()  # what was computed of an earlier row, as by an encoder, stays as it is
            self.samples_count, self._other, self._tokens = tensor.shape[1], others[0], tensor.detach().clone()
            first, second = tensor.detach().clone(), tensor.detach().clone()
            first[:, 0] = tensor[:, self._other]
            second[:, self._other] = tensor[:, 0]
            self._twins[tensor] = first, second

    def _answer(self, op: RecordedOp, scores: Any, targets: Any, ignored: Any) -> Answer | None:
        """The answer that the model sees; None where it sees none, or where the layout of scores and targets is another."""
        tokens = self._tokens
        if tokens is None or not isinstance(scores, torch.Tensor) or scores not in self._twins or targets.numel() % len(tokens):
            return None
        rows, steps = tokens.shape
        own = targets.reshape(rows, -1)
        count = own.shape[1]
        if count not in {steps, steps - 1} or scores.numel() % (rows * count):
            return None
        changed = differs(self._twins[scores][1], scores)
        by_step = changed.transpose(1, 2) if changed.ndim > _TABLE else changed.reshape(rows, count, -1)
        sees = by_step.any(-1).any(0).tolist()
        is_known = own != ignored
        for ahead in (0, 1):
            width = min(count, steps - ahead)
            same = (own[:, :width] == tokens[:, ahead : ahead + width]) | ~is_known[:, :width]
            if not bool(same.all()) or not bool(is_known.any()) or len(sees) != count or self._other >= count:
                continue
            is_leak = sees[self._other - 1] if ahead else sees[self._other] and not any(sees[: self._other])
            return Answer(op, bool(ahead), (steps, count)) if is_leak else None
        return None
