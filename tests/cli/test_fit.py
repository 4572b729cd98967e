"""`evenpipe fit`: the run as it is, answers with the flags that they change, a script, and refusals in one line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.cli.fit import _wrapped
from evenpipe.cli.main import main
from evenpipe.fitting.moves import SHORT
from tests.readme import ROOT
from tests.refusals import refusal

TINY = shlex.split(
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 4 --global-batch-size 64 --bf16 --pipeline-model-parallel-size 4 --vocab-size 50257 "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-model 'a b' --lr 1e-4"
)
LLAMA = shlex.split(
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 "
    "--global-batch-size 128 --bf16 --tensor-model-parallel-size 4 --sequence-parallel "
    "--pipeline-model-parallel-size 4 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--vocab-size 128256"
)
START = ["torchrun", "--nproc-per-node", "4"]


def fit(capsys: pytest.CaptureFixture[str], *words: str, flags: list[str] = TINY, start: list[str] = START) -> str:
    main(["fit", "--cluster", "1x4-h100", *words, "--", *start, "pretrain_gpt.py", *flags])
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *words: str, flags: list[str] = TINY) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(fit(capsys, "--json", *words, flags=flags))
    return found


def test_answers_fit_and_are_what_an_estimate_of_their_own_line_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--memory-gib", "24")
    assert found["format"] == "evenpipe.fit/1"
    assert not found["now"]["fits"]
    by_name = {name: one for one in found["answers"] for name in one["names"]}
    assert {"least", "sized", "stock"} <= set(by_name)
    for one in found["answers"]:
        assert one["memory_gib"] <= 24
        line = one["command"]
        assert [word for word in TINY if word in ("a b", "50257")] == [w for w in line if w in ("a b", "50257")]
    least, stock = by_name["least"], by_name["stock"]
    assert len(least["added"]) + len(least["removed"]) <= len(stock["added"]) + len(stock["removed"])
    assert stock["iteration_ms"] <= 1.02 * min(by_name[name]["iteration_ms"] for name in ("least", "stock"))
    assert "evenpipe" not in stock["command"]
    few = ("--cluster", "1x4-h100", "--memory-gib", "24", "--keep", "t,p,c,b,schedule,recompute", "--json")
    main(["fit", *few, "--", *stock["command"]])
    again = json.loads(capsys.readouterr().out)
    assert again["now"]["fits"], "the changed line, fitted again, is the run that was promised"
    assert again["now"]["iteration_ms"] == pytest.approx(stock["iteration_ms"])


def test_the_text_has_stages_answers_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    shown = fit(capsys, "--memory-gib", "24", "--keep", "t,p,c,b")
    assert "waits" in shown
    assert "does not fit" in shown
    assert "least change that fits" in shown
    assert "  + --recompute-granularity" in shown
    assert "not read, so that what they change is not in these estimates: --foo" in fit(
        capsys, "--keep", "t,p,c,b,schedule", flags=[*TINY, "--foo", "3"]
    )


def test_a_slip_in_a_flag_and_another_number_of_processes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--keep", "t,p,c,b,schedule,recompute")
    flags = [*TINY, "--overlap-param-gathr", "--fp8-recipe", "tensorwise"]
    shown = fit(capsys, *few, flags=flags, start=["torchrun", "--nproc-per-node", "2"])
    assert "--fp8-recipe: works only with --fp8-format; Megatron ignores it here" in shown
    assert "--overlap-param-gathr (did you mean --overlap-param-gather?)" in shown
    assert "the line starts 2 processes, but 1x4-h100 has 4 GPUs: change one of them" in shown


def test_hidden_messages_of_experts_leave_out_schedules_that_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    experts = "--num-experts 8 --expert-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    experts += " --pipeline-model-parallel-size 2 --micro-batch-size 1 --overlap-moe-expert-parallel-comm"
    flags = [*TINY, *shlex.split(experts)]
    kept = "t,p,c,e,b,v,recompute,optimizer,gradients,moments,allocator"
    with pytest.raises(SystemExit):
        fit(capsys, "--memory-gib", "12", "--keep", kept, flags=flags)
    told = capsys.readouterr().err
    assert "keep less" in told
    assert "zb-h1" not in told, "it has no order for that, and nobody asked for it"


def test_what_is_kept_stays(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--memory-gib", "24", "--keep", "t,p,c,v,b,schedule,gradients,moments,optimizer,allocator")
    changed = {word.split()[0] for one in found["answers"] for word in (*one["added"], *one["removed"])}
    assert changed <= {
        *("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules"),
        *("--overlap-grad-reduce", "--overlap-param-gather"),
    }
    assert all(one["loss"] == "same bits" for one in found["answers"])


def test_a_run_that_nothing_makes_faster_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--keep", "t,p,c,e,b,v,schedule,recompute,gradients,moments,optimizer,overlap,placement")
    assert found["answers"] == []
    assert any("nothing to gain" in note for note in found["notes"])


def test_a_script_is_written_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run.sh"
    few = ("--memory-gib", "24", "--keep", "t,p,c,b,schedule")
    fit(capsys, *few, "--write", str(out))
    text = out.read_text()
    assert out.stat().st_mode & 0o111
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    flags = words[words.index("pretrain_gpt.py") + 1 :]
    assert flags[: len(TINY)] == TINY, "all flags are as they were typed"
    assert any(word.startswith("--recompute") for word in words)
    with pytest.raises(SystemExit):
        fit(capsys, *few, "--write", str(out))
    assert out.read_text() == text
    assert "is there already: name a new file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no script: give the line that starts the run"),
        ("--keep t,q -- pretrain_gpt.py", "--keep: 'q' is nothing to keep"),
        ("--kep t -- pretrain_gpt.py", "--kep: unknown option, did you mean --keep?"),
        ("--memory-gib lots -- pretrain_gpt.py", "--memory-gib: 'lots' is no number"),
        ("--cluster h1000 -- pretrain_gpt.py", "--cluster h1000: unknown among clusters, did you mean"),
        ("-- pretrain_gpt.py --hidden-size 64", "--num-layers: not given"),
        ("-- pretrain_gpt.py --num-layers x", "--num-layers: 'x' is no whole number"),
        ("-- pretrain_gpt.py {} --micro-batch-size 3", "is no multiple of"),
        ("-- pretrain_gpt.py {} --hybrid-layer-pattern M*", "--hybrid-layer-pattern"),
        ("--memory-gib 1 -- pretrain_gpt.py {}", "is too small for pretrain_gpt.py"),
        ("--memory-gib 12 --keep t,p,c,b,recompute -- pretrain_gpt.py {}", "or keep less than"),
        ("--write run.sh -- pretrain_gpt.py {}", "--write: which launcher?"),
        ("--take least -- pretrain_gpt.py {}", "--take: says which answer --write writes"),
        ("-- deepspeed train.py --deepspeed_config ds.json", "ds.json: cannot be read: No such file"),
        ("-- deepspeed train.py --deepspeed", "train.py: --deepspeed_config: not given, and"),
        ("nowhere", "nowhere: no such folder: name one that"),
        ("none.yaml", "none.yaml: cannot be read: No such file"),
        ("mkdocs.yml", "mkdocs.yml:39: is neither YAML nor JSON"),
        ("docs", "has neither run_config.yaml nor recipe.json"),
        ("examples/deepspeed/bpipe.json", "does not say what the model is: give --model"),
        (".pre-commit-config.yaml", "has no section model"),
        ("mkdocs.yml --bf16", "--bf16: behind mkdocs.yml"),
    ],
)
def test_bad_input_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = [] if "--cluster" in words else ["--cluster", "1x4-h100"]
    assert said in refusal(capsys, "fit", *where, *shlex.split(words.format(shlex.join(TINY))))


@pytest.mark.long
def test_the_page_s_example_is_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    main(
        [
            "fit",
            "--cluster",
            "8x8-h100",
            "--",
            "torchrun",
            "--nnodes",
            "8",
            "--nproc-per-node",
            "8",
            "pretrain_gpt.py",
            *LLAMA,
        ]
    )
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    page = (ROOT / "docs" / "fit.md").read_text()
    example = page.partition("<!-- example")[2].partition("```\n")[2].partition("\n```")[0]
    assert example.splitlines() == shown[-len(example.splitlines()) :]


def test_a_recipe_from_flags_changes_the_schedule_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipe", "--cluster", "1x4-h100", "--from-flags", *START, "pretrain_gpt.py", *TINY])
    shown = capsys.readouterr().out
    main(
        [
            "fit",
            "--cluster",
            "1x4-h100",
            "--keep",
            ",".join(set(SHORT) - {"schedule"}),
            "--",
            *START,
            "pretrain_gpt.py",
            *TINY,
        ]
    )
    assert shown == capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["ds.json"], "--from-flags: ds.json is DeepSpeed's"),
        (["deepspeed", "train.py", "--deepspeed_config", "ds.json"], "--from-flags: ds.json is DeepSpeed's"),
        (["deepspeed", "train.py"], "--deepspeed_config: not given"),
        (["ds.json", "--stages", "4"], "--stages: behind ds.json"),
        (["run.yaml", "--stages", "4"], "--stages: behind run.yaml"),
    ],
)
def test_a_recipe_from_flags_refuses_what_is_no_line_of_megatron(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 64}')
    assert said in refusal(capsys, "recipe", "--from-flags", *line)


#: As Bridge writes it beside a checkpoint: objects of Python's by their names, and a null for what is not given.
SAVED = """
_target_: megatron.bridge.training.config.ConfigContainer
comm_overlap: null
dataset: {_target_: megatron.bridge.training.config.GPTDatasetConfig, sequence_length: 4096, split: "1,1,1"}
ddp: {grad_reduce_in_fp32: true, overlap_grad_reduce: false, overlap_param_gather: false,
      use_distributed_optimizer: false, fp8_param_gather: false}
