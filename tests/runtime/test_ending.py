"""A process whose last act was a collective over gloo ends well, however late gloo's threads get the GIL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("exit_at_once.py")
RUN = """
import runpy, sys
from evenpipe.runtime.processes import rest_at_exit
rest_at_exit()
runpy.run_path(sys.argv[1])
"""


@pytest.mark.parametrize("command", [("-c", RUN), ("-m", "evenpipe", "run", "--cpu")], ids=["alone", "in CPU mode"])
def test_gloos_threads_come_to_rest_before_the_interpreter_is_torn_down(command: tuple[str, ...]) -> None:
    """Without that the process is aborted: "terminate called without an active exception"."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, *command, str(SCRIPT)], env=environment, capture_output=True, timeout=800)
    assert (run.returncode, run.stderr.partition(b"terminate called")[1]) == (0, b""), run.stderr[-2000:]
