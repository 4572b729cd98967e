"""Runs give the losses and weights of an independent, sequential implementation of their update rule, bit for bit."""

import math
import re

import numpy as np
import pytest
import torch

from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from tests.oracle.process import Case, train_cases
from tests.oracle.recurrence import TwoBWUpdates, clip, descend, global_norm
from tests.selected import marked, selected

# Whichever test is the first waits for all runs.

SMALL = {"hidden": 32, "heads": 4, "seq_length": 32, "iterations": 8}

SGD = {"optimizer": "sgd", "lr": 0.3}
MOMENTUM = {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1}
ADAM = {"optimizer": "adam", "lr": 0.01}
# Embeddings are tied and gradients clipped where nothing else is said.
UNTIED = {"untie_embeddings": True}
UNCLIPPED = {"clip_grad": 0.0}

# With a flush in every iteration there is no delay.
FLUSHED = {
    "p=2, Adam": {**ADAM, "stages": 2, "micro_batches": 3},
    "p=2, SGD, bert, untied": {**SGD, **UNTIED, "stages": 2, "micro_batches": 2, "model": "bert"},
    "p=4, momentum, unclipped": {**MOMENTUM, **UNCLIPPED, "stages": 4, "micro_batches": 5},
    "p=4, Adam, bert, unclipped": {**ADAM, **UNCLIPPED, "stages": 4, "micro_batches": 4, "model": "bert"},
    "p=2, SGD, experts, unclipped": {**SGD, **UNCLIPPED, "stages": 2, "micro_batches": 3, "experts": 4},
}

DELAYED = {
    "p=2, m=p, Adam": {**ADAM, "stages": 2, "micro_batches": 2},
    "p=2, m=2p, momentum, bert": {**MOMENTUM, "stages": 2, "micro_batches": 4, "model": "bert"},
    "p=2, m=p+1, SGD, untied, unclipped": {**SGD, **UNTIED, **UNCLIPPED, "stages": 2, "micro_batches": 3},
    "p=4, m=p, momentum, untied": {**MOMENTUM, **UNTIED, "stages": 4, "micro_batches": 4},
    "p=4, m=2p, Adam, rate": {**ADAM, "stages": 4, "micro_batches": 8, "lr_warmup": 3, "lr_decay": "cosine"},
    "p=4, m=p+1, SGD, unclipped": {**SGD, **UNCLIPPED, "stages": 4, "micro_batches": 5},
    "p=4, m=p+1, Adam, bert, BPipe": {**ADAM, "stages": 4, "micro_batches": 5, "model": "bert", "bpipe": True},
    "p=8, m=p, SGD": {**SGD, "stages": 8, "micro_batches": 8},
    "p=8, m=2p, Adam, untied, unclipped": {**ADAM, **UNTIED, **UNCLIPPED, "stages": 8, "micro_batches": 16},
    "p=8, m=p+1, momentum": {**MOMENTUM, "stages": 8, "micro_batches": 9},
    # The forward that a backward repeats runs on the weights of the first one.
    "p=4, m=p+1, Adam, recomputed": {**ADAM, "stages": 4, "layers": 8, "micro_batches": 5, "recompute": "full"},
    "p=4, m=2p, momentum, bert, recomputed, BPipe": {
        **MOMENTUM,
        "stages": 4,
        "micro_batches": 8,
        "model": "bert",
        "recompute": "full",
        "bpipe": True,
    },
    "p=4, m=p+1, momentum, experts, BPipe": {
        **MOMENTUM,
        "stages": 4,
        "micro_batches": 5,
        "experts": 4,
        "bpipe": True,
    },
    "p=4, m=2p, Adam, lengths, BPipe": {
        **ADAM,
        "stages": 4,
        "micro_batches": 8,
        "min_length": 8,
        "bpipe": True,
    },
    "DP2 x PP2, m=p, Adam": {**ADAM, "stages": 2, "data_parallel": 2, "micro_batches": 2},
    "DP2 x PP2, m=p+1, momentum, overlapped": {
        **MOMENTUM,
        "stages": 2,
        "data_parallel": 2,
        "micro_batches": 3,
        "overlap_grad_reduce": True,
    },
    "DP2 x PP4, m=p, Adam, distributed": {
        **ADAM,
        **UNCLIPPED,
        "stages": 4,
        "data_parallel": 2,
        "micro_batches": 4,
        "distributed_optimizer": True,
    },
}
# The gradient of a key's bias is nothing but rounding, which Adam blows up to its full step; a small one here.
SHARDED = {
    "TP2 x PP2, m=p+1, momentum": {**MOMENTUM, "stages": 2, "tensor_parallel": 2, "micro_batches": 3},
    "TP2 x PP2, m=2p, Adam": {**ADAM, "lr": 0.001, "stages": 2, "tensor_parallel": 2, "micro_batches": 4},
}
# Experts add up the tokens of all replicas that share them, in another order.
_EXPERTS = {"experts": 4, "expert_parallel": 2}
SHARED_OUT = {
    "DP2 x PP2, m=p+1, momentum, experts over both": {
        **MOMENTUM,
        **_EXPERTS,
        "stages": 2,
        "data_parallel": 2,
        "micro_batches": 3,
    },
    "DP2 x PP2, m=p, Adam, untied, experts over both, distributed, overlapped": {
        **ADAM,
        **UNTIED,
        **_EXPERTS,
        "stages": 2,
        "data_parallel": 2,
        "micro_batches": 2,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
    },
    "DP4 x PP2, m=p+1, Adam, experts over two, distributed": {
        **ADAM,
        **_EXPERTS,
        "stages": 2,
        "data_parallel": 4,
        "micro_batches": 3,
        "distributed_optimizer": True,
    },
    "DP2 x PP4, m=p+1, momentum, experts over both, BPipe": {
        **MOMENTUM,
        **_EXPERTS,
        "stages": 4,
        "data_parallel": 2,
        "micro_batches": 5,
        "bpipe": True,
    },
}
# Eight processes, and what differs little from a case that stays.
LONG = [
    "p=2, m=p, Adam",
    "DP2 x PP2, m=p+1, momentum, experts over both",
    "p=2, SGD, bert, untied",
    "p=2, m=2p, momentum, bert",
    "p=4, m=p+1, SGD, unclipped",
    "p=4, m=p+1, Adam, bert, BPipe",
    "p=4, m=p+1, Adam, recomputed",
    "p=8, m=p, SGD",
    "p=8, m=2p, Adam, untied, unclipped",
    "p=8, m=p+1, momentum",
    "DP2 x PP4, m=p, Adam, distributed",
    "DP2 x PP2, m=p, Adam",
    "TP2 x PP2, m=2p, Adam",
    "p=4, Adam, bert, unclipped",
    "DP4 x PP2, m=p+1, Adam, experts over two, distributed",
    "DP2 x PP4, m=p+1, momentum, experts over both, BPipe",
]
TOLD_APART = ["p=2, m=p+1, SGD, untied, unclipped", "p=4, m=p, momentum, untied", "p=4, m=2p, Adam, rate"]


