"""Two versions of the parameters: each in memory of its own, true for what a forward has saved of it."""

import pytest
import torch
from torch import nn

from evenpipe.runtime.weight_versions import Alias, WeightVersions


class Flat:
    """Parameters that are views of one buffer, as Megatron's distributed optimizer has them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.buffer = torch.arange(10, dtype=dtype)
        self.parameters = [nn.Parameter(self.buffer[0:6].view(2, 3)), nn.Parameter(self.buffer[6:10])]
        self.shard = self.buffer[4:8]


def test_a_backward_uses_the_weights_of_its_forward() -> None:
    module = nn.Linear(3, 3)
    versions = WeightVersions(module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    first = module.weight.detach().clone()
    given = torch.ones(2, 3, requires_grad=True)
    output = module(given)  # saves a view of the weight, not the parameter itself
    module.weight.grad, module.bias.grad = torch.ones(3, 3), torch.ones(3)
    with versions.writing():
        optimizer.step()
    versions.use(0)
    output.backward(torch.ones(2, 3))
    assert given.grad is not None
    assert torch.equal(given.grad, torch.ones(2, 3) @ first)
    versions.use(1)
    assert torch.equal(module.weight, first - 1)
    assert versions.peak == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flat_buffers_and_shards_follow_the_newest_version(dtype: torch.dtype) -> None:
    flat = Flat(dtype)
    versions = WeightVersions(flat.parameters, [flat.shard], [Alias(flat, "buffer")])
    assert versions.nbytes == 10 * flat.buffer.element_size()
    with versions.writing():
        flat.shard += 100
    assert flat.buffer.tolist() == [0, 1, 2, 3, 104, 105, 106, 107, 8, 9]
    versions.use(0)
    assert flat.parameters[1].tolist() == [6, 7, 8, 9]
    assert flat.buffer.tolist()[6:8] == [106, 107], "the buffer stays with the newest version"
    versions.use(1)
    assert flat.parameters[1].tolist() == [106, 107, 8, 9]
    with versions.writing():
        flat.buffer.zero_()
    versions.use(1)
    assert flat.parameters[0].flatten().tolist() == [0, 1, 2, 3, 104, 105]
    assert not any(flat.parameters[0].data_ptr() == tensor.data_ptr() for tensor in versions.tensors(2))


def test_only_two_versions_are_kept() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    versions = WeightVersions([parameter, parameter])
    for _ in range(2):
        with versions.writing():
            pass
    with pytest.raises(RuntimeError, match=r"version 0 of the weights is asked for, and \(1, 2\) are kept"):
        versions.use(0)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_restart_takes_what_is_loaded_as_the_newest(steps: int) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    versions = WeightVersions([parameter])
    for _ in range(steps):
        with versions.writing():
            pass
    parameter.data.fill_(7.0)
    versions.restart(1, [torch.full((2,), 6.0)])
    versions.use(0)
    assert parameter.tolist() == [6, 6]
    versions.use(1)
    assert parameter.tolist() == [7, 7]
    versions.restart(0, None)
    with versions.writing():
        parameter.data += 1
    versions.use(0)
    assert parameter.tolist() == [7, 7]
    versions.use(1)
    assert parameter.tolist() == [8, 8]
