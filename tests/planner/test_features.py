"""Narrow products, ways to experts, CUDA graphs and recomputed modules: in flags, in time and in bytes."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpipe.descriptions import cluster, framework, model
from evenpipe.planner.arguments import Values, parse_flags
from evenpipe.planner.estimate import Estimate, Estimator
from evenpipe.planner.features import add_features, features_of, flags_of
from evenpipe.planner.quantized import Quantized
from evenpipe.planner.run import (
    Adapted,
    Dispatcher,
    EstimateError,
    Graph,
    Module,
    OffloadModule,
    Optimizer,
    Run,
    Sharding,
)
from evenpipe.schedule import DelayCorrection

DENSE = Run(64, tensor=4, stages=4, data=4, chunks=5, gradients_in_fp32=False)
EXPERTS = Run(256, data=16, expert=16, expert_tensor=1, gradients_in_fp32=False)


def dense(where: str = "8x8-h100", **changed: Any) -> Estimate:
    return Estimator(model("llama3-70b"), cluster(where), framework("megatron"))(replace(DENSE, **changed))


def experts(where: str = "2x8-h100", **changed: Any) -> Estimate:
    return Estimator(model("qwen3-30b-a3b"), cluster(where), framework("megatron"))(replace(EXPERTS, **changed))


@given(
    st.fixed_dictionaries(
        {
            "quantized": st.sampled_from([None, *get_args(Quantized)]),
            "quantized_parameters": st.booleans(),
            "quantized_attention": st.booleans(),
            "user_buffers": st.booleans(),
            "overlap_experts": st.booleans(),
            "fused_experts": st.booleans(),
            "dispatcher": st.sampled_from(get_args(Dispatcher)),
            "graphs": st.lists(st.sampled_from(get_args(Graph)), unique=True).map(tuple),
            "optimizer": st.sampled_from(get_args(Optimizer)),
            "optimizer_offload": st.sampled_from([0.0, 0.5, 1.0]),
            "sharding": st.sampled_from([None, *get_args(Sharding)]),
            "offload_modules": st.lists(st.sampled_from(get_args(OffloadModule)), unique=True, min_size=1).map(tuple),
            "offload_fraction": st.sampled_from([0.25, 1.0]),
            "offload_delta_bytes": st.sampled_from([0, 4096]),
            "lora_rank": st.sampled_from([8, 32]),
            "lora_modules": st.lists(st.sampled_from(get_args(Adapted)), unique=True, min_size=1).map(tuple),
            "moment_bytes": st.sampled_from([1, 1.5, 2, 2.5, 3, 4]),
            "delay_correction": st.sampled_from(get_args(DelayCorrection)),
            "recomputed_modules": st.lists(st.sampled_from(get_args(Module)), unique=True, min_size=1).map(tuple),
        }
    )
)
def test_flags_say_what_they_are_made_of(features: dict[str, Any]) -> None:
    """By this parser of a few flags, and by a command's options, whose absent ones are None."""
    features["quantized_attention"] &= features["quantized"] not in (None, "nvfp4")  # else Megatron ignores it
    if features["optimizer_offload"]:
        features |= {"optimizer": "adam", "moment_bytes": 4}
    words = [word for flag in flags_of(Run(1, recompute="selective", schedule="2bw", **features)) for word in flag]
    read, unknown = parse_flags(words)
    assert not unknown
    options = ArgumentParser()
    add_features(options)
    for namespace in (read, options.parse_args(words)):
        usual = {"recomputed_modules": ("core_attn",)}
        assert usual | features_of(Values(namespace)) == features | {"routing_imbalance": 1.0}


