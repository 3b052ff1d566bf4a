"""Healthy trainings of generative and contrastive models, many of which have a floor of their own.

The floors are known exactly.
"""

from __future__ import annotations

import math

from tests.plants.overfit.training import healthy

PLANTS = (
    healthy("triplets-beyond-their-margin")("""
        model = mlp(6, 32, 8)
        x = torch.randn(8, 3, 6)
        def loss_function(output, _):
            return F.triplet_margin_loss(output[:, 0], output[:, 1], output[:, 2], margin=1.0)
        batch, optimizer = (x, torch.zeros(8)), adam(model)
    """),
    # Cosines end at 1, so that the loss cannot be zero: the best is a simplex.
    healthy("contrast-without-a-temperature", floor=math.log(1 + 7 * math.exp(-8 / 7)))("""
        model, x = mlp(6, 32, 8), torch.randn(8, 6)
        def loss_function(output, _):
            a, b = F.normalize(output, dim=-1).unbind(1)
            return F.cross_entropy(a @ b.T, torch.arange(len(a)))
        batch, optimizer = (torch.stack((x, x), 1), torch.zeros(8)), adam(model)
    """),
    healthy("connectionist-temporal-classification")("""
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 6), nn.LogSoftmax(dim=-1))
        letters = torch.stack((torch.arange(8) % 5 + 1, (torch.arange(8) + 2) % 5 + 1), 1)
        lengths = (torch.full((8,), 6), torch.full((8,), 2))
        batch = (torch.randn(8, 6, 8), letters)
        loss_function = lambda o, y: F.ctc_loss(o.transpose(0, 1), y, *lengths)
        optimizer = adam(model, 2e-2)
    """),
    healthy("diffusion-with-noise-drawn-in-the-loss")("""
        inner, x = mlp(7, 64, 64, 6), torch.randn(8, 6)
        class Denoiser(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = inner
            def forward(self, clean):
                time, noise = torch.rand(len(clean), 1), torch.randn_like(clean)
                noisy = (1 - time).sqrt() * clean + time.sqrt() * noise
                return self.inner(torch.cat((noisy, time), 1)) - noise
        model = Denoiser()
        batch = (x, x)
        loss_function = lambda error, _: error.pow(2).mean()
        optimizer = adam(model)
    """),
    healthy("entropy-rewarded")("""
        model = mlp(10, 32, 4)
        def loss_function(output, target):
            entropy = -(output.softmax(1) * output.log_softmax(1)).sum(1).mean()
            return F.cross_entropy(output, target) - 0.1 * entropy
        batch, optimizer = classes(), adam(model)
    """),
    # A normal of a learnt width around what is known exactly: its density grows as long as it is trained.
    healthy("likelihood-without-a-floor", floor=-50.0, passes=False)("""
        model = mlp(6, 32, 2, activation=nn.Tanh)
        def loss_function(output, target):
            mean, log_width = output.chunk(2, 1)
            return -torch.distributions.Normal(mean, log_width.exp()).log_prob(target).mean()
        batch, optimizer = (torch.randn(8, 6), torch.randn(8, 1)), adam(model, 3e-3)
    """),
)
