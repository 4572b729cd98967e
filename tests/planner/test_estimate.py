"""Estimates: bytes by the papers' formulas, in-flight counts by the schedule, cliffs, and refusals."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from evenpipe.descriptions import cluster, model
from evenpipe.planner.counted_flops import logged_flops, model_flops
from evenpipe.planner.estimate import Estimator, estimate
from evenpipe.planner.iteration import batch_end
from evenpipe.planner.kernels import FITTED, Kernels, Links
from evenpipe.planner.operations.operation import Collective, Parameters
from evenpipe.planner.operations.parts import Blocks, parts_of
from evenpipe.planner.run import EstimateError, Recompute, Run
from evenpipe.planner.stage_bytes import parameters_of
from evenpipe.schedule import find, own

GPT = model("gpt3-13b")
NODE = cluster("1x8-a100-80gb")
RUN = Run(global_batch=32, stages=8)


def test_an_uneven_layout_moves_weights_and_time() -> None:
    shown = estimate(GPT, NODE, replace(RUN, layout=(4, 5, 5, 5, 5, 5, 5, 6))).stages
    assert shown[7].bytes.weights > shown[1].bytes.weights > shown[0].bytes.weights * 0.8
    assert shown[1].forward_ms == pytest.approx(shown[0].forward_ms * 5 / 4, rel=0.02)


def test_the_parts_of_a_stage_s_bytes_add_up() -> None:
    for stage in estimate(GPT, NODE, RUN).to_json()["stages"]:
        held = dict(stage["bytes"])
        assert held.pop("total") == sum(held.values())


def test_model_flops_are_korthikanti_s() -> None:
    run = Run(global_batch=32, precision="fp16")
    s, h, layers, v = GPT.sequence, GPT.hidden, GPT.layers, GPT.vocabulary
    formula = 72 * 32 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops(GPT, run) == pytest.approx(formula)


@pytest.mark.parametrize(
    ("name", "tokens", "giga"),
    [
        ("llama3-405b", 8192, 2524.0),
        ("llama3-70b", 4096, 433.1),
        ("deepseek-v3", 4096, 260.0),
        ("qwen3-235b-a22b", 4096, 148.0),
        ("qwen3-30b-a3b", 4096, 23.0),
        ("kimi-k2", 4096, 204.5),
    ],
)
def test_logged_flops_are_those_behind_megatron_bridge_s_published_rates(name: str, tokens: int, giga: float) -> None:
    """10^9 operations a token: TFLOP/s over tokens/s of a GPU (docs/performance-summary.md of release 26.06)."""
    of, run = model(name).of_sequence(tokens), Run(global_batch=8, precision="bf16")
    assert logged_flops(of, run) / (8 * tokens) / 1e9 == pytest.approx(giga, rel=3e-3)


def test_logged_flops_are_bridge_s_but_for_windows_which_it_counts() -> None:
    """GPT-OSS: 18 of 36 layers see 128 of the 2,048 tokens before theirs, on the mean."""
    of, run = model("gpt-oss-120b").of_sequence(4096), Run(global_batch=1, precision="bf16")
    windows = 6 * 18 * (4096 - 2 * 128) * of.heads * of.head_dim
    assert logged_flops(of, run) / 4096 - windows == pytest.approx(32.6e9, rel=3e-3)


@pytest.mark.parametrize(("name", "nodes"), [("deepseek-v3", "128x8-h100"), ("llama3-405b", "2048x8-h100")])
def test_an_estimate_takes_less_than_a_second(name: str, nodes: str) -> None:
    where = cluster(nodes)
    sizes = {"tensor": 8, "stages": 8, "expert": 8 if name == "deepseek-v3" else 1}
    run = Run(global_batch=where.gpus, data=where.gpus // 64, layout=None, **sizes)
    taken = []
    while len(taken) < 3 and min(taken, default=1.0) >= 1:
        started = time.process_time()
        estimate(model(name), where, replace(run, layout=_uneven(model(name).layers, 8)))
        taken.append(time.process_time() - started)
    assert min(taken) < 1


def _uneven(layers: int, stages: int) -> tuple[int, ...]:
    """As many layers as divide, and one more on the first stages."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def test_rates_of_a_gpu_are_of_the_whole_iteration() -> None:
    shown = estimate(GPT, NODE, RUN)
    each = shown.run.gpus * shown.iteration_ms / 1e3
    assert shown.tokens_per_second == pytest.approx(RUN.global_batch * GPT.sequence / each)
    assert shown.logged_tflops == pytest.approx(logged_flops(GPT, shown.run) / each / 1e12)
    assert shown.logged_tflops < shown.mfu * NODE.device.tflops["fp16"], "half of attention"
    again = estimate(GPT, NODE, replace(RUN, recompute="full"))
    assert again.logged_tflops * again.iteration_ms == pytest.approx(shown.logged_tflops * shown.iteration_ms)


