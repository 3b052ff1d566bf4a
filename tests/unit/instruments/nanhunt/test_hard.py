"""The hard cases of the issue, one by one: right, or one line that says what could not be done; never a crash."""

# ruff: noqa: PT012 - what raises is a whole step, watched

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchdebug_magics import NonFiniteError, nanhunt

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.ones(3, 2)


@pytest.fixture
def compiler() -> Iterator[Any]:
    torch._dynamo.reset()
    yield torch.compile
    torch._dynamo.reset()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))


class Root(nn.Module):
    """NaN in its forward from the call `bad` on."""

    def __init__(self, bad: int = 0) -> None:
        super().__init__()
        self.lin, self.bad, self.calls = nn.Linear(2, 2), bad, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lin(x)
        self.calls += 1
        if self.calls > self.bad:
            h = (h * 0 - 1).sqrt()  # born here
        return h


def right(session: Any, op: str = "sqrt", phase: str = "forward", **fields: Any) -> None:
    finding = session.report.finding
    assert finding is not None, session.report.verdict
    assert (finding.op, finding.phase) == (op, phase), session.report.problems
    for name, value in fields.items():
        assert getattr(finding, name) == value, name


def right_or_said(session: Any, op: str = "sqrt") -> None:
    finding = session.report.finding
    assert finding is not None, session.report.verdict
    assert finding.op == op or session.report.problems


def healthy(session: Any) -> None:
    assert not session.report.found, session.report.verdict
    assert session.report.problems == ()


# ------------------------------------------------------------------------------------------------ loops


def test_no_model_and_no_backward() -> None:
    with nanhunt() as session:
        assert torch.ones(2).log().sum() == 0
    healthy(session)
    assert "Nothing to check" in session.report.verdict


def test_two_models_and_two_optimizers(model: nn.Module) -> None:
    other = Root(bad=1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, other)]
    with pytest.raises(NonFiniteError), nanhunt() as session:
        for _ in range(3):
            for one, optimizer in zip((model, other), optimizers, strict=True):
                loss = one(X).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    right(session, module="", step=3, backward=3)


def test_lbfgs(model: nn.Module) -> None:
    optimizer, calls = torch.optim.LBFGS(model.parameters(), max_iter=4), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        calls.append(1)
        loss = model(X).square().mean()
        if len(calls) > 6:
            loss = loss + (loss * 0 - 1).sqrt()
        loss.backward()
        return loss

    with pytest.raises(NonFiniteError), nanhunt() as session:
        for _ in range(5):
            optimizer.step(closure)
    right(session, phase="loss")


def test_lbfgs_without_anything_wrong(model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(X) - 1).square().mean()
        loss.backward()
        return loss

    with nanhunt() as session:
        for _ in range(3):
            optimizer.step(closure)
    healthy(session)
    assert session.report.steps_count == 3


