"""Builds and runs every stage of a model on the meta device, in a process of its own, one rank after another.

As a script: options in on standard input; stages out, as JSON, on the last line of standard output.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from evenpipe.megatron.adaptive.static_memory import static_bytes, workspace_bytes
from evenpipe.megatron.cpu_mode import cpu_mode
from evenpipe.megatron.stage import Batch, MegatronStage
from evenpipe.megatron.supported import installed_release
from evenpipe.megatron.train_engine.learner import Learner, Tensors, forward_step, make_learner
from evenpipe.runtime.precisions import PRECISIONS
from evenpipe.runtime.store import ActivationStore
from evenpipe.schedule import FORWARD, Size, Unit, build
from evenpipe.train.data import Corpus
from evenpipe.train.options import TrainOptions
from evenpipe.tuner.group_memory import Measured, StageMemory, stage_memory

__all__ = ["fake_groups", "profile", "without_memory"]

_META: Final = torch.device("meta")


def without_memory(device: str) -> None:
    """From here on this process makes models as on `device` ("cpu" or "cuda"), but on the meta device."""
    with _META:
        torch.empty(0)  # torch lists what makes tensors at its first use, and would miss what has been patched before
    cpu_mode("meta").apply()
    # Megatron wants gloo's groups too, which would wait for the other processes.
    dist.new_group = fake_groups(dist.new_group)
    if device == "cuda":
        torch.nn.functional.dropout = _dropout_on_cuda


def profile(options: TrainOptions) -> tuple[StageMemory, ...]:
    """Return every stage of a model with one chunk a stage. All stages between the first and the last are alike."""
    last = options.stages - 1
    found = {stage: _profile(options, stage) for stage in sorted({0, min(1, last), last})}
    return tuple(found.get(stage, found[min(1, last)]) for stage in range(options.stages))


def _profile(options: TrainOptions, stage: int) -> StageMemory:
    corpus = Corpus(np.empty(0, dtype=np.uint8), options)
    with _as_rank_of(options, stage):
        with _META:
            learner = make_learner(options, corpus, _META)
        return _memory(learner, stage)


@contextlib.contextmanager
def _as_rank_of(options: TrainOptions, stage: int) -> Iterator[None]:
    """The first process of `stage` in a world of which there is no other."""
    rank = stage * options.data_parallel * options.tensor_parallel
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=options.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.stages,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _memory(learner: Learner, stage: int) -> StageMemory:
    """From two micro-batches of one sample and one of two, all live at once: the first also saves what all share."""
    options, store = learner.options, ActivationStore(learner.replica.chunks[0].parameters())
    alive, saved, workspace = [], [], []
    for number, samples in enumerate((1, 1, 2)):
        alive.append(_forward(learner, stage, store, Unit(number), samples))
        saved.append(store.nbytes(Unit(number)))
        workspace.append(workspace_bytes())
    first, again, double = saved
    one = Measured(
        forward_ms=0,
        backward_ms=0,
        each_bytes=again,
        shared_bytes=first - again,
        message_bytes=options.seq_length * options.hidden * PRECISIONS[options.precision].itemsize,
        workspace_bytes=workspace[2] - workspace[1],
        static_bytes=static_bytes(learner.replica.chunks, learner.optimizer),
    )
    return stage_memory(one, 1, one._replace(each_bytes=double), 2)


def _forward(learner: Learner, stage: int, store: ActivationStore, unit: Unit, samples: int) -> Any:
    """One forward as the executor has it done; returned is what keeps its saved tensors alive."""
    options, config = learner.options, learner.replica.config
    # Not inside `with _META`: what Megatron makes of Python's numbers in a forward, it may want to read.
    tokens = torch.zeros(samples, options.seq_length, dtype=torch.int64, device=_META)
    micro_batch = Tensors(tokens, torch.zeros_like(tokens), torch.zeros(tokens.shape, device=_META))
    shape = (options.seq_length, samples, options.hidden)
    batch = Batch(
        partial(forward_step, options),
        [iter([micro_batch])],
        learner.replica.chunks,
        config,
        1,
        [shape],
        [shape],
        1,
        False,
    )
    carried_out = MegatronStage(
        batch, build("1f1b", Size(options.stages, 1)).schedule, stage, _META, installed_release()
    )
    inputs = carried_out.receive_buffers(FORWARD, unit) if stage else None
    with store.recording(unit):
        carried_out.forward(unit, inputs)
        for tensor in inputs or ():
            store.attach(unit, tensor)
    return carried_out


def fake_groups(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """`dist.new_group` for a world of which there is this process only."""
    return lambda *args, **settings: new_group(*args, **{**settings, "backend": "fake"})


def _dropout_on_cuda(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """As CUDA's own: it saves a mask of booleans, where the CPU's saves one of the input's type."""
    return torch.native_dropout(input, p, training)[0] if training and p else input


def _main() -> None:
    """Profile what is asked for. Whatever goes wrong ends the process with a traceback, its last line the error's."""
    asked = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            without_memory(asked["device"])
            # Checked by whoever asks.
            found = [profile(TrainOptions.model_construct(**options)) for options in asked["cases"]]
    except Exception:
        # Here, since torch.distributed would put the rank before each of its lines.
        traceback.print_exc()
        raise SystemExit(1) from None
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
