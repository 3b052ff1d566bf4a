"""Every way to name what is trained: models, batches, steps, loaders, trainers and cells; and wrong ones, in one line."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it
from torch.utils.data import DataLoader, TensorDataset

import torchdebug_magics
from tests.plants.state import state_of
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.overfit.subjects import cut

if TYPE_CHECKING:
    from tests.doors import Observe

pytestmark = pytest.mark.filterwarnings("ignore")

LOOP = """\
import torch
from torch.nn import functional as F
losses = []
for epoch in range(3):
    correct = count = 0
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        correct, count = correct + (output.argmax(1) == y).sum().item(), count + len(y)
    accuracy = correct / count
"""


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))


def _data(many: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(many, 10), torch.arange(many) % 4


def _adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


class Twin(nn.Module):
    """Takes two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(10, 16), nn.Linear(10, 16), nn.Linear(32, 4)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(torch.cat([self.left(left), self.right(right)], 1)))


class Recurrent(nn.Module):
    """Gives a tuple, and takes its batch in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(10, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        output, state = self.rnn(x)
        return self.head(output[-1]), state


class Own(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _cases() -> dict[str, tuple[tuple[Any, ...], dict[str, Any], int | None]]:
    x, y = _data()
    twin, recurrent, own, net, code = Twin(), Recurrent(), Own(), _net(), nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 6))
    lazy = torch.optim.LBFGS(net.parameters(), lr=0.5)
    return {
        "two inputs": ((twin, (x, x.flip(0), y), F.cross_entropy, _adam(twin)), {}, 8),
        "inputs in a tuple": ((twin, ((x, x.flip(0)), y), nn.CrossEntropyLoss(), _adam(twin)), {}, 8),
        "batch second": ((recurrent, (x.expand(5, 32, 10), y), F.cross_entropy, _adam(recurrent)), {}, None),
        "a dict with the loss": ((own, {"x": x, "labels": y}, _adam(own)), {}, 8),
        "a dict and a loss function": ((net, {"input": x, "label": y}, F.cross_entropy, _adam(net)), {}, 8),
        "only a model and a batch": ((own, {"x": x, "labels": y}), {}, 8),
        "the optimizer by name": ((net, (x, y), F.cross_entropy), {"keywords": {"optimizer": _adam(net)}}, 8),
        "the optimizer before the loss": ((net, (x, y), _adam(net), F.cross_entropy), {}, 8),
        "closures": ((net, (x, y), F.cross_entropy, lazy), {}, 8),
        "an autoencoder": ((code, torch.randn(8, 6), nn.MSELoss(), _adam(code)), {}, 8),
        "fewer samples": ((net, (x, y), F.cross_entropy, _adam(net)), {"samples": 4}, 4),
        "a loader": ((net, DataLoader(TensorDataset(x, y), 16), F.cross_entropy, _adam(net)), {}, 8),
        "epochs of a subset": ((net, DataLoader(TensorDataset(x, y), 8, shuffle=True), F.cross_entropy, _adam(net)), {"samples": 24}, 24),
        "a compiled model": ((torch.compile(net, backend="eager"), (x, y), F.cross_entropy, _adam(net)), {}, 8),
        "in evaluation mode": ((_net().eval(), (x, y), F.cross_entropy), {}, 8),
    }


@pytest.mark.parametrize("name", list(_cases()))
def test_it_learns_and_all_is_as_before(name: str) -> None:
    values, options, samples = _cases()[name]
    keywords = options.pop("keywords", {})
    named = (*values, *keywords.values())
    before = state_of(named)
    report = torchdebug_magics.overfit(*values, **options, **keywords)
    assert report.passed, report.verdict
    assert report.samples == samples or samples is None
    assert state_of(named) == before


def test_a_scheduler_that_lowers_the_rate_too_early_is_named() -> None:
    net, (x, y) = _net(), _data(8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    report = torchdebug_magics.overfit(step)
    assert (report.cause, report.verified) == ("learning_rate", True)
    assert report.headline.startswith("The scheduler lowers the learning rate from 0.1 to ")


def test_a_language_model_with_its_own_labels() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 64, (16, 12))
    ids[:, 0] = torch.arange(16)
    batch = transformers.BatchEncoding({"input_ids": ids, "labels": ids})
    before = state_of((model,))
    report = torchdebug_magics.overfit(model, batch, torch.optim.AdamW(model.parameters(), lr=5e-3))
    assert report.passed, report.verdict
    assert report.samples == 8
    assert state_of((model,)) == before


def test_a_lightning_trainer_and_its_module(tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def training_step(self, batch: Any, _number: int) -> torch.Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    module, loader = Module(), DataLoader(TensorDataset(*_data()), 16)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    for values in ((module, loader), (trainer, module, loader)):
        report = torchdebug_magics.overfit(*values)
        assert report.cause == "learning_rate", report.verdict
        assert report.verified


class Trainer:
    """What `%overfit` uses of the class of that name in transformers, which itself needs a further package."""

    def __init__(self, model: nn.Module, data: DataLoader[Any]) -> None:
        self.model, self.data, self.optimizer = model, data, None

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self.data

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def create_optimizer(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        return self.optimizer

    def compute_loss(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        return model(**inputs)["loss"]


def test_a_trainer_that_computes_its_loss() -> None:
    x, y = _data()
    samples = [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]
    trainer = Trainer(Own(), DataLoader(samples, 16, shuffle=True))
    before = state_of((trainer,))
    report = torchdebug_magics.overfit(trainer)
    assert report.cause == "learning_rate", report.verdict
    assert trainer.optimizer is None
    assert state_of((trainer,)) == before


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((3,), "the first value must be a model"),
        ((_net(),), "write `%overfit model .inputs, targets."),
        ((nn.Flatten(), _data(), F.cross_entropy), "has no parameters"),
        ((_net(), (torch.empty(0, 10), torch.empty(0)), F.cross_entropy), "the batch is empty"),
        ((_net(), _data()), "name a loss function"),
        ((_net(), torch.randn(4, 10), torch.randn(4)), "the loss function must be callable"),
    ],
)
def test_wrong_use_is_one_line(values: tuple[Any, ...], says: str) -> None:
    with pytest.raises(TorchDebugError, match=says) as raised:
        torchdebug_magics.overfit(*values)
    assert "\n" not in str(raised.value)


def test_a_gan_is_refused_and_put_back() -> None:
    maker, judge = nn.Linear(4, 10), nn.Linear(10, 1)
    mine, its = _adam(maker), _adam(judge)

    def step() -> torch.Tensor:
        its.zero_grad()
        F.softplus(judge(maker(torch.randn(8, 4)).detach())).mean().backward()
        its.step()
        mine.zero_grad()
        loss = F.softplus(-judge(maker(torch.randn(8, 4)))).mean()
        loss.backward()
        mine.step()
        return loss

    before = state_of((maker, judge, mine, its))
    with pytest.raises(TorchDebugError, match="as a GAN does"):
        torchdebug_magics.overfit(step)
    assert state_of((maker, judge, mine, its)) == before


@pytest.mark.parametrize("after", [1, 40, 150, 210, 260])
def test_an_interrupt_puts_everything_back(after: int) -> None:
    model, calls = _net(), ctypes.c_long()  # which no trial puts back
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, y = _data(8)

    def step() -> torch.Tensor:
        calls.value += 1
        if calls.value == after:
            raise KeyboardInterrupt
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    before = state_of((model, optimizer))
    with pytest.raises(KeyboardInterrupt):
        torchdebug_magics.overfit(step)
    assert state_of((model, optimizer)) == before


def test_an_error_of_the_step_is_raised_as_it_is() -> None:
    model = _net()
    x, y = _data(8)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        torchdebug_magics.overfit(model, (x[:, :7], y), F.cross_entropy, _adam(model))
    report = torchdebug_magics.overfit(model, (x, y + 1), F.cross_entropy, _adam(model))
    assert report.cause == "off_by_one_labels"
    assert report.verified
    assert "out of bounds" in report.error


def test_out_of_memory_in_a_trial_ends_that_trial_only() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.net[0].weight.requires_grad:  # as soon as it is unfrozen
                raise torch.OutOfMemoryError
            return self.net(x)

    model = Greedy()
    model.net[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    report = torchdebug_magics.overfit(model, _data(8), F.cross_entropy, optimizer)
    assert report.trials[0].suspect == "frozen"
    assert "OutOfMemoryError" in report.trials[0].error
    assert report.cause == "learning_rate", report.verdict


def test_the_first_batch_of_a_loop_is_repeated(observe: Observe) -> None:
    model, (x, y) = _net(), _data(64)
    optimizer = _adam(model)
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
    weights = [one.detach().clone() for one in model.parameters()]
    observed = observe("overfit", LOOP, namespace={"model": model, "optimizer": optimizer, "loader": loader})
    assert observed.error is None
    assert observed.report.passed, observed.report.verdict
    assert observed.report.samples == 8
    assert all(map(torch.equal, weights, model.parameters()))
    assert not optimizer.state
    assert all(one.grad is None for one in model.parameters())


def test_a_loop_that_stalls_is_run_again(shell: Any) -> None:
    from tests.doors import MagicDoor

    model, (x, y) = nn.Sequential(_net(), nn.Softmax(1)), _data(64)
    optimizer, loader = _adam(model), DataLoader(TensorDataset(x, y), 16, shuffle=True)
    observed = MagicDoor(shell)("overfit", LOOP, namespace={"model": model, "optimizer": optimizer, "loader": loader})
    assert observed.report.cause == "double_softmax", observed.report.verdict
    assert observed.report.verified
    assert not optimizer.state


NEVER_ZEROED = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
"""