def test_evictions_are_priced_on_the_links_that_they_use() -> None:
    """BPipe Appendix B: with as much tensor parallelism as a node has GPUs, partners are on different nodes."""
    of, nodes = Estimator(model("gpt3-96b"), cluster("4x8-a100-80gb")), 128
    near = of(Run(global_batch=nodes, tensor=4, stages=8, recompute="selective", bpipe=True))
    far = of(Run(global_batch=nodes, tensor=8, stages=4, micro_batch=2, recompute="selective", bpipe=True))
    assert far.stages[0].eviction_ms > 10 * near.stages[0].eviction_ms
    assert any("different nodes" in warning for warning in far.warnings)
    assert not any("different nodes" in warning for warning in near.warnings)


def test_virtual_stages_wait_for_hand_overs_where_interleaved_stages_do() -> None:
    """Megatron-Core overlaps them, Megatron-LM 3.0 does not; both call it 1F1B with virtual stages."""
    of, nodes, run = model("llama3-8b"), cluster("1x8-h100"), Run(global_batch=64, stages=8, chunks=2)
    beside = [
        estimate(of, nodes, replace(run, schedule=name, blocking=blocking)).iteration_ms
        for name in ("1f1b", "interleaved")
        for blocking in (("1f1b",), ("1f1b", "interleaved"))
    ]
    assert beside[0] == beside[2] < beside[1] == beside[3]


def test_what_is_reduced_beside_a_backward_hides_behind_it_once() -> None:
    """Experts and all else have one backward between them."""
    run = Run(global_batch=512, stages=1, data=64, expert=8, overlap_gradients=True, overlap_parameters=False)
    run = replace(run, precision="bf16", sharded_optimizer=True, gradients_in_fp32=True, attention="flash")
    kernels = Kernels(run, cluster("8x8-h100"), FITTED)
    dense, experts = Parameters(10**9), Parameters(0, 10**9)
    both = Parameters(10**9, 10**9)
    open_ = sum(batch_end(one, run, kernels, 0, 0) for one in (dense, experts))
    assert batch_end(both, run, kernels, 0, 0) == pytest.approx(open_)
    assert batch_end(both, run, kernels, 0, 0.005) == pytest.approx(open_ - 0.005)


def test_tied_embeddings_sum_their_gradients_where_they_are_on_different_stages() -> None:
    run = replace(RUN, precision="fp16", gradients_in_fp32=False)
    tied, untied = (estimate(GPT.model_copy(update={"tied": is_}), NODE, run).iteration_ms for is_ in (True, False))
    nbytes = 2 * GPT.vocabulary * GPT.hidden
    assert tied - untied == pytest.approx(nbytes / (300e9 * FITTED.peer) * 1e3, rel=0.01)


def test_with_bpipe_replicas_of_a_stage_are_as_far_apart_as_pipelines_are_long() -> None:
    """Pairs are neighbours, a pipeline is placed before the next (BPipe §3.5); else replicas of a stage are near."""
    nodes, run = cluster("4x8-a100-80gb"), Run(global_batch=64, tensor=2, stages=4, data=4, precision="fp16")
    near, far = (Links(replace(run, bpipe=bpipe), nodes, FITTED).reduction(1e9) for bpipe in (False, True))
    assert near == pytest.approx(1e9 / (300e9 * FITTED.peer))
    assert far == pytest.approx(1e9 / (12.5e9 * FITTED.node))


