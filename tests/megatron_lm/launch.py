"""Start a script of a Megatron-LM checkout with torchrun on CPU, and read what it printed and saved."""

import atexit
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import NamedTuple

import torch

from tests.megatron_lm.ranks import RankServer

__all__ = ["EXPERTS", "LAYOUTS", "Run", "differences", "gpt_flags", "launch", "model_flags", "start", "torchrun"]

BYTECODE = Path(__file__).parents[2] / "build" / "bytecode"
"""Compiled modules, as a checkout stays as it is."""

MODEL = (
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "1", "--global-batch-size", "8"),
    *("--lr", "1e-3", "--lr-decay-style", "constant", "--clip-grad", "1.0", "--seed", "1234"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
    *("--log-interval", "1", "--eval-interval", "2", "--eval-iters", "1", "--num-workers", "0"),
)
"""Eight layers, eight micro-batches of one sample (four with two replicas); no dropout."""

LAYOUTS = {
    "PP2": (2, ("--pipeline-model-parallel-size", "2")),
    "PP4": (4, ("--pipeline-model-parallel-size", "4")),
    "PP4xVPP2": (4, ("--pipeline-model-parallel-size", "4", "--num-layers-per-virtual-pipeline-stage", "1")),
    "DP2xPP2 distributed optimizer": (
        4,
        (
            *("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"),
            *("--overlap-grad-reduce", "--overlap-param-gather"),
        ),
    ),
    "DP2xPP4 distributed optimizer": (
        8,
        (
            *("--pipeline-model-parallel-size", "4", "--use-distributed-optimizer"),
            *("--overlap-grad-reduce", "--overlap-param-gather"),
        ),
    ),
    "TP2xPP4": (8, ("--pipeline-model-parallel-size", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "TP2xPP2": (4, ("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel")),
}
"""Processes and flags of each."""

EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-router-load-balancing-type", "aux_loss"),
    *("--moe-aux-loss-coeff", "1e-2", "--disable-bias-linear"),
)
"""Of which a router chooses two for a token, without a capacity."""


class Run(NamedTuple):
    """A finished job: `lines` are what Megatron logged of each iteration, as printed, without times."""

    returncode: int
    output: str

    @property
    def peak_live(self) -> list[int]:
        """Micro-batches, by stage, in the last iteration that EvenPipe logged."""
        return [int(peak) for peak in re.findall(r"peak live: ([\d ]+)", self.output)[-1].split()]

    @property
    def validation(self) -> list[str]:
        """The losses of every evaluation, as printed."""
        return re.findall(r"validation loss at iteration .*?PPL: \S+", self.output)

    @property
    def lines(self) -> list[str]:
        losses = "lm loss|mtp_1 loss|sop loss|load_balancing_loss"
        kept = re.compile(rf"(iteration\s+\d+/|({losses}|loss scale|grad norm):|number of (skipped|nan) )")
        found = []
        for line in self.output.splitlines():
            # Another rank's text, without an end of its own, can stand before it.
            if (logged := re.search(r"iteration\s+\d+/\s*\d+ \|.*", line)) is not None:
                found.append(" | ".join(part.strip() for part in logged[0].split("|") if kept.search(part)))
        return found


def gpt_flags(iterations: int) -> list[str]:
    """A small GPT on mock data."""
    data = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "8192")
    return [*MODEL, *data, "--train-iters", str(iterations)]


def model_flags(checkout: Path, script: str, iterations: int, bert_data: Sequence[str]) -> list[str]:
    """A small model for pretrain_gpt.py or pretrain_bert.py."""
    if "gpt" in script:
        return gpt_flags(iterations)
    # Newer releases read a BERT vocabulary with the transformers package, unless told to do it as before.
    legacy = ["--legacy-tokenizer"] if _knows(checkout, "--legacy-tokenizer") else []
    return [*MODEL, *bert_data, *legacy, "--train-iters", str(iterations)]


def torchrun(processes: int, *agent: str) -> list[str]:
    """The command before a script, or before `-m`."""
    where = agent or ("--standalone",)
    return [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", str(processes)]


def start(command: Sequence[str], checkout: Path, environment: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    """Start `command` in `checkout`, in a process group of its own."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    given["PYTHONDONTWRITEBYTECODE"] = "1"  # a checkout stays as it is
    # The checkout's own megatron.core, not one that happens to be installed, is what is tested.
    given["PYTHONPATH"] = os.pathsep.join(filter(None, (str(checkout), given.get("PYTHONPATH"))))
    return subprocess.Popen(
        command,
        cwd=checkout,
        env=given,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _knows(checkout: Path, flag: str) -> bool:
    return flag in (checkout / "megatron" / "training" / "arguments.py").read_text()


def launch(
    checkout: Path,
    script: str,
    processes: int,
    flags: Sequence[str],
    environment: dict[str, str] | None = None,
    timeout: float = 800,
    check: bool = True,
    options: Sequence[str] = ("--cpu",),
    signalled_at: str | None = None,
) -> Run:
    """Run `script` of `checkout` to its end with `evenpipe run --cpu`; without EvenPipe's flags that is stock.

    One rank gets SIGTERM once `signalled_at` has been printed.
    """
    with tempfile.TemporaryDirectory(prefix="evenpipe-") as folder, ThreadPoolExecutor(1) as beside:
        said, server, over = Path(folder, "output"), _server(), Event()
        if signalled_at is not None:
            beside.submit(_signal_one, server, said, signalled_at, over)
        status = server.run(checkout, script, flags, processes, environment or {}, said, timeout, options)
        over.set()
        output = said.read_text(errors="replace")
    assert status is not None, f"no end after {timeout} s:\n{output[-4000:]}"
    if check:
        assert status == 0, f"status {status}:\n{output[-6000:]}"
    return Run(status, output)


def _signal_one(server: RankServer, said: Path, text: str, over: Event) -> None:
    while not over.wait(0.1):
        if said.exists() and text in said.read_text(errors="replace"):
            os.kill(server.ranks()[0], signal.SIGTERM)
            return


@functools.cache
def _server() -> RankServer:
    server = RankServer(BYTECODE)
    atexit.register(server.close)
    return server


def differences(one: Path, other: Path) -> list[str]:
    """Tensors by name that differ between two checkpoint folders of the same format ("torch" or "torch_dist")."""
    first, second = _tensors(one), _tensors(other)
    assert first, f"no tensors in {one}"
    names = sorted(first.keys() | second.keys())
    return [name for name in names if name not in first or name not in second or not _same(first[name], second[name])]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    if any(folder.glob("*.distcp")):
        return _distributed_tensors(folder)
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*.pt")):
        content = torch.load(path, map_location="cpu", weights_only=False)
        if isinstance(content, dict):
            content.pop("args", None)
            # The state of random generators, of which stock runs with other timing draw no less or more: not weights.
            content.pop("rng_state", None)
        _collect(f"{path.relative_to(folder)}", content, found)
    return found


def _distributed_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    reader = FileSystemReader(str(folder))
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    _load_state_dict(state, storage_reader=reader, no_dist=True)
    return state


def _collect(name: str, value: object, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = value
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(f"{name}/{key}", item, found)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _collect(f"{name}/{number}", item, found)