def flushed(name):
    return options(FLUSHED[name])


def delayed(name, **others):
    return options({**DELAYED, **SHARDED, **SHARED_OUT}[name] | {"schedule": "2bw"} | others)


def options(case):
    return TrainOptions.of(**{**SMALL, "layers": case["stages"], **case})


def last_weights(folder, stages):
    """Of each stage, the parameters of each of its ranks."""
    checkpoint = folder / (folder / "latest").read_text().split()[0]
    ranks = [torch.load(path)["state"]["parameters"][0] for path in sorted(checkpoint.glob("rank_*.pt"))]
    each = len(ranks) // stages
    return [ranks[first : first + each] for first in range(0, len(ranks), each)]


def together(shards, shape):
    """One array of `shape` from the shards of tensor-parallel ranks, or from the copies that each of them has."""
    cut = [dim for dim, size in enumerate(shape) if shards[0].shape[dim] != size]
    return np.concatenate(shards, axis=cut[0]) if cut else shards[0].numpy()


def of_all_experts(ranks):
    """A stage's parameters, experts by their number in the whole model; replicas have the same to the last bit."""
    each = _EXPERTS["experts"] // _EXPERTS["expert_parallel"]
    found = {}
    for number, rank in enumerate(ranks):
        first = number % _EXPERTS["expert_parallel"] * each
        for name, parameter in rank.items():
            whole = re.sub(r"(?<=local_experts\.)\d+", lambda local, first=first: str(first + int(local[0])), name)
            assert torch.equal(found.setdefault(whole, parameter), parameter), (number, whole)
    return found


def distance(pairs):
    """Of two models, given as pairs of arrays, in units of the second's norm."""
    found, expected = (np.concatenate([np.ravel(one) for one in side]) for side in zip(*pairs, strict=True))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def bits(values):
    return [value.hex() for value in values]


