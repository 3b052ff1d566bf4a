"""A backward that the user has written: whether what it returns depends on the gradient that it is given."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import finding, user_function
from torchdebug_magics.instruments.autograd.tape import RecordedOp, Tape, walk
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.syntax import as_atom, expression, nodes
from torchdebug_magics.probing.source.user_code import is_user_code, local_values, location
from torchdebug_magics.probing.tensors import tensors_in


class WrongBackward(NamedTuple):
    """What a backward returned."""

    function: type
    is_factor: bool
    """Whether what it returned and what it was given have one shape."""


class OwnFunctions:
    """Looks at the first call of each function's backward, by a hook on its node that takes itself off."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._met: set[type] = set()
        self._handles: list[Any] = []
        self.wrong: list[WrongBackward] = []

    def meet(self, node: Any, tape: Tape, frame: FrameType | None) -> None:
        """An op is about to run in the backward of a node, called from that frame or from one that it calls."""
        function = getattr(type(node), "_forward_cls", None)
        if function is None or function in self._met:
            return
        self._met.add(function)
        code = getattr(inspect.unwrap(function.backward), "__code__", None)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is None or code is None or not is_user_code(code):
            return
        # A hook on a node that runs already is given no gradients; before its first op the function still has them all.
        arguments = code.co_varnames[1 : code.co_argcount + bool(code.co_flags & inspect.CO_VARARGS)]
        incoming = list(tensors_in(list(local_values(frame, frozenset(arguments)).values())))
        first = tape.count

        def returned(made: tuple[Any, ...], _: object) -> None:
            handle.remove()
            self._guard.run("the look at a backward", self._look, function, made, incoming, tape, first)
            incoming.clear()

        handle = node.register_hook(returned)
        self._handles.append(handle)

    def off(self) -> None:
        """Take off the hooks on nodes that raised."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _look(self, function: type, made: tuple[Any, ...], incoming: list[torch.Tensor], tape: Tape, first: int) -> None:
        gradients = [gradient for gradient in made if gradient is not None]
        with modes_aside(), torch.no_grad():
            if not incoming or all(bool((one == one.flatten()[:1]).all()) for one in incoming if one.numel()):
                return  # as at the end of a graph, where it is 1
        if gradients and not _depends(tape, gradients, {tape.numbers.of(one) for one in incoming}, first):
            is_factor = any(gradient.shape == one.shape for gradient in gradients for one in incoming)
            self.wrong.append(WrongBackward(function, is_factor))


def _depends(tape: Tape, gradients: Iterable[torch.Tensor], incoming: set[int], first: int) -> bool:
    """Whether the gradients were computed from those that came in, or may have been.

    That is where no op is seen to have made one, and where one lies in memory that was only allocated or set to a constant: what fills
    that may be a kernel that no dispatcher sees.
    """
    origins = [tape.origin(id(gradient)) for gradient in gradients]
    makers = [maker for maker in origins if maker is not None and maker.index >= first]
    if len(makers) < len(origins):
        return True

    def may_depend(op: RecordedOp) -> bool:
        is_filled_unseen = not op.reads or op.name.startswith(("empty", "new_", "zeros", "ones", "full"))
        return is_filled_unseen or op.unknown or any(use.memory in incoming or not use.memory for use in op.reads)

    return any(map(may_depend, walk(makers, lambda op: [maker for maker in op.parents if maker.index >= first])))


def own_function_finding(wrong: WrongBackward) -> AutogradFinding:
    """A backward, at the line that returns."""
    function: Any = wrong.function
    backward = inspect.unwrap(function.backward)
    code, returns = backward.__code__, list(nodes(ast.Return, user_function(backward)))
    given = list(inspect.signature(backward).parameters)[1:2]
    line = returns[-1].lineno if returns else code.co_firstlineno
    where, name = location(code.co_filename, line, code.co_name), given[0] if given else "grad_output"
    value, fix = returns[-1].value if len(returns) == 1 else None, f"multiply what it returns by `{name}`"
    if wrong.is_factor and value is not None and not isinstance(value, ast.Tuple):
        fix = f"`return {ast.unparse(ast.BinOp(ast.Name(name), ast.Mult(), expression(as_atom(value))))}`"
    return finding(
        "wrong_backward",
        f"`{function.__name__}.backward` ignores `{name}`",
        where,
        fix,
        tensor=name,
        explanation="by the chain rule, the gradient of an input is that of the output times the derivative; "
        "what comes after the function does not influence what is trained",
    )
