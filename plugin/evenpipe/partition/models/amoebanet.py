"""AmoebaNet-D, the image classifier of "Regularized Evolution for Image Classifier Architecture Search" (2019)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["AmoebaNet"]


class Genotype(NamedTuple):
    """A cell: ten operations, of which each pair is summed into a new state, and the states that it returns.

    Each operation is on the state of that number: 0 and 1 are the cell's inputs, 2 to 6 its pairs' sums.
    """

    operations: tuple[tuple[int, str], ...]
    returned: tuple[int, ...]


# As in Google's reference implementation (tensorflow/tpu, models/official/amoeba_net), which GPipe's parameter counts
# agree with; the paper's figure returns states 4, 5 and 6 from the normal cell too.
NORMAL: Final = Genotype(
    (
        *((1, "conv_1x1"), (1, "max_pool_3x3")),
        *((1, "none"), (0, "conv_1x7_7x1")),
        *((0, "conv_1x1"), (0, "conv_1x7_7x1")),
        *((2, "max_pool_3x3"), (2, "none")),
        *((1, "avg_pool_3x3"), (5, "conv_1x1")),
    ),
    returned=(0, 3, 4, 6),
)
REDUCTION: Final = Genotype(
    (
        *((0, "max_pool_2x2"), (0, "max_pool_3x3")),
        *((2, "none"), (1, "conv_3x3")),
        *((2, "conv_1x7_7x1"), (2, "max_pool_3x3")),
        *((3, "none"), (1, "max_pool_2x2")),
        *((2, "avg_pool_3x3"), (3, "conv_1x1")),
    ),
    returned=(4, 5, 6),
)


def _step(
    inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> list[nn.Module]:
    """ReLU, convolution, batch norm: what every convolution of a cell is made of."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return [nn.ReLU(), convolution, nn.BatchNorm2d(outputs)]


def _bottleneck(channels: int, *kernels: tuple[tuple[int, int], tuple[int, int]]) -> nn.Module:
    """Convolutions (kernel, stride) at a quarter of the channels, between two that take them down and up again."""
    narrow = channels // 4
    inside = [module for kernel, stride in kernels for module in _step(narrow, narrow, kernel, stride)]
    return nn.Sequential(*_step(channels, narrow), *inside, *_step(narrow, channels))


class HalvedImage(nn.Module):
    """An image at half its size without losing every other pixel: two convolutions, one of them moved by a pixel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, image: Tensor) -> Tensor:
        image = functional.relu(image)
        moved = functional.pad(image[:, :, 1:, 1:], (0, 1, 0, 1))
        out: Tensor = self.norm(torch.cat([self.even(image), self.odd(moved)], dim=1))
        return out


_OPERATIONS: Final[dict[str, Callable[[int, int], nn.Module]]] = {
    "none": lambda channels, stride: nn.Identity() if stride == 1 else HalvedImage(channels, channels),
    "avg_pool_3x3": lambda channels, stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
    "max_pool_2x2": lambda channels, stride: nn.MaxPool2d(2, stride),
    "max_pool_3x3": lambda channels, stride: nn.MaxPool2d(3, stride, padding=1),
    "conv_1x1": lambda channels, stride: nn.Sequential(*_step(channels, channels, stride=(stride, stride))),
    "conv_3x3": lambda channels, stride: _bottleneck(channels, ((3, 3), (stride, stride))),
    "conv_1x7_7x1": lambda channels, stride: _bottleneck(channels, ((1, 7), (1, stride)), ((7, 1), (stride, 1))),
}


class Cell(nn.Module):
    """One cell: from the outputs of the last cell and of the one before it to its own."""

    def __init__(self, before: int, last: int, channels: int, *, reduction: bool, after_reduction: bool) -> None:
        """`before`, `last`: the channels of its inputs; `reduction`: it halves the image, as the last cell may have."""
        super().__init__()
        genotype = REDUCTION if reduction else NORMAL
        self.last = nn.Sequential(*_step(last, channels))
        self.before: nn.Module = nn.Identity()
        if after_reduction:
            self.before = HalvedImage(before, channels)
        elif before != channels:
            self.before = nn.Sequential(*_step(before, channels))
        self.states = [state for state, _ in genotype.operations]
        self.returned = genotype.returned
        self.out_channels = channels * len(genotype.returned)
        self.operations = nn.ModuleList(
            _OPERATIONS[name](channels, 2 if reduction and state < 2 else 1) for state, name in genotype.operations
        )

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        states = [self.last(last), self.before(before)]
        done = [(state, operation) for state, operation in zip(self.states, self.operations, strict=True)]
        for (left, first), (right, second) in zip(done[::2], done[1::2], strict=True):
            states.append(first(states[left]) + second(states[right]))
        return torch.cat([states[number] for number in self.returned], dim=1)


class AmoebaNet(nn.Module):
    """AmoebaNet-D with `layers` normal cells in three groups, and its classification loss.

    (18 layers, 120 filters) has 28.0 million parameters, for 1000 classes.
    """

    def __init__(self, layers: int = 18, filters: int = 120, classes: int = 1000) -> None:
        """`layers`: a multiple of three; `filters`: a multiple of 16."""
        super().__init__()
        channels = before = last = filters // 4
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels))
        normal = [False] * (layers // 3)
        self.cells = nn.ModuleList()
        after_reduction = False
        for reduction in [True, True, *normal, True, *normal, True, *normal]:
            channels *= 2 if reduction else 1
            cell = Cell(before, last, channels, reduction=reduction, after_reduction=after_reduction)
            self.cells.append(cell)
            before, last, after_reduction = last, cell.out_channels, reduction
        self.classifier = nn.Linear(last, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of images (batch, 3, height, width), their classes `labels` (batch)."""
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return functional.cross_entropy(self.classifier(last.mean(dim=(2, 3))), labels)
