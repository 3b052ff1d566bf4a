"""A model, and all around it, is after `%shapes` what it was before: models put together at random, in every mode, also where they fail."""

from __future__ import annotations

import gc
import random
import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import torchdebug_magics
from torchdebug_magics.instruments.shapes.forward_table import examine_model
from torchdebug_magics.probing.dry_runs import untouched

if TYPE_CHECKING:
    from tests.torch_forks import TorchForks

WIDTH = 4
SEEN: list[Any] = []
STATE = torch.zeros(WIDTH)
COUNTS: dict[str, Any] = {"calls": 0, "nested": {"outputs": []}}


class Keeping(nn.Module):
    """Caches a tensor, appends to lists in lists, makes new attributes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.cache = None
        self.history: list[Any] = []
        self.table = {"a": {"b": [torch.zeros(WIDTH)]}, "seen": set()}
        self.position = torch.arange(float(WIDTH))

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.arange(WIDTH)
        y = self.layer(x + self.cache + self.position + self.table["a"]["b"][0])
        self.table["a"]["b"][0] += 1
        self.table["a"]["b"].append(y)
        self.table["seen"].add(y)
        self.history.append({"y": y})
        self.position = y
        self.new = y
        return y


class Writing(nn.Module):
    """Writes buffers, weights, globals and its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))
        self.plain = [nn.BatchNorm1d(WIDTH)]

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
            self.mean += x.mean(0)
            STATE.add_(1)
        self.count = self.count + 1
        COUNTS["calls"] += 1
        COUNTS["nested"]["outputs"].append(x)
        x.add_(1)
        return self.plain[0](x) * self.weight + self.mean + STATE


class Toggling(nn.Module):
    """Changes flags, modes, hooks and gradients."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        Toggling.calls += 1
        self.training = not self.training
        self.layer.weight.requires_grad_(requires_grad=False)
        self.layer.register_forward_hook(lambda *_: None)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(True)
        warnings.simplefilter("ignore")
        self.layer.bias.sum().backward()
        torch.set_default_dtype(torch.float32)
        return self.layer(x)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        import numpy as np

        return self.drop(x) + torch.rand(WIDTH) + random.random() + np.random.rand()  # noqa: NPY002 - the one that users seed


class Reading(nn.Module):
    """Asks for a number, which only a real run has."""

    def forward(self, x):
        return x + 1 if x.sum().item() > 0 else x


class Inner(nn.Module):
    """A gradient inside the forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.layer(leaf).sum(), leaf, create_graph=True)
        return x + gradient


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.cell(x[:, None])[0][:, 0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]


class Raising(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


def spectral():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def old_spectral():
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


def compiled():
    return torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager")


def frozen():
    return nn.BatchNorm1d(WIDTH).eval()


def scripted():
    return torch.jit.script(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)))


BLOCKS = [
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.ReLU(inplace=True),
    Keeping,
    Writing,
    Toggling,
    Drawing,
    Reading,
    Inner,
    Recurrent,
    Attention,
    spectral,
    old_spectral,
    compiled,
    frozen,
    scripted,
]


def hooked(block, pick):
    """Hooks as users write them: one appends to a global, one to a closure, one changes the output."""
    outputs: list[Any] = []
    counts = {"calls": 0}

    def append(_module, _inputs, output):
        outputs.append(output)
        SEEN.append(output)
        counts["calls"] += 1

    def change(_module, _inputs, output):
        return output * 2

    if not isinstance(block, torch.jit.ScriptModule):
        block.register_forward_hook(pick.choice([append, change]))
        if pick.random() < 0.3:
            block.register_forward_pre_hook(lambda _module, inputs: COUNTS["nested"]["outputs"].append(inputs))
    return block, outputs, counts


