"""Runs give the losses and weights of an independent, sequential implementation of their update rule, bit for bit."""

import math

import pytest
import torch

from evenpipe.megatron.trainer.launch import run_cases
from evenpipe.megatron.trainer.options import TrainOptions
from tests.oracle.clipping import clip, global_norm
from tests.oracle.process import Case, train_cases
from tests.oracle.recurrence import DelayedUpdates, descend

SMALL = {"hidden": 32, "heads": 4, "seq_length": 32, "iterations": 8}

# With a flush in every iteration there is no delay.
FLUSHED = {
    "p=2, clipped": {"stages": 2, "micro_batches": 3},
    "p=2, bert, untied": {"stages": 2, "micro_batches": 2, "model": "bert", "untie_embeddings": True, "clip_grad": 0.0},
    "p=4": {"stages": 4, "micro_batches": 5, "clip_grad": 0.0},
    "p=4, bert": {"stages": 4, "micro_batches": 4, "model": "bert", "clip_grad": 0.0},
}


def options(case):
    return TrainOptions.of(**{**SMALL, "layers": case["stages"], **case})


def bits(losses):
    return [loss.hex() for loss in losses]


@pytest.fixture(scope="module")
def flushed():
    """Every flushed run, and what the oracle makes of it."""
    cases = [options(case) for case in FLUSHED.values()]
    # Megatron adds the stages' squared norms in fp32: two in one addition, more in an order of gloo's.
    oracles = train_cases([Case(case, 0, torch.float32) for case in cases])
    return dict(zip(FLUSHED, zip(run_cases(cases), oracles, strict=True), strict=True))


@pytest.mark.parametrize("name", FLUSHED)
def test_without_delay_the_oracle_trains_as_megatron_does(name, flushed):
    run, oracle = flushed[name]
    assert bits(run.losses) == bits(oracle.losses)
    assert run.weights_sha256 == oracle.weights_sha256


# f(w) = a/2 · w², so ∇f(w) = a·w.
STEEPNESS = 0.7
RATES = [0.1, 0.2, 0.3, 0.25, 0.15, 0.05]


def descended(delay, make, rates):
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    updates = DelayedUpdates(make([weight]), delay)
    (last,) = descend(updates, lambda batch, weights: [STEEPNESS * weights[0]], rates)
    return last.item()


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_update_rule_on_a_quadratic(delay):
    """W(t+1) = W(t) − ν(t)·a·W(t−d); W(0) is used for the first d + 1 batches."""
    weights = [2.0]
    for batch, rate in enumerate(RATES):
        weights.append(weights[batch] - rate * STEEPNESS * weights[max(batch - delay, 0)])
    assert descended(delay, lambda p: torch.optim.SGD(p, lr=1.0), RATES) == pytest.approx(weights[-1], rel=1e-12)


def test_delayed_by_one_a_quadratic_follows_the_roots_of_its_recurrence():
    """w(t+1) − w(t) + r·w(t−1) = 0 with w(−1) = w(0) is solved by powers of the roots of x² − x + r."""
    step, batches = 0.1 * STEEPNESS, 9
    one, other = (1 + math.sqrt(1 - 4 * step)) / 2, (1 - math.sqrt(1 - 4 * step)) / 2
    share = (1 - step - other) / (one - other)
    expected = 2.0 * (share * one**batches + (1 - share) * other**batches)
    found = descended(1, lambda p: torch.optim.SGD(p, lr=1.0), [0.1] * batches)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_momentum_gathers_old_gradients_and_moves_the_newest_weights(delay):
    """m(t) = β·m(t−1) + a·W(t−d), W(t+1) = W(t) − ν(t)·m(t)."""
    weights, momentum = [2.0], 0.0
    for batch, rate in enumerate(RATES):
        momentum = 0.9 * momentum + STEEPNESS * weights[max(batch - delay, 0)]
        weights.append(weights[batch] - rate * momentum)
    found = descended(delay, lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), RATES)
    assert found == pytest.approx(weights[-1], rel=1e-12)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_adam_decays_and_moves_the_newest_weights_by_old_gradients(delay):
    weights, mean, square = [2.0], 0.0, 0.0
    for batch, rate in enumerate(RATES):
        gradient = STEEPNESS * weights[max(batch - delay, 0)]
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        unbiased = mean / (1 - 0.9 ** (batch + 1)), square / (1 - 0.999 ** (batch + 1))
        decayed = weights[batch] * (1 - rate * 0.01)
        weights.append(decayed - rate * unbiased[0] / (math.sqrt(unbiased[1]) + 1e-8))
    found = descended(delay, lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.01), RATES)
    assert found == pytest.approx(weights[-1], rel=1e-12)


def test_clipping_scales_all_stages_to_the_norm_over_all_of_them():
    stages = [[torch.tensor([1.0, 2.0]), torch.tensor([2.0])], [torch.tensor([4.0])]]
    assert global_norm(stages) == 5.0
    together = [gradient for stage in stages for gradient in stage]
    clip(together, 5.0, most=6.0)
    assert global_norm(stages) == 5.0
    clip(together, 5.0, most=1.0)
    assert global_norm(stages) == pytest.approx(1.0, rel=1e-6)
