"""Trains a GPT or a BERT with DeepSpeed's pipelines; train.sh starts it, with EvenPipe in it."""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from data import batches
from model import add_model_flags, layers_of, loss


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_model_flags(parser)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--recompute", action="store_true", help="compute layers again in the backward")
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--data", help="prefix of a .bin of tokens")
    parser.add_argument("--mock", action="store_true", help="random tokens")
    parser.add_argument("--checkpoints", required=True)
    parser.add_argument("--save-interval", type=int, default=1000)
    given = deepspeed.add_config_arguments(parser).parse_args()
    if not (given.mock or given.data):
        parser.error("--data: which? Give the prefix of a .bin of tokens, or --mock")

    if not torch.cuda.is_available():
        # DeepSpeed would compile an all-reduce of its own for CPUs, for half a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(given.seed)
    model = PipelineModule(
        layers_of(given),
        num_stages=given.stages,
        loss_fn=loss,
        partition_method="uniform",  # the section "evenpipe" has the stages' layers
        seed_layers=True,
        activation_checkpoint_interval=int(given.recompute),
    )
    engine, *_ = deepspeed.initialize(args=given, model=model, model_parameters=list(model.parameters()))
    if os.path.exists(os.path.join(given.checkpoints, "latest")):
        engine.load_checkpoint(given.checkpoints)

    done = engine.global_steps
    data = batches(
        given,
        engine.train_micro_batch_size_per_gpu(),
        engine.grid.data_parallel_id,
        done * engine.gradient_accumulation_steps(),
    )
    for iteration in range(done + 1, given.iterations + 1):
        mean = engine.train_batch(data)
        if dist.get_rank() == 0 and iteration % engine.steps_per_print() == 0:
            print(f"iteration {iteration}/{given.iterations} | loss {mean.item():.4f}", flush=True)
        if iteration % given.save_interval == 0 or iteration == given.iterations:
            engine.save_checkpoint(given.checkpoints)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
