"""`evenpipe.fit`: a line or settings in, settings to change out; and layouts for recipes of Megatron-Bridge."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

import evenpipe
from evenpipe.fitting import FitError, source_of_line, source_of_settings
from evenpipe.fitting.moves import SHORT
from evenpipe.megatron.bridge import layout_builder
from evenpipe.recipes.megatron import starts
from tests.readme import ROOT

FLAGS = shlex.split(
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 4 --global-batch-size 64 --bf16 --pipeline-model-parallel-size 4 --vocab-size 50257 "
    "--hidden-dropout 0 --attention-dropout 0"
)
LINE = ["torchrun", "--nproc-per-node", "4", "pretrain_gpt.py", *FLAGS]
FEW = ("t", "p", "c", "b", "schedule", "moments", "gradients")


@dataclass
class Provider:
    """As megatron-core's `TransformerConfig` and Bridge's `GPTModelProvider` name their fields."""

    num_layers: int = 24
    hidden_size: int = 2048
    num_attention_heads: int = 16
    num_query_groups: int | None = None
    seq_length: int = 4096
    max_position_embeddings: int = 4096
    vocab_size: int = 50257
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    share_embeddings_and_output_weights: bool = True
    add_bias_linear: bool = True
    gated_linear_unit: bool = False
    position_embedding_type: str = "learned_absolute"
    normalization: str = "LayerNorm"
    bf16: bool = True
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 4
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_layout: Any = None
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    recompute_granularity: str | None = None
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    num_moe_experts: int | None = None
    moe_layer_freq: int = 1
    cuda_graph_scope: str = "full"


def config() -> SimpleNamespace:
    """As Bridge's `ConfigContainer` has sections."""
    return SimpleNamespace(
        model=Provider(),
        train=SimpleNamespace(micro_batch_size=4, global_batch_size=64),
        ddp=SimpleNamespace(
            use_distributed_optimizer=False,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            grad_reduce_in_fp32=True,
        ),
        optimizer=SimpleNamespace(optimizer="adam", use_precision_aware_optimizer=False, lr=1e-4),
        mixed_precision="bf16_mixed",
        dataset=SimpleNamespace(sequence_length=4096, num_workers=8),
        logger=SimpleNamespace(log_interval=10),
    )


def test_a_line_and_settings_that_say_the_same_have_the_same_answers() -> None:
    by_line = evenpipe.fit(LINE, cluster="1x4-h100", memory_gib=24, keep=FEW)
    by_settings = evenpipe.fit(config(), cluster="1x4-h100", memory_gib=24, keep=FEW)
    for line, settings in zip(by_line.answers, by_settings.answers, strict=True):
        assert line.iteration_ms == settings.iteration_ms
        assert {name.rpartition(".")[2] for name in settings.changes} == set(line.changes)
    least = by_settings.answer()
    assert least is not None
    assert least.names[0] == "least"
    assert least.changes
    assert all(name.split(".")[0] in ("model", "train", "ddp", "optimizer") for name in least.changes)


def test_changes_that_are_set_are_the_run_that_was_promised() -> None:
    of = config()
    answer = evenpipe.fit(of, cluster="1x4-h100", memory_gib=24, keep=FEW).answer("stock")
    assert answer is not None
    for name, value in answer.changes.items():
        section, _, attribute = name.partition(".")
        setattr(getattr(of, section), attribute, value)
    with pytest.MonkeyPatch.context() as patch:
        for name, text in answer.environment.items():
            patch.setenv(name, text)
        again = evenpipe.fit(of, cluster="1x4-h100", memory_gib=24, keep=(*FEW, "recompute", "v", "optimizer"))
    assert again.now["fits"]
    assert again.now["iteration_ms"] == pytest.approx(answer.iteration_ms)