def test_gradient_accumulation(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(NonFiniteError), nanhunt() as session:
        for step in range(3):
            for part in range(4):
                out = model(X)
                loss = (out * 0 - 1).sqrt().mean() if (step, part) == (1, 2) else out.mean()
                (loss / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    right(session, phase="loss", step=1, backward=6)
    assert all(bool(torch.isfinite(one).all()) for one in model.parameters())


def test_next_is_not_drawn_again(model: nn.Module) -> None:
    batches = iter([torch.full((3, 2), float(value)) for value in range(10)])
    with nanhunt(keep_going=True) as session:
        for step in range(4):
            h = model(next(batches)).square() + 1
            loss = (h * float(step != 1) - float(step == 1)).sqrt().sum()
            loss.backward()
    right(session, phase="loss", backward=1)
    assert float(next(batches)[0, 0]) == 4.0


@pytest.mark.thorough  # twelve seconds of imports for what two plants of `nan_cases` show as well, of the same library
def test_lightning() -> None:
    import logging

    from lightning.pytorch import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Root(bad=2)

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            out = self.net(batch[0])
            return out.mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    with pytest.raises(NonFiniteError), nanhunt() as session:
        trainer.fit(Lit(), data)
    right_or_said(session)
    assert session.report.finding.step == 2


def test_a_trainer_class_as_huggingface_has_it() -> None:
    class Trainer:
        def __init__(self, model: nn.Module, data: list[torch.Tensor]) -> None:
            self.model, self.data = model, data
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
            self.losses = 0.0

        def compute_loss(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
            return model(inputs).mean()

        def training_step(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
            model.train()
            loss = self.compute_loss(model, inputs)
            (loss / 2).backward()
            return loss.detach()

        def train(self) -> None:
            for step, inputs in enumerate(self.data):
                self.losses += self.training_step(self.model, inputs)
                if step % 2:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()

    with pytest.raises(NonFiniteError), nanhunt() as session:
        Trainer(Root(bad=5), [X] * 10).train()
    right(session, module="", step=2, backward=5)
    assert session.report.reproduced is True


# ------------------------------------------------------------------------------------------------ autograd


def test_a_model_that_is_a_reentrant_checkpoint_as_a_whole() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(NonFiniteError), nanhunt() as session:
        for _ in range(2):
            z = checkpoint(model, torch.rand(4, 3).requires_grad_(), use_reentrant=True)
            squares = (z[:, None] - z[None]).pow(2).sum(-1)
            loss = squares.sqrt().mean()
            loss.backward()
    assert session.report.finding.op == "sqrt"
    assert session.report.finding.location.source == "loss = squares.sqrt().mean()"
    assert session.report.forward_count == 0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("bad", ["forward", "backward"])
def test_checkpoints(reentrant: bool, bad: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def block(self, x: torch.Tensor) -> torch.Tensor:
            h = self.two(x)
            return (h * 0 - 1).sqrt() if bad == "forward" else (h * 0).sqrt()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, self.one(x), use_reentrant=reentrant)

    model = Net()
    with pytest.raises(NonFiniteError), nanhunt() as session:
        loss = model(X).sum()
        loss.backward()
    right(session, phase=bad, module="")


@pytest.mark.parametrize("bad", ["forward", "backward"])
def test_a_model_that_is_made_inside_the_step(bad: str) -> None:
    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 0 - 1).sqrt() if bad == "forward" else (x * 0).sqrt()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.part = nn.Linear(2, 2), Part()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(self.lin(x))

    with pytest.raises(NonFiniteError), nanhunt() as session:
        loss = Net()(X).sum()
        loss.backward()
    right(session, phase=bad, module="part")


def test_a_zero_tensor_in_a_double_backward_kills_nobody() -> None:
    x = torch.ones(3, requires_grad=True)
    with nanhunt(layers=True) as session:
        (slope,) = torch.autograd.grad((x * 2).sum(), x, create_graph=True)
        loss = slope.sum() + x.sum()
        loss.backward()
    healthy(session)


def test_a_gradient_penalty_at_zero(model: nn.Module) -> None:
    x = torch.ones(3, 2, requires_grad=True)
    with pytest.raises(NonFiniteError), nanhunt() as session:
        out = (model(x) * 0).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = slope.square().sum(1).sqrt().mean()
        loss.backward()
    right(session, phase="backward")


@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap of grad", "functional_call", "jacrev", "jvp"])
@pytest.mark.parametrize("bad", [False, True])
def test_functional_transforms(transform: str, bad: bool, model: nn.Module) -> None:
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    scale = -1.0 if bad else 1.0

    def loss_of(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(model, parameters, (x,)).square().sum() * 0 + scale).sqrt()

    with nanhunt(keep_going=True) as session:
        if transform == "grad":
            torch.func.grad(loss_of)(parameters, X)
        elif transform == "vmap":
            torch.vmap(loss_of, in_dims=(None, 0))(parameters, X)
        elif transform == "vmap of grad":
            torch.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(parameters, X)
        elif transform == "jacrev":
            torch.func.jacrev(loss_of)(parameters, X)
        elif transform == "jvp":
            torch.func.jvp(lambda x: loss_of(parameters, x), (X,), (X,))
        else:
            live = {name: one.clone().requires_grad_() for name, one in parameters.items()}
            loss = loss_of(live, X)
            loss.backward()
    if transform == "functional_call":
        assert session.report.found is bad
    elif not bad:
        healthy(session)


# ------------------------------------------------------------------------------------------------ the compiler


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model(compiler: Any, backend: str) -> None:
    compiled = compiler(Root(), backend=backend)
    with pytest.raises(NonFiniteError), nanhunt() as session:
        loss = compiled(X).mean()
        loss.backward()
    right(session, module="")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_without_anything_wrong(compiler: Any, backend: str, model: nn.Module) -> None:
    compiled = compiler(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with nanhunt() as session:
        for _ in range(3):
            loss = compiled(X).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    healthy(session)
    assert session.report.steps_count == 3


@pytest.mark.parametrize("when", ["before", "inside"])
def test_module_compile_in_place(compiler: Any, when: str) -> None:
    model = Root(bad=1)
    if when == "before":
        model.compile(backend="eager")
    with pytest.raises(NonFiniteError), nanhunt() as session:
        if when == "inside":
            model.compile(backend="eager")
        for _ in range(3):
            loss = model(X).mean()
            loss.backward()
    right_or_said(session)
    assert session.report.finding.backward == 1


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_forward_step_with_fullgraph(compiler: Any, backend: str, bad: bool, model: nn.Module) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return (out * 0 - 1).sqrt().sum() if bad else out.square().sum()

    compiled = compiler(forward, backend=backend, fullgraph=True)
    with nanhunt(keep_going=True) as session:
        for _ in range(2):
            loss = compiled(X)
            loss.backward()
    if bad:
        right_or_said(session)
        assert session.report.finding.kind == "nan"
    else:
        healthy(session)


@pytest.mark.parametrize("bad", [False, True])
def test_a_compiled_whole_step_with_the_backward_inside(compiler: Any, bad: bool, model: nn.Module) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        loss = (out * 0 - 1).sqrt().sum() if bad else out.square().sum()
        loss.backward()
        return loss

    compiled = compiler(step, backend="eager")
    with nanhunt(keep_going=True) as session:
        for _ in range(2):
            compiled(X)
    if bad:
        right_or_said(session)
    else:
        healthy(session)


def test_what_was_compiled_before_is_not_compiled_anew_under_us(compiler: Any, model: nn.Module) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    compiled = compiler(model, backend=counter)
    compiled(X).sum().backward()
    before = counter.frame_count
    with nanhunt():
        for _ in range(3):
            loss = compiled(X).sum()
            loss.backward()
    compiled(X).sum().backward()
    assert counter.frame_count - before <= 1


# ------------------------------------------------------------------------------------------------ values


class Structured(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.lin, self.make = nn.Linear(2, 2), make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make((self.lin(x) * 0 - 1).sqrt())


@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize(
    ("make", "take"),
    [
        (lambda h: ({"a": {"b": h}},), lambda out: out[0]["a"]["b"]),
    ],
    ids=["deep"],
)
def test_structured_outputs(make: Any, take: Any, grads: bool) -> None:
    model = Structured(make)
    with pytest.raises(NonFiniteError), nanhunt() as session, torch.set_grad_enabled(grads):
        loss = take(model(X)).sum()
        if grads:
            loss.backward()
    right(session, module="")


@pytest.mark.parametrize("bad", [False, True])
def test_complex_numbers(bad: bool) -> None:
    w = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    with nanhunt(keep_going=True) as session:
        h = w * (1 + 2j)
        loss = (h / (0 if bad else 1)).abs().sum()
        loss.backward()
    assert session.report.found is bad
    if bad:
        right(session, op="div", phase="loss")


@pytest.mark.parametrize("bad", [False, True])
def test_sparse_gradients(bad: bool) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.01)
    with nanhunt(keep_going=True) as session:
        for step in range(3):
            out = table(torch.tensor([1, 1, 2]))
            loss = (out * 0 - 1).sqrt().sum() if bad and step == 1 else out.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert session.report.found is bad
    if bad:
        right(session, phase="loss", step=1)


nan = float("nan")
WEIRD: dict[str, Any] = {
    "meta": lambda: torch.empty(2, 2, device="meta"),
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "strided nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "zero": lambda: torch._efficientzerotensor((2,)),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "lazy": lambda: nn.LazyLinear(3).weight,
}


class Holds(nn.Module):
    """A weird tensor as a parameter, a buffer, an argument and an output of a part, beside an ordinary way."""

    def __init__(self, weird: Any, place: str) -> None:
        super().__init__()
        self.lin, self.place, self.part = nn.Linear(2, 2), place, nn.Identity()
        if place == "buffer":
            self.register_buffer("weird", weird)
        elif place == "parameter":
            self.weird = weird if isinstance(weird, nn.Parameter) else nn.Parameter(weird, requires_grad=False)

    def forward(self, x: torch.Tensor, weird: Any = None) -> Any:
        if weird is not None:
            self.part(weird)
        h = self.lin(x)
        return (h, weird) if self.place == "output" else h


@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize(
    ("name", "place"),
    [(name, place) for name in WEIRD for place in ("parameter", "buffer", "argument", "output") if name != "lazy" or place == "parameter"],
)
def test_weird_tensors_beside_a_step_are_no_error_and_hide_nothing(name: str, place: str, grads: bool) -> None:
    weird = WEIRD[name]()
    model = Holds(weird, place)
    extra = (weird,) if place in {"argument", "output"} else ()
    with nanhunt(keep_going=True) as session, torch.set_grad_enabled(grads):
        for step in range(2):
            out = model(X, *extra)
            out = out[0] if isinstance(out, tuple) else out
            loss = (out * 0 - 1).sqrt().sum() if step and grads else out.sum()
            if grads:
                loss.backward()
    if grads:
        right_or_said(session)
        assert session.report.backward_count == 2
    elif "nan" not in name:
        healthy(session)


@pytest.mark.parametrize("when", ["first call", "later"])
def test_lazy_modules(when: str) -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d(), nn.Linear(2, 1))
    if when == "later":
        model(X)
    with pytest.raises(NonFiniteError), nanhunt() as session:
        out = model(X)
        loss = (out * 0 - 1).sqrt().sum()
        loss.backward()
    right(session, phase="loss")


def test_nested_tensors_through_a_step() -> None:
    w = torch.ones(3, requires_grad=True)
    with nanhunt(keep_going=True) as session:
        nested = torch.nested.as_nested_tensor([w[:2], w[1:]], layout=torch.jagged)
        h = (nested * 0 - 1).sqrt()
        loss = h.values().sum()
        loss.backward()
    right_or_said(session)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("bad", [False, True])
def test_inference(mode: Any, bad: bool) -> None:
    model = Root(bad=0 if bad else 100)
    with nanhunt(keep_going=True) as session, mode():
        for _ in range(3):
            model(X)
    assert session.report.found is bad
    assert session.report.forward_count == 3
    if bad:
        right(session, module="")
    assert model.calls == 3


# ------------------------------------------------------------------------------------------------ modules


@pytest.mark.parametrize("where", ["", "2"])
def test_a_module_that_is_bad_before_the_cell(where: str, model: nn.Module) -> None:
    with torch.no_grad():
        (model[2] if where else model[0]).weight[0, 0] = nan
    with pytest.raises(NonFiniteError), nanhunt() as session:
        loss = model(X).sum()
        loss.backward()
    right(session, op=None, phase="parameter", tensor="2.weight" if where else "0.weight", diagnosis="bad_parameter")


def test_a_module_that_is_bad_and_not_used(model: nn.Module) -> None:
    model.unused = nn.Linear(2, 2)
    with torch.no_grad():
        model.unused.weight.fill_(nan)

    class Wrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.idle = nn.Linear(2, 1), nn.Linear(2, 2)
            with torch.no_grad():
                self.idle.weight.fill_(nan)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    with nanhunt() as session:
        Wrap()(X).sum().backward()
    healthy(session)


def test_modules_in_a_thread_of_the_users(model: nn.Module) -> None:
    import threading

    def work() -> None:
        with torch.no_grad():
            for _ in range(20):
                model(X)

    thread = threading.Thread(target=work)
    with nanhunt() as session:
        model(X).sum().backward()
        thread.start()
        for _ in range(5):
            model(X).sum().backward()
        thread.join()
    healthy(session)


def test_scripted_and_traced_modules(model: nn.Module) -> None:
    traced = torch.jit.trace(model, X)
    with nanhunt(keep_going=True) as session:
        loss = (traced(X) * 0 - 1).sqrt().sum()
        loss.backward()
    right_or_said(session)


def test_fake_tensor_mode_around_a_cell(model: nn.Module) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with nanhunt() as session, FakeTensorMode():
        fake = nn.Linear(2, 1)
        fake(torch.ones(1, 2)).sum().backward()
    assert not session.report.found


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with nanhunt() as session:
        loss = model(torch.empty(3, 2, device="meta")).sum()
        loss.backward()
    assert not session.report.found


def test_data_parallel_wrappers_are_seen_through() -> None:
    with pytest.raises(NonFiniteError), nanhunt() as session:
        loss = nn.DataParallel(Root())(X).sum()
        loss.backward()
    right(session)


def test_averaged_models_of_swa(model: nn.Module) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(model)
    with nanhunt() as session:
        for _ in range(2):
            model(X).sum().backward()
            averaged.update_parameters(model)
        with torch.no_grad():
            averaged(X)
    healthy(session)
