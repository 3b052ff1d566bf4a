"""What a cell that is stopped shows in place of a traceback."""

from __future__ import annotations

import pytest
import torch

from torchdebug_magics import NonFiniteError, nanhunt


def lose(parameter: torch.Tensor) -> None:
    parameter.log().sum().backward()


def test_the_traceback_is_the_users_own_lines_and_then_the_verdict() -> None:
    # Given a NaN that is born in a function of the user's
    with pytest.raises(NonFiniteError) as caught, nanhunt() as session:
        lose(torch.tensor([-1.0], requires_grad=True))
    # When IPython asks how to show it
    head, *calls, last = caught.value._render_traceback_()
    # Then each line is a place as in the report, the outermost first, and no line is torch's or ours
    assert head == "Traceback of your own code (most recent call last):"
    assert [call.rpartition(": ")[2] for call in calls[-2:]] == [
        "lose(torch.tensor([-1.0], requires_grad=True))",
        "parameter.log().sum().backward()",
    ]
    assert not [call for call in calls if "torchdebug_magics" in call or "site-packages" in call]
    assert last == f"NonFiniteError: {session.report.verdict}"
