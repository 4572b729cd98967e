"""A GPT as PipelineModule: predicts the next byte. Its embedding, on the first and the last stage, is tied.

On a laptop:  deepspeed --num_gpus 4 examples/deepspeed/gpt.py --deepspeed_config examples/deepspeed/bpipe.json
Or cut inside layers by a plan, that of `evenpipe partition --module examples/deepspeed/gpt.py:uncut`: planned.json.
"""

from collections.abc import Iterator

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from training import text, train
from transformer import BLOCKS, HIDDEN, SEQUENCE, Block, Embedding, loss, projected

from evenpipe.deepspeed.planned import WholeModel

VOCABULARY = 256

layers = [
    TiedLayerSpec("embedding", Embedding, VOCABULARY),
    *(LayerSpec(Block, causal=True) for _ in range(BLOCKS)),
    LayerSpec(nn.LayerNorm, HIDDEN),
    TiedLayerSpec("embedding", Embedding, VOCABULARY, forward_fn=projected),
]


def batches(micro_batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    for passage in text(micro_batch, SEQUENCE + 1, seed):
        yield passage[:, :-1].contiguous(), passage[:, 1:].contiguous()


def uncut(micro_batch_size: int = 4) -> tuple[nn.Module, dict[str, Tensor]]:
    """What is cut where a plan is asked for."""
    tokens, labels = next(batches(micro_batch_size, seed=0))
    return WholeModel(layers, loss), {"inputs": tokens, "labels": labels}


if __name__ == "__main__":
    train(layers, batches)
