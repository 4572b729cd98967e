"""One training iteration, as Megatron-LM's `train_step` does it, and what it needs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state, pipeline_parallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from evenpipe.megatron.train_engine.models import Replica, build_replica, make_optimizer, make_scheduler
from evenpipe.train import data
from evenpipe.train.options import TrainOptions
from evenpipe.train.recorder import FailureContext

__all__ = ["Learner", "Stepped", "Tensors", "forward_step", "make_learner", "micro_batches", "train_step"]


class Learner(NamedTuple):
    """This process' part of a model in training."""

    options: TrainOptions
    replica: Replica
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    corpus: data.Corpus
    device: torch.device


class Tensors(NamedTuple):
    """A `data.MicroBatch` on the device of the model."""

    tokens: torch.Tensor
    labels: torch.Tensor
    counted: torch.Tensor


class Stepped(NamedTuple):
    """What an iteration gave: on the last stage its micro-batches' losses, and what `optimizer.step` returned.

    `grad_norm` is None where the step was skipped, since gradients overflowed.
    """

    reduced: list[dict[str, torch.Tensor]]
    updated: bool
    grad_norm: float | None


def make_learner(options: TrainOptions, corpus: data.Corpus, device: torch.device) -> Learner:
    """Seed everything, build the model and its optimizer; needs Megatron's parallel state."""
    _seed(options.seed)
    replica = build_replica(options, corpus.vocabulary, device)
    optimizer = make_optimizer(options, replica)
    return Learner(options, replica, optimizer, make_scheduler(options, optimizer), corpus, device)


def micro_batches(learner: Learner, first_iteration: int) -> list[Iterator[Tensors]]:
    """For each model chunk, all micro-batches of the run from that iteration on, which goes on without end."""
    return [_stream(learner, first_iteration) for _ in learner.replica.chunks]


def train_step(learner: Learner, streams: list[Iterator[Tensors]], failure: FailureContext) -> Stepped:
    """One iteration on what `streams`, one for each model chunk, have next.

    Whatever `get_forward_backward_func` returns carries out the schedule.
    """
    options, chunks = learner.options, learner.replica.chunks
    learner.scheduler.step(1)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    learner.optimizer.zero_grad()
    reduced: list[dict[str, torch.Tensor]] = pipeline_parallel.get_forward_backward_func()(
        forward_step_func=partial(forward_step, options),
        data_iterator=streams if len(chunks) > 1 else streams[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=options.micro_batches,
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch_size,
        decoder_seq_length=options.seq_length,
        forward_only=False,
    )
    failure.enter("optimizer step")
    updated, grad_norm, _ = learner.optimizer.step()
    return Stepped(reduced, updated, grad_norm)


def _seed(seed: int) -> None:
    """As Megatron-LM: stages draw differently, data-parallel replicas alike, shards as their regions need."""
    own = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(own)


def _stream(learner: Learner, first_iteration: int) -> Iterator[Tensors]:
    replica = parallel_state.get_data_parallel_rank()
    for iteration in itertools.count(first_iteration):
        for batch in learner.corpus.micro_batches(iteration, replica):
            yield Tensors(*(torch.from_numpy(array).to(learner.device) for array in batch))


def forward_step(options: TrainOptions, iterator: Iterator[Tensors], model: torch.nn.Module) -> tuple[Any, Any]:
    """Megatron's forward step: the model's output for the next micro-batch, and how to make a loss of it."""
    batch = next(iterator)
    if options.model == "gpt":
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
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
