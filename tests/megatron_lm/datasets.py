"""A small data set for pretrain_bert.py, which has no mock data."""

from pathlib import Path

import numpy as np
import torch

__all__ = ["make_bert_data"]

_WORDS = 195
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make_bert_data(folder: Path) -> list[str]:
    """Write a vocabulary and sentences of random words to `folder`; the flags that name them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join((*_SPECIAL, *(f"w{number}" for number in range(_WORDS)))) + "\n")
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint16)
    random = np.random.default_rng(0)
    for _ in range(200):
        for _ in range(random.integers(4, 9)):
            words = random.integers(len(_SPECIAL), len(_SPECIAL) + _WORDS, size=random.integers(8, 20))
            builder.add_item(torch.from_numpy(words))
        builder.end_document()
    builder.finalize(str(folder / "text.idx"))
    return [
        *("--data-path", str(folder / "text")),
        *("--vocab-file", str(vocabulary)),
        *("--tokenizer-type", "BertWordPieceLowerCase"),
        *("--split", "90,8,2"),
        # A short sample can have no masked token, and then its loss is 0 / 0.
        *("--short-seq-prob", "0"),
    ]