mixed_precision: {bf16: true, fp16: false, fp8: null, fp8_recipe: tensorwise, grad_reduce_in_fp32: true}
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama31ModelProvider
  activation_func: {_call_: false, _target_: torch.nn.functional.gelu}
  attention_backend: {_args_: [5], _call_: true, _target_: megatron.core.transformer.enums.AttnBackend}
  attention_dropout: 0.0
  cuda_graph_scope: full
  hidden_dropout: 0.0
  hidden_size: 2048
  is_hybrid_model: false
  kv_channels: 128
  masked_softmax_fusion: true
  max_position_embeddings: 4096
  moe_token_dispatcher_type: allgather
  num_attention_heads: 16
  num_layers: 24
  num_moe_experts: null
  pipeline_model_parallel_size: 4
  position_embedding_type: learned_absolute
  recompute_granularity: null
  recompute_modules: [core_attn]
  seq_length: 131072
  share_embeddings_and_output_weights: true
  vocab_size: 50257
optimizer:
  exp_avg_dtype: {_call_: false, _target_: torch.float32}
  exp_avg_sq_dtype: {_call_: false, _target_: torch.float32}
  optimizer: adam
  optimizer_cpu_offload: false
  optimizer_offload_fraction: 0.0
  overlap_param_gather: false
