"""What turns a model into code finds nothing of ours in it: the same graphs, as many compilations, no error."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from torchdebug_magics import autograd, memtrace, nanhunt, shapes
from torchdebug_magics.errors import NonFiniteError

pytestmark = pytest.mark.filterwarnings("ignore")
MAGICS: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "nanhunt": nanhunt,
    "shapes": shapes,
    "memtrace": memtrace,
    "autograd": autograd,
}
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.lin(x)).relu())  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


def steps(call: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        call(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def of_function(model: Model, magic: Callable[[], Any], optimizer: torch.optim.Optimizer) -> None:
    run = compiled(lambda x: model(x) * 2)
    with magic():
        steps(run, optimizer)
    steps(run, optimizer)


def of_model(model: Model, magic: Callable[[], Any], optimizer: torch.optim.Optimizer) -> None:
    with magic():
        run = compiled(model)
        steps(run, optimizer)
    steps(run, optimizer)


def in_place(model: Model, magic: Callable[[], Any], optimizer: torch.optim.Optimizer) -> None:
    with magic():
        model.compile(backend="eager")
        steps(model, optimizer)
    steps(model, optimizer)


def of_part(model: Model, magic: Callable[[], Any], optimizer: torch.optim.Optimizer) -> None:
    with magic():
        model.last = compiled(model.last)
        steps(model, optimizer)
    steps(model, optimizer)


@pytest.mark.parametrize("case", [of_function, of_model, in_place, of_part], ids=lambda case: case.__name__)
@pytest.mark.parametrize("name", ["nanhunt", "shapes", "memtrace", "autograd"])
def test_as_much_is_compiled_as_without(case: Callable[..., None], name: str) -> None:
    counted = []
    for magic in (MAGICS["nothing"], MAGICS[name]):
        torch._dynamo.reset()
        counters.clear()
        model = Model()
        case(model, magic, torch.optim.SGD(model.parameters(), 1e-3))
        counted.append((counters["stats"]["unique_graphs"], dict(counters["frames"]), dict(counters["graph_break"])))
    assert counted[0] == counted[1]


def test_a_finding_behind_a_compiled_function_is_the_same() -> None:
    model = Model()
    scale = compiled(lambda x: model(x) * 0)

    def root(x: torch.Tensor) -> torch.Tensor:
        return x.sum().sqrt()

    with pytest.raises(NonFiniteError), nanhunt() as session:
        root(scale(X)).backward()
    finding = session.report.finding
    assert finding is not None
    assert (finding.op, finding.phase, finding.diagnosis) == ("sqrt", "backward", "sqrt_zero")
    assert finding.location is not None
    assert finding.location.source == "return x.sum().sqrt()"


def scripted(model: Model) -> str:
    return str(torch.jit.script(model).inlined_graph)


def traced(model: Model) -> str:
    return str([node.kind() for node in torch.jit.trace(model, X).inlined_graph.nodes()])


def exported(model: Model) -> str:
    return str(torch.export.export(model, (X,), strict=True).graph)


def symbolic(model: Model) -> str:
    return torch.fx.symbolic_trace(model).code


def proxied(model: Model) -> str:
    return str(make_fx(model)(X).code)


def saved(model: Model) -> str:
    file = io.BytesIO()
    torch.save(model, file)
    return str(len(file.getvalue()) > 0)


@pytest.mark.parametrize("turned", [scripted, traced, exported, symbolic, proxied, saved], ids=lambda turned: turned.__name__)
@pytest.mark.parametrize("name", ["nanhunt", "shapes", "memtrace", "autograd"])
@pytest.mark.parametrize("is_new", [True, False])
def test_the_code_made_of_a_model_is_the_same(turned: Callable[[Model], str], name: str, is_new: bool) -> None:
    plain = turned(Model().eval())
    earlier = Model().eval()
    with MAGICS[name]():
        model = Model().eval() if is_new else earlier
        with torch.no_grad():
            model(X)
        made = turned(model)
        model(X).sum().backward()
    assert made == plain


def test_a_model_is_watched_again_after_it_was_scripted() -> None:
    model = Model()
    with nanhunt() as session:
        torch.jit.script(model)
        model(X).sum().backward()
        with torch.no_grad():
            model(X)
    assert (session.report.backward_count, session.report.forward_count) == (1, 1)
