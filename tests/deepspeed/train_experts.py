"""Trains layers of `deepspeed.moe`: under 2bw, and in DeepSpeed's own engine by the same rule, by hand.

A case is {"config": {..}, "steps", "folder" (where a checkpoint goes, from which a second engine goes on), "broken" (a
batch in which one expert of one replica has an infinite gradient), "fused", "ep_size", "model_parallel" (experts are
dealt out among two ranks that have the same tokens), "stages" and "only_first" (the last stage has no experts),
"layers" (of experts), and "sections" (under each of which, or none, it trains as it is)}.
"""

from __future__ import annotations

import math
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm, initialize
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups
from torch import Tensor, nn
from train_tiny import HIDDEN, MICRO_BATCH, Block, Embedding, Head, batches, digest, loss_of, run

_FUSED_ADAM = deepspeed_engine.FusedAdam
_GATHER = comm.all_gather_into_tensor
MORE = 2


class Experts(nn.Module):
    """A block of experts. The losses of routers so far go on beside the activations."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = MoE(HIDDEN, expert, num_experts=4, ep_size=ep_size, capacity_factor=1.0, use_rts=False)

    def forward(self, given: Any) -> tuple[Tensor, Tensor]:
        x, routers = given if isinstance(given, tuple) else (given, 0.0)
        y, loss, _ = self.moe(self.norm(x))
        return x + y, loss + routers


class Last(Head):
    """Also hands the routers' losses to the loss."""

    def forward(self, given: tuple[Tensor, Tensor]) -> Any:
        return super().forward(given[0]), given[1]


class Beside(Block):
    """A block without experts."""

    def forward(self, given: tuple[Tensor, Tensor]) -> Any:
        return super().forward(given[0]), given[1]


