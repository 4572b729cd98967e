"""Trains tiny transformers as PipelineModules with real DeepSpeed engines: several cases in one job, on CPU.

train_tiny.py CASES.json OUT.json; a case is {"stages": p, "config": {..}, and what `Case` has}.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import evenpipe.deepspeed  # isort: skip
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups
from shards import ShardedBlock, ShardedEmbedding, Shards, project_sharded

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gloo import share_device

evenpipe.deepspeed.install()

RANKS = 4
VOCABULARY, HIDDEN, HEADS, SEQUENCE, MICRO_BATCH = 64, 32, 4, 16, 2


class Case(NamedTuple):
    """One training run."""

    stages: int
    config: dict[str, Any]
    blocks: int = 6
    steps: int = 2
    tied: bool = False
    late_tie: bool = False  # the second stage and the last share a weight
    pair: bool = False  # two tensors cross from stage to stage
    dynamic: bool = False  # micro-batches differ in length, and from the third batch on they are longer
    checkpoint_interval: int = 0
    checkpoints_itself: bool = False  # layers call DeepSpeed's function
    dropout: bool = False
    model_parallel: bool = False  # two processes a stage, which compute the same
    sharded: bool = False  # or which have half of each linear layer
    evaluate: bool = False
    measure: bool = False
    slow_host: bool = False  # copies to the host count as slow
    recomputes: bool = True  # layers, under a cap
    save: str = ""  # a checkpoint in the end, to this folder
    load: str = ""
    decay: str = ""  # of matrices only: the groups of parameters are a list, an optimizer's or a function's


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.1)
        self.position = nn.Parameter(torch.randn(SEQUENCE, HIDDEN) * 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight) + self.position[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        mask = torch.full((t, t), float("-inf"), dtype=x.dtype).triu(1)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / (d // HEADS) ** 0.5 + mask, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return deepspeed.checkpointing.checkpoint(super().forward, x)


class DroppingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class Paired(nn.Module):
    """Hands integers on beside the activations."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.inner = kind()

    def forward(self, given: Any) -> Any:
        x, integers = given if isinstance(given, tuple) else (given, given)
        return self.inner(x), integers + 1


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(HIDDEN), nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.1)

    def forward(self, x: Any) -> Tensor:
        x = x[0] + x[1].sum() * 0 if isinstance(x, tuple) else x
        return nn.functional.linear(self.norm(x), self.weight)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float().view(-1, VOCABULARY), labels.view(-1))


def layers(case: Case, shards: Shards = Shards()) -> list[Any]:  # noqa: B008 (a value)
    def paired(kind: type[nn.Module]) -> LayerSpec:
        return LayerSpec(Paired, kind) if case.pair else LayerSpec(kind)

    if case.sharded:
        embedding = VOCABULARY, HIDDEN, SEQUENCE, shards
        ends = [
            TiedLayerSpec("embedding", ShardedEmbedding, *embedding, forward_fn=forward, tied_weight_attr="weight.0")
            for forward in (None, project_sharded)
        ]
        return [ends[0], *(LayerSpec(ShardedBlock, HIDDEN, shards) for _ in range(case.blocks)), ends[1]]
    block = CheckpointedBlock if case.checkpoints_itself else DroppingBlock if case.dropout else Block
    blocks = [paired(block) for _ in range(case.blocks)]
    if case.late_tie:
        blocks[2] = blocks[-1] = TiedLayerSpec("late", Block, tied_weight_attr="out.weight")
    if case.tied:
        first, last = (TiedLayerSpec("embedding", Embedding, forward_fn=forward) for forward in (None, project))
        return [first, *blocks, last]
    return [paired(Embedding), *blocks, LayerSpec(Head)]


def project(embedding: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, embedding.weight)


def batches(replica: int, replicas: int, micro_batches: int, dynamic: bool = False) -> Any:
    generator = torch.Generator().manual_seed(5)
    for batch in count():
        tokens = torch.randint(0, VOCABULARY, (micro_batches, replicas, MICRO_BATCH, SEQUENCE + 1), generator=generator)
        for number in range(micro_batches):
            length = _length(batch, number + replica) if dynamic else SEQUENCE
            own = tokens[number, replica, :, : length + 1]
            yield own[:, :-1].contiguous(), own[:, 1:].contiguous()


def _length(batch: int, number: int) -> int:
    return SEQUENCE - 4 - number % 5 if batch < 2 else SEQUENCE - number % 2


