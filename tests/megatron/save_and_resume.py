"""A script for `evenpipe run --cpu`: trains, saves with torch_dist, goes on; then resumes and prints both losses.

It has no line of EvenPipe's. Reads FOLDER from the environment; its spawned children leave a file there.
"""

import json
import os
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, SEQUENCE, BEFORE, AFTER = 64, 16, 2, 2
FOLDER = Path(os.environ["FOLDER"])
SHARDING = {"distrib_optim_sharding_type": "dp_reshardable"}


class Training:
    """A tiny GPT under the distributed optimizer, whose Adam is torch's."""

    def __init__(self, seed: int) -> None:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
        )
        gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE)
        self.model = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt.cuda()
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True), [self.model]
        )

    def step(self, index: int) -> float:
        tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(index))
        positions = torch.arange(SEQUENCE).expand(2, -1)
        mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return loss.item()

    def sharded(self, loading: bool) -> dict[str, object]:
        state = {"model": self.model.module.sharded_state_dict()}
        state["optimizer"] = self.optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=SHARDING)
        return state


def main() -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{FOLDER / 'rendezvous'}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    first = Training(seed=1)
    for index in range(BEFORE):
        first.step(index)
    (FOLDER / "checkpoint").mkdir()
    dist_checkpointing.save(first.sharded(loading=False), str(FOLDER / "checkpoint"))
    went_on = [first.step(index) for index in range(BEFORE, BEFORE + AFTER)]
    second = Training(seed=2)
    loaded = dist_checkpointing.load(second.sharded(loading=True), str(FOLDER / "checkpoint"))
    second.model.module.load_state_dict(loaded["model"])
    second.optimizer.load_state_dict(loaded["optimizer"])
    resumed = [second.step(index) for index in range(BEFORE, BEFORE + AFTER)]
    print(json.dumps({"went on": went_on, "resumed": resumed}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
else:
    (FOLDER / f"{__name__} {os.getpid()}").write_text(str(torch.empty(1, device="cuda").device))
