"""A BERT as PipelineModule: predicts the 15 % of the bytes that are hidden from it.

On a laptop:  deepspeed --num_gpus 4 examples/deepspeed/bert.py --deepspeed_config examples/deepspeed/bpipe.json
"""

from collections.abc import Iterator

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from training import text, train
from transformer import BLOCKS, HIDDEN, SEQUENCE, Block, Embedding

HIDDEN_BYTE, VOCABULARY = 256, 257
NOT_ASKED = -100  # the label that cross entropy leaves out

layers = [
    LayerSpec(Embedding, VOCABULARY),
    *(LayerSpec(Block, causal=False) for _ in range(BLOCKS)),
    LayerSpec(nn.LayerNorm, HIDDEN),
    LayerSpec(nn.Linear, HIDDEN, VOCABULARY),
]


def batches(micro_batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for passage in text(micro_batch, SEQUENCE, seed):
        asked = torch.rand(passage.shape, generator=generator) < 0.15
        yield passage.masked_fill(asked, HIDDEN_BYTE), passage.masked_fill(~asked, NOT_ASKED)


if __name__ == "__main__":
    train(layers, batches)
