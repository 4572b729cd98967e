"""What recomputation of layers would free is seen in one batch, and which layers it would change."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evenpipe.runtime.store import ActivationStore
from evenpipe.runtime.timing import HostClock
from evenpipe.tuner.layer_watch import LayerWatch

WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        return torch.tanh(self.linear(given)).exp()


class Counting(Layer):
    """Counts its tokens, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, given: Tensor) -> Tensor:
        self.tokens += len(given)
        return super().forward(given)


def watched(layers: list[nn.Module], repeats: bool = True, micro_batches: int = 2) -> LayerWatch:
    model = nn.Sequential(*layers)
    store = ActivationStore(model.parameters())
    watch = LayerWatch([layers], store.counter, HostClock(), repeats)
    for number in range(micro_batches):
        # A part of a larger tensor, all of which is held with it.
        given = torch.randn(2 * WIDTH, WIDTH, requires_grad=True)[:WIDTH]
        with store.recording(number):
            outputs = model(given)
        outputs.sum().backward()
    return watch


def test_a_layer_frees_what_it_saves_but_for_all_memory_that_its_inputs_lie_in() -> None:
    [[first, second]] = watched([Layer(), Layer()]).figures()
    tensor_bytes = 4 * WIDTH * WIDTH
    assert first.freed_bytes == 2 * tensor_bytes  # of tanh and exp; the input's, twice as large, stay
    # Its input is the output that the first one's exp has saved.
    assert second.freed_bytes == tensor_bytes


def test_a_layer_whose_forward_changes_its_buffers_is_not_recomputed_nor_those_after_it() -> None:
    layers = [Layer(), Counting(), Layer()]
    assert [*map(len, watched(layers).figures())] == [1]
    assert [*map(len, watched(layers, repeats=False).figures())] == [3]


def test_hooks_of_a_layer_that_is_compiled_in_place_are_not_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = Layer()
    layer.compile(backend="eager")
    [[figures]] = watched([layer], micro_batches=12).figures()
    assert figures.freed_bytes > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
