"""What does not go together is refused in one line that names both flags."""

from argparse import Namespace

import pytest

from evenpipe.megatron_lm.checks import check, warnings
from evenpipe.megatron_lm.flags import ArgumentError
from evenpipe.schedule import Size, build
from evenpipe.settings.config import EvenPipeConfig


def megatrons(**others):
    """Arguments as Megatron-LM leaves them after its own validation."""
    values = {
        "rank": 0,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": None,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "data_parallel_size": 1,
        "rampup_batch_size": None,
        "train_iters": 10,
        "num_experts": None,
        "recompute_granularity": None,
        "moe_pad_expert_input_to_capacity": False,
        "optimizer": "adam",
        "vision_pretraining": False,
        "async_save": False,
    }
    return Namespace(**values | others)


KFKB = {"schedule": "kfkb"}
IN_A_V = {"virtual_pipeline_model_parallel_size": 2, "save": None, "load": None, "ckpt_format": "torch_dist"}
AUTO = KFKB | {"group_size": "auto", "memory_gib": 1}
REFUSED = {
    "one stage": ({"bpipe": True}, {"pipeline_model_parallel_size": 1}, "--bpipe: --pipeline-model-parallel-size 1 "),
    "gpipe, virtual": (
        {"schedule": "gpipe"},
        {"virtual_pipeline_model_parallel_size": 2},
        "--evenpipe-schedule gpipe: .*--num-layers-per-virtual-pipeline-stage",
    ),
    "backwards in two halves of what is deferred": (
        {"schedule": "zb-h1"},
        {"defer_embedding_wgrad_compute": True},
        "zb-h1: --defer-embedding-wgrad-compute puts off the same gradients in its own way: turn it off, or use 1f1b",
    ),
    "in a V": (
        {"schedule": "v-half"},
        {**IN_A_V, "virtual_pipeline_model_parallel_size": 4},
        "--evenpipe-schedule v-half: has 2 model chunks a stage, but .* gives it 4: "
        "use --num-virtual-stages-per-pipeline-rank 2",
    ),
    "in a V, layers counted by chunk": (
        {"schedule": "v-half"},
        {**IN_A_V, "save": "ckpt", "ckpt_format": "torch"},
        "--evenpipe-schedule v-half: --ckpt-format torch counts layers from the start of their chunk .* use torch_dist",
    ),
    "in a V, local checkpoints": (
        {"schedule": "zbv"},
        {**IN_A_V, "non_persistent_ckpt_type": "local"},
        "--evenpipe-schedule zbv: --non-persistent-ckpt-type local brings back the embedding and its copy",
    ),
    "in a V, hybrid": (
        {"schedule": "v-min"},
        {**IN_A_V, "hybrid_layer_pattern": "M*|M-|M*|M-"},
        r"--evenpipe-schedule v-min: --hybrid-layer-pattern chooses layers by the rank itself",
    ),
    "in a V, converted": (
        {"schedule": "zbv"},
        {**IN_A_V, "load": "ckpt", "ckpt_convert_format": "torch"},
        "--evenpipe-schedule zbv: --ckpt-convert-format torch counts layers",
    ),
    "in a V, MTP apart": (
        {"schedule": "zbv"},
        {**IN_A_V, "pipeline_model_parallel_layout": "Et|t|tm|L"},
        r"--evenpipe-schedule zbv: --pipeline-model-parallel-layout Et\|t\|tm\|L has multi-token prediction apart",
    ),
    "interleaved, not virtual": (
        {"schedule": "interleaved"},
        {},
        "--evenpipe-schedule interleaved: needs --num-layers-per-virtual-pipeline-stage",
    ),
    "uneven groups": (
        {"bpipe": True},
        {"virtual_pipeline_model_parallel_size": 2, "global_batch_size": 12, "data_parallel_size": 2},
        "--bpipe: --global-batch-size 12 makes 6 .*--pipeline-model-parallel-size 4: make it a multiple of 8, or ",
    ),
    "sharded weights": ({"bpipe": True}, {"use_megatron_fsdp": True}, "--bpipe: --use-megatron-fsdp "),
    "restart inside": ({"schedule": "1f1b"}, {"inprocess_restart": True}, "1f1b: --inprocess-restart "),
    "gpipe levelled": ({"schedule": "gpipe", "bpipe": True}, {}, "--bpipe: with --evenpipe-schedule gpipe "),
    "no trace": ({"bpipe": True, "trace_iteration": 3}, {}, "--evenpipe-trace-iteration 3: .*--evenpipe-trace: "),
    "no schedule": ({"trace": "t.json"}, {}, "--evenpipe-trace t.json: .*--evenpipe-schedule 1f1b or --bpipe"),
    "no pairs": ({"pair_adjacent": True, "schedule": "1f1b"}, {}, "--pair-adjacent: .*--bpipe"),
    "late": (
        {"bpipe": True, "trace": "t.json", "trace_iteration": 11},
        {},
        "--evenpipe-trace-iteration 11: comes after --train-iters 10",
    ),
    "nowhere": (
        {"bpipe": True, "trace": "/no/folder/t.json"},
        {},
        "--evenpipe-trace /no/folder/t.json: there is no folder /no/folder: make it",
    ),
    "graphs": ({"schedule": "1f1b"}, {"enable_cuda_graph": True}, "--evenpipe-schedule 1f1b: --enable-cuda-graph "),
    "offloading": ({"bpipe": True}, {"cpu_offloading": True}, "--bpipe: --cpu-offloading-num-layers "),
    "a small last group": (
        {"schedule": "1f1b"},
        {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 6},
        "1f1b: --global-batch-size 8 makes 8 .* groups of --microbatch-group-size-per-virtual-pipeline-stage 6, none "
        "smaller than --pipeline-model-parallel-size 4: make it a multiple of 6, or choose another --microb",
    ),
    "a group of more than all": (
        {"schedule": "1f1b"},
        {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 9},
        "1f1b: --global-batch-size 8 makes 8 .* --microbatch-group-size-per-virtual-pipeline-stage 9, none ",
    ),
    "2bw, too few": (
        {"schedule": "2bw"},
        {"global_batch_size": 6, "data_parallel_size": 2},
        "--evenpipe-schedule 2bw: --global-batch-size 6 makes 3 micro-batches, fewer than "
        "--pipeline-model-parallel-size 4: make it at least 8, or use 1f1b$",
    ),
    "2bw, too few at first": (
        {"schedule": "2bw"},
        {"rampup_batch_size": ["2", "2", "100"]},
        "--evenpipe-schedule 2bw: --rampup-batch-size 2 makes 2 ",
    ),
    "2bw, virtual": ({"schedule": "2bw"}, {"virtual_pipeline_model_parallel_size": 2}, "2bw: .*no virtual stages$"),
    "2bw, gathered early": (
        {"schedule": "2bw", "bpipe": True},
        {"overlap_param_gather_with_optimizer_step": True},
        "--evenpipe-schedule 2bw: --overlap-param-gather-with-optimizer-step gathers .*: leave it out, or use "
        "--evenpipe-schedule 1f1b$",
    ),
    "2bw, fp8 alone": (
        {"schedule": "2bw"},
        {"fp8_param_gather": True},
        "2bw: --fp8-param-gather keeps weights in FP8 ",
    ),
    "2bw, fp4 alone": ({"schedule": "2bw"}, {"fp4_param": True}, "2bw: --fp4-param-gather keeps weights in FP8 or "),
    "2bw, captured": ({"schedule": "2bw"}, {"cuda_graph_impl": "transformer_engine"}, "2bw: --cuda-graph-impl "),
    "2bw, written beside bpipe": ({"schedule": "2bw", "bpipe": True}, {"async_save": True}, "2bw: --async-save asks "),
    "2bw, traced with bpipe": (
        {"schedule": "2bw", "bpipe": True, "trace": "t.json"},
        {},
        "--evenpipe-trace t.json: with --evenpipe-schedule 2bw and --bpipe partners .*: leave one of them out$",
    ),
    "2bw, on the nodes": (
        {"schedule": "2bw"},
        {"non_persistent_ckpt_type": "local"},
        "2bw: --non-persistent-ckpt-type local ",
    ),
    "groups of another schedule": (
        {"schedule": "1f1b", "group_size": 2},
        {},
        "--group-size 2: only --evenpipe-schedule kfkb ",
    ),
    "groups of no schedule": (
        {"group_size": "auto"},
        {},
        "--group-size auto: only --evenpipe-schedule kfkb .*: use it",
    ),
    "kfkb, one stage": (
        KFKB | {"group_size": 2},
        {"pipeline_model_parallel_size": 1},
        "--evenpipe-schedule kfkb: --pipeline-model-parallel-size 1 ",
    ),
    "kfkb, virtual": (KFKB, {"virtual_pipeline_model_parallel_size": 2}, "kfkb: has one model chunk .* no virtual"),
    "kfkb, captured by Transformer Engine": (
        KFKB | {"group_size": 2},
        {"cuda_graph_impl": "transformer_engine"},
        "kfkb: --cuda-graph-impl transformer_engine captures Megatron's order, in which action 5 of stage 0 is B0, not "
        "F4: .*: turn it off, or use 1f1b$",
    ),
    "gpipe, captured by Transformer Engine": (
        {"schedule": "gpipe"},
        {"external_cuda_graph": True},
        "gpipe: --external-cuda-graph captures Megatron's order",
    ),
    "kfkb, captured": (KFKB, {"enable_cuda_graph": True}, "--evenpipe-schedule kfkb: --enable-cuda-graph "),
    "nothing to retune": (
        KFKB | {"group_size": 2, "retune_interval": 5},
        {},
        "--retune-interval 5: only --group-size auto and --evenpipe-schedule searched make use of it: use one of them, "
        "or leave --retune-interval out$",
    ),
    "no memory to fill": (KFKB | {"memory_gib": 1}, {}, "--memory-gib 1: only --group-size auto, --evenpipe-sch"),
    "tuned, memory unknown": (KFKB | {"group_size": "auto"}, {}, "--group-size auto: .* on CPU: give --memory-gib$"),
    "tuned, growing": (
        AUTO,
        {"rampup_batch_size": ["2", "2", "100"]},
        "--group-size auto: --rampup-batch-size changes .*: leave it out, or give --group-size a number$",
    ),
    "2bw, experts whose weights are gathered": (
        {"schedule": "2bw"},
        {"num_experts": 8, "expert_tensor_parallel_num_weight_shards": 4, "expert_gtp_weight_remat_size": 2},
        "--expert-tensor-parallel-num-weight-shards 4 shards weights beyond data-parallel replicas: leave it out, ",
    ),
    "tuned, partly recomputed": (
        AUTO,
        {"num_microbatches_with_partial_activation_checkpoints": 1},
        "auto: --num-microbatches-with-partial-activation-checkpoints recomputes a micro-batch or not by its place ",
    ),
    "tuned, fp8": (AUTO, {"fp8": "hybrid"}, "--group-size auto: --fp8-format keeps activations where "),
    "tuned, captured": (AUTO, {"cuda_graph_impl": "transformer_engine"}, "auto: --cuda-graph-impl transformer_engine "),
    "tuned, compared": (
        AUTO,
        {"rerun_mode": "report_determinism_stats"},
        "auto: --rerun-mode report_determinism_stats ",
    ),
    "tuned, weights gathered": (
        AUTO,
        {"gtp_weight_remat_size": 2, "tensor_parallel_num_weight_shards": 4},
        "auto: --tensor-parallel-num-weight-shards 4 keeps gathered weights ",
    ),
    "tuned, context": (AUTO, {"hybrid_context_parallel": True}, "auto: --hybrid-context-parallel has a scheduler of "),
    "tuned, sampled": (AUTO, {"perform_rl_step": True}, "auto: --perform-rl-step packs what was sampled "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    ours, theirs, said = REFUSED[case]
    with pytest.raises(ArgumentError, match=said) as error:
        check(EvenPipeConfig.of(**ours), megatrons(**theirs))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {"pipeline_model_parallel_size": 1, "enable_cuda_graph": True}),
        ({"bpipe": True}, {}),
        ({"schedule": "1f1b"}, {"cuda_graph_impl": "transformer_engine"}),
        ({"schedule": "1f1b"}, {"cuda_graph_impl": "transformer_engine", "virtual_pipeline_model_parallel_size": 2}),
        (KFKB | {"group_size": 1}, {"cuda_graph_impl": "transformer_engine"}),
        ({"schedule": "1f1b"}, {"cpu_offloading": True, "num_experts": 8}),
        ({"bpipe": True}, {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 4}),
        ({"bpipe": True}, {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 8}),
        (
            {"schedule": "interleaved"},
            {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 6}
            | {"global_batch_size": 10},
        ),
        ({"bpipe": True}, {"virtual_pipeline_model_parallel_size": 2, "rampup_batch_size": ["2", "2", "100"]}),
        ({"bpipe": True, "trace": "t.json", "trace_iteration": 10}, {}),
        ({"bpipe": True, "trace": "/no/folder/of/this/node/t.json"}, {"rank": 8}),
        ({"bpipe": True, "trace": "t.json", "trace_iteration": 10}, {"train_iters": None}),
        ({"schedule": "2bw", "bpipe": True}, {"cuda_graph_impl": "none", "num_distributed_optimizer_instances": 1}),
        (KFKB | {"group_size": 100, "bpipe": True}, {"num_experts": None, "fp8": "hybrid", "sft": True}),
        (KFKB, {"rampup_batch_size": ["2", "2", "100"]}),
        (AUTO | {"retune_interval": 1, "bpipe": True}, {"cuda_graph_impl": "none", "fp8": None}),
        (AUTO, {"num_experts": 8, "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]}),
        (AUTO, {"num_experts": 8, "moe_router_enable_expert_bias": True}),
        (AUTO, {"sft": True, "variable_seq_lengths": True, "dataloader_inter_document_masking": True}),
        (
            {"schedule": "2bw"},
            {"num_experts": 8, "moe_router_load_balancing_type": "aux_loss", "expert_model_parallel_size": 2},
        ),
        ({"schedule": "2bw"}, {"global_batch_size": 4, "rampup_batch_size": ["4", "4", "100"]}),
    ],
)
def test_accepted(ours, theirs):
    check(EvenPipeConfig.of(**ours), megatrons(**theirs))


def test_a_group_of_a_whole_batch_is_said_to_be_gpipe():
    [line] = warnings(EvenPipeConfig.of(schedule="kfkb", group_size=9), megatrons())
    assert line.startswith("--group-size 9: a batch has 8 micro-batches, which make one group: kfkb then runs as gpipe")
    assert not [*warnings(EvenPipeConfig.of(schedule="kfkb", group_size=4), megatrons())]


def test_a_table_goes_with_its_own_groups_of_virtual_stages(tmp_path):
    table = tmp_path / "interleaved.txt"
    table.write_text(str(build("interleaved", Size(4, 12, 2, 6)).schedule))
    config = EvenPipeConfig.of(schedule=f"file:{table}")
    theirs = {"virtual_pipeline_model_parallel_size": 2, "global_batch_size": 12}
    for group in (None, 4, 6):
        check(config, megatrons(**theirs, microbatch_group_size_per_vp_stage=group))
    with pytest.raises(ArgumentError, match=f"^--evenpipe-schedule file:{table}: group_size=5: the table .* is of 6"):
        check(config, megatrons(**theirs, microbatch_group_size_per_vp_stage=5))