def put_together(seed):
    """A model of three to six blocks, some hooked, one perhaps twice; and what its hooks fill."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    blocks, around = [], []
    for _ in range(pick.randint(3, 6)):
        block = pick.choice(BLOCKS)()
        if pick.random() < 0.4:
            block, *filled = hooked(block, pick)
            around += filled
        blocks.append(block)
    if pick.random() < 0.3:
        blocks.append(blocks[0])
    model = nn.Sequential(*blocks)
    model.train(pick.random() < 0.7)
    return model, around


def fingerprint(value, depth=0):
    """Identities all the way down; of tensors the numbers and the count of writes too."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().clone() if value.layout == torch.strided else None
        return id(value), value._version, value.requires_grad, id(value.grad) if value.is_leaf else None, Numbers(numbers)
    if isinstance(value, nn.Module):
        return id(value)
    if depth < 6 and isinstance(value, dict):
        return id(value), [(key, fingerprint(item, depth + 1)) for key, item in value.items()]
    if depth < 6 and isinstance(value, (list, tuple)):
        return id(value), [fingerprint(item, depth + 1) for item in value]
    if isinstance(value, set):
        return id(value), set(map(id, value))
    return id(value)


class Numbers:
    """Compares to the last bit."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __eq__(self, other):
        return self.tensor is None or torch.equal(self.tensor.nan_to_num(), other.tensor.nan_to_num())

    __hash__ = None

    def __repr__(self):
        return str(self.tensor)


def world(model, *values):
    import numpy as np

    state = {f"value {place}": fingerprint(value) for place, value in enumerate(values)}
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            state[path] = [fingerprint(tensor) for tensor in (*module.parameters(), *module.buffers())], module.training
        else:
            state[path] = type(module), {name: fingerprint(value) for name, value in module.__dict__.items()}
    for hidden in (part for module in model.modules() for part in module.__dict__.get("plain", ())):
        state[f"plain {id(hidden)}"] = {name: fingerprint(value) for name, value in hidden.__dict__.items()}
    state["globals"] = fingerprint(SEEN), fingerprint(STATE), fingerprint(COUNTS), Toggling.calls
    state["generators"] = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002 - the global one
    state["flags"] = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        sys.getrecursionlimit(),
        torch.is_warn_always_enabled(),
        list(warnings.filters),
        torch.is_autocast_enabled("cpu"),
        torch.distributions.Distribution._validate_args,
    )
    state["global hooks"] = {
        name: dict(table) for name, table in vars(torch_module).items() if name.startswith("_global_") and isinstance(table, dict)
    }
    return state


def differences(before, after):
    assert before.keys() == after.keys()
    return [f"{name}: {before[name]} became {after[name]}" for name in before if before[name] != after[name]]


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("seed", range(40))
def test_a_model_is_what_it_was(seed, real):
    model, around = put_together(seed)
    x = torch.randn(3, WIDTH)
    before = world(model, x, *around)
    report = examine_model(model, x, real=real).report
    assert differences(before, world(model, x, *around)) == []
    assert report.failure is None, report.failure
    assert report.rows[0].output_shapes == ((3, WIDTH),)


@pytest.mark.parametrize("error", [ValueError("of the model's"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("seed", range(12))
def test_a_forward_that_ends_early_leaves_nothing(seed, error):
    model, around = put_together(seed)
    model.insert(random.Random(seed).randint(0, len(model)), Raising(error))
    x = torch.randn(3, WIDTH)
    before = world(model, x, *around)
    with warnings.catch_warnings():
        try:
            report = examine_model(model, x).report
        except KeyboardInterrupt:
            report = None
        assert (report is None) == isinstance(error, KeyboardInterrupt)
    if report is not None:
        assert report.failure.error == "ValueError: of the model's"
    assert differences(before, world(model, x, *around)) == []


@pytest.mark.parametrize("at", [1, 5, 20, 60])
def test_an_interrupt_in_any_op_leaves_nothing(at, monkeypatch):
    from torchdebug_magics.probing.dry_runs.arithmetic import Arithmetic

    model = nn.Sequential(Keeping(), Writing(), nn.BatchNorm1d(WIDTH), Recurrent(), Attention(), Drawing())
    x = torch.randn(3, WIDTH)
    before = world(model, x)
    left = [at]
    followed = Arithmetic._followed

    def interrupted(self, *rest):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return followed(self, *rest)

    monkeypatch.setattr(Arithmetic, "_followed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        examine_model(model, x)
    monkeypatch.undo()
    assert differences(before, world(model, x)) == []


def test_a_graph_that_is_alive_can_still_go_backward():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Writing(), nn.Tanh())
    x = torch.randn(3, WIDTH)
    loss = model(x.clone()).sum()
    examine_model(model, x)
    examine_model(model, x, real=True)
    loss.backward()
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)


def test_gradients_and_the_inputs_own_graph_stay():
    model = nn.Linear(WIDTH, WIDTH)
    model(torch.randn(2, WIDTH)).sum().backward()
    before = {name: (one.grad, one.grad.clone()) for name, one in model.named_parameters()}
    x = torch.randn(2, WIDTH, requires_grad=True)
    y = x * 2
    for real in (False, True):
        examine_model(model, y, real=real)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    assert all(one.grad is before[name][0] and torch.equal(one.grad, before[name][1]) for name, one in model.named_parameters())


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_the_model_dies_with_its_last_name(real):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Keeping(), nn.ReLU())  # which saves its own result for the backward pass
    held = [weakref.ref(one) for one in (model, model[0].weight, model[1])]
    report = torchdebug_magics.shapes(model, torch.randn(2, WIDTH), real=real)
    failed = torchdebug_magics.shapes(model, torch.randn(2, 7))
    del model
    gc.collect()
    assert [one() for one in held] == [None, None, None]
    assert report.rows
    assert failed.failure is not None


def test_no_tensor_of_the_run_is_alive():
    gc.collect()
    before = {id(one) for one in gc.get_objects() if issubclass(type(one), torch.Tensor)}
    model = Keeping()
    report = examine_model(model, torch.randn(2, WIDTH), real=True).report
    del model
    gc.collect()
    assert report.rows
    assert [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and id(one) not in before] == []


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_containers_that_are_given_stay_as_they_are(real):
    class Model(nn.Module):
        def forward(self, batch, out, cache):
            y = batch.pop("x") + 1
            out.append(y)
            cache["k"].append(y)
            batch["extra"] = y.mul_(2)
            return y

    batch, out, cache = {"x": torch.ones(2)}, [], {"k": [torch.zeros(2)]}
    before = fingerprint((batch, out, cache))
    report = examine_model(Model(), batch, out, cache, real=real).report
    assert report.failure is None
    assert fingerprint((batch, out, cache))[1] == before[1]


def test_a_model_that_moves_on_in_another_thread_is_never_seen_empty():
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(50)])
    missing: list[str] = []
    stop = threading.Event()

    def look():
        while not stop.is_set():
            missing.extend(name for name in ("_parameters", "_modules", "training") if name not in model.__dict__)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(5):
            examine_model(model, torch.randn(1, WIDTH))
    finally:
        stop.set()
        watcher.join()
    assert missing == []


ONCE = """
import warnings
import torch
import torchdebug_magics
model, x = torch.nn.LSTM(4, 4, proj_size=2), torch.randn(2, 3, 4)
warnings.simplefilter("error")
assert torchdebug_magics.shapes(model, x).mode == "fake"
try:
    model(x)
except UserWarning as warning:
    print(warning)
"""


def test_what_torch_says_but_once_is_still_to_be_said(torch_forks: TorchForks):
    assert "LSTM with projections is not supported" in torch_forks.check(ONCE)


def test_however_large_a_model_is_it_gets_its_own_tensors_back(monkeypatch):
    """What is kept beside the tables of modules is bounded; the tables themselves get stand-ins, and are all kept."""
    monkeypatch.setattr(untouched, "_MOST_BESIDE", 0)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(400)])
    before = [id(parameter) for parameter in model.parameters()]
    assert examine_model(model, torch.zeros(1, 2)).report.failure is None
    assert [id(parameter) for parameter in model.parameters()] == before
