"""The three workloads, each a model with its data, its loss and a usual training loop; and bugs to plant in them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BATCHES_COUNT = 4


@dataclass
class Training:
    """All that a step needs. `plant` is where this step goes wrong, "" for nowhere."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Any, torch.Tensor]]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    plant: str = ""
    done_count: int = 0


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    asked: float
    """The most that the sentinel may cost, as a ratio."""
    make: Callable[[torch.device], Training] = field(repr=False)
    block: int
    """Steps timed in one go."""
    rounds: int


def train(training: Training, steps_count: int) -> None:
    """The loop that is timed."""
    model, optimizer, batches, loss_of = training.model, training.optimizer, training.batches, training.loss
    for number in range(training.done_count, training.done_count + steps_count):
        inputs, target = batches[number % BATCHES_COUNT]
        optimizer.zero_grad()
        output = model(inputs)
        loss = loss_of(output, target)
        loss.backward()
        optimizer.step()
    training.done_count += steps_count


def train_badly(training: Training, steps_count: int, plant: str, began: dict[int, float]) -> None:
    """The same loop, whose last step holds a bug; `began` gets the time at which each backward() was called."""
    model, optimizer, batches, loss_of = training.model, training.optimizer, training.batches, training.loss
    for number in range(steps_count):
        training.plant = plant if number == steps_count - 1 else ""
        inputs, target = batches[number % BATCHES_COUNT]
        optimizer.zero_grad()
        output = model(inputs)
        loss = loss_of(output, target)
        if training.plant == "log in the loss":
            loss = loss + (loss.detach() * 0 - 1).log()
        if training.plant == "slope of sqrt in the loss":
            loss = loss + (loss * 0).sqrt()
        began.setdefault(number, time.perf_counter())  # a replay comes by here again, and changes nothing
        loss.backward()
        optimizer.step()


PLANTS = ("log in the first layer", "log in the loss", "slope of sqrt in the loss")


def plant_in_first_layer(training: Training) -> None:
    """So that everything after it is bad, and the way back is the longest."""
    first = next(module for module in training.model.modules() if not list(module.children()))

    def bug(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output + (output.detach() * 0 - 1).log() if training.plant == "log in the first layer" else None

    first.register_forward_hook(bug)


# --- the models ----------------------------------------------------------------------------------------------------------------------


def gpt2(device: torch.device) -> Training:
    """6 layers, 256 wide: about 0.4 s a step on one core."""
    from transformers import GPT2Config, GPT2LMHeadModel

    words = 5000
    config = GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=words, n_positions=128, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).to(device)
    tokens = [torch.randint(0, words, (4, 128), device=device) for _ in range(BATCHES_COUNT)]

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.logits[:, :-1].reshape(-1, words), target[:, 1:].reshape(-1))

    return Training(model, torch.optim.AdamW(model.parameters(), lr=3e-4), [(one, one) for one in tokens], loss)


class Block(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(self.first(x)))


def cnn(device: torch.device) -> Training:
    """A stem, three residual blocks of 32 channels, a linear head."""
    wide = 32
    model = nn.Sequential(
        nn.Conv2d(3, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(),
        Block(wide), nn.MaxPool2d(2), Block(wide), nn.MaxPool2d(2), Block(wide),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 10),
    ).to(device)  # fmt: skip
    batches = [(torch.randn(16, 3, 32, 32, device=device), torch.randint(0, 10, (16,), device=device)) for _ in range(BATCHES_COUNT)]
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batches, functional.cross_entropy)


def mlp(device: torch.device) -> Training:
    """20 layers of 64: many tiny ops, so that every microsecond of ours shows."""
    layers: list[nn.Module] = []
    for _ in range(19):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).to(device)
    batches = [(torch.randn(32, 64, device=device), torch.randint(0, 10, (32,), device=device)) for _ in range(BATCHES_COUNT)]
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-3), batches, functional.cross_entropy)


WORKLOADS = (
    Workload("gpt2", "GPT-2, 6 layers x 256, batch 4 x 128, AdamW", 1.03, gpt2, block=2, rounds=12),
    Workload("cnn", "residual CNN with BatchNorm, 16 x 3 x 32 x 32, SGD with momentum", 1.03, cnn, block=8, rounds=16),
    Workload("mlp", "MLP, 20 layers x 64, batch 32, Adam", 1.15, mlp, block=60, rounds=40),
)