def relative(found, expected):
    """How far they are apart, at most."""
    return max(abs(one - other) / other for one, other in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where the runs whose sums have another order save their weights."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def runs(saved, request):
    """What every run that is looked at found, by name; one set of processes a world size."""
    cases = {name: flushed(name) for name in FLUSHED} | {name: delayed(name) for name in DELAYED}
    cases |= {name: delayed(name, save=str(saved / name)) for name in (*SHARDED, *SHARED_OUT)}
    names = sorted(selected(request, "name"), key=lambda name: (cases[name].world_size, name))
    return dict(zip(names, run_cases([cases[name] for name in names]), strict=True))


@pytest.fixture(scope="module")
def oracles(request):
    """The oracle's word, by name and delay."""
    cases = {(name, 1): Case(delayed(name), 1) for name in (*DELAYED, *SHARDED, *SHARED_OUT)}
    cases |= {(name, delay): Case(delayed(name), delay) for name in TOLD_APART for delay in (0, 2)}
    # Megatron adds the stages' squared norms in fp32: two in one addition, more in an order of gloo's.
    cases |= {(name, 0): Case(flushed(name), 0, torch.float32) for name in FLUSHED}
    asked = [case for case in cases if case[0] in selected(request, "name")]
    return dict(zip(asked, train_cases([cases[case] for case in asked]), strict=True))


@pytest.mark.parametrize("name", marked(FLUSHED, LONG))
def test_with_flushes_runs_train_by_the_rule_without_delay(name, runs, oracles):
    run, oracle = runs[name], oracles[name, 0]
    assert bits(run.losses) == bits(oracle.losses)
    assert run.weights_sha256 == oracle.weights_sha256


@pytest.mark.parametrize("name", marked(DELAYED, LONG))
def test_two_buffers_train_by_the_rule_of_delay_one(name, runs, oracles):
    """Also with two data-parallel replicas: the sum of two gradients has one order."""
    run, oracle = runs[name], oracles[name, 1]
    assert bits(run.losses) == bits(oracle.losses)
    assert run.weights_sha256 == oracle.weights_sha256
    if "distributed" in name:  # each rank adds up the squares of its own shards
        assert relative(run.grad_norms, oracle.grad_norms) < 1e-6
    else:
        assert bits(run.grad_norms) == bits(oracle.grad_norms)


@pytest.mark.parametrize("name", marked(SHARDED, LONG))
def test_tensor_parallel_ranks_add_in_another_order(name, runs, oracles, saved):
    run, oracle = runs[name], oracles[name, 1]
    assert relative(run.losses, oracle.losses) < 1e-6
    assert relative(run.grad_norms, oracle.grad_norms) < 1e-6
    pairs = [
        (together([shard[f"module.{parameter}"] for shard in shards], expected.shape), expected)
        for shards, stage in zip(last_weights(saved / name, len(oracle.weights)), oracle.weights, strict=True)
        for parameter, expected in stage.items()
    ]
    assert distance(pairs) < 1e-6


@pytest.mark.parametrize("name", marked(SHARED_OUT, LONG))
def test_experts_that_are_shared_out_train_by_the_same_rule(name, runs, oracles, saved):
    """The norm is over dense parameters and experts, which other ranks hold."""
    run, oracle = runs[name], oracles[name, 1]
    assert relative(run.losses, oracle.losses) < 1e-5
    assert relative(run.grad_norms, oracle.grad_norms) < 1e-5
    assert max(oracle.grad_norms) > 1, "something is clipped"
    stages = [of_all_experts(ranks) for ranks in last_weights(saved / name, len(oracle.weights))]
    pairs = [
        (found[f"module.{parameter}"], expected)
        for found, stage in zip(stages, oracle.weights, strict=True)
        for parameter, expected in stage.items()
    ]
    assert distance(pairs) < 1e-5


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("name", TOLD_APART)
def test_another_delay_is_told_apart(name, delay, runs, oracles):
    """By at least 5 %, where 1e-6 is allowed for sums in another order."""
    apart = relative(runs[name].losses, oracles[name, delay].losses)
    print(f"{name}: losses differ by up to {apart:.1%} from those of a delay of {delay}")
    assert apart > 0.05
    assert runs[name].weights_sha256 != oracles[name, delay].weights_sha256


# f(w) = a/2 · w², so ∇f(w) = a·w.
STEEPNESS = 0.7
RATES = [0.1, 0.2, 0.3, 0.25, 0.15, 0.05]


def descended(delay, make, rates):
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    updates = TwoBWUpdates(make([weight]), delay)
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
