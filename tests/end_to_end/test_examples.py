"""The scripts in examples/ run as their users run them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("script", "configuration", "peaks"),
    [("gpt", "bpipe", [3, 3, 2, 3]), ("bert", "kfkb", [8, 6, 4, 2]), ("gpt", "2bw", [3, 3, 2, 3])],
)
def test_pipeline_modules_of_deepspeed(script, configuration, peaks):
    """By DeepSpeed's launcher, with the commands in the README."""
    pytest.importorskip("deepspeed")
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    launcher = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", "4", "--master_port", str(port)]
    flags = ["--deepspeed_config", f"examples/deepspeed/{configuration}.json", "--iterations", "4"]
    run = subprocess.run(
        [*launcher, f"examples/deepspeed/{script}.py", *flags],
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
    assert [int(line.split(": ")[1].split()[0]) for line in found] == peaks


def test_plain_modules_of_a_users_own():
    """Any schedule gives the same losses, to the last digit shown; the script is short."""
    script = EXAMPLES / "plain_torch.py"
    assert len(script.read_text().splitlines()) <= 30
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", script]
    printed = []
    for schedule in ("1f1b", "zb-h1"):
        run = subprocess.run([*command, schedule], timeout=100, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        printed.append(run.stdout)
    losses = [float(line.split()[-1]) for line in printed[0].splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert printed[1] == printed[0]