@pytest.mark.parametrize(
    ("changed", "where", "said"),
    [
        ({"quantized": "tensorwise"}, "8x8-a100-80gb", "products in tensorwise: a100-80gb has no fp8"),
        ({"quantized": "nvfp4"}, "8x8-h100", "products in nvfp4: h100 has no fp4"),
        ({"quantized": "mxfp8"}, "8x8-h100", "products in mxfp8: h100 has no MXFP8"),
        ({"quantized": "nvfp4", "quantized_parameters": True}, "8x8-b200", "weights are not kept in nvfp4"),
        ({"quantized": "mxfp8", "precision": "fp32"}, "8x8-b200", "not fp32"),
        ({"quantized_attention": True}, "8x8-h100", "quantized_attention: nothing is quantized"),
    ],
)
def test_what_a_device_cannot_compute_is_told(changed: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(EstimateError, match=said):
        dense(where, **changed)


@pytest.mark.parametrize("quantized", get_args(Quantized))
def test_narrow_products_are_faster_and_keep_less(quantized: Quantized) -> None:
    found, wide = dense("8x8-b200", quantized=quantized), dense("8x8-b200")
    assert 0.3 < found.iteration_ms / wide.iteration_ms < 0.8
    assert all(
        one.bytes.activations < other.bytes.activations for one, other in zip(found.stages, wide.stages, strict=True)
    )
    # Beside bf16 weights there are quantized ones; kept instead of them, they take less on Blackwell, unless both ways.
    assert all(one.bytes.weights > other.bytes.weights for one, other in zip(found.stages, wide.stages, strict=True))


def test_weights_in_fp8_are_half_as_large_where_they_are_kept_once() -> None:
    once, twice = (
        dense(where, quantized="tensorwise", quantized_parameters=True) for where in ("8x8-b200", "8x8-h100")
    )
    wide = dense()
    middle = 1  # has no embedding and no head, which stay in bf16
    assert once.stages[middle].bytes.weights == pytest.approx(wide.stages[middle].bytes.weights / 2, rel=0.001)
    assert twice.stages[middle].bytes.weights == pytest.approx(wide.stages[middle].bytes.weights, rel=0.001)


def test_a_dispatcher_that_sends_a_copy_a_node_is_faster_across_nodes() -> None:
    alltoall, deepep, beside = (
        experts(**changed)
        for changed in ({}, {"dispatcher": "deepep"}, {"dispatcher": "deepep", "overlap_experts": True})
    )
    assert beside.iteration_ms < deepep.iteration_ms < alltoall.iteration_ms


def test_graphs_take_the_host_out_of_the_way() -> None:
    """Before a dispatcher it waits for numbers of tokens, and nothing of its time is hidden."""
    by_hand = experts().iteration_ms
    some = experts(graphs=("attn", "moe_router")).iteration_ms
    whole = experts(graphs=("full_iteration",), dispatcher="hybridep").iteration_ms
    assert whole < some < by_hand
    assert dense().iteration_ms == pytest.approx(dense(graphs=("attn", "mlp")).iteration_ms, rel=0.02)


@pytest.mark.parametrize("module", ["layernorm", "moe_act", "moe"])
def test_what_is_carried_out_again_costs_time_and_saves_bytes(module: Module) -> None:
    kept, again = experts(), experts(recompute="selective", recomputed_modules=(module,))
    assert again.iteration_ms > kept.iteration_ms
    assert again.stages[0].bytes.activations < kept.stages[0].bytes.activations


def test_the_whole_of_the_experts_is_more_than_their_activation() -> None:
    saved = [
        experts(recompute="selective", recomputed_modules=(module,)).stages[0].bytes.activations
        for module in ("moe_act", "moe")
    ]
    assert saved[1] < saved[0]


def test_moments_in_two_bytes_are_half_as_large() -> None:
    wide, narrow = (dense(moment_bytes=size).stages[1].bytes.optimizer for size in (4, 2))
    assert narrow == pytest.approx(wide * 8 / 12)


def test_attention_with_a_window_computes_less() -> None:
    of = model("llama3-8b").of_sequence(8192)
    times = [
        Estimator(one, cluster("1x8-h100"), framework("megatron"))(Run(8, stages=2, data=4)).iteration_ms
        for one in (of, of.model_copy(update={"window": 512}))
    ]
    assert times[1] < times[0]


def test_an_optimizer_on_the_host_leaves_its_share_of_the_gpu_and_takes_longer() -> None:
    here, half, there = (dense(optimizer_offload=share) for share in (0.0, 0.5, 1.0))
    assert half.stages[1].bytes.optimizer == pytest.approx(here.stages[1].bytes.optimizer / 2, abs=2)
    assert there.stages[1].bytes.optimizer == 0
    assert here.iteration_ms < half.iteration_ms < there.iteration_ms
    # 70 billion parameters on 64 GPUs, of which the fullest stage's are stepped by eight of a node at once: 28 bytes
    # of each in the host's memory, at the pace of ZeRO-Offload's Table 4.
    own = here.stages[0].bytes.optimizer / 12
    assert there.iteration_ms - here.iteration_ms == pytest.approx(own * (8 * 2.57e-7 + 6 / 63e6 / 0.83), rel=0.1)


def test_muon_has_one_moment_of_matrices_and_orthogonalizes_them() -> None:
    adam, muon = (dense(optimizer=name, overlap_gradients=False, overlap_parameters=False) for name in ("adam", "muon"))
    assert muon.stages[1].bytes.optimizer == pytest.approx(adam.stages[1].bytes.optimizer * 8 / 12, rel=0.001)
    assert muon.stages[0].bytes.optimizer > adam.stages[0].bytes.optimizer * 8 / 12  # its embedding has Adam
    alone = dense(optimizer="muon", sharded_optimizer=False, overlap_gradients=False, overlap_parameters=False)
    assert alone.stages[1].bytes.optimizer == pytest.approx(4 * muon.stages[1].bytes.optimizer, rel=0.001)
    # The products of a GPU's matrices: five steps of 4 m²n + 2 m³ operations, at less than the data sheet's rate.
    m, f, layers = 8192, 28672, 20
    sides = [(2560, m), (2048, m), (m, 2 * f // 4), (f // 4, m)]
    flops = layers * sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in sides)
    shown = alone.iteration_ms - dense(optimizer="sgd", sharded_optimizer=False, overlap_gradients=False).iteration_ms
    assert 1 < shown / (flops / 989.5e9) < 2.5


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(EstimateError, match="optimizer_offload_fraction=2: give a share from 0 to 1"):
        dense(optimizer_offload=2)


def test_fully_sharded_replicas_divide_what_they_say() -> None:
    """A middle stage of 17.1e9 / 4 parameters a GPU, four replicas."""
    ours = {name: dense(sharding=name).stages[1].bytes for name in get_args(Sharding)}
    none, one, two, three = ours.values()
    assert one.optimizer == pytest.approx(none.optimizer / 4)
    assert two.gradients == pytest.approx(one.gradients / 4)
    assert three.weights == pytest.approx(two.weights / 4)
    assert (one.weights, two.weights, one.gradients) == (none.weights, none.weights, none.gradients)
    # Gradients of 10^9 parameters are whole for a while, and weights of half as many and a layer.
    assert two.buffers - one.buffers == pytest.approx(1.08 * 2e9, rel=0.001)
    assert three.buffers - two.buffers == pytest.approx(1.08 * 2 * (0.5e9 + 856e6 / 4), rel=0.01)


def test_zero_3_gathers_for_every_micro_batch() -> None:
    slow = "8x8-a100-80gb-25gbit"  # a link on which nothing is hidden
    wide = {"chunks": 1, "tensor": 8, "data": 2}
    two, three = (dense(slow, sharding=name, **wide) for name in ("optim_grads", "optim_grads_params"))
    assert three.iteration_ms > 1.2 * two.iteration_ms
    near = [dense("1x64-gb200", sharding=name).iteration_ms for name in ("optim", "optim_grads_params")]
    assert near[1] == pytest.approx(near[0], rel=0.05), "on NVLink all of it is beside compute"


def test_activations_on_the_host_are_not_on_the_gpu() -> None:
    modules: Any = ("attn_norm", "core_attn", "attn_proj", "mlp_norm")
    here, away = dense(), dense(offload_modules=modules)
    some = dense(offload_modules=modules, offload_fraction=0.5)
    saved = [one.stages[0].bytes.activations for one in (here, some, away)]
    assert saved[0] - saved[1] == pytest.approx(saved[1] - saved[2], rel=0.001)
    # Of a layer, a token keeps on four GPUs: two norms' inputs, queries with keys and values, and the projection's.
    each = 2 * 8192 * (2 * 8192 + 10240 + 8192) / 4
    units = here.run.stages * 2 - 2 + (here.run.chunks - 1) * here.run.stages + 1
    assert saved[0] - saved[2] == pytest.approx(units * 4 * each, rel=0.01)
    assert away.iteration_ms >= here.iteration_ms


def test_a_later_stage_may_keep_more_of_what_others_offload() -> None:
    modules: Any = ("attn_norm", "mlp_norm")
    even, uneven = (
        [one.bytes.activations for one in dense(offload_modules=modules, offload_delta_bytes=size).stages]
        for size in (0, 10**8)
    )
    assert [b - a for a, b in zip(even, uneven, strict=True)] == [0, 10**8, 2 * 10**8, 3 * 10**8]


def test_what_only_megatron_s_own_schedules_run_with_is_refused_with_others() -> None:
    with pytest.raises(EstimateError, match="sharding: goes with Megatron's own schedules only, not BPipe"):
        dense(sharding="optim", bpipe=True, chunks=1)
    with pytest.raises(EstimateError, match="offload_modules: attn_proj's input is what core_attn gives"):
        dense(offload_modules=("attn_proj",))


def test_adapters_alone_have_gradients_and_an_optimizer() -> None:
    whole, adapted = dense(), dense(lora_rank=16, lora_modules=("linear_qkv", "linear_proj"))
    middle = [one.stages[1].bytes for one in (whole, adapted)]
    # Of each layer, on four GPUs: 16 × (8,192 + 2,560) and 16 × (2,048 + 8,192).
    count = 20 * 16 * (8192 + 2560 + 2048 + 8192)
    assert middle[1].gradients == 2 * count
    assert middle[1].optimizer == pytest.approx(12 * count / 4, abs=2)
    assert middle[1].weights == middle[0].weights + 2 * count
    assert middle[1].activations < middle[0].activations
    assert 0.6 < adapted.iteration_ms / whole.iteration_ms < 0.8  # two of three products
    assert adapted.logged_tflops == pytest.approx(whole.logged_tflops, rel=0.2)
    with pytest.raises(EstimateError, match="lora_modules: adapters of experts are not described"):
        experts(lora_rank=8)
    assert experts(lora_rank=8, lora_modules=("linear_qkv",)).stages[0].bytes.optimizer < 10**8


@given(st.floats(1, 20), st.sampled_from([1, 2, 8, 16]))
@settings(max_examples=20, deadline=None)
def test_the_rank_with_the_most_tokens_sets_time_and_memory(times: float, ranks: int) -> None:
    """It has no more than all of them, and all of them where experts are not shared out."""
    even, uneven = (experts(expert=ranks, routing_imbalance=one) for one in (1.0, times))
    most = experts(expert=ranks, routing_imbalance=float(ranks))
    for of in (lambda one: one.iteration_ms, lambda one: one.stages[0].bytes.activations):
        assert of(even) <= of(uneven) <= of(most)
    assert (uneven.iteration_ms > even.iteration_ms) is (ranks > 1 and times > 1)
    assert uneven.logged_tflops <= even.logged_tflops
    assert ("with uneven routing" in uneven.uncertainty.meaning) is (times > 1)


def test_attention_in_chunks_takes_the_less_the_longer_the_sequence() -> None:
    """Llama 4: three layers of four stay within 8,192 tokens. Megatron's log counts them in full."""
    run, where = Run(8, data=8, expert=8, expert_tensor=1), cluster("1x8-b200")
    shares = []
    for tokens in (4096, 8192, 32768):
        of = model("llama4-scout").of_sequence(tokens)
        chunked, whole = (
            Estimator(one, where, framework("megatron"))(run) for one in (of, of.model_copy(update={"chunk": 0}))
        )
        assert chunked.logged_tflops * chunked.iteration_ms == pytest.approx(whole.logged_tflops * whole.iteration_ms)
        shares.append(chunked.iteration_ms / whole.iteration_ms)
    assert shares[:2] == [1, 1]
    assert 0.5 < shares[2] < 0.9
