"""Bytes that layers keep and states that ranks hold, by the papers' formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.descriptions import Model, cluster, model
from evenpipe.planner.estimate import Estimate, estimate
from evenpipe.planner.operations.operation import Parameters
from evenpipe.planner.operations.parts import Blocks
from evenpipe.planner.run import Run
from evenpipe.planner.stage_bytes import chunks_of, parameters_of, states

GPT = model("gpt3-13b")
NODE = cluster("1x8-a100-80gb")
RUN = Run(global_batch=32, stages=8)


def kept(of: Model, run: Run) -> float:
    """Bytes that one layer keeps of a micro-batch."""
    run = replace(run, precision="fp16", attention=run.attention or "unfused")
    return chunks_of([{"layer": 1}], Blocks(of, run))[0].kept_bytes


def test_a_gated_mlp_keeps_both_halves_that_its_gate_multiplies() -> None:
    run, gated = replace(RUN, attention="flash"), GPT.model_copy(update={"gated": True})
    assert kept(gated, run) - kept(GPT, run) == 2 * GPT.sequence * GPT.ffn * run.micro_batch / run.tensor


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from(["megatron-22b", "gpt3-175b"]))
def test_a_layer_keeps_what_bpipe_s_equations_4_to_6_say(t: int, b: int, name: str) -> None:
    of = model(name)
    s, h, a = of.sequence, of.hidden, of.heads
    run = Run(global_batch=8, tensor=t, micro_batch=b, sequence_parallel=t > 1)
    # Beside the paper's terms, mean and deviation of each row that two norms take, in fp32.
    norms = 2 * 8 * s * b / t
    assert kept(of, replace(run, recompute="none")) == pytest.approx(s * b * h / t * (34 + 5 * a * s / h) + norms)
    assert kept(of, replace(run, recompute="selective")) == 34 * s * b * h / t + norms
    assert kept(of, replace(run, recompute="full", sequence_parallel=False)) == 2 * s * b * h


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["none", "selective", "full"]))
def test_input_gradients_leave_the_inputs_of_products_and_the_gradients_of_their_outputs(
    t: int, recompute: str
) -> None:
    """As many bytes as a layer of megatron-core's has been seen to leave, whatever it computes again."""
    run = replace(RUN, tensor=t, recompute=recompute, sequence_parallel=t > 1, precision="fp16")
    [chunk] = chunks_of([{"layer": 1}], Blocks(GPT, run))
    # Of qkv, projection, fc1 and fc2; what has been gathered of a sequence is whole.
    inputs, gradients = 1 + 1 + 1 + 4, 3 + t + 4 + t
    assert chunk.left_bytes == 2 * (inputs + gradients) * GPT.sequence * GPT.hidden / t


def test_flash_attention_s_backward_adds_the_queries_gradient_up_in_fp32() -> None:
    run = Run(global_batch=1, attention="flash", precision="bf16")
    heads = chunks_of([{"layer": 1}], Blocks(GPT, run))[0].working_bytes
    assert heads == GPT.sequence * GPT.heads * (4 * GPT.head_dim + 4)
    shared = model("llama3-8b")
    expanded = chunks_of([{"layer": 1}], Blocks(shared, run))[0].working_bytes
    assert expanded == shared.sequence * shared.heads * (4 * 128 + 4 + 2 * 2 * 128)


def test_flash_attention_keeps_a_row_s_sum_instead_of_its_scores() -> None:
    s, h, a = GPT.sequence, GPT.hidden, GPT.heads
    assert kept(GPT, Run(global_batch=1, attention="flash")) == 34 * s * h + 2 * 8 * s + 4 * s * a


def test_grouped_queries_keep_fewer_keys_and_values_and_no_fewer_queries() -> None:
    """Flash attention keeps queries, keys and values as the one matrix product makes them (Ainslie et al. 2023)."""
    run, of = Run(global_batch=1, attention="flash"), model("llama3-70b")
    alike = of.model_copy(update={"key_value_heads": of.heads})
    fewer = 2 * (of.heads - of.key_value_heads) * of.head_dim
    assert kept(alike, run) - kept(of, run) == 2 * of.sequence * fewer


def test_context_parallelism_divides_what_a_layer_keeps() -> None:
    run = Run(global_batch=1, attention="flash")
    assert kept(GPT, replace(run, context=4)) == kept(GPT, run) / 4


