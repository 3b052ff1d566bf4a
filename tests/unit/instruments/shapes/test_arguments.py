"""`%shapes model x mask=mask ...`: what stands on the line is read as the arguments of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from IPython.core.error import UsageError
from IPython.utils.capture import capture_output
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import torchdebug_magics
from torchdebug_magics import TorchDebugError


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, mask=None, scale=1):
        return self.layer(x) * (1 if mask is None else mask) * scale


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 2)

    def forward(self, input_ids, weights=None):
        y = self.layer(self.embed(input_ids))
        return y if weights is None else y * weights[..., None]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, a, b):
        return self.layer(a) + self.layer(b)


class OfTuple(Pair):
    def forward(self, pair):
        return super().forward(*pair)


class OfDict(Pair):
    def forward(self, batch):
        return self.layer(batch["x"])


class Reshaped(Pair):
    def forward(self, x, output_size=(2, 2)):
        return self.layer(x).reshape(output_size)


class Rest(Pair):
    def forward(self, *tensors, **named):
        return sum(map(self.layer, (*tensors, *named.values())))


@pytest.fixture
def names() -> dict[str, Any]:
    return {
        "torch": torch,
        "nn": nn,
        "model": Scaled(),
        "tokens": Tokens(),
        "pair": Pair(),
        "of_tuple": OfTuple(),
        "of_dict": OfDict(),
        "reshaped": Reshaped(),
        "rest": Rest(),
        "half": Scaled().half(),
        "bf16": Scaled().bfloat16(),
        "image": nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
        "x": torch.randn(3, 4),
        "y": torch.randn(5, 4),
        "mask": torch.ones(3, 2),
        "ids": torch.zeros(3, 5, dtype=torch.long),
        "c": True,
        "i": 0,
        "net": [Scaled()],
        "models": {"a b": Scaled()},
        "batch": {"x": torch.randn(3, 4), "mask": torch.ones(3, 2)},
        "args": (torch.randn(3, 4),),
    }


LINES = [
    ('tokens **{"input_ids": ids}', "input_ids 3 x 5 int64", (3, 5, 2)),
    ("of_tuple (x, x)", "pair[0] 3 x 4 float32, pair[1] 3 x 4 float32", (3, 2)),
    ("of_tuple ((3, 4), (1, 4))", "pair[0] 3 x 4 float32, pair[1] 1 x 4 float32", (3, 2)),
    ('of_dict {"x": (7, 4)}', "batch.x 7 x 4 float32", (7, 2)),
    ("reshaped (2, 4) (4, 1)", "x 2 x 4 float32", (4, 1)),
    ("reshaped (2, 4) output_size=(4,)", "x 2 x 4 float32", (4,)),
    ("model x --sort=params --depth=1", "x 3 x 4 float32", (3, 2)),
    ("model.forward(x)", "x 3 x 4 float32", (3, 2)),
]


def run(shell, names, line):
    shell.push(names)
    with capture_output():
        result = shell.run_cell(f"%shapes -o REPORT {line}")
    error = result.error_before_exec or result.error_in_exec
    if error is not None:
        raise error
    return shell.user_ns.pop("REPORT")


@pytest.mark.parametrize(("line", "inputs", "output"), LINES, ids=[line for line, _, _ in LINES])
def test_a_line(line, inputs, output, names, shell):
    report = run(shell, names, line)
    assert report.failure is None, report.failure
    assert report.inputs == inputs
    assert report.rows[0].output_shapes == (output,)
    assert report.mode == ("real" if "--real" in line else "fake")


@pytest.mark.parametrize("line", ["model", "model  # alone", "model --depth 1", "nn.Linear(4, 2)", "net[0]"])
def test_a_model_alone_is_its_parameters(line, names, shell):
    report = run(shell, names, line)
    assert (report.mode, report.total_params) == ("params", 10)


def test_a_call_on_the_line_is_not_made(names, shell):
    class OnFakes(Scaled):
        def forward(self, x):
            assert isinstance(x, FakeTensor)
            return super().forward(x)

    assert run(shell, {**names, "model": OnFakes()}, "model(x)").failure is None


def test_a_call_of_anything_else_is_made_once(names, shell):
    made: list[nn.Module] = []

    def make():
        made.append(Scaled())
        return made[-1]

    assert run(shell, {**names, "make": make}, "make()").mode == "params"
    assert len(made) == 1
    assert run(shell, {**names, "make": make}, "make()(x)").mode == "fake"
    assert len(made) == 2


WRONG = [
    ("x", "the first argument must be a torch.nn.Module"),
    ("3", "the first argument must be a torch.nn.Module"),
    ("model(x).sum()", "the first argument must be a torch.nn.Module"),
    ("model x y=", "cannot read"),
    ("model x mask=mask mask=mask", "keyword argument repeated"),
    ("model mask=mask x", "positional argument follows keyword argument"),
    ("model x --depth many", "invalid int value"),
]


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line for line, _ in WRONG])
def test_what_is_wrong_is_one_line(line, said, names, shell):
    with pytest.raises(UsageError, match=said) as error:
        run(shell, names, line)
    assert "\n" not in str(error.value)
    assert "torchdebug_values" not in str(error.value)


def test_an_error_of_the_users_own_words_is_theirs(names, shell):
    with pytest.raises(UsageError, match="there is no variable `nothere`"):
        run(shell, names, "model nothere")
    with pytest.raises(NameError, match="'inside'"):
        run(shell, names, "model (lambda: inside)()")
    with pytest.raises(ZeroDivisionError):
        run(shell, names, "model x scale=1/0")


def test_arguments_that_the_forward_does_not_take_are_the_failure(names, shell):
    report = run(shell, names, "model x colour=1")
    assert "unexpected keyword argument 'colour'" in report.failure.error


def test_the_function_takes_the_same(names):
    shapes, model, x = torchdebug_magics.shapes, names["model"], names["x"]
    assert shapes(model, x, mask=names["mask"]).rows[0].output_shapes == ((3, 2),)
    assert shapes(model, (3, 4), depth=1).layout.depth == 1
    assert shapes(model, **names["batch"]).failure is None
    assert shapes(names["tokens"], {"input_ids": names["ids"]}).failure is None
    assert shapes(model).mode == "params"
    with pytest.raises(TorchDebugError, match="write `%shapes model input`"):
        shapes(x, x)


def test_a_mixed_model_gets_whole_numbers_only_where_it_embeds():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.layer = nn.Linear(4, 4)

        def forward(self, a, b):
            return self.embed(a) + self.layer(b)

    report = torchdebug_magics.shapes(Mixed(), (2, 3), (2, 3, 4))
    assert report.failure is None
    assert report.inputs == "a 2 x 3 int64, b 2 x 3 x 4 float32"


def test_a_spec_lives_where_the_model_does():
    model = nn.Linear(4, 2, device="meta")
    report = torchdebug_magics.shapes(model, (3, 4))
    assert (report.mode, report.rows[0].device, report.rows[0].output_shapes) == ("meta", "meta", ((3, 2),))


@pytest.mark.parametrize(
    ("line", "inputs"),
    [
        ("nn.Embedding(9, 4) (3, 4):int64", "input 3 x 4 int64"),
        ("nn.Embedding(9, 4) (3,4):int32", "input 3 x 4 int32"),
        ("nn.Embedding(9, 4) (3, 4) : torch.int64 --depth 1", "input 3 x 4 int64"),
        ("nn.Bilinear(2, 3, 4).double() (5, 2):float64 (5, 3):torch.float64", "input1 5 x 2 float64, input2 5 x 3 float64"),
        ("nn.Embedding(9, 4) input=(3, 4):int32 --depth 1", "input 3 x 4 int32"),
        ("nn.Bilinear(2, 3, 4).double() (5, 2):float64 input2 = (5, 3):float64", "input1 5 x 2 float64, input2 5 x 3 float64"),
    ],
)
def test_a_size_with_its_dtype(line, inputs, names, shell):
    report = run(shell, names, line)
    assert report.failure is None, report.failure
    assert report.inputs == inputs


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("model (3, 4):int63", "there is no dtype 'int63': write one of torch's, as in `(2, 5):int64`"),
        ("model x --depth -1", "--depth must be 0 or more, not -1: 0 shows the model alone"),
        ("model x --depth many", "%shapes: argument --depth: invalid int value: 'many'; %shapes? lists what it takes"),
        ("model x --deep 3", "%shapes: "),
    ],
)
def test_a_wrong_line_is_one_line_about_that_line(line, said, names, shell):
    with pytest.raises(UsageError) as wrong:
        run(shell, names, line)
    assert str(wrong.value).startswith(said)
    assert "%%" not in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_above_a_cell_the_magic_has_two_signs(shell):
    with capture_output():
        error = shell.run_cell("%%shapes --deep\n1").error_in_exec
    assert str(error).startswith("%%shapes: ")
