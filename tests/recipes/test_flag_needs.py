"""Flags that have an effect only beside others: each is told, or refused as Megatron refuses it."""

from __future__ import annotations

from argparse import Namespace
from typing import Final

import pytest

from evenpipe.cli.main import main
from evenpipe.planner.arguments import Pipelined, Values, model_of, parse_flags, run_of
from evenpipe.planner.run import EstimateError, Run
from evenpipe.recipes.flag_needs import Given, Need, needs, without_effect
from tests.refusals import refusal

BASE: Final = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --padded-vocab-size 256 --bf16 "
    "--global-batch-size 8 --use-distributed-optimizer --swiglu --disable-bias-linear"
)
EXPERTS: Final = "--num-experts 8"
LATENT: Final = "--multi-latent-attention --q-lora-rank 32"
SELECTIVE: Final = "--recompute-granularity selective"
OFFLOAD: Final = "--use-precision-aware-optimizer --optimizer-cpu-offload"
AWAY: Final = "fine-grained-activation-offloading"
OVERLAP: Final = f"{EXPERTS} --overlap-moe-expert-parallel-comm"
#: By option and what it needs: flags that lack it, and what to add to them.
CASES: Final = {
    ("fp8-recipe", "with --fp8-format"): ("--fp8-recipe tensorwise", "--fp8-format hybrid"),
    ("fp8-param-gather", "with --fp8-format"): ("--fp8-param-gather", "--fp8-format hybrid"),
    ("fp8-dot-product-attention", "with --fp8-format"): (
        "--fp8-dot-product-attention",
        "--fp8-format hybrid",
    ),
    ("fp4-recipe", "with --fp4-format"): ("--fp4-recipe nvfp4", "--fp4-format e2m1"),
    ("cuda-graph-scope", "with --cuda-graph-impl"): ("--cuda-graph-scope attn", "--cuda-graph-impl local"),
    ("cuda-graph-modules", "with --cuda-graph-impl"): ("--cuda-graph-modules attn", "--cuda-graph-impl local"),
    ("moe-flex-dispatcher-backend", "with --moe-token-dispatcher-type flex"): (
        f"{EXPERTS} --moe-flex-dispatcher-backend deepep",
        "--moe-token-dispatcher-type flex",
    ),
    ("overlap-moe-expert-parallel-comm", "with expert parallelism"): (OVERLAP, "--expert-model-parallel-size 2"),
    ("overlap-moe-expert-parallel-comm", "with one pipeline stage, or with virtual stages"): (
        f"{OVERLAP} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "--virtual-stages 2",
    ),
    ("overlap-moe-expert-parallel-comm", "without recomputation of whole layers"): (
        f"{OVERLAP} --expert-model-parallel-size 2 --recompute-granularity full",
        SELECTIVE,
    ),
    ("tp-comm-overlap", "with tensor parallelism and sequence parallelism"): (
        "--tp-comm-overlap --tensor-model-parallel-size 2",
        "--sequence-parallel",
    ),
    ("recompute-modules", "with selective recomputation"): ("--recompute-modules layernorm", SELECTIVE),
    ("recompute-modules mla_up_proj", "with --multi-latent-attention"): (
        f"{SELECTIVE} --recompute-modules mla_up_proj",
        LATENT,
    ),
    ("recompute-modules moe_act", "in a model with experts"): (f"{SELECTIVE} --recompute-modules moe_act", EXPERTS),
    ("recompute-modules moe, shared_experts", "in a model with experts"): (
        f"{SELECTIVE} --recompute-modules moe",
        EXPERTS,
    ),
    ("recompute-modules layernorm, moe_act", "with another --fp8-recipe than delayed"): (
        f"{SELECTIVE} --recompute-modules layernorm --fp8-format hybrid",
        "--fp8-recipe tensorwise",
    ),
    ("recompute-method", "with --recompute-granularity full"): (
        "--recompute-method block",
        "--recompute-granularity full",
    ),
    ("recompute-num-layers", "with --recompute-granularity full"): (
        "--recompute-num-layers 1",
        "--recompute-granularity full",
    ),
    ("exp-avg-dtype", "with --use-precision-aware-optimizer"): (
        "--exp-avg-dtype bf16",
        "--use-precision-aware-optimizer",
    ),
    ("exp-avg-sq-dtype", "with --use-precision-aware-optimizer"): (
        "--exp-avg-sq-dtype bf16",
        "--use-precision-aware-optimizer",
    ),
    ("optimizer-cpu-offload", "with --use-precision-aware-optimizer"): (
        "--optimizer-cpu-offload",
        "--use-precision-aware-optimizer",
    ),
    **{
        (option, "with --optimizer-cpu-offload"): (f"--{option} {value}".strip(), OFFLOAD)
        for option, value in {"optimizer-offload-fraction": "0.5", "overlap-cpu-optimizer-d2h-h2d": ""}.items()
    },
    ("lora-modules", "with --lora-rank"): ("--lora-modules linear_qkv", "--lora-rank 8"),
    ("data-parallel-sharding-strategy", "with --use-megatron-fsdp"): (
        "--data-parallel-sharding-strategy optim_grads_params",
        "--use-megatron-fsdp",
    ),
    ("fine-grained-activation-offloading", "with --offload-modules"): (f"--{AWAY}", "--offload-modules attn_norm"),
    **{
        (option, f"with --{AWAY}"): (f"--{option} {value}", f"--{AWAY} --offload-modules attn_norm")
        for option, value in {
            "offload-modules": "attn_norm",
            "activation-offload-fraction": "0.5",
            "delta-offload-bytes-across-pp-ranks": "1",
            "min-offloaded-tensor-size": "1",
        }.items()
    },
    **{
        (f"muon-{option}", "with --optimizer muon"): (f"--muon-{option} {value}", "--optimizer muon")
        for option, value in {
            "momentum": "0.9",
            "num-ns-steps": "4",
            "tp-mode": "blockwise",
            "scale-mode": "spectral",
            "fp32-matmul-prec": "high",
        }.items()
    },
    ("num-query-groups", "with --group-query-attention"): ("--num-query-groups 2", "--group-query-attention"),
    ("window-attn-skip-freq", "with --window-size"): ("--window-attn-skip-freq 2", "--window-size 16,0"),
    ("q-lora-rank", "with --multi-latent-attention"): ("--q-lora-rank 32", "--multi-latent-attention"),
    **{
        (option, "with --multi-latent-attention"): (f"--{option} 32", LATENT)
        for option in ("kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
    },
    **{
        (option, "in a model with experts"): (f"--{option} {value}".strip(), EXPERTS)
        for option, value in {
            "moe-token-dispatcher-type": "alltoall",
            "overlap-moe-expert-parallel-comm": "",
            "use-transformer-engine-op-fuser": "",
            "routing-imbalance": "1.2",
            "moe-ffn-hidden-size": "64",
            "moe-router-topk": "2",
            "moe-layer-freq": "1",
            "moe-shared-expert-intermediate-size": "64",
            "moe-grouped-gemm": "",
            "moe-router-num-groups": "2",
            "moe-router-group-topk": "1",
            "moe-router-load-balancing-type": "none",
            "moe-aux-loss-coeff": "0.1",
            "expert-tensor-parallel-size": "1",
        }.items()
    },
}
#: Those that lack something by flags that are there: what has it instead.
OTHERS: Final = {
    ("fp8-format", "without --fp4-format"): ("--fp8-format hybrid --fp4-format e2m1", "--fp8-format hybrid"),
    ("use-precision-aware-optimizer", "with the distributed optimizer"): (
        "--use-precision-aware-optimizer --unsharded",
        "--use-precision-aware-optimizer",
    ),
    ("use-precision-aware-optimizer", "with --optimizer adam"): (
        "--use-precision-aware-optimizer --optimizer sgd",
        "--use-precision-aware-optimizer",
    ),
    **{
        (option, "without --optimizer-cpu-offload"): (
            f"--{option} bf16 {OFFLOAD}",
            f"--{option} bf16 --use-precision-aware-optimizer",
        )
        for option in ("exp-avg-dtype", "exp-avg-sq-dtype")
    },
    # The command's name of --expert-tensor-parallel-size, which only it has.
    ("expert-tensor-parallel", "in a model with experts"): (
        "--expert-tensor-parallel",
        f"--expert-tensor-parallel {EXPERTS}",
    ),
}


def lines(words: str, need: Need) -> list[str]:
    """Return what is told of this need; refusals too."""
    flags = f"{BASE} {words}".split()
    virtual = 2 if "--virtual-stages" in flags else None
    args, _ = parse_flags([word for word in flags if word != "--virtual-stages"])
    args.virtual_pipeline_model_parallel_size = virtual
    args.use_distributed_optimizer = "--unsharded" not in flags
    of, run = model_of(args, "own"), run_of(args, Pipelined())
    names = {word.removeprefix("--") for word in flags if word.startswith("--")}
    try:
        found = without_effect(Given(names, Values(args), of, run))
    except EstimateError as error:
        found = [str(error)]
    return [line for line in found if line == need.line]


def test_an_option_without_what_it_needs_is_told() -> None:
    for need in needs():
        key = need.option, need.when
        lacking, having = OTHERS[key] if key in OTHERS else (CASES[key][0], " ".join(CASES[key]))
        assert lines(lacking, need) == [need.line]
        assert not lines(having, need), need


def test_a_search_chooses_sizes_itself() -> None:
    args, _ = parse_flags(f"{BASE} --tp-comm-overlap".split())
    given = Given({"tp-comm-overlap"}, Values(args), model_of(args, "own"), run_of(args, Pipelined()))
    assert without_effect(given, searched=True) == []
    with pytest.raises(EstimateError, match="--tp-comm-overlap: works only with tensor parallelism"):
        without_effect(given)


WHERE: Final = ["--model", "llama3-8b", "--cluster", "1x8-h100", "--global-batch-size", "8"]


def test_estimate_and_plan_tell_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["estimate", *WHERE, "--fp8-recipe", "tensorwise", "--expert-tensor-parallel", "1"])
    shown = capsys.readouterr().out
    assert "--fp8-recipe: works only with --fp8-format; Megatron ignores it here" in shown
    assert "--expert-tensor-parallel: works only in a model with experts; Megatron ignores it here" in shown
    main(["plan", *WHERE, "--tensor-parallel", "8", "--no-bpipe", "--fp8-recipe", "tensorwise"])
    said = capsys.readouterr()
    assert "--fp8-recipe: works only with --fp8-format" in said.err
    assert "fp8" not in said.out


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_what_megatron_refuses_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, command, *WHERE, "--fp8-param-gather")
    assert "--fp8-param-gather: works only with --fp8-format; Megatron refuses it here" in said


