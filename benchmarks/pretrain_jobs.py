"""Jobs of a Megatron-LM checkout's own pretrain_gpt.py with sleeping stages, and the times in their logs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any, Final

from harness import Tick

__all__ = ["iterations_ms", "measure"]

VARIANTS: Final[dict[str, tuple[str, ...]]] = {
    "megatron": (),
    "evenpipe": ("--evenpipe-schedule", "1f1b"),
    "2bw": ("--evenpipe-schedule", "2bw"),
}
# The first iterations open connections and fill the pipeline.
START: Final = 2
_LINE: Final = re.compile(r"iteration\s+\d+/.*elapsed time per iteration \(ms\): ([\d.]+)")


def measure(checkout: Path, setting: Any, model: dict[str, Any], tick: Tick) -> dict[str, list[float]]:
    """Milliseconds of an iteration in every round, per variant: the mean over the measured iterations of a job."""
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(setting.repeats):
        for name, flags in VARIANTS.items():
            logged = iterations_ms(checkout, setting, model, flags)
            times[name].append(mean(logged[START + setting.warm_up :]))
            tick()
    return times


def iterations_ms(checkout: Path, setting: Any, model: dict[str, Any], flags: tuple[str, ...]) -> list[float]:
    """Train once, and read the log. Raises SystemExit with what the job printed when it fails."""
    script = Path(__file__).with_name("pretrain_sleeping.py")
    stages, seq_length = str(setting.stages), str(model["seq_length"])
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", stages),
        *("-m", "evenpipe", "run", "--cpu", str(script)),
        *("--pipeline-model-parallel-size", stages, "--num-layers", stages),
        *("--hidden-size", str(model["hidden"]), "--num-attention-heads", str(model["heads"])),
        *("--seq-length", seq_length, "--max-position-embeddings", seq_length),
        *("--micro-batch-size", "1", "--global-batch-size", str(setting.micro_batches)),
        *("--train-iters", str(START + setting.warm_up + setting.batches)),
        *("--lr", "1e-3", "--lr-decay-style", "constant", "--clip-grad", str(model["clip_grad"])),
        *("--hidden-dropout", "0", "--attention-dropout", "0"),
        *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "256", "--num-workers", "0"),
        *("--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000", *flags),
    ]
    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "FORWARD_MS": str(setting.forward_ms),
    }
    job = subprocess.run(
        command, cwd=checkout, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    logged = [float(found) for found in _LINE.findall(job.stdout)]
    if job.returncode or len(logged) != START + setting.warm_up + setting.batches:
        raise SystemExit("\n".join(job.stdout.splitlines()[-40:]))
    return logged