def test_a_fact_is_said_though_no_training_proves_it(observe: Observe) -> None:
    report = observe("overfit", NEVER_ZEROED).report
    assert not report.passed
    assert "gradients accumulate over the steps: zero_grad() is missing" in report.verdict


def test_five_cases_of_a_probe(observe: Observe) -> None:
    assert "draws no batch" in observe("overfit", "pass\n").report.verdict
    failed = observe("overfit", "raise ValueError('mine')\n")
    assert str(failed.error) == "mine"
    nested = observe("overfit", "import torchdebug_magics\nwith torchdebug_magics.overfit() as inner:\n    pass\n")
    assert nested.error is None


def test_a_subset_is_balanced_and_keeps_the_loader() -> None:
    data = TensorDataset(torch.randn(90, 3), torch.arange(90) // 30)
    small = torchdebug_magics.subset(DataLoader(data, 7, shuffle=True, collate_fn=list), 9)
    drawn = [sample for batch in small for sample in batch]
    assert small.batch_size == 7
    assert sorted(int(label) for _, label in drawn) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    plain = torchdebug_magics.subset(DataLoader(TensorDataset(torch.randn(20, 3)), 4), 5)
    assert sum(len(batch[0]) for batch in plain) == 5


def test_lists_and_second_dimensions_are_cut() -> None:
    batch = {"x": torch.zeros(12, 3), "state": torch.zeros(2, 12, 5), "names": list("abcdefghijkl"), "scale": torch.tensor(2.0)}
    small = cut(batch, 4)
    assert small["x"].shape == (4, 3)
    assert small["state"].shape == (2, 4, 5)
    assert small["names"] == list("abcd")
    assert small["scale"] == 2


def test_leaks_between_samples_are_named() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(10, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x + torch.cat([x[1:3].sum(0, keepdim=True), torch.zeros_like(x[1:])]))

    model = Leaky()
    assert torchdebug_magics.overfit(model, _data(), F.cross_entropy, _adam(model)).leaks == (1, 2)
    plain = _net()
    assert torchdebug_magics.overfit(plain, _data(), F.cross_entropy, _adam(plain)).leaks == ()


MADE_IN_THE_CELL = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 10), torch.randint(0, 3, (64,))), batch_size=8)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    def forward(self, x):
        return self.body(x)
model = Net()
before = [one.detach().clone() for one in model.parameters()]
opt = torch.optim.Adam(model.parameters(), lr={rate})
for x, y in loader:
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("rate", [1e-2, 1e-9])
def test_a_model_that_the_cell_makes_is_unchanged_too(rate: float, observe: Observe) -> None:
    """A rate of 1e-9 does not learn: further trainings run the whole cell again, with models of their own."""
    observed = observe("overfit", MADE_IN_THE_CELL.format(rate=rate), steps=40)
    names = observed.namespace
    assert observed.report.passed is (rate == 1e-2)
    assert names["opt"].param_groups[0]["params"][0] is names["model"].body[0].weight
    assert all(torch.equal(one, other) for one, other in zip(names["model"].parameters(), names["before"], strict=True))
    assert not names["opt"].state
    assert all(one.grad is None for one in names["model"].parameters())
