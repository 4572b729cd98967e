"""One training process: set up, iterate as Megatron-LM's `train_step` does, and give its share of the result."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, pipeline_parallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from evenpipe.megatron import data
from evenpipe.megatron.engines import Engine, engine_for
from evenpipe.megatron.gather import Coordinates, Share, combine, digest, gather
from evenpipe.megatron.models import Replica, build_replica
from evenpipe.megatron.options import TrainOptions
from evenpipe.megatron.recorder import Recorder
from evenpipe.megatron.result import RunResult, StageMeasurement
from evenpipe.megatron.whereabouts import Whereabouts

__all__ = ["Tell", "run_case"]

Tell = Callable[[int, float, float], None]
"""Called with (iteration, loss, milliseconds) after each iteration, by one process: the one that knows the loss."""


class _Trainer(NamedTuple):
    options: TrainOptions
    replica: Replica
    optimizer: MegatronOptimizer
    engine: Engine
    recorder: Recorder
    corpus: data.Corpus
    device: torch.device
    whereabouts: Whereabouts


def run_case(
    options: TrainOptions,
    device: torch.device,
    whereabouts: Whereabouts,
    tell: Tell,
    host_group: dist.ProcessGroup | None = None,
) -> RunResult | None:
    """Train as `options` say; needs torch.distributed initialised with `options.world_size` processes.

    Leaves no Megatron state behind, so that other cases can follow. The result is returned on rank 0, None elsewhere.
    `host_group` holds all ranks and moves host memory; it may be left out where the default group does so.
    Raises OptionsError when the data cannot be read.
    """
    corpus = data.load(options)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.stages,
        virtual_pipeline_model_parallel_size=options.chunks if options.chunks > 1 else None,
    )
    try:
        _seed(options.seed)
        replica = build_replica(options, corpus.vocabulary, device)
        optimizer = _optimizer(options, replica)
        recorder = Recorder(whereabouts)
        with engine_for(options, whereabouts.stage, replica.chunks, recorder) as engine:
            trainer = _Trainer(options, replica, optimizer, engine, recorder, corpus, device, whereabouts)
            losses, times, measured = _iterate(trainer, tell)
        whereabouts.enter("gathering results")
        weights = digest(replica.chunks)
        share = Share(_coordinates(), losses, weights, times, measured, recorder.unit_bytes, recorder.spans)
        shares = gather(share, host_group)
        return combine(shares) if shares is not None else None
    finally:
        parallel_state.destroy_model_parallel()


def _coordinates() -> Coordinates:
    return Coordinates(
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )


def _seed(seed: int) -> None:
    """As Megatron-LM: stages draw differently, data-parallel replicas alike, shards as their regions need."""
    own = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(own)


def _optimizer(options: TrainOptions, replica: Replica) -> MegatronOptimizer:
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        weight_decay=0.01,
        clip_grad=options.clip_grad,
        params_dtype=torch.float32,
        use_distributed_optimizer=False,
    )
    optimizer = get_megatron_optimizer(config, replica.chunks)
    replica.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _iterate(trainer: _Trainer, tell: Tell) -> tuple[tuple[float, ...], tuple[float, ...], StageMeasurement]:
    """All iterations: this replica's losses (none but on the last stage), times in milliseconds, and peaks."""
    losses: list[float] = []
    times: list[float] = []
    peaks: list[StageMeasurement] = []
    for iteration in range(trainer.options.iterations):
        start = _clock(trainer.device)
        reduced = _step(trainer, iteration)
        times.append((_clock(trainer.device) - start) * 1e3)
        held = trainer.engine.counter.snapshot()
        peaks.append(StageMeasurement(held.peak_units, held.peak_bytes, held.evicted_bytes))
        if reduced:
            values = [total / count for total, count in (report["lm loss"].tolist() for report in reduced)]
            losses.append(sum(values) / len(values))
            mean = _over_replicas(losses[-1], trainer.device)
            if parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_tensor_model_parallel_rank() == 0:
                tell(iteration, mean, times[-1])
    return tuple(losses), tuple(times), StageMeasurement(*map(max, zip(*peaks, strict=True)))


def _step(trainer: _Trainer, iteration: int) -> list[dict[str, torch.Tensor]]:
    """One iteration; on the last stage the losses of its micro-batches, elsewhere nothing."""
    options, chunks = trainer.options, trainer.replica.chunks
    trainer.whereabouts.start_iteration(iteration)
    trainer.engine.start_batch()
    trainer.engine.counter.reset_peak()
    trainer.recorder.start_batch()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    iterators = [_batches(trainer, iteration) for _ in chunks]
    reduced: list[dict[str, torch.Tensor]] = pipeline_parallel.get_forward_backward_func()(
        forward_step_func=partial(_forward_step, options),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=options.micro_batches,
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch_size,
        decoder_seq_length=options.seq_length,
        forward_only=False,
    )
    trainer.whereabouts.enter("optimizer step")
    updated, _, _ = trainer.optimizer.step()
    if not updated:
        raise RuntimeError("the optimizer refused the step")
    return reduced


class _Tensors(NamedTuple):
    """A `data.MicroBatch` on the device of the model."""

    tokens: torch.Tensor
    labels: torch.Tensor
    counted: torch.Tensor


def _batches(trainer: _Trainer, iteration: int) -> Iterator[_Tensors]:
    for batch in trainer.corpus.micro_batches(iteration, parallel_state.get_data_parallel_rank()):
        yield _Tensors(*(torch.from_numpy(array).to(trainer.device) for array in batch))


def _forward_step(options: TrainOptions, iterator: Iterator[_Tensors], model: torch.nn.Module) -> tuple[Any, Any]:
    """Megatron's forward step: the model's output for the next micro-batch, and how to make a loss of it."""
    batch = next(iterator)
    if options.model == "gpt":
        positions = torch.arange(options.seq_length, device=batch.tokens.device).expand_as(batch.tokens)
        # Without a mask, Megatron's own attention makes the causal one, once for all micro-batches.
        output = model(batch.tokens, positions, None, labels=batch.labels)
    else:
        output = model(batch.tokens, torch.ones_like(batch.tokens), lm_labels=batch.labels)
    return output, partial(_loss, batch.counted)


def _loss(
    counted: torch.Tensor, output: torch.Tensor | tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """As Megatron-LM's `loss_func`: summed loss, number of tokens, and both for the log."""
    losses = output[0] if isinstance(output, tuple) else output
    loss = torch.sum(losses.float() * counted)
    tokens = counted.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def _over_replicas(loss: float, device: torch.device) -> float:
    """The mean over data-parallel replicas, for the log."""
    mean = torch.tensor(loss, dtype=torch.float64, device=device)
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return mean.item() / int(parallel_state.get_data_parallel_world_size())


def _clock(device: torch.device) -> float:
    """Seconds, once the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
