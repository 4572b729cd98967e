"""Processes of a job: ranks that were started differently say so, and one whose last act was over gloo ends well."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import command
from tests.ports import free_port

SCRIPT = Path(__file__).with_name("meeting_cases.py")
HOST = socket.gethostname()
NAMED = {
    "another version": f"rank 2 ({HOST}) was started differently from rank 0 ({HOST}): EvenPipe 0.9 instead of 1.0",
    "another setting": f"rank 1 ({HOST}) was started differently from rank 0 ({HOST}): --bpipe False instead of True",
    "another setting, held by rank 0": f"rank 1 ({HOST}) was started differently from rank 0 ({HOST}): --bpipe False",
    "without flags": f"rank 1 ({HOST}) was started without EvenPipe's flags",
    "rank 0 without flags": f"rank 0 ({HOST}) was started without EvenPipe's flags",
    "absent": "rank 2 has not come",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meeting")
    words = command(3, "evenpipe.runtime.meeting", SCRIPT, str(folder), str(free_port()))
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("case", ["alike", "alike, held by rank 0"])
def test_ranks_that_were_started_alike_go_on(ranks, case):
    assert [rank[case]["error"] for rank in ranks] == [None] * 3


@pytest.mark.parametrize("case", NAMED)
def test_who_differs_is_named_by_every_rank_that_has_come(ranks, case):
    errors = [rank[case]["error"] for rank in ranks]
    assert all(error.startswith(NAMED[case]) and "\n" not in error for error in errors if error is not None)
    assert errors.count(None) == (case in ("without flags", "rank 0 without flags", "absent"))
    assert max(rank[case]["seconds"] for rank in ranks) < 15


RUN = """
import runpy, sys
from evenpipe.runtime.processes import rest_at_exit
rest_at_exit()
runpy.run_path(sys.argv[1])
"""
#: Ends right after a collective of very many tensors, which gloo's thread has just begun to drop; it waits 100 s before
#: it asks for the GIL.
SCRIPT_THAT_ENDS = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
kept = [torch.ones(1) for _ in range(30_000)]
sys.setswitchinterval(100.0)
dist.all_reduce_coalesced(kept)
"""


@pytest.mark.parametrize("command", [("-c", RUN), ("-m", "evenpipe", "run", "--cpu")], ids=["alone", "in CPU mode"])
def test_gloos_threads_come_to_rest_before_the_interpreter_is_torn_down(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    """Without that the process is aborted: "terminate called without an active exception"."""
    script = tmp_path / "ends.py"
    script.write_text(SCRIPT_THAT_ENDS)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, *command, script], env=environment, capture_output=True, timeout=800)
    assert (run.returncode, run.stderr.partition(b"terminate called")[1]) == (0, b""), run.stderr[-2000:]
