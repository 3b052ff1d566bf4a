"""No activation and no input outlives its step because of us."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchdebug_magics import nanhunt
from torchdebug_magics.instruments.nanhunt.rerun.step_recorder import Entry
from torchdebug_magics.probing.state.rng import RandomState

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What only the garbage collector would free has outlived its step."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.seen = nn.Linear(4, 4), nn.Linear(4, 1), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).tanh()
        self.seen.append(weakref.ref(h))
        return self.b(h)


def alive(references: list[Any]) -> int:
    return sum(reference() is not None for reference in references)


def steps(model: Net, count: int, *, bad: int = -1, retain: bool = False) -> list[Any]:
    """After every optimizer step nothing of it is left; what is, is counted."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    left = []
    for step in range(count):
        x = torch.randn(3, 4)
        out = model(x)
        loss = out.square().mean()
        if step == bad:
            loss = loss + (loss * 0 - 1).log()
        optimizer.zero_grad()
        loss.backward(retain_graph=retain)
        optimizer.step()
        references = {"x": weakref.ref(x), "out": weakref.ref(out), "loss": weakref.ref(loss), "h": model.seen[-1]}
        del x, out, loss
        left.append([name for name, reference in references.items() if reference() is not None])
    return left


def test_the_measure_sees_what_is_kept() -> None:
    model, kept = Net(), []
    model.register_forward_hook(lambda _m, args, _o: kept.append(args))
    assert steps(model, 2) == [["x"], ["x"]]


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("options", [{}, {"keep_going": True}])
def test_nothing_of_a_step_is_left_after_it(options: dict[str, Any], retain: bool) -> None:
    model = Net()
    with nanhunt(**options):
        assert steps(model, 5, retain=retain) == [[]] * 5


def test_nothing_of_a_step_is_left_where_layers_are_shown() -> None:
    model = Net()
    with nanhunt(layers=True):
        left = steps(model, 5)
        gc.collect()
        assert alive(model.seen) == 0
    assert [names for names in left if set(names) - {"h"}] == []


def test_nothing_of_a_bad_step_is_left_but_the_tensors_at_the_birth() -> None:
    model = Net()
    with nanhunt(keep_going=True) as session:
        steps(model, 4, bad=1)
        gc.collect()
        assert alive(model.seen) == 0
    assert session.report.found
    assert all(one.numel() == 1 for one in session.bad.values())


def test_manual_updates_without_an_optimizer() -> None:
    model, references = Net(), []
    with nanhunt():
        for _ in range(5):
            x = torch.randn(3, 4)
            loss = model(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for one in model.parameters():
                    one -= 0.01 * one.grad  # noqa: PLW2901 - in place, as users write it
                    one.grad = None
            references += [weakref.ref(x), weakref.ref(loss)]
            del x, loss
        assert alive(model.seen) == 0
        # One batch may wait for the next step to begin.
        assert alive(references) <= 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_without_gradients_keeps_nothing(mode: Any) -> None:
    model = Net()
    with nanhunt(), mode():
        for _ in range(10):
            x = torch.randn(3, 4)
            out = model(x)
            references = [weakref.ref(x), weakref.ref(out), model.seen[-1]]
            del x, out
            assert alive(references) == 0


def test_inference_with_a_graph_keeps_a_bounded_number_of_inputs_and_no_activation() -> None:
    model, inputs, outputs = Net(), [], []
    with nanhunt():
        for _ in range(200):
            x = torch.randn(3, 4)
            out = model(x)
            inputs.append(weakref.ref(x))
            outputs.append(weakref.ref(out))
            del x, out
        assert alive(outputs) == 0
        assert alive(model.seen) == 0
        assert alive(inputs) <= 64 + 1  # and the `x` that the step began with: a replay begins with it, too


def test_what_a_call_leaves_behind_is_one_and_the_same_for_all_old_ones() -> None:
    model = Net()
    with nanhunt():
        for _ in range(500):
            model(torch.randn(1, 4))
        entries = sum(type(one) is Entry for one in gc.get_objects())
    assert entries <= 64 + 1


def test_a_model_that_was_dropped_is_freed_while_the_session_goes_on() -> None:
    references = []
    with nanhunt():
        for _ in range(5):
            model = Net()
            references += [weakref.ref(model), weakref.ref(model.a.weight)]
            steps(model, 4)
            del model
        assert alive(references) == 0


def test_a_loop_that_never_calls_backward_does_not_pile_up_states() -> None:
    # A state of all generators is tens of kilobytes: a hundred thousand batches must not keep one each.
    model = Net()
    with nanhunt():
        for _ in range(300):
            model(torch.randn(1, 4))
        states = sum(type(one) is RandomState for one in gc.get_objects())
    assert states <= 150


def test_the_generators_states_of_an_rl_rollout_are_bounded() -> None:
    policy = Net()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    inputs: list[Any] = []
    with nanhunt() as session:
        for _ in range(2):
            rewards = []
            for _ in range(100):
                state = torch.randn(1, 4)
                inputs.append(weakref.ref(state))
                rewards.append(policy(state).mean())
                del state
            assert alive(inputs) <= 100 + 64  # the graph itself holds the inputs of this rollout
            loss = torch.stack(rewards).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del loss, rewards
            assert alive(inputs) == 0
            assert alive(policy.seen) == 0
    assert session.report.steps_count == 2


def test_a_rollout_without_gradients_then_an_update() -> None:
    policy, inputs = Net(), []
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    with nanhunt():
        for _ in range(3):
            with torch.no_grad():
                for _ in range(20):
                    state = torch.randn(1, 4)
                    inputs.append(weakref.ref(state))
                    policy(state)
                    del state
            assert alive(inputs) == 0
            loss = policy(torch.randn(3, 4)).mean()
            loss.backward()
            optimizer.step()
            del loss
            assert alive(policy.seen) == 0


def test_validation_after_training_keeps_nothing() -> None:
    model = Net()
    with nanhunt():
        steps(model, 2)
        with torch.no_grad():
            for _ in range(3):
                x = torch.randn(3, 4)
                model(x)
                reference = weakref.ref(x)
                del x
                assert reference() is None


def test_locals_of_the_users_function_are_not_kept() -> None:
    model, references = Net(), []

    def step() -> None:
        scale = torch.ones(3, 1)
        references.append(weakref.ref(scale))
        scale = scale * 2  # read and overwritten: a value that a replay begins with
        references.append(weakref.ref(scale))
        out = model(torch.randn(3, 4))
        scale = scale * 2
        references.append(weakref.ref(scale))
        loss = (out * scale).mean()
        loss.backward()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nanhunt():
        for _ in range(3):
            step()
            optimizer.step()
            assert alive(references) == 0


def test_a_model_that_was_deleted_is_freed_when_the_session_ends() -> None:
    model = Net()
    reference = weakref.ref(model)
    with nanhunt() as session:
        steps(model, 2)
        del model
    gc.collect()
    assert reference() is None
    assert session.report.steps_count == 2


def test_the_report_pins_nothing() -> None:
    model = Net()
    with nanhunt(keep_going=True) as session:
        steps(model, 3, bad=1)
    report, reference = session.report, weakref.ref(model.a.weight)
    del session, model
    gc.collect()
    assert report.found
    assert reference() is None
