"""Small models by hand, each with something that makes it hard to shrink."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Attending", "Backbone", "Block", "Experts", "Heads", "Indexed", "Nested", "Numbered", "Plain", "SideLists", "Stages", "Towers"]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x)).relu()


class Plain(nn.Module):
    """A stack, and a projection of equal layers beside it, which is none."""

    def __init__(self, layers: int = 12, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Indexed(Plain):
    """Layer 7 feeds the end: its forward depends on numbers."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.blocks[7](x)


class Backbone(Plain):
    """Gives what the layers 2, 5, 8 and 11 made, without a word where they are not."""

    def forward(self, x: Tensor) -> list[Tensor]:
        made = []
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in {2, 5, 8, 11}:
                made.append(x)
        return made


class Numbered(Plain):
    """Says itself how many layers it has, and what each of them is."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__(layers)
        self.num_layers = layers
        self.layer_types = ["full" if number % 4 == 3 else "local" for number in range(layers)]
        self.cache: list[Tensor | None] = [None] * layers
        self.labels = [f"class {number}" for number in range(layers)]
        for number, block in enumerate(self.blocks):
            block.layer_number = number + 1  # type: ignore[assignment]
            block.path = f"blocks.{number}"  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.num_layers):
            assert self.blocks[number].layer_number == number + 1
            x = self.blocks[number](x) * (2 if self.layer_types[number] == "full" else 1)
            self.cache[number] = x
        return x


class Heads(nn.Module):
    """Heads stand side by side, over a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.heads = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.stack([head(x) for head in self.heads]).sum(0)


class Experts(nn.Module):
    """Experts alone, without layers around them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        return sum((share[..., [number]] * expert(x) for number, expert in enumerate(self.experts)), torch.zeros(()))


class Towers(nn.Module):
    """Towers side by side, and in each of them a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Plain(6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum((tower(x) for tower in self.towers), torch.zeros(()))


class Nested(nn.Module):
    """Stages of different widths, with a stack in each."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(*(Block(width) for _ in range(5))) for width in (8, 16))
        self.widen = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.stages[1](self.widen(self.stages[0](x)))


class Stages(nn.Module):
    """Each layer halves the picture: equal layers, and no stack."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 3, 2, 1), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SideLists(nn.Module):
    """Two lists that are gone through side by side, and are cut alike."""

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(Block() for _ in range(6))
        self.norms = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=number == 4)) for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for mixer, norm in zip(self.mixers, self.norms, strict=True):
            x = norm(mixer(x))
        return x


class Attending(nn.Module):
    """Attention by torch's function, grouped queries included."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.pair = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 2)).transpose(1, 2)
        key, value = self.pair(x).unflatten(-1, (2, 2, 2)).unbind(2)
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
        mixed = nn.functional.scaled_dot_product_attention(query, key.transpose(1, 2), value.transpose(1, 2), **options)
        return x + mixed.transpose(1, 2).flatten(-2)
