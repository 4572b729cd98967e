"""The scripts in examples/ run as their users run them."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_megatron_core_script_with_bpipe():
    """The loss falls, and no stage holds more than ⌈(4+2)/2⌉ micro-batches."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run = subprocess.run([*command, EXAMPLES / "megatron_core.py"], timeout=200, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("iteration")]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    peaks = sorted(line for line in run.stdout.splitlines() if line.startswith("stage"))
    assert [int(line.split("most ")[1].split()[0]) for line in peaks] == [3, 3, 2, 3]
