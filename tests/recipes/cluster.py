"""A cluster that is this machine: what starts the processes of each node here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["here", "trained"]

#: `srun COMMAND`: the command once for each node; ended when one of them fails, as --kill-on-bad-exit asks for.
_SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & done
for _ in $(seq "$SLURM_NNODES"); do wait -n || { kill $(jobs -p); exit 1; }; done
"""
_SCONTROL = "#!/usr/bin/env bash\necho 127.0.0.1\n"


def here(folder: Path, nodes: int = 1, **extra: str) -> dict[str, str]:
    """An environment in which the launchers of this interpreter are found, and Slurm's stand-ins start processes."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = os.pathsep.join((str(programs), str(Path(sys.executable).parent), os.environ["PATH"]))
    slurm = {"SLURM_NNODES": str(nodes), "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": f"n[0-{nodes - 1}]"}
    given = {**os.environ, **slurm, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parents[2]
    given["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root / "plugin"), os.environ.get("PYTHONPATH"))))
    return {**given, "PYTHONDONTWRITEBYTECODE": "1", **extra}


def trained(command: Sequence[str], cwd: Path, environment: dict[str, str], timeout: float = 600) -> str:
    """What the job printed, which ends well. Nothing of it is left behind when it takes longer."""
    job = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=timeout)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, output[-6000:]
    return output
