"""Whether this machine has room and memory for a run, and bytes of every stage of a run, from its options alone."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from evenpipe.runtime.communicators import link_bytes
from evenpipe.runtime.processes import ChildFailed, answer_of, free_bytes
from evenpipe.schedule import links, loop
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.rules import RULES, device_type, fits_this_machine
from evenpipe.tuner.group_memory import StageMemory

__all__ = ["PlannedRun", "ProfileError", "check_memory", "check_room", "least_bytes", "stage_memories", "stage_memory"]

_SHARED: Final = Path("/dev/shm")
_MIB: Final = 2**20
#: Semaphores, sockets and buffers: free space in MiB, whatever the number of processes.
_LEAST_FREE_MIB: Final = 4
#: Open files of a process: libraries and standard streams, and what each of its peers adds in sockets and pipes.
_FILES_BY_ITSELF: Final = 64
_FILES_A_PEER: Final = 8
_GIB: Final = 2**30
_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
_VOCABULARY: Final = 256  # of bytes of text
#: Tensors of s·b·h elements that a layer saves at least: inputs of two norms, q, k, v, attention's output, and the
#: MLP's two, which are four times as wide.
_SAVED_OF_A_LAYER: Final = 14


def check_room(processes: int) -> None:
    """Raise OptionsError where shared memory, the folder for temporary files or the number of open files is too small.

    Raises the soft limit of open files to what is needed, up to the hard one.
    """
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError as error:
        raise OptionsError(f"TMPDIR: {error.strerror}: set it to a folder that can be written to") from None
    _check_free(temporary, "TMPDIR", "free some there, or set TMPDIR to another folder")
    if _SHARED.is_dir():
        _check_free(_SHARED, "shared memory", "remove what others have left there, or enlarge it (docker: --shm-size)")
    needed = _FILES_BY_ITSELF + _FILES_A_PEER * processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise OptionsError(
                f"open files: at most {hard}, and {processes} processes need {needed}: ulimit -n {needed}, or more"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _check_free(folder: Path, what: str, remedy: str) -> None:
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise OptionsError(f"{what} {folder}: {error.strerror}: {remedy}") from None
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < _LEAST_FREE_MIB * _MIB:
        raise OptionsError(f"{what} {folder}: {free / _MIB:.1f} MiB free, and {_LEAST_FREE_MIB} are needed: {remedy}")


def check_memory(options: TrainOptions) -> None:
    """Raise OptionsError where the processes of a run on CPU would hold more than this host has free."""
    free = free_bytes()
    if free is None or device_type(options.world_size) == "cuda":
        return
    needed = least_bytes(options)
    if needed > free:
        of = f"--partition {options.partition}: " if options.partition else ""
        held = f"{needed // _GIB:,}.{needed % _GIB * 10 // _GIB} GiB in {options.world_size} processes"
        raise OptionsError(
            f"{of}this run holds at least {held}, and this host has {free / _GIB:,.1f} GiB free: train a smaller model "
            "or smaller micro-batches, or use another machine"
        )


def least_bytes(options: TrainOptions) -> int:
    """Return bytes that all processes of a run hold at least, without those of Python and its libraries.

    Weights, gradients, Adam's two moments, and what layers save for backwards. With a plan: its predicted peaks, or the
    whole model in each process, which builds that first and keeps its stage.
    """
    if options.partition is not None:
        from evenpipe.partition.search.plan import Plan

        plan = Plan.read(Path(options.partition))
        peaks = {part.stage: part.peak_bytes for part in plan.stages}
        return max(options.data_parallel * sum(peaks.values()), options.world_size * (plan.model_bytes or 0))
    hidden, size = options.hidden, _BYTES[options.precision]
    shared = options.data_parallel if options.distributed_optimizer else 1
    mlps = max(options.experts // options.expert_parallel, 1)
    weights = options.layers * (4 + 8 * mlps) * hidden**2 + (_VOCABULARY + options.seq_length) * hidden
    moments = 8 // shared if options.optimizer != "sgd" else 0  # Muon: at most
    of_weights = options.data_parallel * weights * (2 * size + moments)
    saved = 1 if options.recompute == "full" else _SAVED_OF_A_LAYER
    sample = options.seq_length if not options.min_length else options.min_length
    one = options.micro_batch_size * sample * hidden * size * saved // options.tensor_parallel
    live = sum(options.plan.peak_live) * options.layers // (options.stages * options.plan.chunks)
    return of_weights + options.data_parallel * options.tensor_parallel * one * live


class ProfileError(ChildFailed):
    """The engine could not build or run the model; the message is the error's line, `details` its traceback."""


class PlannedRun(TrainOptions):
    """A training run for machines elsewhere, of any number of processes."""

    rules = tuple(rule for rule in RULES if rule is not fits_this_machine)


def stage_memory(options: TrainOptions, device: str | None = None) -> tuple[StageMemory, ...]:
    """Return what one process of every stage holds, with one model chunk a stage; byte for byte what a run would count.

    `device` None is what `evenpipe train` would take here; on CPU dropout's masks are larger. Raises ProfileError.
    """
    [found] = stage_memories([options], device or device_type(options.world_size))
    return found


def stage_memories(cases: Sequence[TrainOptions], device: str) -> list[tuple[StageMemory, ...]]:
    """`stage_memory` of several runs, from one child process.

    The real model runs its forward for micro-batches of one and two samples, without memory and without values: a few
    seconds at any size. Neither torch.distributed nor the engine is touched in the calling process.
    """
    asked = {"cases": [options.model_dump(mode="json") for options in cases], "device": device}
    try:
        answer = answer_of("evenpipe.megatron.train_engine.profile", asked)
    except ChildFailed as error:
        raise ProfileError(f"the model cannot be profiled: {error}", error.details) from None
    found = [[StageMemory(*stage) for stage in stages] for stages in answer]
    if device == "cuda":
        found = [_with_links(stages, options) for stages, options in zip(found, cases, strict=True)]
    return [tuple(stages) for stages in found]


def _with_links(stages: Sequence[StageMemory], options: TrainOptions) -> list[StageMemory]:
    """Return `stages` with what communicators take as static bytes: it stays from batch to batch, as weights do."""
    joined = links(loop(options.stages), options.bpipe)
    return [
        stage._replace(static_bytes=stage.static_bytes + link_bytes(joined, number))
        for number, stage in enumerate(stages)
    ]
