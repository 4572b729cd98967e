"""What both examples share: the text, the command line, and the training loop."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics  # the language reference behind `help()`: English text that every Python carries

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor
from transformer import loss

import evenpipe.deepspeed

evenpipe.deepspeed.install()  # all that EvenPipe needs; the rest is DeepSpeed's and yours


def text(micro_batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Random passages, bytes as tokens, [micro_batch, length], without end; the same for the same seed."""
    everything = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(everything), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - length + 1, (micro_batch, 1), generator=generator)
        yield tokens[starts + torch.arange(length)]


def train(layers: list[LayerSpec], batches: Callable[[int, int], Iterator[tuple[Tensor, Tensor]]]) -> None:
    """Train a model of these layers; `batches` makes (tokens, labels) of a micro-batch size and a seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--local_rank", type=int)  # given by the launcher
    arguments = deepspeed.add_config_arguments(parser).parse_args()

    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        # DeepSpeed would compile an all-reduce of its own for CPUs, for half a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    model = PipelineModule(
        layers, num_stages=arguments.stages, loss_fn=loss, partition_method="uniform", seed_layers=True
    )
    engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=list(model.parameters()))
    ours = hasattr(engine, "evenpipe")  # the configuration has the section
    if ours:
        engine.executor.measure = True

    data = batches(engine.micro_batch_size, engine.grid.data_parallel_id)
    for iteration in range(arguments.iterations):
        mean = engine.train_batch(data)
        if dist.get_rank() == 0:
            sys.stdout.write(f"iteration {iteration}: loss {mean:.4f}\n")
    if ours:
        peak = engine.executor.counter.peak_units
        sys.stdout.write(f"rank {dist.get_rank()}, stage {engine.stage_id}: {peak} micro-batches live at most\n")
    dist.destroy_process_group()
