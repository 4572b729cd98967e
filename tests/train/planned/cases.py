"""Small models, cut and trained in processes of their own, and the same models uncut in one process.

Arguments: a folder (case.json in; rank-<rank>.pt out, and uncut.pt). A script of its own, forked after the imports.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.models import Example, build
from evenpipe.partition.models.described import for_training, inputs_of
from evenpipe.partition.profile import Profile
from evenpipe.partition.profiling import profile
from evenpipe.partition.search.finding import find_plan
from evenpipe.partition.search.plan import Plan
from evenpipe.partition.timing import NodeTimes
from evenpipe.partition.trace import trace
from evenpipe.stage_code import drawing, write_stages
from evenpipe.torch.planned import PlannedPipeline

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.oracle.recurrence import TwoBWUpdates

SEED, STEPS, SIZE, RATE = 3, 5, 2, 0.05


UNTIED = "gpt2 with weights of its own for the output"


def untied() -> Example:
    configuration = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "tie_word_embeddings": False}
    kind = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "bos_token_id": 0, "eos_token_id": 0}
    model = for_training(kind | configuration, "eager", UNTIED)
    return Example(UNTIED, model, inputs_of(model, SIZE, 32))


class Alike:
    """Every node takes as long as every other, in any precision."""

    name, device, device_type = "alike", "cpu", "cpu"

    def times(self, graph: Any, work: list[Any], precision: str, progress: Any) -> list[NodeTimes]:
        return [NodeTimes(1.0, 2.0) for _ in work]


def example_of(model: str, dtype: torch.dtype = torch.float32) -> Example:
    torch.manual_seed(0)
    made = untied() if model == UNTIED else build(model, SIZE, small=True)
    inputs = {name: one.to(dtype) if one.is_floating_point() else one for name, one in made.inputs.items()}
    return Example(made.name, made.model.to(dtype), inputs)


def batch_of(example: Example, micro_batches: int, step: int) -> dict[str, Tensor]:
    """Other values for each step, of the kind that the example has."""
    generator = torch.Generator().manual_seed(step)
    most = {"input_ids": 128, "labels": 10 if "images" in example.inputs else 128, "next_sentence_label": 2}
    batch = {}
    for name, one in example.inputs.items():
        shape = (micro_batches * one.shape[0], *one.shape[1:])
        if one.is_floating_point():
            batch[name] = torch.randn(shape, generator=generator, dtype=one.dtype)
        else:
            random = torch.randint(most.get(name, 1), shape, generator=generator)
            batch[name] = random if name in most else one.repeat(micro_batches, *[1] * (one.dim() - 1))
    return batch


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def train_uncut(example: Example, micro_batches: int, delay: int = 0) -> dict[str, Any]:
    """A loop in one process; with a delay of 1, 2bw's rule."""
    optimizer, losses, first = optimizer_of(example.model.parameters()), [], {}
    updates, model = TwoBWUpdates(optimizer, delay), copy.deepcopy(example.model)
    for step in range(STEPS):
        batch, found = batch_of(example, micro_batches, step), []
        with torch.no_grad():
            for one, seen in zip(model.parameters(), updates.seen, strict=True):
                one.copy_(seen)
        model.zero_grad()
        for number in range(micro_batches):
            share = {name: values.chunk(micro_batches)[number] for name, values in batch.items()}
            with drawing(SEED, step * micro_batches + number):
                returned = model(**share)
                loss = returned if isinstance(returned, Tensor) else returned[0]
                (loss / micro_batches).backward()
            found.append(loss.detach())
        losses.append(torch.stack(found).mean())
        first = first or gradients(model)
        updates.update([one.grad for one in model.parameters()], RATE)
    state = example.model.state_dict()
    state |= {name: one for name, one in model.named_buffers() if name in state}
    return {"losses": losses, "gradients": first, "state": state}


def train_cut(plan: Path, example: Example, rank: int) -> dict[str, Any]:
    """One stage's share, and on the first stage the whole state."""
    pipeline = PlannedPipeline(plan, example.model, seed=SEED)
    optimizer, losses, first = optimizer_of(pipeline.parameters()), [], {}
    if pipeline.versions is not None:
        batches = (batch_of(example, pipeline.plan.micro_batches, step) for step in range(STEPS))
        losses += pipeline.two_bw(batches, optimizer)
    for step in range(STEPS if pipeline.versions is None else 0):
        optimizer.zero_grad()
        losses.append(pipeline.step(batch_of(example, pipeline.plan.micro_batches, step)))
        first = first or {n: p.grad.clone() for n, p in pipeline._parameters.items() if p.grad is not None}
        optimizer.step()
    whole = pipeline.full_state_dict()
    pipeline.load_state_dict(example.model.state_dict())
    pipeline.load_state_dict(pipeline.state_dict())
    pipeline.close()
    return {"losses": losses, "gradients": first, "own": pipeline.state_dict(), "state": whole}


def run(rank: int, folder: str, case: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    stages = case["stages"]
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", stages), rank=rank, world_size=stages)
    found = {}
    twice = ("", ", all kept") if case.get("optimize", "none") != "none" else ("",)
    for name in [f"{name}{which}" for name in case["workloads"] for which in twice]:
        example = example_of(case["model"], getattr(torch, case["dtype"]))
        found[name] = train_cut(Path(folder, f"{name}.json"), example, rank)
    torch.save(found, f"{folder}/rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def plan_for(of_nodes: Profile, workload: Workload, case: dict[str, Any]) -> Plan:
    """With memory for all; or, if something is to be done for it, for the share that the case says."""
    roomy = find_plan(of_nodes, workload, case["stages"], 1 << 40)
    if case.get("optimize", "none") == "none":
        return roomy
    limit = int(case["share"] * max(part.peak_bytes for part in roomy.stages))
    return find_plan(of_nodes, workload, case["stages"], limit, case["optimize"], case["gbps"])


def all_kept(plan: Plan) -> Plan:
    """The same cuts, and nothing recomputed or swapped."""
    nothing = dict.fromkeys(("recompute", "swap", "drop", "swap_storages", "drop_storages"), ())
    return plan.model_copy(update={"stages": tuple(part.model_copy(update=nothing) for part in plan.stages)})


def main(folder: str) -> None:
    case = json.loads(Path(folder, "case.json").read_text())
    example = example_of(case["model"], getattr(torch, case["dtype"]))
    graph = trace(example.model, example.inputs)
    of_nodes = profile(graph, Alike(), case["model"])
    uncut = {}
    for name, workload in case["workloads"].items():
        plan = plan_for(of_nodes, Workload(*workload), case)
        for which, one in ((name, plan), (f"{name}, all kept", all_kept(plan))):
            one.write(Path(folder, f"{which}.json"))
            write_stages(graph, of_nodes, one, Path(folder, f"{which}.json"))
        key = f"{plan.schedule == '2bw'}, {plan.micro_batches}"
        if key not in uncut:
            whole = example_of(case["model"], getattr(torch, case["dtype"]))
            uncut[key] = train_uncut(whole, plan.micro_batches, int(plan.schedule == "2bw"))
    torch.save(uncut, f"{folder}/uncut.pt")
    mp.start_processes(run, (folder, case), nprocs=case["stages"], start_method="fork")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
