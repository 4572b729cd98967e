"""The registry of parts: what each is called, needs and finds, and how long it may take."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import torch

__all__ = ["PARTS", "ROOT", "Part", "checkout", "described", "lacking", "nccl_version", "place_of"]

ROOT: Final = Path(__file__).resolve().parents[2]
_SHARES_A_GPU: Final = (2, 30)  # of NCCL; src/init.cc there, NCCL_MULTI_RANK_GPU_ENABLE


class Part(NamedTuple):
    """`module` of this package, called with `argument`, on every stage's rank, or on one that is `alone`.

    `checks` says for people what it finds; `needs` are keys of `_NEEDS`.
    """

    name: str
    module: str
    argument: str
    seconds: float
    checks: str
    environment: tuple[tuple[str, str], ...] = ()
    alone: bool = False
    needs: tuple[str, ...] = ()
    #: Whether it does is to be found out: it may take `seconds` for each row.
    may_hang: bool = False
    #: The control of those: what ended in them says something only if this does not end.
    must_hang: bool = False


def _synchronised(name: str, argument: str, checks: str, *environment: tuple[str, str]) -> Part:
    return Part(name, "synchronised", argument, 40, checks, environment, may_hang=True)


def _itself(name: str, argument: str, seconds: float, checks: str, *environment: tuple[str, str]) -> Part:
    return Part(f"NCCL with itself{name}", "itself", argument, seconds, checks, environment, alone=True)


_ENDS: Final = "whether seven schedules, 2BW among them, end with"
#: What matters most comes first, should time run out.
PARTS: Final = (
    Part(
        *("bit-identity", "identity", "module", 120),
        "losses and weights of every schedule, with BPipe and without, in bf16 and fp32, against one stage on the same "
        "device, in plain torch; 1F1B, BPipe and 2BW before the rest",
    ),
    _itself(
        *("", "schedules", 60),
        "gradients of every schedule that flushes, with BPipe and without, against a loop without a pipeline. Four "
        "stages are in one process, and links are groups of one rank that sends to itself. Messages take a random "
        "while more; memory that has been let go of is NaN. A run that does not wait for evictions must differ. Also: "
        "memory, thread blocks and priority of a communicator; whether memory that was sent is the allocator's again "
        "at once",
    ),
    _itself(", recomputation", "recomputation", 30, "the same of checkpointed layers, by both of torch's ways"),
    _itself(
        *(", host swap", "swaps", 30),
        "the same where stages swap to the host's memory, late, and operations run again in the backward",
    ),
    _itself(
        *(", torch.cuda._sanitizer", "sanitizer", 60),
        "whether the sanitizer sees two accesses without an order, and that it does where evictions are not waited for",
        ("TORCH_CUDA_SANITIZER", "1"),
    ),
    _itself(
        *(", Transformer Engine", "transformer-engine", 40),
        "1F1B with BPipe against 1F1B for layers of Transformer Engine, in bf16 and FP8; which saved tensors stay",
    )._replace(needs=("Transformer Engine",)),
    _synchronised(
        *("torch.cuda.synchronize around every action", "device"),
        f"{_ENDS} it. One has ended when all ranks say so; while any is in an action and none says anything for 40 s, "
        "it is `HUNG`",
    ),
    Part(
        *("a script of Megatron-LM", "scripts", "megatron", 240),
        "losses of `pretrain_gpt.py` under EvenPipe's flags against those without: two stages, the distributed "
        "optimizer, both overlaps",
        needs=("Megatron-LM", "several ranks"),
    ),
    Part(
        *("a script of DeepSpeed", "scripts", "deepspeed", 90),
        "losses of `examples/deepspeed/gpt.py` with a section of EvenPipe's against those of DeepSpeed's own engine",
        needs=("DeepSpeed", "several ranks"),
    ),
    Part(
        *("bit-identity in Megatron", "identity", "evenpipe", 120),
        "the same as bit-identity, in megatron-core: weights against 1F1B's, or among interleaved ones; 2bw with BPipe "
        "against 2bw; over NCCL Megatron's own 1F1B too",
        needs=("megatron-core",),
    ),
    Part(
        *("BPipe", "bpipe", "module", 60),
        "of each stage under 1F1B (of two stages under 4F4B) saved activations, active and reserved memory "
        "(`torch.cuda.memory_stats`) in steady state, and calls of `cudaMalloc` there, against predictions; an "
        "iteration with BPipe against one without; how long compute waits for evictions and loads",
    ),
    Part(
        *("BPipe in Megatron", "bpipe", "evenpipe", 60),
        "the same in megatron-core, without the waits",
        needs=("megatron-core",),
    ),
    _synchronised(
        *("torch.cuda.synchronize, one hardware queue", "device", f"{_ENDS} both"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
    ),
    _synchronised(
        *("torch.cuda.synchronize, CUDA_LAUNCH_BLOCKING", "device", f"{_ENDS} both"),
        ("CUDA_LAUNCH_BLOCKING", "1"),
    ),
    _synchronised(
        *("one hardware queue alone", "nothing", f"{_ENDS} one hardware queue"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
    ),
    _synchronised(
        *("retries of the caching allocator", "allocator"),
        f"{_ENDS} a retry of the caching allocator at every action; how many there were",
    ),
    _synchronised(
        *("receives posted ahead, which must hang", "posted-ahead"),
        "that 1F1B hangs with receives posted k + 1 actions ahead: else the others prove nothing, and it is `failed`",
    )._replace(seconds=20, must_hang=True),
    Part(
        *("links", "links", "", 30),
        "GB/s between partners; over NCCL a communicator's memory, and SMs: as the share of the device's that matrix "
        "products lose beside receives that wait for their message",
    ),
    Part(
        *("device", "device", "", 40),
        "GB/s to the host and back, alone, both at once, and beside compute; forward and backward of a GPT layer",
        alone=True,
    ),
)


def _installed(module: str, called: str) -> str | None:
    return None if find_spec(module) else f"{called} is not installed"


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that this process calls; torch tells that of the one that it was built with."""
    code = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    except OSError:  # linked into torch
        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return code.value // 10_000, code.value // 100 % 100, code.value % 100


