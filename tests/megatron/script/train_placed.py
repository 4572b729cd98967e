"""One of torchrun's processes on pretended nodes: trains a tiny GPT as Megatron would, then placed and with BPipe.

Argument: a folder (slot-<slot>.json out). Rank 0 prints the table of links.
"""

import json
import os
import sys
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from torch.distributed.rendezvous import rendezvous

from evenpipe.megatron.cpu_mode import cpu_mode
from evenpipe.megatron.schedule import PipelineSchedule, in_place_of_megatron
from evenpipe.megatron_lm.link_table import LinkTable
from evenpipe.megatron_lm.placing import place_process
from evenpipe.settings.config import EvenPipeConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from train_tiny_gpt import LAYOUTS, MICRO_BATCH, MICRO_BATCHES, SEQUENCE, train

LIMIT = timedelta(seconds=60)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    cpu_mode().apply()
    slot, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore("unplaced", next(rendezvous("env://", timeout=LIMIT))[0])
    dist.init_process_group("gloo", store=store, rank=slot, world_size=world, timeout=LIMIT)
    stock = train(LAYOUTS["PP4"])
    dist.destroy_process_group()

    config = EvenPipeConfig(bpipe=True)
    args = Namespace(
        rank=slot,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=None,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        num_experts=None,
        use_tp_pp_dp_mapping=False,
        async_save=None,
        num_layers=8,
        num_attention_heads=4,
        hidden_size=32,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        params_dtype=torch.float32,
        sequence_parallel=False,
        recompute_granularity=None,
        recompute_modules=None,
        transformer_impl="local",
    )
    placement = place_process(args, config, os.environ)
    # As Megatron starts it.
    dist.init_process_group("gloo", world_size=world, rank=args.rank, timeout=LIMIT)
    init_num_microbatches_calculator(args.rank, None, MICRO_BATCH * MICRO_BATCHES, MICRO_BATCH, 1)
    schedule = PipelineSchedule(bpipe=True, connected=LinkTable(args, config, placement).report)
    in_place_of_megatron(schedule).apply()
    placed = train(LAYOUTS["PP4"])
    peak = schedule.executor.counter.peak_units
    seen = {"rank": dist.get_rank(), "variable": os.environ["RANK"], "losses": [stock, placed], "live": peak}
    (folder / f"slot-{slot}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