def with_routers(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return loss_of(output[0], labels) + 0.01 * output[1]


def _net(given: dict[str, Any]) -> PipelineModule:
    ep_size = given.get("ep_size", 2)
    second = LayerSpec(Beside) if "only_first" in given else LayerSpec(Experts, ep_size)
    more = [LayerSpec(Experts, ep_size) for _ in range(given.get("layers", 2) - 2)]
    laid: dict[str, Any] = {"num_stages": given.get("stages", 2)}
    if "model_parallel" in given:  # two processes of each replica, which compute the same
        comm.all_gather_into_tensor = _flat  # tokens of the two, in a flat buffer
        laid = {"topology": PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=dist.get_world_size() // 4)}
    net = PipelineModule(
        [LayerSpec(Embedding), LayerSpec(Experts, ep_size), *more, second, LayerSpec(Last)],
        **laid,
        loss_fn=with_routers,
        seed_layers=True,
        base_seed=7,
        partition_method="uniform",
    )
    for layer in net.modules():
        if "model_parallel" in given and isinstance(layer, Experts):
            layer.norm.weight.model_parallel = True  # DeepSpeed's norm fails on a rank that counts nothing
    return net


def _flat(gathered: Tensor, own: Tensor, *group: Any, **how: Any) -> Any:
    """Gather as NCCL does, for which shapes do not matter; gloo asks for like ones."""
    return _GATHER(gathered.view(-1), own.reshape(-1), *group, **how)


def engine_of(given: dict[str, Any], section: dict[str, Any] | None) -> tuple[Any, Any]:
    # DeepSpeed keeps them, and this job has destroyed them with the engine before.
    for kept in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
        kept.clear()
    deepspeed_engine.FusedAdam = torch.optim.AdamW if "fused" in given else _FUSED_ADAM
    net = _net(given)
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "steps_per_print": 1000,
        "gradient_clipping": 0.0,
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        **given["config"],
        **({"evenpipe": section} if section is not None else {}),
    }
    engine, *_ = initialize(model=net, config=config, model_parameters=list(net.parameters()))
    return engine, batches(engine.grid.data_parallel_id, engine.grid.data_parallel_size, engine.micro_batches)


def train(given: dict[str, Any]) -> dict[str, Any]:
    if "only_first" in given:
        return {"refused": _refused(given)}
    if "sections" in given:
        return {"runs": [_under(given, section) for section in given["sections"]]}
    return {"two_bw": _two_bw(given), "by_hand": _by_hand(given)}


def _under(given: dict[str, Any], section: dict[str, Any] | None) -> dict[str, Any]:
    """Train under a section; without one, by DeepSpeed's own engine."""
    engine, data = engine_of(given, section)
    losses = [float(engine.train_batch(data_iter=data)).hex() for _ in range(given["steps"])]
    found = {"losses": losses, "weights": {name: digest(one) for name, one in engine.module.named_parameters()}}
    if section is not None:
        found["peak_bytes"] = engine.executor.counter.peak_bytes
    engine.destroy()
    return found


def _two_bw(given: dict[str, Any]) -> dict[str, Any]:
    engine, data = engine_of(given, {"schedule": "2bw"})
    losses, norms = _train(engine, data, given, 0, given["steps"])
    found: dict[str, Any] = {"optimizer": type(engine.optimizer).__name__}
    if "folder" in given:
        engine.save_checkpoint(given["folder"])
        more, later = _train(engine, data, given, given["steps"], MORE)
        losses, norms = losses + more, norms + later
    engine.drain()
    norms.append(_norm(engine))
    found |= _found(engine, losses)
    engine.destroy()
    if "folder" in given:
        again, data = engine_of(given, {"schedule": "2bw"})
        again.load_checkpoint(given["folder"])
        for _ in islice(data, given["steps"] * again.micro_batches):
            pass
        losses, _ = _train(again, data, given, given["steps"], MORE)
        again.drain()
        found["resumed"] = _found(again, losses)
        again.destroy()
    # That of a batch is known after the next one.
    return {**found, "norms": norms[1:]}


def _by_hand(given: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's own engine: batch t forwards and backwards on W(t - 1), and steps W(t)."""
    engine, data = engine_of(given, None)
    weights = list(engine.module.parameters())
    versions = [[weight.detach().clone() for weight in weights]] * 2
    step = engine.optimizer.step

    @torch.no_grad()
    def load(version: list[Tensor]) -> None:
        for weight, value in zip(weights, version, strict=True):
            weight.copy_(value)

    def on_the_newest(*args: Any, **kwargs: Any) -> Any:
        load(versions[1])
        return step(*args, **kwargs)

    engine.optimizer.step = on_the_newest
    losses, norms = [], []
    for number in range(given["steps"] + MORE * ("folder" in given)):
        load(versions[0])
        loss, norm = _train(engine, data, given, number, 1)
        losses, norms = losses + loss, norms + norm
        versions = [versions[1], [weight.detach().clone() for weight in weights]]
    found = {**_found(engine, losses), "norms": norms}
    del engine.optimizer.step
    engine.destroy()
    return found


def _train(
    engine: Any, data: Any, given: dict[str, Any], first: int, steps: int
) -> tuple[list[str], list[float | None]]:
    losses, norms = [], []
    for number in range(first, first + steps):
        hook = None
        if number == given.get("broken"):
            expert = next(one for name, one in engine.module.named_parameters() if "experts.1.0.weight" in name)
            if engine.global_rank == engine.global_rank // 4 * 4 + 3:
                hook = expert.register_hook(lambda gradient: gradient * float("inf"))
        losses.append(float(engine.train_batch(data_iter=data)).hex())
        norms.append(_norm(engine))
        if hook is not None:
            hook.remove()
    return losses, norms


def _found(engine: Any, losses: list[str]) -> dict[str, Any]:
    weights = {name: digest(weight) for name, weight in engine.module.named_parameters()}
    sizes = [float(weight.double().norm()) for weight in engine.module.parameters()]
    return {"losses": losses, "weights": weights, "sizes": sizes, "skipped": engine.skipped_steps}


def _norm(engine: Any) -> float | None:
    """That of the last step that is finished: infinite if it was skipped; None where none is known."""
    if hasattr(engine, "two_bw"):
        outcome = engine.two_bw.outcome
        return outcome.grad_norm if outcome.updated else math.inf
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def _refused(given: dict[str, Any]) -> str | None:
    """What rank 0 says before DeepSpeed starts."""
    from evenpipe.deepspeed.section import SectionError
    from evenpipe.deepspeed.unsupported import refuse_uneven_experts

    try:
        refuse_uneven_experts(_net(given))
    except SectionError as error:
        return str(error)
    return None


if __name__ == "__main__":
    run(train, Path(sys.argv[1]), Path(sys.argv[2]))
