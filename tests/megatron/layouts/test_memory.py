"""What stages are said to hold is what Megatron's own model holds."""

import pytest

from evenpipe.layouts.plan import best_layout
from evenpipe.megatron_lm.layout_model import read
from evenpipe.planner.operations.operation import Parameters
from evenpipe.planner.stage_bytes import states
from evenpipe.train.machine import PlannedRun, stage_memory

SAMPLES = 2
RUN = PlannedRun(
    layers=8, hidden=64, heads=4, seq_length=64, stages=4, micro_batches=8, micro_batch_size=SAMPLES, iterations=1
)
FLAGS = (
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--micro-batch-size", "2", "--global-batch-size", "16", "--max-position-embeddings", "64"),
    *("--pipeline-model-parallel-size", "4", "--padded-vocab-size", "256"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
)


@pytest.mark.long
def test_of_the_even_split_with_tied_embeddings():
    plan, _ = best_layout(FLAGS)
    rows = [plan.layers[:3], plan.layers[3:5], plan.layers[5:7], plan.layers[7:]]
    for stage, layers, held, ahead in zip(plan.even.stages, rows, stage_memory(RUN, "cpu"), (4, 3, 2, 1), strict=True):
        saved = sum(layer.saved_bytes for layer in layers)
        assert stage.peak_bytes - ahead * saved == held.static_bytes
        assert saved == pytest.approx(SAMPLES * held.sample_bytes, rel=0.01)


def test_a_distributed_optimizer_is_shared_by_all_replicas():
    """18 bytes a parameter in bf16; 6 and 12 / 4 with four replicas."""
    runs = [read([*FLAGS, "--bf16", *flags], 4 * 4)[1].run for flags in ([], ["--use-distributed-optimizer"])]
    assert [states(Parameters(1), run).stay for run in runs] == [18, 9]
    assert [run.data for run in runs] == [4, 4]
