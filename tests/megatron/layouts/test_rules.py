"""Which layouts there are is what the installed Megatron's own class says."""

import itertools

import numpy as np
import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from evenpipe.layouts.gpt import Pipeline
from evenpipe.layouts.layers import Layer, layout_text, parts_of
from evenpipe.layouts.plan import plan_layout
from evenpipe.layouts.split import Problem

EMBEDDING, DENSE = Layer("E", "embedding", 1.0, 2.0), Layer("t", "dense", 10.0, 20.0)
LOSS = Layer("L", "loss", 55.0, 65.0)


def model(layers, mtp):
    return (EMBEDDING, *[DENSE] * layers, *([Layer("m" * mtp, "mtp", 15.0, 25.0)] if mtp else []), LOSS)


def accepted(layout, stages, layers, mtp):
    try:
        PipelineParallelLayerLayout.from_str(layout, stages).validate_layer_layout(layers, mtp or None)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(("stages", "chunks", "mtp"), [(3, 1, 0), (4, 1, 1), (2, 2, 0), (2, 2, 2), (3, 2, 1)])
def test_every_layout_that_is_looked_at_is_accepted_and_others_are_not(stages, chunks, mtp):
    """Embedding first and loss last, where GPTModel has them. MTP layers are never on the first of several stages.

    In the last chunk Megatron's message forbids these too, but its condition does not.
    """
    layers = model(3, mtp)
    problem = Problem(layers, Pipeline(stages, chunks, stages), mtp_apart=True)
    ends = range(1, len(layers))
    rows = np.array(list(itertools.combinations_with_replacement(ends, problem.pipeline.parts - 1)))
    for cuts, allowed in zip(rows.tolist(), problem.allowed(rows).tolist(), strict=True):
        parts = parts_of(layers, cuts)
        first = any(layer.kind == "mtp" for part in parts[::stages] for layer in part)
        assert allowed == (accepted(layout_text(parts), stages, 3, mtp) and not first), layout_text(parts)


@pytest.mark.parametrize(("stages", "chunks"), [(4, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("mtp", [0, 1])
@pytest.mark.parametrize("apart", [True, False])
def test_the_best_layout_is_accepted(stages, chunks, mtp, apart):
    plan = plan_layout(model(9, mtp), Pipeline(stages, chunks, 8), mtp_apart=apart, source="test")
    assert plan.best.max_stage_ms <= plan.even.max_stage_ms
    assert accepted(plan.layout, stages, 9, mtp)
    assert accepted(plan.even.layout, stages, 9, mtp)
    assert apart or not mtp or plan.layout.endswith("mL")
