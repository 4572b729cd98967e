"""A stage that dies ends the whole job at once, with its own error last."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked import command
from tests.ports import free_port

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.long


def _launcher(name: str) -> list[str]:
    if name == "torchrun":
        return ["torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    return ["deepspeed.launcher.runner", "--num_gpus", "4", "--master_port", str(free_port()), "--no_local_rank"]


@pytest.mark.parametrize(("how", "launcher", "schedule"), [("raise", "deepspeed", "2bw"), ("kill", "torchrun", "1f1b")])
def test_a_stage_that_dies_ends_the_job_within_15_seconds(
    how: str, launcher: str, schedule: str, tmp_path: Path
) -> None:
    cases, section = tmp_path / "cases.json", {"schedule": schedule, "bpipe": True}
    cases.write_text(json.dumps([{"stages": 4, "config": {"evenpipe": section}, "steps": 50}]))
    script = Path(__file__).with_name("train_broken.py")
    started_at = time.time()
    job = subprocess.Popen(
        [sys.executable, "-m", *_launcher(launcher), str(script), how, str(cases), str(tmp_path / "out.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    try:
        output, _ = job.communicate(timeout=800)
        ended_at = time.time()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    failed_at = re.search(r"FAILS AT ([\d.]+)", output)
    assert failed_at is not None, output[-4000:]
    # On a busy machine all takes longer, as the start has.
    assert ended_at - float(failed_at[1]) < max(15, float(failed_at[1]) - started_at)
    assert job.returncode != 0
    if how == "raise":
        errors = re.findall(r"^(?:\[rank\d\]: )?(\w+Error: .*)", output, re.MULTILINE)
        assert errors[-1] == "RuntimeError: stage two is broken", output[-4000:]


def test_stages_that_owe_each_other_something_end_well() -> None:
    """Under 2bw an acceptor is done with a batch before its partner; nobody has destroyed the process groups."""
    script = Path(__file__).with_name("train_to_the_end.py")
    run = subprocess.run(
        command(4, "deepspeed.pipe,torch._dynamo,torch.optim", script),
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert "Error" not in run.stderr
