"""A U-Net for diffusion, of the sizes in Ada-Grouper's Table 2: 64 dimensions and 32 M parameters, 320 and 768 M.

The paper gives dimensions, image size and numbers of parameters, and no structure. This one is after Ho et al. (DDPM,
2020), with as many blocks as come within 5 % of both numbers (30.5 M and 762 M): four resolutions with 1, 2, 3 and 4
times the dimensions, residual blocks that see an embedding of the time step, attention at the two lowest, and skips
from the way down to the way up. Text, which the paper's sees too, is left out.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.nn import functional

__all__ = ["IMAGE", "UNet"]

#: Pixels of a side (Table 2), in three colours.
IMAGE: Final = 32
COLOURS: Final = 3
TIMES: Final = (1, 2, 3, 4)
#: Residual blocks of a resolution, on the way down; on the way up there is one more.
BLOCKS: Final = 3
GROUPS: Final = 8
HEADS: Final = 4


class Residual(nn.Module):
    """[B, in, H, W] and a time embedding [B, T] to [B, out, H, W]."""

    def __init__(self, into: int, out: int, time: int) -> None:
        super().__init__()
        self.first_norm, self.first = nn.GroupNorm(GROUPS, into), nn.Conv2d(into, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.second_norm, self.second = nn.GroupNorm(GROUPS, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        found = self.first(functional.silu(self.first_norm(x))) + self.time(functional.silu(time))[:, :, None, None]
        return self.second(functional.silu(self.second_norm(found))) + self.skip(x)


class Attention(nn.Module):
    """Over all pixels of [B, C, H, W], added to it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.GroupNorm(GROUPS, size),
            nn.Conv2d(size, 3 * size, 1),
            nn.Conv2d(size, size, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(self.norm(x)).flatten(2).unflatten(1, (3, HEADS, -1)).transpose(-1, -2).unbind(1)
        found = functional.scaled_dot_product_attention(query, key, value)
        return x + self.outer(found.transpose(-1, -2).flatten(1, 2).unflatten(-1, x.shape[-2:]))


class Level(nn.Module):
    """A resolution of one way: residual blocks, and attention at low ones."""

    def __init__(self, into: int, out: int, time: int, low: bool) -> None:
        super().__init__()
        self.block = Residual(into, out, time)
        self.attention = Attention(out) if low else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.attention(self.block(x, time))


class UNet(nn.Module):
    """Images [B, 3, 32, 32] and embedded times [B, dimensions]: how far the predicted noise is from `noise`."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        widths = [dimensions * times for times in TIMES]
        time = 4 * dimensions
        self.time = nn.Sequential(nn.Linear(dimensions, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(COLOURS, dimensions, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.lower, self.raise_ = nn.ModuleList(), nn.ModuleList()
        into, skips = dimensions, [dimensions]
        for number, width in enumerate(widths):
            for _ in range(BLOCKS):
                self.down.append(Level(into, width, time, number >= 2))
                skips.append(into := width)
            if number < len(widths) - 1:
                self.lower.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = nn.ModuleList(Level(into, into, time, low) for low in (True, True, False))
        for number, width in reversed(list(enumerate(widths))):
            for _ in range(BLOCKS + 1):
                self.up.append(Level(into + skips.pop(), width, time, number >= 2))
                into = width
            if number:
                self.raise_.append(nn.Conv2d(width, width, 3, padding=1))
        self.last_norm, self.last = nn.GroupNorm(GROUPS, into), nn.Conv2d(into, COLOURS, 3, padding=1)

    def forward(self, image: torch.Tensor, time: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        time = self.time(time)
        x = self.first(image)
        skips = [x]
        for number in range(len(TIMES)):
            for level in self.down[number * BLOCKS : (number + 1) * BLOCKS]:
                skips.append(x := level(x, time))
            if number < len(self.lower):
                skips.append(x := self.lower[number](x))
        for level in self.middle:
            x = level(x, time)
        for number in range(len(TIMES)):
            for level in self.up[number * (BLOCKS + 1) : (number + 1) * (BLOCKS + 1)]:
                x = level(torch.cat([x, skips.pop()], 1), time)
            if number < len(self.raise_):
                x = self.raise_[number](functional.interpolate(x, scale_factor=2.0))
        return functional.mse_loss(self.last(functional.silu(self.last_norm(x))), noise)
