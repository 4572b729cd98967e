"""One training iteration, as Megatron-LM's `train_step` does it, and what it needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state, pipeline_parallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from evenpipe.megatron.trainer import data
from evenpipe.megatron.trainer.models import Replica, build_replica
from evenpipe.megatron.trainer.options import TrainOptions

__all__ = ["Learner", "make_learner", "train_step"]


class Learner(NamedTuple):
    """This process' part of a model in training."""

    options: TrainOptions
    replica: Replica
    optimizer: MegatronOptimizer
    corpus: data.Corpus
    device: torch.device


def make_learner(options: TrainOptions, corpus: data.Corpus, device: torch.device) -> Learner:
    """Seed everything, build the model and its optimizer; needs Megatron's parallel state."""
    _seed(options.seed)
    replica = build_replica(options, corpus.vocabulary, device)
    return Learner(options, replica, _optimizer(options, replica), corpus, device)


def train_step(
    learner: Learner, iteration: int, before_update: Callable[[], None] = lambda: None
) -> list[dict[str, torch.Tensor]]:
    """One iteration; on the last stage the losses of its micro-batches, elsewhere nothing.

    Whatever `get_forward_backward_func` returns carries out the schedule. `before_update` is called between it and the
    optimizer's step. Raises RuntimeError when the optimizer skips the step.
    """
    options, chunks = learner.options, learner.replica.chunks
    for chunk in chunks:
        chunk.zero_grad_buffer()
    learner.optimizer.zero_grad()
    iterators = [_batches(learner, iteration) for _ in chunks]
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
    before_update()
    updated, _, _ = learner.optimizer.step()
    if not updated:
        raise RuntimeError("the optimizer refused the step")
    return reduced


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


class _Tensors(NamedTuple):
    """A `data.MicroBatch` on the device of the model."""

    tokens: torch.Tensor
    labels: torch.Tensor
    counted: torch.Tensor


def _batches(learner: Learner, iteration: int) -> Iterator[_Tensors]:
    for batch in learner.corpus.micro_batches(iteration, parallel_state.get_data_parallel_rank()):
        yield _Tensors(*(torch.from_numpy(array).to(learner.device) for array in batch))


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
