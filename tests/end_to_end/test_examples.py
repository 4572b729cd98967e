"""The scripts in examples/ run: by torchrun, by DeepSpeed's launcher, and the others by ranks that share imports."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.ports import free_port
from tests.readme import commands_of

pytestmark = pytest.mark.gate

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_megatron_core_script_with_bpipe():
    """The loss falls, and no stage holds more than ⌈(4+2)/2⌉ micro-batches."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run = subprocess.run([*command, EXAMPLES / "megatron_core.py"], timeout=800, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("iteration")]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    peaks = sorted(line for line in run.stdout.splitlines() if line.startswith("stage"))
    assert [int(line.split("most ")[1].split()[0]) for line in peaks] == [3, 3, 2, 3]


def deepspeed_launcher(script):
    """The README's command, up to its configuration."""
    [words] = commands_of("deepspeed")
    assert words[-3:] == [script, "--deepspeed_config", "examples/deepspeed/bpipe.json"]
    return [Path(sys.executable).with_name(words[0]), "--master_port", str(free_port()), *words[1:-2]]


def forked_deepspeed(script):
    return forked.command(4, "deepspeed.pipe,torch._dynamo,torch.optim", script)


@pytest.mark.parametrize(
    ("start", "script", "configuration", "peaks"),
    [
        (deepspeed_launcher, "gpt", "bpipe", [3, 3, 2, 3]),
        pytest.param(forked_deepspeed, "bert", "kfkb", [8, 6, 4, 2], marks=pytest.mark.long),
        (forked_deepspeed, "gpt", "2bw", [3, 3, 2, 3]),
        pytest.param(forked_deepspeed, "gpt", "auto", None, marks=pytest.mark.long),  # as what is measured has it
    ],
)
def test_pipeline_modules_of_deepspeed(start, script, configuration, peaks):
    """One by DeepSpeed's launcher, with the README's whole command."""
    pytest.importorskip("deepspeed")
    flags = ["--deepspeed_config", f"examples/deepspeed/{configuration}.json", "--iterations", "4"]
    run = subprocess.run(
        [*start(f"examples/deepspeed/{script}.py"), *flags],
        timeout=800,
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("iteration")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    found = sorted(line for line in run.stdout.splitlines() if line.startswith("rank"))
    live = [int(line.split(": ")[1].split()[0]) for line in found]
    assert live == peaks if peaks is not None else min(live) >= 1


def test_a_pipeline_module_that_a_plan_cuts_inside_layers(tmp_path):
    """Losses are those of whole layers, to the last digit shown."""
    pytest.importorskip("deepspeed")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    script = EXAMPLES / "deepspeed" / "gpt.py"
    page = (EXAMPLES.parent / "docs" / "deepspeed.md").read_text()
    [plan] = re.findall(r"^evenpipe (partition --module .*)$", page, re.MULTILINE)
    plan = plan.replace("gpt.py:", f"{script}:").split()
    commands = [[sys.executable, "-m", "evenpipe", *plan]]
    for configuration in ("planned", "bpipe"):
        flags = ["--deepspeed_config", script.with_name(f"{configuration}.json"), "--iterations", "4"]
        commands.append([*forked_deepspeed(script), *flags])
    runs = []
    for command in commands:
        runs.append(subprocess.run(command, timeout=300, capture_output=True, text=True, cwd=tmp_path, env=environment))
        assert runs[-1].returncode == 0, runs[-1].stdout + runs[-1].stderr
    assert "evenpipe: partition: P.json cuts PipelineModule's 11 layers " in runs[1].stderr
    losses = [[line for line in run.stdout.splitlines() if line.startswith("iteration")] for run in runs[1:]]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


def test_plain_modules_of_a_users_own():
    """Any schedule gives the same losses, to the last digit shown; the script is short."""
    script = EXAMPLES / "plain_torch.py"
    assert len(script.read_text().splitlines()) <= 40
    printed = []
    for schedule in ("1f1b", "zb-h1", "2bw"):
        command = forked.command(4, "torch._dynamo,torch.optim", script, schedule)
        run = subprocess.run(command, timeout=600, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        printed.append(run.stdout)
    for output in printed:
        losses = [float(line.split()[-1]) for line in output.splitlines()]
        assert len(losses) == 5
        assert losses[-1] < losses[0]
    assert printed[1] == printed[0] != printed[2]  # without flushes steps are a batch late
    theirs = EXAMPLES / "torch_pipelining.py"
    assert len(theirs.read_text().splitlines()) <= 40
    run = subprocess.run(forked.command(4, "torch._dynamo,torch.optim", theirs), timeout=600, capture_output=True)
    assert run.stdout.decode() == printed[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["huggingface.py"], "huggingface.py: the following arguments are required: model, plan (see --help)"),
        (["huggingface.py", "gpt2"], "huggingface.py: the following arguments are required: plan (see --help)"),
        (["huggingface.py", "gpt2", "P.json"], "start it by torchrun --nproc-per-node N"),
        (["plain_torch.py", "1fb1"], "plain_torch.py: schedule=1fb1: unknown schedule, did you mean 1f1b?"),
    ],
)
def test_an_argument_that_is_wrong_is_one_line(words, said):
    run = subprocess.run([sys.executable, EXAMPLES / words[0], *words[1:]], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert said in run.stderr


@pytest.mark.parametrize("script", ["huggingface.py", "plain_torch.py"])
def test_an_example_has_help(script):
    run = subprocess.run([sys.executable, EXAMPLES / script, "--help"], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert "torchrun --nproc-per-node 4" in run.stdout


@pytest.mark.parametrize("model", ["gpt2", *(pytest.param(name, marks=pytest.mark.long) for name in ("bert", "t5"))])
def test_models_of_hugging_faces(tmp_path, model):
    """Cut into four as they are; the script is short, and says what its stages took beside what was planned."""
    script = EXAMPLES / "huggingface.py"
    lines = script.read_text().splitlines()
    assert len([line for line in lines if line and not line.startswith(("import ", "from "))]) <= 40
    imported = "transformers.models.gpt2.modeling_gpt2,torch._dynamo,torch.optim"
    command = forked.command(4, imported, script, model, str(tmp_path / "P.json"))
    run = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("iteration ")]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    told = re.findall(r"^stage (\d) \(nodes .*\| peak MiB: ([\d.]+) predicted, ([\d.]+) measured \|", run.stdout, re.M)
    assert [int(stage) for stage, *_ in told] == [*range(4)]
    for _, predicted, measured in told:  # said to a tenth
        assert float(measured) == pytest.approx(float(predicted), rel=0.03, abs=0.11)