train: {global_batch_size: 64, micro_batch_size: 4}
"""
KEPT = ("--cluster", "1x4-h100", "--memory-gib", "24", "--keep", "t,p,c,b,schedule,gradients,moments")


def test_a_configuration_that_bridge_saved_is_the_run_of_the_same_flags(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "iter_0000010" / "run_config.yaml"
    saved.parent.mkdir()
    saved.write_text(SAVED)
    main(["fit", *KEPT, "--json", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    same = document(capsys, *KEPT)
    assert found["now"] == same["now"]
    assert [one["iteration_ms"] for one in found["answers"]] == [one["iteration_ms"] for one in same["answers"]]
    main(["fit", *KEPT, str(saved)])
    shown = capsys.readouterr().out
    assert '  model.recompute_granularity = "' in shown
    assert "  + --" not in shown
    with pytest.raises(SystemExit):
        main(["fit", *KEPT, "--write", "run.sh", str(saved)])
    assert "no line starts a configuration" in capsys.readouterr().err


def test_a_recipe_s_folder_is_the_line_that_its_script_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "recipe"
    what = ("--model", "gpt3-13b", "--cluster", "1x8-a100-80gb", "--global-batch-size", "64", "--stages", "4")
    main(["recipe", "gpt", *what, "--framework", "megatron", "--launcher", "torchrun", "--out", str(out)])
    capsys.readouterr()
    main(["recipe", "--check", str(out)])
    checked = capsys.readouterr().out
    main(["fit", "--keep", ",".join(set(SHORT) - {"recompute"}), "--json", str(out)])
    found = json.loads(capsys.readouterr().out)
    assert f"{found['now']['iteration_ms']:,.0f} ms an iteration" in checked
    assert found["now"]["fits"]


@given(
    st.lists(st.text("ab|*t (){}$'\"=-+", min_size=1, max_size=90), min_size=1, max_size=5), st.sampled_from((40, 80))
)
def test_a_long_flag_is_wrapped_into_lines_that_a_shell_joins(values: list[str], width: int) -> None:
    text = f"--flag {shlex.join(values)}"
    lines = list(_wrapped(f"  + {text}", width))
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == ["+", *shlex.split(text)]
    # A quote within a value is never a line's end: no flag of Megatron's has one.
    long = max(len(shlex.quote(one)) for one in values) + 8 > width or any("'" in one for one in values)
    assert long or all(len(line) <= width for line in lines)


def test_flags_are_wrapped_at_the_width_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    layout = "Et|" * 1 + "|".join(f"t*{2 - n % 2}" for n in range(30)) + "|L"
    lines = list(_wrapped(f"  + --pipeline-model-parallel-layout '{layout}'", 80))
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80
    shown = fit(capsys, "--memory-gib", "24", "--keep", "t,p,c,b,schedule,gradients,moments")
    changes = [line for line in shown.splitlines() if line.startswith("  + ")]
    assert changes
    assert max(map(len, changes)) <= 80


def test_a_wrong_value_in_a_configuration_names_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run_config.yaml").write_text("model:\n  num_layers: many\n", "utf-8")
    with pytest.raises(SystemExit):
        main(["fit", "--cluster", "1x4-h100", str(tmp_path)])
    said = "run_config.yaml: --num-layers: 'many' is no whole number"
    assert said in capsys.readouterr().err
