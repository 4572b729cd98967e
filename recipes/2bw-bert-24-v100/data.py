"""Random passages of a file of tokens, or random tokens; the same for the same seed, replica and micro-batch."""

from argparse import Namespace
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from model import NOT_ASKED

HIDDEN = 0.15  # of a BERT's tokens; the last of the vocabulary stands in their place


def batches(given: Namespace, micro_batch: int, replica: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels, each [micro_batch, sequence], from micro-batch ``first`` on, without end."""
    tokens = None if given.mock else _tokens(given.data, given.vocabulary)
    number = first
    while True:
        generator = np.random.default_rng((given.seed, replica, number))
        passages = _passages(tokens, generator, micro_batch, given)
        yield _masked(passages, generator, given) if given.masked else (passages[:, :-1], passages[:, 1:])
        number += 1


def _tokens(prefix: str, vocabulary: int) -> np.ndarray:
    """As tools/preprocess_data.py of Megatron-LM writes them: 2 bytes each, or 4 where the vocabulary needs them."""
    return np.memmap(f"{prefix}.bin", dtype=np.uint16 if vocabulary < 65_500 else np.int32, mode="r")


def _passages(tokens: np.ndarray | None, generator: np.random.Generator, rows: int, given: Namespace) -> Tensor:
    length = given.sequence + (not given.masked)
    if tokens is None:
        return torch.from_numpy(generator.integers(given.vocabulary, size=(rows, length)))
    starts = generator.integers(len(tokens) - length + 1, size=rows)
    return torch.from_numpy(np.stack([tokens[start : start + length].astype(np.int64) for start in starts]))


def _masked(passages: Tensor, generator: np.random.Generator, given: Namespace) -> tuple[Tensor, Tensor]:
    asked = torch.from_numpy(generator.random(passages.shape) < HIDDEN)
    asked[:, 0] = True  # a micro-batch always has something to predict
    return passages.masked_fill(asked, given.vocabulary - 1), passages.masked_fill(~asked, NOT_ASKED)