@pytest.mark.parametrize(
    "flags",
    [
        "--swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear",
        "--group-query-attention --num-query-groups 4 --recompute-granularity selective",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2 --grad-reduce-in-bf16",
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-layer-freq ([0]*1+[1]*23)",
        "--pipeline-model-parallel-layout Et*5|t*6|t*6|t*7L --fp8-format hybrid --fp8-recipe tensorwise",
        "--num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer --overlap-grad-reduce",
        "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    ],
)
def test_settings_are_read_as_the_flags_that_say_the_same(flags: str) -> None:
    line = source_of_line([*LINE, *shlex.split(flags)], "1x4-h100", None)
    words = dict(vars(line.given))
    settings: dict[str, Any] = {name: _typed(value) for name, value in words.items() if value is not None}
    settings["gated_linear_unit"] = settings.pop("swiglu", False)
    settings["share_embeddings_and_output_weights"] = not settings.pop("untie_embeddings_and_output_weights", False)
    settings["add_bias_linear"] = not settings.pop("disable_bias_linear", False)
    settings["grad_reduce_in_fp32"] = not settings.pop("grad_reduce_in_bf16", False)
    settings["num_moe_experts"] = settings.pop("num_experts", None)
    settings["virtual_pipeline_model_parallel_size"] = settings.pop("num_virtual_stages_per_pipeline_rank", None)
    settings["fp8"] = settings.pop("fp8_format", None)
    found = source_of_settings(settings, "1x4-h100", None, "pretrain_gpt.py")
    assert found.found.model == line.found.model
    assert found.found.run == line.found.run


def _typed(value: Any) -> Any:
    if isinstance(value, str):
        return int(value) if value.isdecimal() else value
    return value


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("torchrun pretrain_gpt.py", "run: give a line as a list of words"),
        (["torchrun", "train"], "no script"),
        ({"hidden_size": 64}, "--num-layers: not given"),
        ({"num_layers": "many"}, "'many' is no whole number"),
        (SimpleNamespace(model=Provider(pipeline_model_parallel_layout=[["glue"]])), "pipeline_model_parallel_layout"),
    ],
)
def test_what_cannot_be_read_is_one_line(run: Any, said: str) -> None:
    with pytest.raises(FitError, match=re.escape(said)) as error:
        evenpipe.fit(run)
    assert "\n" not in str(error.value)


def test_a_configuration_of_megatron_core_is_read() -> None:
    """Its fields have enums, types and functions among them; sizes of the data are not in it."""
    core = pytest.importorskip("megatron.core.transformer")
    of = core.TransformerConfig(
        num_layers=24, hidden_size=2048, num_attention_heads=16, num_query_groups=4, pipeline_model_parallel_size=4,
        pipeline_dtype="bf16", bf16=True, hidden_dropout=0.0, attention_dropout=0.0, gated_linear_unit=True,
    )  # fmt: skip
    with pytest.raises(FitError, match="--seq-length: not given"):
        evenpipe.fit(of)
    data = {"seq_length": 4096, "micro_batch_size": 4, "global_batch_size": 64, "vocab_size": 50257}
    found = evenpipe.fit(vars(of) | data, cluster="1x4-h100", memory_gib=20, keep=FEW)
    assert found.answers
    assert not found.now["fits"]
    assert any(name.startswith("recompute") for name in found.answers[0].changes)


KEPT = ("t", "p", "c", "e", "b", "recompute", "optimizer", "overlap", "gradients", "moments")


def test_answers_leave_swaps_out_and_say_so() -> None:
    found = evenpipe.fit([*LINE, "--evenpipe-swap", "0.5"], cluster="1x4-h100", keep=KEPT)
    assert found.answers
    assert all("--evenpipe-swap" not in one.command for one in found.answers)
    assert "--evenpipe-swap 0.5: left out of all answers" in found.notes


@pytest.mark.parametrize(
    ("flags", "schedules", "bpipe"),
    [
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router", ("1f1b", "interleaved"), True),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn mlp", ("1f1b", "interleaved"), False),
        ("--cuda-graph-impl full_iteration", (), False),
        ("--cpu-offloading-num-layers 2 --cpu-offloading", None, False),
    ],
)
def test_schedules_go_together_with_the_other_flags(flags: str, schedules: tuple[str, ...] | None, bpipe: bool) -> None:
    source = source_of_line([*LINE, *shlex.split(flags)], "1x4-h100", None)
    found, balances, notes = source.schedules(source.found.run)
    assert schedules is None or found == schedules
    assert balances == bpipe
    assert schedules is None or notes


def test_flags_of_evenpipe_that_the_others_rule_out_are_one_line() -> None:
    with pytest.raises(FitError, match=r"--cuda-graph-impl full_iteration replays .*: turn it off, or EvenPipe's sche"):
        evenpipe.fit([*LINE, "--bpipe", "--cuda-graph-impl", "full_iteration"], cluster="1x4-h100", keep=KEPT)


def test_gates_of_quick_geglu_are_parameters() -> None:
    plain, gated = (source_of_line([*LINE, *more], "1x4-h100", None) for more in ([], ["--quick-geglu"]))
    assert gated.found.model.gated
    assert not plain.found.model.gated


def test_only_flags_that_matter_are_named_as_not_read() -> None:
    flags = "--log-memory-to-tensorboard --manual-gc --no-load-optim --wandb-project x --moe-permute-fusion"
    source = source_of_line([*LINE, *shlex.split(flags)], "1x4-h100", None)
    [note] = [note for note in source.notes if note.startswith("not read")]
    assert note.endswith(": --moe-permute-fusion")