@given(st.integers(1, 64), st.integers(1, 10**9))
def test_states_of_megatron_s_mixed_precision(d: int, count: int) -> None:
    run = Run(global_batch=1, data=d, precision="fp16", sharded_optimizer=True, gradients_in_fp32=False)
    held = states(Parameters(count), run)
    assert held.stay == pytest.approx(count * (4 + 12 / d))
    assert held.step == pytest.approx(4 * count / d)
    whole = states(Parameters(count), replace(run, sharded_optimizer=False, gradients_in_fp32=True))
    assert (whole.stay, whole.step) == (18 * count, 0)


def test_experts_are_sharded_among_fewer_ranks() -> None:
    run = Run(global_batch=1, data=8, expert=4, precision="bf16", sharded_optimizer=True, gradients_in_fp32=True)
    assert states(Parameters(0, 100), run).optimizer == pytest.approx(12 * 100 / 2)


def activations(shown: Estimate) -> list[float]:
    return [stage.bytes.activations / 2**30 for stage in shown.stages]


def test_stages_hold_as_many_micro_batches_as_the_verified_schedule_says() -> None:
    one = 5 * kept(GPT, RUN) / 2**30
    ordinary = activations(estimate(GPT, NODE, RUN))
    assert ordinary[1:-1] == pytest.approx([one * (8 - stage) for stage in range(1, 7)])
    level = activations(estimate(GPT, NODE, replace(RUN, bpipe=True)))
    assert max(level[1:-1]) == pytest.approx(5 * one)  # ⌈(p + 2) / 2⌉
    of_gpipe = activations(estimate(GPT, NODE, replace(RUN, schedule="gpipe")))
    assert of_gpipe[1] == pytest.approx(32 * one)


def test_2bw_holds_two_versions_of_the_weights_and_a_batch_s_gradients() -> None:
    one, two = (estimate(GPT, NODE, replace(RUN, schedule=name)).stages[1].bytes for name in ("1f1b", "2bw"))
    assert two.weights == 2 * one.weights
    assert two.gradients == 2 * one.gradients  # one replica: nothing is sharded
    assert two.activations == one.activations


@pytest.mark.parametrize("sharded", [False, True])
def test_2bw_s_corrections_keep_what_docs_2bw_says(sharded: bool) -> None:
    """Beyond 2BW's: w bytes a parameter, or o / d of what the rank steps, here fp32 masters of 16-bit weights."""
    run = replace(RUN, schedule="2bw", stages=4, data=2, sharded_optimizer=sharded)

    def parts(**given: Any) -> Any:
        return estimate(GPT, NODE, replace(run, **given)).stages[1].bytes

    without = parts()
    for name in ("weight-prediction", "nesterov"):
        assert parts(delay_correction=name) == without._replace(weights=without.weights * 3 / 2)
    fed_back = without.optimizer + 4 * without.weights / 4 / (2 if sharded else 1)
    assert parts(delay_correction="error-feedback") == without._replace(optimizer=fed_back)
    assert parts(delay_correction="nesterov", schedule="1f1b") == parts(schedule="1f1b")


def test_2bw_holds_what_its_paper_s_formulas_say() -> None:
    """PipeDream-2BW §3.1 (with recomputation, d·|A^inp| among it, which §4.2.2 leaves out) and §4.2.2 (without)."""
    of, d, m = model("gpt2-2.2b"), 8, 64
    run = Run(global_batch=m, stages=d, schedule="2bw", precision="fp16", attention="unfused", recompute="none")
    layers, middle = of.layers, slice(1, d - 1)
    whole = kept(of, run) * layers  # |A^total(b)|; of the stages between the embedding's and the head's
    weights = 2 * parameters_of({"layer": layers}, Blocks(of, run)).all
    shown = estimate(of, cluster("1x8-v100-16gb"), run).stages
    assert {stage.bytes.weights for stage in shown[middle]} == {2 * weights / d}
    # The paper counts d in flight on all stages; stage s of the schedule holds d − s.
    assert [stage.bytes.activations for stage in shown[middle]] == pytest.approx(
        [(d - s) * whole / d for s in range(1, d - 1)], rel=1e-6
    )
    again = estimate(of, cluster("1x8-v100-16gb"), replace(run, recompute="full")).stages
    inputs = layers * 2 * of.sequence * of.hidden  # |A^inp(b)|, of each layer
    for s, stage in enumerate(again[middle], start=1):
        assert stage.bytes.activations == (d - s) * inputs / d
    # What is recomputed comes and goes, a layer of it at a time, not the whole stage's |A| − |A^inp|.
    one = chunks_of([{"layer": 1}], Blocks(of, replace(run, recompute="full")))[0].working_bytes
    assert kept(of, run) <= one < 1.1 * kept(of, run)