def test_namespaces_without_values_are_read() -> None:
    """As those of releases that lack an argument."""
    args, _ = parse_flags(BASE.split())
    given = Given({"num-query-groups"}, Values(Namespace()), model_of(args, "own"), run_of(args, Pipelined()))
    assert len(without_effect(given)) == 1


@pytest.mark.parametrize(
    "words",
    ["--use-megatron-fsdp", "--fine-grained-activation-offloading --offload-modules attn_norm"],
)
def test_what_no_schedule_of_a_plan_runs_with_is_not_planned(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *WHERE, *words.split()])
    assert f"{words.split()[0]}: EvenPipe's schedules run without it" in capsys.readouterr().err
    main(["estimate", *WHERE, *words.split()])
    assert "error unknown" in capsys.readouterr().out


def test_nothing_is_known_of_paci_s_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    for schedule, iterations in (("2bw", 1.25), ("paci", 1.0)):
        assert Run(1, stages=4, schedule=schedule).iterations == iterations
        main(["estimate", *WHERE, "--schedule", schedule])
        assert ("to the same loss is unknown" in capsys.readouterr().out) == (schedule == "paci")


def test_no_plan_has_paci(capsys: pytest.CaptureFixture[str]) -> None:
    """Its speed alone would put it first."""
    with pytest.raises(SystemExit):
        main(["plan", *WHERE, "--global-batch-size", "32", "--delayed", "--schedules", "paci"])
    said = capsys.readouterr().err
    assert "--schedule paci: how many iterations it needs to a loss is not known: choose of 1f1b" in said
    assert "2bw" in said
    assert said.count("paci") == 1
    main(["plan", *WHERE, "--global-batch-size", "32", "--schedule", "1f1b,paci"])
    assert "is not known; an iteration would be about" in " ".join(capsys.readouterr().out.split())
