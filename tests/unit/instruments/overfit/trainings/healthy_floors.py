"""Healthy trainings of generative and contrastive models, many of which have a floor of their own.

The floors are known exactly.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, healthy, made
from tests.unit.instruments.overfit.trainings.models import adam, classes, mlp

__all__ = ["CASES"]

_SMOOTH = (0.925, 0.025, 0.025, 0.025)


@healthy()
def divergence_from_a_teacher() -> Built:
    model, (x, _) = mlp(10, 32, 4).append(nn.LogSoftmax(dim=1)), classes()
    return made(model, (x, torch.randn(8, 4).softmax(1)), nn.KLDivLoss(reduction="batchmean"), adam(model))


@healthy()
def triplets_beyond_their_margin() -> Built:
    model = mlp(6, 32, 8)
    x = torch.randn(8, 3, 6)

    def triplet(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return F.triplet_margin_loss(output[:, 0], output[:, 1], output[:, 2], margin=1.0)

    return made(model, (x, torch.zeros(8)), triplet, adam(model))


@healthy()
def contrast_of_two_views() -> Built:
    model, x = mlp(6, 32, 8), torch.randn(8, 6)

    def info_nce(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(output, dim=-1).unbind(1)
        return F.cross_entropy(a @ b.T / 0.07, torch.arange(len(a)))

    return made(model, (torch.stack((x, x + 0.1 * torch.randn(8, 6)), 1), torch.zeros(8)), info_nce, adam(model))


@healthy(floor=math.log(1 + 7 * math.exp(-8 / 7)))
def contrast_without_a_temperature() -> Built:
    """Cosines end at 1, so that the loss cannot be zero: the best is a simplex."""
    model, x = mlp(6, 32, 8), torch.randn(8, 6)

    def info_nce(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(output, dim=-1).unbind(1)
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    return made(model, (torch.stack((x, x), 1), torch.zeros(8)), info_nce, adam(model))


@healthy()
def connectionist_temporal_classification() -> Built:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 6), nn.LogSoftmax(dim=-1))
    letters = torch.stack((torch.arange(8) % 5 + 1, (torch.arange(8) + 2) % 5 + 1), 1)
    lengths = torch.full((8,), 6), torch.full((8,), 2)
    return made(model, (torch.randn(8, 6, 8), letters), lambda o, y: F.ctc_loss(o.transpose(0, 1), y, *lengths), adam(model, 2e-2))


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(10, 32, 8), mlp(4, 32, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()), mean, log_variance


def _elbo(outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    output, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
    return F.mse_loss(output, x) + 1e-4 * divergence


@healthy()
def variational_autoencoder() -> Built:
    model, x = _Variational(), torch.randn(8, 10)
    return made(model, (x, x), _elbo, adam(model, 2e-2))


@healthy()
def diffusion_with_noise_drawn_in_the_loss() -> Built:
    model, x = mlp(7, 64, 64, 6), torch.randn(8, 6)

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, clean: torch.Tensor) -> torch.Tensor:
            time, noise = torch.rand(len(clean), 1), torch.randn_like(clean)
            noisy = (1 - time).sqrt() * clean + time.sqrt() * noise
            return self.inner(torch.cat((noisy, time), 1)) - noise

    denoiser = Denoiser()
    return made(denoiser, (x, x), lambda error, _: error.pow(2).mean(), adam(denoiser))


class _Experts(nn.Module):
    """The auxiliary loss balances the experts: it is at least its coefficient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(10, 4), nn.ModuleList(mlp(10, 16, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.gate(x).softmax(1)
        output = sum(w[:, None] * expert(x) for w, expert in zip(weights.unbind(1), self.experts, strict=True))
        return torch.as_tensor(output), 4 * weights.mean(0).pow(2).sum()


@healthy(floor=0.01)
def experts_with_an_auxiliary_loss() -> Built:
    model = _Experts()
    return made(model, classes(), lambda outputs, y: F.cross_entropy(outputs[0], y) + 0.01 * outputs[1], adam(model, 2e-2))


@healthy()
def entropy_rewarded() -> Built:
    model = mlp(10, 32, 4)

    def loss_function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        entropy = -(output.softmax(1) * output.log_softmax(1)).sum(1).mean()
        return F.cross_entropy(output, target) - 0.1 * entropy

    return made(model, classes(), loss_function, adam(model))


@healthy(floor=0.5 * math.log(2 * math.pi) + math.log(0.1))
def likelihood_of_a_normal_of_fixed_width() -> Built:
    model = mlp(6, 32, 1, activation=nn.Tanh)
    return made(
        model, (torch.randn(8, 6), torch.randn(8, 1)), lambda o, y: -torch.distributions.Normal(o, 0.1).log_prob(y).mean(), adam(model)
    )


@healthy(floor=sum(count - count * math.log(count) for count in (1, 2, 3, 4)) / 4)
def poisson_counts() -> Built:
    model = mlp(6, 32, 1)
    y = torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat(2)[:, None]
    return made(model, (torch.randn(8, 6), y), nn.PoissonNLLLoss(), adam(model, 2e-2))


@healthy(floor=-50.0, passes=False)
def likelihood_without_a_floor() -> Built:
    """A normal of a learnt width around what is known exactly: its density grows as long as it is trained."""
    model = mlp(6, 32, 2, activation=nn.Tanh)

    def loss_function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mean, log_width = output.chunk(2, 1)
        return -torch.distributions.Normal(mean, log_width.exp()).log_prob(target).mean()

    return made(model, (torch.randn(8, 6), torch.randn(8, 1)), loss_function, adam(model, 3e-3))


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