def engine_of(case: Case) -> tuple[Any, Any]:
    """An engine, and the micro-batches of its replica."""
    laid, shards = {"num_stages": case.stages}, Shards()
    if case.model_parallel or case.sharded:
        topology = PipeModelDataParallelTopology(num_pp=case.stages, num_mp=2, num_dp=RANKS // case.stages // 2)
        laid = {"topology": topology}
        for ranks in topology.get_axis_comm_lists("model"):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                shards = Shards(ranks.index(dist.get_rank()), group)
    net = PipelineModule(
        layers(case, shards),
        **laid,
        loss_fn=loss_of,
        seed_layers=True,
        base_seed=7,
        partition_method="uniform",
        dynamic_shape=case.dynamic,
        activation_checkpoint_interval=case.checkpoint_interval,
        # The default function does not get through a layer whose input has no gradient.
        checkpointable_layers=["Block"] if case.checkpoint_interval else None,
    )
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "steps_per_print": 1000,
        "gradient_clipping": 0.0,  # in fp32, what DeepSpeed clips to depends on the partition
        **case.config,
    }
    engine, *_ = deepspeed.initialize(model=net, config=config, **trained_how(case, net))
    return engine, batches(
        engine.grid.data_parallel_id, engine.grid.data_parallel_size, engine.micro_batches, case.dynamic
    )


def trained_how(case: Case, net: nn.Module) -> dict[str, Any]:
    """What `deepspeed.initialize` is given beside model and configuration."""

    def groups_of() -> list[dict[str, Any]]:
        trained = list(net.parameters())
        return [
            {"params": [one for one in trained if one.ndim > 1], "weight_decay": 0.3},
            {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
        ]

    def adamw(_: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups_of(), lr=3e-3)

    if case.decay == "function":
        return {"optimizer": adamw}
    if case.decay == "optimizer":
        return {"optimizer": adamw(None)}
    return {"model_parameters": groups_of() if case.decay else net.parameters()}


def train(case: Case) -> dict[str, Any]:
    engine, data = engine_of(case)
    net = engine.module
    if case.measure:
        engine.executor.measure = True
    if case.slow_host:
        engine.executor.swaps.link.ms_a_byte = lambda: 1.0
    if not case.recomputes:
        engine._able = list
    if case.load:
        engine.load_checkpoint(case.load)
    losses = []
    for _ in range(case.steps):
        losses.append(float(engine.train_batch(data_iter=data)).hex())
        if case.evaluate:
            losses.append(float(engine.eval_batch(data_iter=data)).hex())
    if case.save:
        engine.save_checkpoint(case.save)
    weights = {name: digest(weight) for name, weight in net.named_parameters()}
    found = {
        "engine": type(engine).__name__,
        "stage": engine.stage_id,
        "replica": engine.grid.data_parallel_id,
        "parts": net.parts,
        "losses": losses,
        "weights": weights,
        "buffers": engine.num_pipe_buffers,
        "checkpointed": sum(net.is_checkpointable_results),
    }
    if case.measure:
        snapshot = engine.executor.counter
        found |= {"peak_units": snapshot.peak_units, "peak_bytes": snapshot.peak_bytes, "left": snapshot.own_units}
        found |= {"evicted_bytes": snapshot.evicted_bytes}
    return found


def digest(weight: Tensor) -> str:
    return hashlib.sha256(weight.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def run(train: Callable[[dict[str, Any]], Any], cases: Path, out: Path) -> None:
    """What `train` found on each rank, for each of the cases; the ranks are forked when all has been imported."""
    for lazily in ("torch._dynamo", "torch.optim", "evenpipe.deepspeed.engine"):
        import_module(lazily)
    # Kept by this process, so that nobody else takes the port before the ranks do.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    gc.collect()
    gc.freeze()
    mp.start_processes(_forked, (store.port, train, cases, out), nprocs=RANKS, start_method="fork")


def _forked(rank: int, port: int, train: Callable[[dict[str, Any]], Any], cases: Path, out: Path) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **{name: str(value) for name, value in places.items()},
    }
    work(train, cases, out)


def work(
    train: Callable[[dict[str, Any]], Any], cases: Path, out: Path, timeout: timedelta = dist.default_pg_timeout
) -> None:
    """The part of one rank, which the environment tells."""
    torch.set_num_threads(1)
    share_device()
    # DeepSpeed would compile a shared-memory all-reduce; gloo's does as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed refuses fp16 on CPUs without AVX512-FP16, where torch computes it as well.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", timeout=timeout)
    groups._clone_world_group()  # DeepSpeed keeps it
    lasting = set(_groups())
    results = []
    for given in json.loads(cases.read_text()):
        found = train(given)
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, found)
        results.append(everybody)
        gc.collect()
        # Groups outlive their engine, and idle ones of gloo's wake their threads a hundred times a second.
        for group in set(_groups()) - lasting:
            dist.destroy_process_group(group)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    run(lambda given: train(Case(**given)), Path(sys.argv[1]), Path(sys.argv[2]))