def test_in_a_v_further_predictions_are_beside_the_loss() -> None:
    layout = "Et*3|t*3|t*3|t*3|t*3|t*3|t*3m|t*3L"
    run = source_of_line([*LINE, "--mtp-num-layers", "1", "--pipeline-model-parallel-layout", layout], None, None)
    apart = run.found.run
    assert starts(apart)
    assert not starts(replace(apart, schedule="zbv"))
    assert starts(replace(apart, schedule="zbv", further_part=7))


#: Few micro-batches, so that stages idle; nothing but the schedule may change.
FEWER = [*LINE, "--micro-batch-size", "1", "--global-batch-size", "16", "--use-distributed-optimizer"]
SCHEDULE_ALONE = tuple(set(SHORT) - {"schedule"})


def test_an_order_that_is_searched_is_an_answer_where_it_gains_and_its_line_is_read_as_that() -> None:
    found = evenpipe.fit(FEWER, cluster="1x4-h100", memory_gib=26, keep=SCHEDULE_ALONE)
    searched = found.answer("evenpipe")
    assert searched is not None
    assert searched.evenpipe == {"schedule": "searched"}
    assert searched.command[-4:] == ["--evenpipe-schedule", "searched", "--memory-gib", "24.7"]
    assert searched.memory_gib <= 24.7
    assert searched.iteration_ms < found.now["iteration_ms"] / 1.02
    again = evenpipe.fit(searched.command, cluster="1x4-h100", memory_gib=26, keep=SCHEDULE_ALONE)
    assert again.now["iteration_ms"] == pytest.approx(searched.iteration_ms)


@pytest.mark.parametrize("flags", ["--distribute-saved-activations", "--defer-embedding-wgrad-compute"])
def test_no_order_is_searched_beside_flags_that_rule_it_out(flags: str) -> None:
    source = source_of_line([*LINE, flags], "1x4-h100", None)
    schedules, _, _ = source.schedules(source.found.run)
    assert source.searches(schedules) == ()
    plain = source_of_line(LINE, "1x4-h100", None)
    assert plain.searches(plain.schedules(plain.found.run)[0]) == (1, 2)


@pytest.mark.parametrize("named", ["--evenpipe", "--evenpipe-schedule"])
def test_a_run_that_chooses_by_itself_is_taken_for_1f1b_and_answers_drop_its_memory(named: str) -> None:
    found = evenpipe.fit([*FEWER, named, "auto", "--memory-gib", "20"], cluster="1x4-h100", keep=KEPT[:3])
    assert "--evenpipe-schedule auto: chosen in a run by its own times; estimated as 1f1b" in found.notes
    for one in found.answers:
        assert "auto" not in one.command
        assert ("--memory-gib" in one.command) == (one.evenpipe.get("schedule") == "searched")


def test_a_name_of_nothing_to_keep_is_one_line() -> None:
    with pytest.raises(FitError, match="nothing to keep"):
        evenpipe.fit(LINE, keep=["q"])


@pytest.mark.parametrize(
    ("run", "memory_gib", "said"),
    [(3, None, "run: 3 is no run"), (None, None, "run: None is no run"), (LINE, -1, "memory_gib: -1 is no amount")],
)
def test_what_is_no_run_or_no_memory_is_one_line(run: object, memory_gib: float | None, said: str) -> None:
    with pytest.raises(FitError, match=said) as error:
        evenpipe.fit(run, memory_gib=memory_gib)
    assert "\n" not in str(error.value)


def test_a_layout_is_built_for_the_stages_that_bridge_names() -> None:
    """As Bridge's recipe runner asks, by position, when sizes of a recipe are overridden."""
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    of = config()
    of.model.pipeline_model_parallel_layout = [["stale"]] * 16
    of.model._pipeline_model_parallel_layout_builder = layout_builder(of, cluster="1x8-h100")
    for stages, virtual in ((4, None), (2, 3), (8, 2)):
        layout = of.model._pipeline_model_parallel_layout_builder(stages, virtual)
        assert len(layout) == stages * (virtual or 1)
        assert [kind for part in layout for kind in part] == ["embedding", *["decoder"] * 24, "loss"]
        theirs = layouts.PipelineParallelLayerLayout(layout, stages)
        theirs.validate_layer_layout(num_layers=24, mtp_num_layers=0)
    with pytest.raises(FitError, match="use no more parts"):
        of.model._pipeline_model_parallel_layout_builder(8, 4)


def test_the_page_s_program_runs() -> None:
    (program,) = re.findall(r"```python\n(import evenpipe.*?)```", (ROOT / "docs" / "fit.md").read_text(), re.S)
    names: dict[str, Any] = {"config": config()}
    exec(program, names)
    assert names["answer"].memory_gib <= 24
