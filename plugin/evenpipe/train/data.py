"""Training samples, each a function of where in the run it is used: of a text, or like the inputs of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from evenpipe.train.fields import BUILTIN_TEXT
from evenpipe.train.options import OptionsError, TrainOptions

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MASK_TOKEN", "Corpus", "MicroBatch", "load", "random_batch", "sample_bytes"]

MASK_TOKEN: Final = 256
_MASKED_FRACTION: Final = 0.15
_Tokens = npt.NDArray[np.int64]


class MicroBatch(NamedTuple):
    """The data that one forward step consumes; every array is [micro_batch_size, its length].

    `counted` is 1 where the loss of a position counts, else 0.
    """

    tokens: _Tokens
    labels: _Tokens
    counted: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, cut into samples for one model."""

    text: npt.NDArray[np.uint8]
    options: TrainOptions

    @property
    def vocabulary(self) -> int:
        """Tokens that can occur: 256 bytes, for BERT the mask as well."""
        return 256 if self.options.model == "gpt" else MASK_TOKEN + 1

    def micro_batch(self, iteration: int, micro_batch: int, replica: int) -> MicroBatch:
        """Return the samples that data-parallel `replica` uses there: always the same for one seed."""
        random = np.random.default_rng((self.options.seed, iteration, micro_batch, replica))
        length = sample_bytes(self.options)
        if shortest := self.options.min_length:
            length -= int(random.integers(0, self.options.seq_length - shortest + 1))
        starts = random.integers(0, len(self.text) - length + 1, size=self.options.micro_batch_size)
        text = np.stack([self.text[start : start + length] for start in starts]).astype(np.int64)
        return _next_token(text) if self.options.model == "gpt" else _masked(text, random)

    def micro_batches(self, iteration: int, replica: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of one iteration on `replica`, in order."""
        for micro_batch in range(self.options.micro_batches):
            yield self.micro_batch(iteration, micro_batch, replica)


def load(options: TrainOptions) -> Corpus:
    """Return the corpus that `options.data` names.

    Raises OptionsError when the file is missing, unreadable, empty or shorter than one sample.
    """
    text = _builtin() if options.data == BUILTIN_TEXT else _read(Path(options.data))
    needed = sample_bytes(options)
    if len(text) < needed:
        raise OptionsError(
            f"--data {options.data}: {len(text)} bytes, but one sample takes {needed}: "
            "give a longer text or a smaller --seq-length"
        )
    return Corpus(np.frombuffer(text, dtype=np.uint8), options)


def sample_bytes(options: TrainOptions) -> int:
    """Return bytes of text in one sample: a GPT sample carries the label of its last token too."""
    return options.seq_length + 1 if options.model == "gpt" else options.seq_length


def random_batch(inputs: Mapping[str, Tensor], micro_batches: int, *key: int) -> dict[str, Tensor]:
    """Return a batch of so many micro-batches like `inputs`, always the same for one key.

    Every number is drawn from those that the input of that name has, so that token ids stay in the vocabulary and a
    mask of ones is one. What has no dimension is as it is.
    """
    import torch  # options of a run are checked without it

    random = torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))

    def drawn(like: Tensor) -> Tensor:
        if not like.dim():
            return like
        shape = (micro_batches * like.shape[0], *like.shape[1:])
        return like.flatten()[torch.randint(like.numel(), shape, generator=random)]

    return {name: drawn(inputs[name]) for name in sorted(inputs)}


def _builtin() -> bytes:
    """English text that every Python carries: the language reference behind `help()`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _read(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise OptionsError(f"--data {path}: {error.strerror or error}: give a readable text file, or builtin") from None
    if not text:
        raise OptionsError(f"--data {path}: the file is empty: give a text file, or builtin")
    return text


def _next_token(text: _Tokens) -> MicroBatch:
    """GPT: predict each following byte."""
    return MicroBatch(text[:, :-1].copy(), text[:, 1:].copy(), np.ones_like(text[:, 1:], dtype=np.float32))


def _masked(text: _Tokens, random: np.random.Generator) -> MicroBatch:
    """BERT: predict 15 % of the bytes; of those 80 % are hidden, 10 % replaced by another byte, 10 % left alone."""
    chosen = random.random(text.shape) < _MASKED_FRACTION
    chosen[:, 0] |= ~chosen.any(axis=1)
    fate = random.random(text.shape)
    tokens = np.where(chosen & (fate < 0.8), MASK_TOKEN, text)
    tokens = np.where(chosen & (fate >= 0.9), random.integers(0, 256, size=text.shape), tokens)
    return MicroBatch(tokens, text, chosen.astype(np.float32))
