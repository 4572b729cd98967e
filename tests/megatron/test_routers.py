"""What routers count is a batch's, and their bias a weight version's: on buffers named as in megatron-core 0.19."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from evenpipe.megatron.two_bw.routers import Routers
from evenpipe.runtime.weight_versions import WeightVersions


class Router(torch.nn.Module):
    """Balances by quantiles: has no experts' bias, and a bias of its own."""

    expert_bias = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qb_beta", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("qb_beta_accum", torch.zeros(3))
        self.register_buffer("qb_beta_count", torch.zeros(1))

    def _maintain_float32_expert_bias(self) -> None:
        self.qb_beta.data = self.qb_beta.data.float()

    def count(self, value: float) -> None:
        self.qb_beta_accum += value
        self.qb_beta_count += 1


def finish(router: Router) -> None:
    """As Megatron at the end of a batch, for routers that are trained; it empties the counts."""
    if router.training:
        router.qb_beta.copy_(router.qb_beta + router.qb_beta_accum / router.qb_beta_count)
    router.qb_beta_accum.zero_()
    router.qb_beta_count.zero_()


def test_counts_are_a_batch_s_and_the_bias_is_a_version_s() -> None:
    router = Router()
    routers = Routers([router])
    versions = WeightVersions([torch.nn.Parameter(torch.zeros(2))], buffers=routers.biases)
    assert len(versions.trained(0)) == 1
    biases = []
    for batch, value in enumerate((1.0, 10.0, 100.0)):
        routers.use(batch)
        router.count(value)
        routers.use(batch + 1)  # the first forwards of the next batch
        router.count(7.0)
        routers.use(batch)
        router.count(3 * value)
        router.eval()  # the loop is about to evaluate: the batch that was trained on counts all the same
        routers.drop(batch + 1)
        with routers.finishing():
            finish(router)
        assert not router.training
        router.train()
        assert router.qb_beta.tolist() == versions.tensors(batch)[1].tolist(), "not before the step"
        with versions.writing():
            routers.step()
        biases.append(router.qb_beta[0].item())
        versions.use(batch)
        assert router.qb_beta[0].item() == ([0.0, *biases])[batch], "the next batch is routed by the version before"
        versions.use(batch + 1)
    assert biases == [2.0, 22.0, 222.0]


def test_a_batch_that_goes_on_has_its_counts_again() -> None:
    router = Router()
    routers = Routers([router])
    routers.use(0)
    router.count(1.0)
    routers.use(1)
    router.count(5.0)
    with routers.finishing():
        assert router.qb_beta_accum[0] == 1
        finish(router)
    assert router.qb_beta_accum[0] == 5
