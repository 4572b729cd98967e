"""Two gloo processes that use a small cut model as its users do: what came of it, as JSON.

Arguments: a folder (rank-<rank>.json out). A script of its own, forked after the imports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.profiling import profile
from evenpipe.partition.search.finding import find_plan
from evenpipe.partition.trace import trace
from evenpipe.runtime import host_memory
from evenpipe.runtime.executor import Observer
from evenpipe.schedule import Size, build
from evenpipe.stage_code import load_parts, write_stages
from evenpipe.torch import planned as planned_pipeline
from evenpipe.torch.batches import Evaluation
from evenpipe.torch.pipeline import ModulePipeline
from evenpipe.torch.planned import PlannedPipeline
from evenpipe.train.data import load
from evenpipe.train.engine import Case, FailureContext, Recorder
from evenpipe.train.options import TrainOptions
from evenpipe.train.plain import PlannedEngine

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.runtime.ranks import report
from tests.train.planned.cases import Alike

STAGES, MICRO_BATCHES, SIZE, WIDTH = 2, 4, 3, 8
#: Schedules of a model with a frozen start, and whether with BPipe.
FROZEN = {"1f1b": ("1f1b", False), "1f1b with BPipe": ("1f1b", True), "zb-h1": ("zb-h1", False), "2bw": ("2bw", False)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4)])

    def forward(self, x: Tensor, unread: Tensor | None = None) -> Tensor:
        return (self.layers(x) - x).square().mean()


def example() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model and inputs that a plan names by this function."""
    return Model(), {"x": batch()["x"][:SIZE], "unread": torch.ones(SIZE)}


