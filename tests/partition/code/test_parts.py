"""A cut model computes what the user's own does: losses, gradients and buffers bit for bit, dropout on."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.partition.code.cut import (
    adds_up_alike,
    batches,
    drawn_cuts,
    plan_at,
    profiled,
    tied,
    train_cut,
    train_uncut,
    written,
)

#: Rounding of a sum in another order, relative to the largest element; batch norm of convolutions makes more of it.
ROUNDING = {"fp32": 1e-6, "bf16": 0.05}


def trained(small, tmp_path, name, precision, stages, seeds):
    """For plans of random cuts: the graph, the cuts, and what the uncut and the cut model come to."""
    example, graph = small(name, precision)
    found = profiled(example, graph)
    given = batches(example, 3)
    before = copy.deepcopy(example.model.state_dict())
    whole = {key: value.clone() for key, value in train_uncut(example.model, given).items()}
    for seed in seeds:
        cuts = drawn_cuts(graph, stages - 1, seed)
        plan = plan_at(found, stages, cuts)
        parts = written(example, graph, plan, found, tmp_path / "plan.json")
        example.model.load_state_dict(before)
        cut = train_cut(example.model, parts, given)
        example.model.load_state_dict(before)
        assert cut.keys() == whole.keys()
        yield graph, cuts, tied(example, parts), whole, cut


@pytest.mark.parametrize(("name", "precision"), [("bert-large", "bf16"), ("gpt2-large", "fp32"), ("t5-large", "fp32")])
def test_parts_train_as_the_model_does(small, tmp_path, name, precision):
    """But for parameters that several parts use, and values whose uses a cut puts into another order: a last bit."""
    alike = 0
    for graph, cuts, twice, whole, cut in trained(small, tmp_path, name, precision, 3, range(4)):
        exact = adds_up_alike(graph, cuts)
        alike += exact
        for key, value in whole.items():
            if key.startswith("gradient") and (key in twice or not exact):
                bound = ROUNDING[precision] * float(value.abs().max())
                torch.testing.assert_close(cut[key], value, rtol=0, atol=bound, msg=f"{cuts}: {key}")
            else:
                assert torch.equal(cut[key], value), f"{cuts}: {key}"
    assert alike