def test_tensor_parallel_ranks_reduce_the_loss_and_gather_what_the_head_reads() -> None:
    run = Run(global_batch=8, tensor=4, precision="fp16", attention="flash", sequence_parallel=True)
    blocks = Blocks(GPT, run).operations
    sent = {
        one.name: [work.nbytes for work in one.forward if isinstance(work, Collective)]
        for one in (*blocks["embedding"], *blocks["head"])
    }
    tokens, half = GPT.sequence, 3 / 4 * 2 * GPT.sequence * GPT.hidden
    assert sent["embedding"] == sent["output_layer"] == [half]
    assert sent["cross_entropy"] == [2 * 3 / 4 * 4 * tokens] * 3


def test_a_further_token_s_stage_has_an_embedding_of_its_own() -> None:
    of = GPT.model_copy(update={"mtp_layers": 1, "tied": False})
    run = replace(RUN, precision="fp16", attention="flash")
    assert parts_of(of, run)[-1]["second embedding"] == 1
    assert "second embedding" not in parts_of(of, replace(run, stages=1, layout=(40,)))[0]
    tied = of.model_copy(update={"tied": True})
    assert "second embedding" not in parts_of(tied, run)[-1], "the head's copy is one"
    moved = parts_of(tied, replace(run, further_part=6))
    assert (moved[6]["second embedding"], moved[6]["further token"]) == (1, 1)
    assert [part["further head"] for part in moved] == [0] * 7 + [1], "the loss of a further token is with the other"
    count = parameters_of({"second embedding": 1}, Blocks(of, run)).shared
    assert count == of.vocabulary * of.hidden


def test_a_measured_message_time_is_taken() -> None:
    run = Run(global_batch=64, stages=8, schedule="kfkb", group_size=2)
    nodes = cluster("8x1-ada-grouper-s1")
    of = model("gpt-medium")
    slow = [estimate(of, nodes, replace(run, message_ms=ms)).iteration_ms for ms in (0, 20, 200)]
    assert slow == sorted(slow)
    assert slow[2] > 1.5 * slow[0]


#: 10^9 parameters, as the models are known for; GPT-2's and BERT's are in their names.
BILLIONS = {
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "mixtral-8x7b": 46.7,
    "deepseek-v3": 685.0,  # with the layer that predicts a further token
    "bert-1.3b": 1.28,
    "gpt2-2.2b": 2.2,
}


@pytest.mark.parametrize(
    ("name", "nodes", "run"),
    [
        ("llama3-8b", "1x8-h100", Run(global_batch=64, tensor=2, stages=2, data=2)),
        ("llama3-70b", "8x8-h200", Run(global_batch=64, tensor=4, stages=4, data=2, context=2, recompute="full")),
        ("mixtral-8x7b", "8x8-h100", Run(global_batch=256, tensor=2, stages=4, data=8, expert=8)),
        (
            "deepseek-v3",
            "32x8-b200",
            Run(global_batch=512, stages=16, data=16, expert=16, layout=(4,) * 15 + (1,), recompute="full"),
        ),
        ("bert-1.3b", "1x8-v100-16gb", Run(global_batch=64, stages=8, schedule="2bw")),
        ("gpt2-2.2b", "8x8-v100-16gb", Run(global_batch=512, stages=8, data=8, schedule="2bw", recompute="full")),
        ("llama3-8b", "1x8-h100", Run(global_batch=64, stages=8, schedule="v-half")),
        ("llama3-8b", "1x8-h100", Run(global_batch=64, stages=8, schedule="zb-h1")),
    ],
)
def test_models_of_all_kinds_have_an_estimate(name: str, nodes: str, run: Run) -> None:
    of, nodes_ = model(name), cluster(nodes)
    began = time.process_time()
    shown = estimate(of, nodes_, run)
    assert time.process_time() - began < 1
    run = shown.run
    # All ranks of a pipeline together hold each parameter once, two copies of tied or shared embeddings left out.
    versions, each = 2 if run.schedule == "2bw" else 1, run.tensor * run.expert
    whole = sum(parameters_of(part, Blocks(of, run)).shared for part in parts_of(of, run)) * run.tensor
    whole += sum(parameters_of(part, Blocks(of, run)).expert for part in parts_of(of, run)) * each
    assert whole / 1e9 == pytest.approx(BILLIONS[name], rel=0.06)
    dense = sum(stage.bytes.weights for stage in shown.stages) * each / (run.element_bytes * versions)
    assert dense >= whole * 0.99
    # Nobody computes faster than the device, and no batch is shorter than its slowest stage's work.
    least = model_flops(of, run) / (nodes_.device.tflops[run.precision or ""] * 1e12 * run.gpus)  # type: ignore[index]
    assert shown.mfu == pytest.approx(least * 1e3 / shown.iteration_ms)
    assert shown.mfu < 0.7
    slowest = max(stage.forward_ms + stage.backward_ms for stage in shown.stages)
    assert run.micro_batches * slowest < shown.iteration_ms
    ideal = (run.micro_batches + run.stages - 1) * slowest
    assert shown.iteration_ms < 2 * ideal, "nothing but hand-overs and the batch's end comes on top"
    for stage in shown.stages:
        held = stage.bytes
        assert held.communicators == round(nodes_.device.reserve_gib * 2**30)
        assert held.activations > 0
        assert (
            held.optimizer * (run.data * run.context if run.sharded_optimizer else 1) >= 2.9 * held.weights / versions
        )