class Answering(Model):
    """Has dropout and batch norm, and returns more than its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))

    def forward(self, x: Tensor, unread: Tensor | None = None) -> dict[str, Any]:
        hidden = self.normed(self.layers[:2](x))
        answer = self.layers[2:](hidden)
        return {"loss": (answer - x).square().mean(), "hidden": hidden, "answer": answer}


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(MICRO_BATCHES * SIZE, WIDTH, generator=torch.Generator().manual_seed(7))}


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def labelled() -> dict[str, Tensor]:
    """Micro-batches of 3, 2, 1 and no labels."""
    labels = torch.arange(MICRO_BATCHES * SIZE) % WIDTH
    return batch() | {"labels": labels.masked_fill(torch.tensor([0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1]).bool(), -100)}


def planned(
    path: Path,
    model: nn.Module,
    schedule: str = "1f1b",
    bpipe: bool = False,
    given: Mapping[str, Tensor] | None = None,
    share: float = 1.0,
    stages: int = STAGES,
    name: str = "model",
) -> None:
    """With memory for all; or with a share of it, and a link to the host on which what leaves is there at once."""
    graph = trace(model, given or {"x": batch()["x"][:SIZE], "unread": torch.ones(SIZE)})
    nodes = profile(graph, Alike(), name)
    workload = Workload(schedule, MICRO_BATCHES, bpipe=bpipe)
    plan = find_plan(nodes, workload, stages, 1 << 34)
    if share < 1:
        limit = int(share * max(part.peak_bytes for part in plan.stages))
        plan = find_plan(nodes, workload, stages, limit, "swap+recompute", 1e3)
    plan.write(path)
    write_stages(graph, nodes, plan, path)


def gradients(named: Any) -> dict[str, list[float]]:
    return {name: one.grad.flatten().tolist() for name, one in named if one.grad is not None}


def uncut(made: Callable[[], nn.Module] = Model) -> dict[str, Any]:
    """Losses and gradients of the model without a pipeline."""
    model, losses = made(), []
    for number in range(MICRO_BATCHES):
        loss = model(**{name: one.chunk(MICRO_BATCHES)[number] for name, one in batch().items()})
        (loss / MICRO_BATCHES).backward()
        losses.append(loss.item())
    return {"losses": losses, "gradients": gradients(model.named_parameters())}


def stepped(plan: Path, made: Callable[[], nn.Module] = Model) -> dict[str, Any]:
    pipeline = PlannedPipeline(plan, made())
    pipeline.step(batch())
    found = {"losses": [one.item() for one in pipeline.losses], "gradients": gradients(pipeline._parameters.items())}
    pipeline.close()
    return found


def frozen_and_cut(folder: Path, schedule: str) -> dict[str, Any]:
    """A first stage that learns nothing."""
    path = folder / f"frozen {schedule}.json"
    if schedule != "2bw":
        return {"uncut": uncut(Frozen), "cut": stepped(path, Frozen)}
    pipeline = PlannedPipeline(path, Frozen())
    learned = [one for one in pipeline.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(learned or [nn.Parameter(torch.zeros(()))], lr=0.5)
    losses = [one and one.item() for one in pipeline.two_bw([batch()] * 3, optimizer, clip_grad=1.0)]
    pipeline.close()
    return {"losses": losses, "learned": len(learned)}


class Buffered(Model):
    """Has a tied parameter, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = self.layers[0]
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))
        self.register_buffer("scale", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.copy_(torch.arange(WIDTH) / WIDTH)

    def forward(self, x: Tensor, unread: Tensor | None = None) -> Tensor:
        return (self.layers(x * self.scale) * self.scale - self.shift).square().mean()


class Counting(Model):
    """Its loss is a mean over labels, of which micro-batches have other numbers, or a sum over a number of them."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        answer = self.layers(x)
        if num_items_in_batch is None:
            return nn.functional.cross_entropy(answer, labels)
        return nn.functional.cross_entropy(answer, labels, reduction="sum") / num_items_in_batch


class Frozen(Model):
    """Three quarters of its layers learn nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[:3].requires_grad_(False)


class Read(dict[str, Tensor]):
    """A state that knows what was taken of it."""

    def __init__(self, of: Mapping[str, Tensor]) -> None:
        super().__init__(of)
        self.taken: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.taken.append(name)
        return super().__getitem__(name)


def placed(folder: Path) -> dict[str, Any]:
    """A model on the meta device, with values from a state dict and from two files."""
    whole, path = Buffered(), folder / "buffered.json"
    state = {name: one.clone() for name, one in whole.state_dict().items() if not name.startswith("layers.3")}
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(state)}
    if dist.get_rank() == 0:
        for file in set(files.values()):
            save_file({name: one for name, one in state.items() if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    dist.barrier()
    with torch.device("meta"):
        empty = Buffered()
    read, found = Read(state), {"refused": refusal(lambda: PlannedPipeline(path, empty))}
    for name, model, options in (
        ("real", whole, {}),
        ("state", empty, {"device": "cpu", "state": read}),
        ("files", empty, {"device": "cpu", "state": folder}),
    ):
        pipeline = PlannedPipeline(path, model, **options)
        pipeline.step(batch())
        losses = [one.item() for one in pipeline.losses]
        found[name] = {"losses": losses, "gradients": gradients(pipeline._parameters.items())}
        found[name] |= {"state": {name: one.tolist() for name, one in (pipeline.full_state_dict() or {}).items()}}
        own = list(pipeline.state_dict())
        pipeline.close()
    lacking = {name: one for name, one in state.items() if name != "shift"}
    lacks = dist.get_rank() == 1 and refusal_of(lambda: load_parts(path, 1, empty, False, torch.device("cpu"), lacking))
    meta = all(one.is_meta for one in (*empty.parameters(), *empty.buffers()))
    return found | {"taken": sorted(read.taken), "own": sorted(own), "lacks": lacks, "meta": meta}


def refusal(call: Callable[[], object]) -> str:
    """What it raises, on the first stage, before anything is sent."""
    return "" if dist.get_rank() else refusal_of(call)


def refusal_of(call: Callable[[], object]) -> str:
    """What it raises."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def autocasted(folder: Path) -> dict[str, Any]:
    """A plan that is traced under autocast, and one that is not, each under it."""
    with autocast():
        found = {"uncut": uncut(), "cut": stepped(folder / "autocast.json")}
        other = PlannedPipeline(folder / "plain.json", Model())
        return found | {"refused": refusal(lambda: other.step(batch()))}


def weighed(folder: Path, name: str) -> dict[str, Any]:
    """By tokens, and by the number that the model divides by; the model itself on the whole batch."""
    more = {"num_items_in_batch": torch.tensor(6)} if name == "divided" else {}
    tokens = {} if more else {"tokens": torch.tensor([3, 2, 1, 0])}
    pipeline = PlannedPipeline(folder / f"counting {name}.json", Counting())
    refused = refusal(lambda: pipeline.shared((labelled() | {"num_items_in_batch": torch.tensor(6)}, [3, 2, 1, 0])))
    loss = pipeline.step(labelled() | more, **tokens)
    evaluation = pipeline.evaluate(labelled() | more, **tokens)
    found = {"losses": [] if loss is None else [loss.item()], "gradients": gradients(pipeline._parameters.items())}
    pipeline.close()
    model = Counting()
    whole = model(**labelled())
    whole.backward()
    return {
        "cut": found,
        "uncut": {"losses": [whole.item()], "gradients": gradients(model.named_parameters())},
        "evaluated": evaluation.loss is None or evaluation.loss.item() == found["losses"][0],
        "refused": refused,
    }


def evaluated(folder: Path, name: str) -> dict[str, Any]:
    """Before and after what trains; and the same of the model without a pipeline."""
    model, made = Answering(), Answering()
    pipeline = PlannedPipeline(folder / name, made, seed=5)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
    first = pipeline.evaluate(batch())
    if pipeline.versions is None:
        pipeline.step(batch())
        optimizer.step()
    else:
        next(pipeline.two_bw([batch()] * 3, optimizer))
    second = pipeline.evaluate(batch())
    model.load_state_dict(pipeline.full_state_dict() or model.state_dict())
    pipeline.close()
    return {"cut": [_said(first), _said(second)], "uncut": [_whole(Answering()), _whole(model)]}


def _said(of: Evaluation) -> dict[str, Any]:
    losses = None if of.loss is None else [one.item() for one in (*of.losses, of.loss)]
    return {"losses": losses} | {name: one.tolist() for name, one in of.outputs.items()}


@torch.no_grad()
def _whole(model: nn.Module) -> dict[str, Any]:
    found = [model.eval()(x) for x in batch()["x"].chunk(MICRO_BATCHES)]
    losses = [one["loss"] for one in found]
    outputs = {name: torch.cat([one[name] for one in found]).tolist() for name in ("hidden", "answer")}
    return {"losses": [one.item() for one in (*losses, torch.stack(losses).mean())]} | outputs


def keyed(folder: Path) -> dict[str, Any]:
    """A batch with an argument that the model was not traced with, and one with an argument that it does not read."""
    pipeline = PlannedPipeline(folder / "plain.json", Model())
    refused = refusal(lambda: pipeline.shared(batch() | {"attention_msk": torch.ones(MICRO_BATCHES * SIZE)}))
    accepted = pipeline.shared(batch() | {"unread": torch.ones(MICRO_BATCHES * SIZE)})
    return {"refused": refused, "accepted": len(accepted)}


class Remarks(Observer):
    """Keeps what people are told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def remark(self, line: str) -> None:
        self.lines.append(line)


def swapped(folder: Path) -> dict[str, Any]:
    """What is on hosts is there from the start, and is no more later; of a host with less it is refused everywhere."""
    remarks = Remarks()
    pipeline = PlannedPipeline(folder / "swapped.json", Model(), observer=remarks)
    keeper = pipeline.executor.keeper
    held = [keeper.link.memory.nbytes if keeper is not None else 0]
    pipeline.step(batch())
    held.append(keeper.link.memory.nbytes if keeper is not None else 0)
    found = {"losses": [one.item() for one in pipeline.losses], "gradients": gradients(pipeline._parameters.items())}
    pipeline.close()
    free = host_memory.free_bytes
    host_memory.free_bytes = lambda: 100
    try:
        PlannedPipeline(folder / "swapped.json", Model())
        refused = "nothing"
    except ValueError as error:
        refused = str(error)
    finally:
        host_memory.free_bytes = free
    return {"cut": found, "uncut": uncut(), "held": held, "sizes": pipeline.host_sizes, "refused": refused} | {
        "said": remarks.lines
    }


def replicated(folder: Path) -> dict[str, str]:
    """Two replicas of one stage, each of which swaps 64 bytes to a host that has 100: a replica by itself, and both."""
    alone = [dist.new_group([rank]) for rank in range(STAGES)][dist.get_rank()]
    options = TrainOptions.of(partition=str(folder / "alone.json"), trust=True, data_parallel=STAGES, iterations=1)
    failure = FailureContext(0)
    case = Case(options, load(options), torch.device("cpu"), failure, Recorder(failure), print)
    with (
        mock.patch.object(planned_pipeline, "sizes_on_host", return_value=[64]),
        mock.patch.object(host_memory, "free_bytes", return_value=100),
    ):
        by_itself = refusal_of(lambda: PlannedPipeline(folder / "alone.json", Model(), group=alone).close())
        return {"alone": by_itself, "both": refusal_of(lambda: PlannedEngine(case))}


class Part(nn.Module):
    """The first gives a scale beside its hidden state, without a gradient, and may be frozen; the second learns."""

    def __init__(self, position: int, learns: bool) -> None:
        super().__init__()
        torch.manual_seed(position)
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(learns or position == 1)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        hidden = self.linear(x)
        return (hidden, hidden.sigmoid().detach()) if scale is None else hidden * scale


def frozen(learns: bool) -> dict[str, Any]:
    """Losses and gradients; `boundary` marks what has a gradient, if there is something."""
    program, x = build("1f1b", Size(STAGES, MICRO_BATCHES)), batch()["x"]
    edge = [torch.empty(SIZE, WIDTH, requires_grad=learns), torch.empty(SIZE, WIDTH)]
    pipeline = ModulePipeline(lambda number: Part(number, learns), program, nn.functional.mse_loss, lambda _: edge)
    pipeline.step(x, x)
    found = {"losses": [one.item() for one in pipeline.losses]}
    found |= {"gradients": gradients(_of_part(dist.get_rank(), pipeline.chunks[0]))}
    pipeline.close()
    parts, losses = [Part(number, learns) for number in range(2)], []
    for share in x.chunk(MICRO_BATCHES):
        loss = nn.functional.mse_loss(parts[1](*parts[0](share)), share)
        (loss / MICRO_BATCHES).backward()
        losses.append(loss.item())
    named = [one for number, part in enumerate(parts) for one in _of_part(number, part)]
    return {"cut": found, "uncut": {"losses": losses, "gradients": gradients(named)}}


def _of_part(number: int, part: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(f"{number}.{name}", one) for name, one in part.named_parameters()]


def run(rank: int, folder: Path) -> dict[str, Any]:
    found = {"autocast": autocasted(folder)}
    found |= {name: evaluated(folder, f"answering {name}.json") for name in ("1f1b", "2bw")}
    found |= {f"cut {name}": frozen_and_cut(folder, name) for name in FROZEN}
    found |= {name: weighed(folder, name) for name in ("meant", "divided")}
    found |= {"placed": placed(folder)}
    found |= {"swapped": swapped(folder), "replicated": replicated(folder)}
    found |= {"keys": keyed(folder), "frozen": frozen(False), "partly": frozen(True)}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    planned(out / "plain.json", Model())
    planned(out / "buffered.json", Buffered())
    few = {name: one[:SIZE] for name, one in labelled().items()}
    planned(out / "counting meant.json", Counting(), given=few)
    planned(out / "counting divided.json", Counting(), given=few | {"num_items_in_batch": torch.tensor(6)})
    for name in FROZEN:
        planned(out / f"frozen {name}.json", Frozen(), *FROZEN[name])
    planned(out / "swapped.json", Model(), share=0.95)
    planned(out / "alone.json", Model(), stages=1, name=f"{__file__}:example")
    for schedule in ("1f1b", "2bw"):
        planned(out / f"answering {schedule}.json", Answering(), schedule)
    with autocast():
        planned(out / "autocast.json", Model())
    report(STAGES, run)
