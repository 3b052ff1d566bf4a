"""Models that are hard to follow, each made anew: name -> () -> (model, args, kwargs)."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import prune, rnn

from tests.plain_first import refusal

Case = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
CASES: dict[str, Case] = {}


def case(make: Case) -> Case:
    CASES[make.__name__] = make
    return make


def of(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module of these parts whose forward is a function of itself and the arguments."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    Model.forward = forward
    return Model()


def linear(inputs: int = 4, outputs: int = 4, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **options)


X = torch.randn(3, 4)
TOKENS = torch.randint(0, 50, (2, 7))


# --- convolutions, norms ------------------------------------------------------------------------------------------------------------


@case
def bfloat16():
    return nn.Sequential(linear(), nn.LayerNorm(4)).bfloat16(), (X.bfloat16(),), {}


@case
def autocast_inside():
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.c(self.b(self.a(x)))

    return of(forward, a=linear(), b=nn.LayerNorm(4), c=nn.Conv1d(2, 2, 1)), (torch.randn(3, 2, 4),), {}


# --- recurrent ----------------------------------------------------------------------------------------------------------------------


@case
def lstm():
    return nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True), (torch.randn(3, 5, 8),), {}


@case
def lstm_in_eval():
    return nn.LSTM(8, 16).eval(), (torch.randn(3, 5, 8),), {}


@case
def packed():
    def forward(self, x, lengths):
        y, _ = self.lstm(rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.out(rnn.pad_packed_sequence(y, batch_first=True)[0])

    return of(forward, lstm=nn.LSTM(8, 16, batch_first=True), out=nn.Linear(16, 2)), (torch.randn(3, 5, 8), torch.tensor([5, 2, 3])), {}


# --- attention ----------------------------------------------------------------------------------------------------------------------


@case
def attention():
    return nn.MultiheadAttention(16, 4, batch_first=True), (torch.randn(2, 5, 16),) * 3, {}


# --- whose parameters ---------------------------------------------------------------------------------------------------------------


@case
def tied():
    model = of(lambda self, ids: self.out(self.embed(ids)), embed=nn.Embedding(50, 8), out=nn.Linear(8, 50, bias=False), spare=linear(3, 3))
    model.out.weight = model.embed.weight
    return model, (TOKENS,), {}


@case
def reused():
    def forward(self, x):
        for _ in range(3):
            x = self.a(x)
        x = self.alias(x)
        for layer in self.layers:
            x = layer(x)
        return self.table["k"](x)

    shared = linear()
    parts = {"layers": nn.ModuleList([linear(), linear()]), "table": nn.ModuleDict({"k": linear()})}
    return of(forward, a=shared, alias=shared, **parts), (X,), {}


@case
def by_hand():
    """A forward called by hand, and parameters that the parent uses."""

    def forward(self, x):
        return nn.functional.linear(self.a.forward(x) @ self.w, self.b.weight) @ self.several[0] + self.several[1] + self.named["q"]

    several, named = nn.ParameterList([torch.randn(4, 4), torch.randn(4)]), nn.ParameterDict({"q": torch.randn(4)})
    return of(forward, a=linear(), b=linear(bias=False), w=nn.Parameter(torch.randn(4, 4)), several=several, named=named), (X,), {}


@case
def in_a_plain_list():
    model = of(lambda self, x: self.hidden[0](self.known(x)), known=linear())
    model.hidden = [nn.BatchNorm1d(4)]
    return model, (X,), {}


# --- what a forward may give --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list[Any]
    count: int = 3


class Named(NamedTuple):
    first: torch.Tensor
    second: tuple[torch.Tensor, ...]


def giving(give):
    return of(lambda self, x: give(self.a(x)), a=linear()), (X,), {}


OUTPUTS = {
    "a dict": lambda y: {"y": y, "n": {"z": [y, y * 2]}, "none": None},
    "a dataclass": lambda y: Output(y, [y, None, {"q": y}]),
    "a named tuple": lambda y: Named(y, (y,)),
    "a tuple": lambda y: (y, [y, (y,)]),
    "none": lambda _: None,
    "a number": lambda _: 5,
    "a scalar": lambda y: y.sum(),
    "a distribution": lambda y: torch.distributions.Normal(y, y.exp(), validate_args=False),
}
for name, give in OUTPUTS.items():
    CASES[f"gives {name}"] = lambda give=give: giving(give)


# --- wrapped ------------------------------------------------------------------------------------------------------------------------


def quantised():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8), (X,), {}


def _quantised_forward():
    model, args, _ = quantised()
    return model(*args)


if not refusal(_quantised_forward):
    case(quantised)


@case
def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))), (X,), {}


@case
def traced_inside():
    return nn.Sequential(linear(), torch.jit.trace(linear(4, 8), X), linear(8, 2)), (X,), {}


@case
def compiled():
    return torch.compile(nn.Sequential(linear(), nn.ReLU()), backend="eager"), (X,), {}


@case
def compiled_in_place():
    model = nn.Sequential(linear(), nn.ReLU())
    model.compile(backend="eager")
    return model, (X,), {}


@case
def compiled_inside():
    model = of(lambda self, x: self.f(self.b(self.a(x))), a=linear(), b=torch.compile(linear(), backend="eager"))
    model.f = torch.compile(lambda x: torch.relu(x) @ x.T, backend="eager")
    return model, (X,), {}


@case
def data_parallel():
    return nn.DataParallel(nn.Sequential(linear())), (X,), {}


@case
def pruned():
    layer = linear()
    prune.l1_unstructured(layer, "weight", amount=0.5)
    return nn.Sequential(layer, nn.ReLU()), (X,), {}


# --- what needs the numbers, or autograd --------------------------------------------------------------------------------------------


@case
def gradient_inside():
    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.a(x).tanh().sum()
        return energy, torch.autograd.grad(energy, x, create_graph=True)[0]

    return of(forward, a=linear()), (X,), {}


@case
def functional_gradient():
    return of(lambda self, x: (torch.vmap(self.a)(x), torch.func.jacrev(self.a)(x[0])), a=linear()), (X,), {}


@case
def distributions():
    def forward(self, x):
        normal = torch.distributions.Normal(self.a(x), self.b(x).exp(), validate_args=False)
        z = normal.rsample()
        return z, normal.log_prob(z), torch.distributions.Categorical(logits=z, validate_args=False).entropy()

    return of(forward, a=linear(), b=linear()), (X,), {}


@case
def numpy_inside():
    return of(lambda self, x: self.a(torch.from_numpy(self.a(x).detach().numpy() * 2)), a=linear()), (X,), {}


@case
def nested():
    return linear(), (torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], layout=torch.jagged),), {}


@case
def sparse():
    return of(lambda self, m, x: torch.sparse.mm(m, self.a(x)), a=linear()), (torch.eye(3).to_sparse(), X), {}


@case
def embedding_bag():
    return nn.EmbeddingBag(50, 4), (torch.randint(0, 50, (9,)), torch.tensor([0, 4])), {}


@case
def views_of_one_memory():
    def forward(self, a, b, c):
        return self.a(a) + b.exp() + c.tanh()

    whole = torch.randn(6, 4)
    return of(forward, a=linear()), (whole[:3], whole[3:], whole[:3]), {}


@case
def rows_of_a_data_set():
    data = torch.randn(1000, 4)
    return of(lambda self, x: self.a(x).exp(), a=linear()), (data[5:8],), {}