def place_of(gpus: int) -> str:
    """Where the stages are on a machine with so many GPUs: see `Rank`."""
    if gpus > 1:
        return "nccl"
    return "nccl-shared" if nccl_version() >= _SHARES_A_GPU else "shared"


def _takes_several_ranks(place: str) -> str | None:
    if place != "shared":
        return None
    return f"NCCL {'.'.join(map(str, nccl_version()))} takes no two ranks on one GPU, as 2.30 does"


#: What parts need, and why a machine lacks it; None where it is there.
_NEEDS: Final[dict[str, Callable[[str], str | None]]] = {
    "megatron-core": lambda place: _installed("megatron", "megatron-core"),
    "DeepSpeed": lambda place: _installed("deepspeed", "DeepSpeed"),
    "Transformer Engine": lambda place: (
        None if place == "cpu" else _installed("transformer_engine", "Transformer Engine")
    ),
    "Megatron-LM": lambda place: None if checkout() else "MEGATRON_LM names no checkout of Megatron-LM",
    "several ranks": _takes_several_ranks,
}


def checkout() -> Path | None:
    """The first checkout of Megatron-LM that MEGATRON_LM names, or that of the main release beside this project's."""
    named = [Path(path) for path in os.environ.get("MEGATRON_LM", "").split(os.pathsep) if path]
    every = [*named, ROOT.parent / "shared" / "megatron-lm" / "0.16.1"]
    return next((path.resolve() for path in every if (path / "pretrain_gpt.py").exists()), None)


def described() -> str:
    """The parts, in Markdown."""
    lines = ["| part | needs | finds |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {part.name} | {', '.join(part.needs)} | {part.checks} |" for part in PARTS)])


def lacking(part: Part, place: str) -> str | None:
    """Why this machine cannot carry out `part`; None if it can."""
    return next((why for need in part.needs if (why := _NEEDS[need](place)) is not None), None)
