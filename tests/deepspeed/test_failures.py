"""A stage that dies ends the whole job at once, with its own error last."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")


def _launcher(name: str) -> list[str]:
    if name == "torchrun":
        return ["torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    return ["deepspeed.launcher.runner", "--num_gpus", "4", "--master_port", str(port), "--no_local_rank"]


@pytest.mark.parametrize(("how", "launcher"), [("raise", "deepspeed"), ("kill", "torchrun")])
def test_a_stage_that_dies_ends_the_job_within_15_seconds(how: str, launcher: str, tmp_path: Path) -> None:
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([{"stages": 4, "config": {"evenpipe": {"bpipe": True}}, "steps": 50}]))
    script = Path(__file__).with_name("train_broken.py")
    job = subprocess.Popen(
        [sys.executable, "-m", *_launcher(launcher), str(script), how, str(cases), str(tmp_path / "out.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    try:
        output, _ = job.communicate(timeout=120)
        ended_at = time.time()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    failed_at = re.search(r"FAILS AT ([\d.]+)", output)
    assert failed_at is not None, output[-4000:]
    assert ended_at - float(failed_at[1]) < 15
    assert job.returncode != 0
    if how == "raise":
        errors = re.findall(r"^(?:\[rank\d\]: )?(\w+Error: .*)", output, re.MULTILINE)
        assert errors[-1] == "RuntimeError: stage two is broken", output[-4000:]
