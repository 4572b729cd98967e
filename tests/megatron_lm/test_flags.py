"""EvenPipe's flags in Megatron's parser: help, refusals in one line, nothing without them."""

import subprocess
import sys

import pytest

from tests.megatron_lm.launch import gpt_flags, launch, start

SCRIPT = "pretrain_gpt.py"
PP4 = ("--pipeline-model-parallel-size", "4")
VIRTUAL = (*PP4, "--num-layers-per-virtual-pipeline-stage", "1")

WRONG = {
    "one stage": (("--bpipe",), ("--bpipe", "--pipeline-model-parallel-size")),
    "misspelt": (("--evenpipe-schedule", "1f1", *PP4), ("--evenpipe-schedule 1f1", "did you mean 1f1b?")),
    "a flag misspelt": (
        ("--evenpipe-scedule", "1f1b", *PP4),
        ("--evenpipe-scedule: ", "did you mean --evenpipe-schedule?"),
    ),
    "nothing to level": (("--evenpipe-schedule", "gpipe", "--bpipe", *PP4), ("--bpipe", "--evenpipe-schedule gpipe")),
    "gpipe has one chunk": (
        ("--evenpipe-schedule", "gpipe", *VIRTUAL),
        ("--evenpipe-schedule gpipe", "--num-layers-per-virtual-pipeline-stage"),
    ),
    "interleaved without chunks": (
        ("--evenpipe-schedule", "interleaved", *PP4),
        ("--evenpipe-schedule interleaved", "--num-layers-per-virtual-pipeline-stage"),
    ),
    "uneven groups": (
        ("--bpipe", *VIRTUAL, "--global-batch-size", "6"),
        ("--bpipe", "--global-batch-size 6", "--pipeline-model-parallel-size 4"),
    ),
    "no order for it": (
        (
            *("--evenpipe-schedule", "v-half", *VIRTUAL, "--num-experts", "4", "--expert-model-parallel-size", "2"),
            *("--moe-token-dispatcher-type", "alltoall", "--bf16", "--overlap-moe-expert-parallel-comm"),
            *("--disable-bias-linear", "--global-batch-size", "16"),
        ),
        ("--evenpipe-schedule v-half with --overlap-moe-expert-parallel-comm", "interleaved, dualpipev"),
    ),
    "placed for nothing": (("--pair-adjacent", *PP4), ("--pair-adjacent", "--bpipe")),
    "traces nothing": (("--evenpipe-trace", "t.json", *PP4), ("--evenpipe-trace", "--evenpipe-schedule")),
    "iteration of no trace": (
        ("--bpipe", *PP4, "--evenpipe-trace-iteration", "3"),
        ("--evenpipe-trace-iteration 3", "--evenpipe-trace"),
    ),
    "traced too late": (
        ("--bpipe", *PP4, "--evenpipe-trace", "t.json", "--evenpipe-trace-iteration", "30"),
        ("--evenpipe-trace-iteration 30", "--train-iters 3"),
    ),
    "no number": (
        ("--bpipe", *PP4, "--evenpipe-trace", "t.json", "--evenpipe-trace-iteration", "soon"),
        ("--evenpipe-trace-iteration soon",),
    ),
    "nowhere to write": (
        ("--bpipe", *PP4, "--evenpipe-trace", "/no/such/folder/t.json"),
        ("--evenpipe-trace /no/such/folder/t.json",),
    ),
    "another order of ranks": (
        ("--bpipe", "--pair-adjacent", "--use-tp-pp-dp-mapping", *PP4),
        ("--pair-adjacent", "--use-tp-pp-dp-mapping"),
    ),
    "activations elsewhere": (
        (
            *("--bpipe", "--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"),
            *("--distribute-saved-activations", "--recompute-granularity", "full", "--recompute-method", "uniform"),
        ),
        ("--bpipe", "--distribute-saved-activations"),
    ),
}


def alone(megatron_lm, flags, world=4):
    """The script in one process that takes itself for rank 0 of `world`: arguments are checked before peers are met."""
    environment = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    run = launch(megatron_lm, SCRIPT, 1, flags, environment, check=False)
    return run.returncode, run.output


@pytest.mark.parametrize("case", WRONG)
def test_wrong_flags_get_one_line_that_names_them(megatron_lm, case):
    wrong, named = WRONG[case]
    status, output = alone(megatron_lm, [*gpt_flags(3), *wrong])
    said = [line for line in output.splitlines() if line.startswith("evenpipe: error: ")]
    assert status == 2, output[-3000:]
    assert len(said) == 1, output[-3000:]
    assert all(name in said[0] for name in named), said
    assert "Traceback" not in output


@pytest.mark.every_release
def test_help_needs_no_gpu_and_starts_nothing(megatron_lm):
    job = start([sys.executable, "-m", "evenpipe", "run", SCRIPT, "--help"], megatron_lm)
    output, _ = job.communicate(timeout=800)
    assert job.returncode == 0, output[-3000:]
    assert "EvenPipe:" in output
    assert "--bpipe" in output
    assert "--pipeline-model-parallel-size" in output


@pytest.mark.every_release
def test_an_unknown_release_is_refused_by_name(megatron_lm, tmp_path):
    subprocess.run(["cp", "-r", str(megatron_lm), str(tmp_path / "copy")], check=True)
    info = tmp_path / "copy" / "megatron" / "core" / "package_info.py"
    text = info.read_text()
    minor = next(line for line in text.splitlines() if line.startswith("MINOR"))
    info.write_text(text.replace(minor, "MINOR = 77"))
    status, output = alone(tmp_path / "copy", gpt_flags(3))
    assert status == 2
    said = [line for line in output.splitlines() if line.startswith("evenpipe: error: ")]
    assert len(said) == 1, output[-3000:]
    assert "0.77." in said[0]
    assert "unknown release, expected one of 0.14" in said[0]


def test_what_only_a_gpu_computes_is_turned_off_on_cpu_and_said(megatron_lm):
    layout = ("--pipeline-model-parallel-size", "2", "--evenpipe-schedule", "1f1b")
    experts = ("--num-experts", "2", "--moe-grouped-gemm", "--disable-bias-linear", "--bf16")
    fused = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te", "--fp8-format", "hybrid")
    run = launch(megatron_lm, SCRIPT, 2, [*gpt_flags(1), *layout, *experts, *fused])
    [said] = [line for line in run.output.splitlines() if line.startswith("evenpipe: CPU mode: ")]
    assert said.endswith("--cross-entropy-fusion-impl native, without --moe-grouped-gemm, without --fp8-format"), said
    assert len(run.lines) == 1
    # An estimate is of the flags as they are, and needs no GPU either.
    command = [sys.executable, "-m", "evenpipe", "run", "--estimate", SCRIPT, *gpt_flags(1), *layout, *experts]
    output, _ = start(command, megatron_lm).communicate(timeout=800)
    assert "ms" in output, output[-3000:]
    # Nor does it take long to hear that training does.
    output, _ = start([sys.executable, "-m", "evenpipe", "run", SCRIPT, *gpt_flags(1)], megatron_lm).communicate()
    assert output.splitlines()[-1].endswith("put --cpu before pretrain_gpt.py, to try it on CPU"), output[-3000:]
    assert "Traceback" not in output
