"""Unmodified scripts under EvenPipe's flags, with all ranks' own NCCL: their losses against those without the flags.

The argument says whose: "megatron" (pretrain_gpt.py, two stages, the distributed optimizer with both of its overlaps)
or "deepspeed" (examples/deepspeed/gpt.py, a stage each). Every rank starts its process of each job in turn.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from .rank import UNDER_WAY, Rank
from .registry import ROOT, checkout

__all__ = ["run"]

_ITERATIONS: Final = 4
_LOSS: Final = {"megatron": re.compile(r"lm loss: (\S+)"), "deepspeed": re.compile(r"iteration \d+: loss (\S+)")}
_MEGATRON: Final = (
    *("--num-layers", "8", "--num-attention-heads", "4", "--micro-batch-size", "1", "--global-batch-size", "16"),
    *("--lr", "1e-3", "--lr-decay-style", "constant", "--seed", "1234", "--hidden-dropout", "0"),
    *("--attention-dropout", "0", "--log-interval", "1", "--eval-interval", "100", "--eval-iters", "0"),
    *("--num-workers", "0", "--train-iters", str(_ITERATIONS), "--mock-data", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "8192", "--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"),
    "--overlap-grad-reduce",
)
_SIZES: Final = (("1024", "1024"), ("64", "64"))  # hidden size, tokens
#: By the module that has the kernels which are Megatron's default: what to say where it is not there.
_WITHOUT_KERNELS: Final = {
    "transformer_engine": ["--transformer-impl", "local", "--no-persist-layer-norm", "--no-masked-softmax-fusion"],
    "fused_weight_gradient_mlp_cuda": ["--no-gradient-accumulation-fusion"],
}


class _Job(NamedTuple):
    """One run; all losses have to be those of the first job, or, without flushes, those of its first iteration."""

    name: str
    arguments: list[str]
    alike: bool = True


def run(rank: Rank, whose: str) -> None:
    jobs = _megatron(rank) if whose == "megatron" else _deepspeed(rank)
    rank.expect(job.name for job in jobs)
    reference: list[str] = []
    for number, job in enumerate(jobs):
        if rank.number == 0:
            rank.row(job.name, UNDER_WAY)
        losses = _losses(rank, number, job, whose)
        reference = reference or losses
        same = losses == reference if job.alike else losses[:1] == reference[:1]
        if rank.number == 0:
            what = "losses" if job.alike else "first loss"
            found = f"the {what} of {jobs[0].name}" if same else f"OTHER {what} than {jobs[0].name}: {' '.join(losses)}"
            rank.row(job.name, "what others are compared with" if number == 0 else found)
    if rank.place == "cpu":
        rank.unchecked("NCCL, and kernels of Transformer Engine and Apex", "there is no GPU")


def _losses(rank: Rank, number: int, job: _Job, whose: str) -> list[str]:
    """What the job's ranks have printed, alike on all ranks. Raises RuntimeError, with the last line, if it fails."""
    if rank.number == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            rank.tell(f"port {number}", str(free.getsockname()[1]))
    local = rank.number if rank.place in ("cpu", "nccl") else 0
    environment = {
        **os.environ,
        "RANK": str(rank.number),
        "WORLD_SIZE": str(rank.ranks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(rank.ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": rank.heard(f"port {number}"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if rank.place == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    folder = checkout() if whose == "megatron" else ROOT
    assert folder is not None, "a part whose needs are not there is skipped"
    if whose == "megatron":
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *job.arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        print(done.stdout[-8000:], file=sys.stderr)
        last = (done.stdout.strip().splitlines() or ["no word"])[-1]
        raise RuntimeError(f"{job.name} ended with {done.returncode}: {last}")
    rank.tell(f"losses {number} {rank.number}", json.dumps(_LOSS[whose].findall(done.stdout)))
    every = [json.loads(rank.heard(f"losses {number} {one}")) for one in range(rank.ranks)]
    losses = max(every, key=len)
    if len(losses) != _ITERATIONS:
        raise RuntimeError(f"{job.name} printed {len(losses)} losses, not {_ITERATIONS}")
    return losses


def _megatron(rank: Rank) -> list[_Job]:
    hidden, tokens = rank.pick(*_SIZES)
    start = ["-m", "evenpipe", "run", *(["--cpu"] if rank.place == "cpu" else []), "pretrain_gpt.py", *_MEGATRON]
    start += ["--hidden-size", hidden, "--seq-length", tokens, "--max-position-embeddings", tokens]
    if rank.place != "cpu":
        start.append("--bf16")
        for module, flags in _WITHOUT_KERNELS.items():
            start += [] if find_spec(module) else flags
    both = [*start, "--overlap-param-gather"]
    return [
        _Job("Megatron's own 1f1b", both),
        _Job("4F4B with BPipe", [*both, "--evenpipe-schedule", "kfkb", "--group-size", "4", "--bpipe"]),
        _Job("2bw, gradients' overlap alone", [*start, "--evenpipe-schedule", "2bw"], alike=False),
        *rank.pick([_Job("1f1b", [*both, "--evenpipe-schedule", "1f1b"])], []),
    ]


def _deepspeed(rank: Rank) -> list[_Job]:
    k = 4 if rank.ranks == 2 else 2
    sections: dict[str, dict[str, Any] | None] = {
        "DeepSpeed's own 1f1b": None,
        **rank.pick({"1f1b": {"schedule": "1f1b"}}, {}),
        f"{k}F{k}B with BPipe": {"schedule": "kfkb", "group_size": k, "bpipe": True},
        "2bw": {"schedule": "2bw"},
    }
    given = json.loads((ROOT / "examples" / "deepspeed" / "bpipe.json").read_text())
    jobs = []
    for number, (name, section) in enumerate(sections.items()):
        given.pop("evenpipe", None)
        path = rank.folder / f"deepspeed-{number}-{rank.number}.json"
        path.write_text(json.dumps(given | ({"evenpipe": section} if section else {})))
        script = str(ROOT / "examples" / "deepspeed" / "gpt.py")
        flags = ["--stages", str(rank.ranks), "--iterations", str(_ITERATIONS)]
        jobs.append(_Job(name, [script, *flags, "--deepspeed_config", str(path)], section != {"schedule": "2bw"}))
    return jobs