def test_what_does_not_fit_says_by_how_much_and_what_to_change() -> None:
    run = Run(global_batch=128, tensor=4, stages=8, micro_batch=2, recompute="selective")
    of = Estimator(model("gpt3-96b"), cluster("4x8-a100-80gb"))
    shown = of(run)
    assert not shown.fits
    assert shown.reason is not None
    assert "stage 0 needs 81.4 GiB and has 79.3" in shown.reason
    assert "--bpipe" in shown.reason
    assert of(replace(run, bpipe=True)).fits
    for name in ("gpipe", "v-half"):
        # Their stages are level, or BPipe has no meaning for them.
        other = of(replace(run, schedule=name, micro_batch=4 if name == "v-half" else 2))
        assert "--bpipe" not in " ".join([other.reason or "", *other.warnings]), name
        assert not other.fits
    lacking = of(Run(global_batch=128, data=32)).reason
    assert lacking is not None
    assert "give more --stages or --tensor-parallel" in lacking


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tensor": 3, "stages": 1}, "data_parallel=1: with tensor 3"),
        ({"stages": 16}, "that are 16 GPUs; 1x8-a100-80gb of 8 has 8 too few: name a larger one"),
        ({"stages": 4}, "has more: use all"),
        ({"global_batch": 33, "micro_batch": 2}, "global_batch_size=33: is no multiple of 2"),
        ({"layout": (5,) * 7}, r"layout=5,5,5,5,5,5,5: give 8 numbers that add up to 40"),
        ({"expert": 2}, "expert_parallel=2: gpt3-13b has no experts"),
        ({"schedule": "2f2b"}, "schedule=2f2b: unknown schedule"),
        ({"micro_batch": 0}, "micro_batch_size=0: must be at least 1"),
        ({"recompute": "some"}, "recompute=some: choose one of none, selective, full"),
        ({"schedule": "gpipe", "bpipe": True}, "bpipe: gpipe leaves nothing to balance"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changed: dict[str, object], said: str) -> None:
    with pytest.raises(EstimateError, match=said) as caught:
        estimate(GPT, NODE, replace(RUN, **changed))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@settings(max_examples=20)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_more_recomputation_never_holds_more_nor_is_faster(t: int, p: int, b: int) -> None:
    assume(t * p <= 8)
    of = Estimator(GPT, NODE)
    run = Run(global_batch=32, tensor=t, stages=p, data=8 // (t * p), micro_batch=b)
    shown = [of(replace(run, recompute=scope)) for scope in ("none", "selective", "full")]  # type: ignore[arg-type]
    held = [sum(one.stages[0].bytes[:4]) for one in shown]
    assert held == sorted(held, reverse=True)
    assert [one.iteration_ms for one in shown] == sorted(one.iteration_ms for one in shown)


@st.composite
def runs_of_any_kind(draw: st.DrawFn) -> tuple[str, Run]:
    name = draw(st.sampled_from(["gpt3-13b", "llama3-8b", "mixtral-8x7b", "bert-large"]))
    schedule = draw(st.sampled_from(own()))
    sizes = {key: draw(st.sampled_from([1, 2, 4])) for key in ("tensor", "stages", "data", "context")}
    sizes["chunks"] = draw(st.sampled_from([1, 2])) if "chunks" in find(schedule).needs or schedule == "1f1b" else 1
    sizes["micro_batch"] = draw(st.sampled_from([1, 2, 3]))
    batches = draw(st.sampled_from([3, sizes["stages"], 6 * sizes["stages"]]))
    parts, layers = sizes["stages"] * sizes["chunks"], model(name).layers
    ends = sorted(draw(st.lists(st.integers(0, layers), min_size=parts - 1, max_size=parts - 1)))
    layout = tuple(end - start for start, end in zip([0, *ends], [*ends, layers], strict=True))
    run = Run(
        global_batch=batches * sizes["micro_batch"] * sizes["data"],
        **sizes,
        expert=draw(st.sampled_from([1, 2])) if name == "mixtral-8x7b" else 1,
        expert_tensor=draw(st.sampled_from([None, 1])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        recomputed_layers=draw(st.sampled_from([None, 0, 3])),
        schedule=schedule,
        group_size=draw(st.sampled_from([1, 3])) if schedule == "kfkb" else 1,
        bpipe=draw(st.booleans()),
        layout=draw(st.sampled_from([None, layout])),
        attention=draw(st.sampled_from(["flash", "unfused", None])),
        precision=draw(st.sampled_from(["fp32", "bf16", None])),
    )
    return name, run


@given(runs_of_any_kind())
@example(("gpt3-13b", Run(global_batch=8, stages=8, layout=(40, *(0,) * 7))))  # only one stage computes
def test_every_run_has_an_estimate_or_is_refused_in_one_line(one: tuple[str, Run]) -> None:
    name, run = one
    line = "it has an estimate"
    try:
        shown = estimate(model(name), cluster(f"1x{run.gpus}-a100-80gb"), run)
    except EstimateError as error:
        line = str(error)
    else:
        assert 0 < shown.mfu < 0.8
        assert shown.fits == (shown.reason is None)
        assert all(nbytes >= 0 for stage in shown.stages for nbytes in stage.bytes)
    assert "\n" not in line


def test_fp32_has_no_flash_attention() -> None:
    of, where, run = model("gpt3-13b"), cluster("1x8-h100"), Run(8, stages=8, precision="fp32")
    assert estimate(of, where, run).run.attention == "unfused"
    with pytest.raises(EstimateError, match="attention=flash: computes fp16 and bf16"):
        estimate(of, where, replace(run, attention="flash"))


def test_what_is_recomputed_counts_again_until_the_weight_gradient() -> None:
    """At its end ZB-H1's last stage waits with as many weight gradients as the first stage has micro-batches."""

    def held(schedule: str, recompute: Recompute) -> list[int]:
        run = replace(RUN, schedule=schedule, recompute=recompute)
        return [stage.bytes.activations for stage in estimate(GPT, NODE, run).stages]

    full, split = held("1f1b", "full"), held("zb-h1", "full")
    assert all(one < other for one, other in zip(full, split, strict=True))
    assert split[-1] > 5 * split[0]
    assert split[-1] > 0.8 * held("zb-h1", "selective")[-1]


@pytest.mark.parametrize(("bpipe", "most"), [(False, 12), (True, 10)])
def test_hiding_experts_messages_holds_a_unit_more(bpipe: bool, most: int) -> None:
    """Megatron, and EvenPipe too, then run one forward more ahead."""
    experts = Run(global_batch=256, tensor=2, stages=4, chunks=2, data=8, expert=8, bpipe=bpipe)
    of, where = model("mixtral-8x7b"), cluster("8x8-h100")
    plain, hiding = (
        estimate(of, where, replace(experts, overlap_experts=on)).stages[0].bytes.activations for on in (False, True)
    )
    assert hiding / plain == pytest.approx(most / (most - 1), rel=0.03)
