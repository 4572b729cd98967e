"""The loss on text that is not trained on."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from megatron.core import pipeline_parallel

from evenpipe.megatron.train_engine.learner import Learner, forward_step, micro_batches
from evenpipe.train.data import Corpus

__all__ = ["Held", "split"]

_HELD_FRACTION: Final = 0.1
_BATCHES: Final = 8


def split(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """What is trained on, and the tenth at the end that is held out."""
    first_held = int(len(corpus.text) * (1 - _HELD_FRACTION))
    return (
        dataclasses.replace(corpus, text=corpus.text[:first_held]),
        dataclasses.replace(corpus, text=corpus.text[first_held:]),
    )


class Held:
    """Evaluates `learner` on always the same eight batches of samples of `corpus`."""

    def __init__(self, learner: Learner, corpus: Corpus) -> None:
        self._learner = learner._replace(corpus=corpus)

    @torch.no_grad()
    def loss(self) -> float:
        """The mean over all tokens that count, by the present schedule's forward-only pass; all stages call it."""
        options, (chunk,) = self._learner.options, self._learner.replica.chunks
        reduced = pipeline_parallel.get_forward_backward_func()(
            forward_step_func=partial(forward_step, options),
            data_iterator=micro_batches(self._learner, 0)[0],
            model=chunk,
            num_microbatches=_BATCHES * options.micro_batches,
            seq_length=options.seq_length,
            micro_batch_size=options.micro_batch_size,
            decoder_seq_length=options.seq_length,
            forward_only=True,
        )
        sums = torch.zeros(2, dtype=torch.float64)
        for one in reduced:
            sums += one["lm loss"]
        dist.broadcast(sums, src=options.stages - 1)
        total, count = sums.tolist()
        return float(total / count)
