"""Four gloo processes that use a ModulePipeline as loops of torch.distributed.pipelining do, under several schedules.

Parts take masks and positions by name, no boundary is given, and some parts are compiled.
Argument: a folder (rank-<rank>.json out). A script of its own, forked after the imports.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from evenpipe.runtime.executor import Observer
from evenpipe.schedule import Action, Size, build
from evenpipe.torch.pipeline import ModulePipeline
from evenpipe.torch.scaling import PipelineScaler
from evenpipe.torch.tuned import GroupTuning

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.oracle.recurrence import TwoBWUpdates, clip
from tests.runtime.ranks import report

STAGES, MICRO_BATCHES, ROWS, TOKENS, WIDTH = 4, 8, 2, 6, 8
#: Chunks, and whether parts are compiled.
CASES = {"1f1b": (1, False), "v-half": (2, False), "zb-h1, compiled": (1, True), "v-half, compiled": (2, True)}
LIMIT = 0.05


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens: Tensor, *, position_ids: Tensor) -> Tensor:
        return self.words(tokens) + self.places(position_ids)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        inner = self.norm(self.linear(hidden).flatten(0, 1)).view_as(hidden)
        return hidden + scale * nn.functional.gelu(inner) * mask[..., None]


def part_of(parts: int, position: int) -> nn.Module:
    torch.manual_seed(position)
    if position == 0:
        return First()
    return nn.Linear(WIDTH, 16) if position == parts - 1 else Block()


def whole(parts: int) -> nn.Sequential:
    return nn.Sequential(*(part_of(parts, position) for position in range(parts)))


def batch() -> tuple[Tensor, dict[str, Any]]:
    drawn = torch.Generator().manual_seed(3)
    rows = MICRO_BATCHES * ROWS
    tokens = torch.randint(16, (rows, TOKENS), generator=drawn)
    mask = torch.randint(2, (rows, TOKENS), generator=drawn).float()
    positions = [torch.randperm(TOKENS, generator=drawn) for _ in range(MICRO_BATCHES)]
    return tokens, {"mask": mask, "position_ids": positions, "scale": 0.5}


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def forwarded(model: nn.Sequential, tokens: Tensor, mask: Tensor, position_ids: Tensor, scale: float) -> Tensor:
    first, *blocks, last = model
    hidden = first(tokens, position_ids=position_ids)
    for block in blocks:
        hidden = block(hidden, mask, scale)
    return last(hidden)


def uncut_step(model: nn.Sequential, scaler: torch.amp.GradScaler | None = None) -> float:
    """Return the mean loss; gradients are in place."""
    tokens, named = batch()
    losses = []
    of_each = zip(tokens.chunk(MICRO_BATCHES), named["mask"].chunk(MICRO_BATCHES), named["position_ids"], strict=True)
    for some, mask, positions in of_each:
        losses.append(loss(forwarded(model, some, mask, positions, named["scale"]), some))
        share = losses[-1] / MICRO_BATCHES
        (share if scaler is None else scaler.scale(share)).backward()
    return torch.stack(losses).mean().item()


def difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest, over the largest value."""
    return max(float((mine[name] - theirs[name]).abs().max() / (1e-30 + theirs[name].abs().max())) for name in mine)


def gradients(named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in named if one.grad is not None}


def scaled(pipeline: ModulePipeline, model: nn.Sequential, rank: int) -> dict[str, Any]:
    """Two steps, of which the first overflows on stage 2 alone."""
    given = {"init_scale": 2.0**10, "growth_interval": 1}
    scaler, own = PipelineScaler(pipeline, **given), torch.amp.GradScaler("cpu", **given)
    optimizer, uncut = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (pipeline, model))
    tokens, named = batch()
    before, scales = {name: one.clone() for name, one in pipeline.state_dict().items()}, []
    for overflows in (True, False):
        optimizer.zero_grad()
        uncut.zero_grad()
        pipeline.step(tokens, tokens, **named)
        uncut_step(model, own)
        if overflows and rank == 2:
            next(pipeline.parameters()).grad[0] = torch.inf
        if overflows:
            model[2].linear.weight.grad[0] = torch.inf
        for one, of in ((scaler, optimizer), (own, uncut)):
            one.unscale_(of)
        norms = pipeline.clip_grad_norm(LIMIT), nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()
        for one, of in ((scaler, optimizer), (own, uncut)):
            one.step(of)
            one.update()
        if overflows:
            skipped = all(torch.equal(before[name], one) for name, one in pipeline.named_parameters())
        scales.append((scaler.get_scale(), own.get_scale()))
    pipeline.scaler = None
    mine = {name: one.detach() for name, one in pipeline.named_parameters()}
    return {"skipped": skipped, "scales": scales, "norms": norms, "off": difference(mine, model.state_dict())}


def refusal(step: Any, *given: Any, **named: Any) -> str:
    try:
        step(*given, **named)
    except ValueError as error:
        return str(error)
    return ""


class Noting(Observer):
    """Notes how many linear layers had a gradient after the first backwards of inputs, before any of weights."""

    def __init__(self) -> None:
        self.pipeline: ModulePipeline | None = None
        self.found: list[int] = []

    def ended(self, action: Action) -> None:
        if action.kind == "D" and not self.found:
            assert self.pipeline is not None
            layers = (one for part in self.pipeline.chunks for one in part.modules() if isinstance(one, nn.Linear))
            self.found.append(sum(one.weight.grad is not None for one in layers))


def carry_out(name: str, rank: int, folder: Path) -> dict[str, Any]:
    chunks, compiles = CASES[name]
    parts = STAGES * chunks

    def part(position: int) -> nn.Module:
        made = part_of(parts, position)
        return torch.compile(made, backend="aot_eager") if compiles else made

    told = Noting()
    program = build(name.partition(",")[0], Size(STAGES, MICRO_BATCHES, chunks))
    told.pipeline = pipeline = ModulePipeline(part, program, loss, observer=told)
    model = whole(parts)
    tokens, named = batch()
    mean = pipeline.step(tokens, tokens, **named)
    theirs = uncut_step(model)
    own, of_model = [*pipeline.named_parameters()], [*model.named_parameters()]
    found = {
        "loss": mean if mean is None else [mean.item(), theirs],
        "gradients": difference(gradients(own), gradients(of_model)),
        "norms": [pipeline.clip_grad_norm(LIMIT), nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()],
        "clipped": difference(gradients(own), gradients(of_model)),
        "buffers": difference(
            {name: one for name, one in pipeline.state_dict().items() if "running" in name} or {"": torch.zeros(1)},
            {**model.state_dict(), "": torch.zeros(1)},
        ),
        "before W": told.found,
        "mistyped": refusal(pipeline.step, tokens, tokens, **named, mosk=named["mask"]),
    }
    state = pipeline.full_state_dict()
    found["whole"] = state and [list(state) == list(model.state_dict()), difference(state, model.state_dict())]
    if not compiles:
        checkpoint = folder / f"checkpoint-{name}"
        dcp.save(pipeline.state_dict(), checkpoint_id=checkpoint)
        loaded = {name: torch.zeros_like(one) for name, one in model.state_dict().items()}
        dcp.load(loaded, checkpoint_id=checkpoint, no_dist=True)
        found["sharded"] = difference(loaded, model.state_dict())
        doubled = {name: 2 * one for name, one in model.state_dict().items()}
        pipeline.load_state_dict(doubled)
        found["loaded"] = difference(pipeline.state_dict(), doubled)
        short = {name: one for name, one in doubled.items() if "bias" not in name}
        found["short"] = refusal(pipeline.load_state_dict, short)
        found["other"] = refusal(pipeline.load_state_dict, {**doubled, "1.linear.wieght": torch.zeros(1)})
        pipeline.load_state_dict(model.state_dict())
        found["scaled"] = scaled(pipeline, model, rank)
    pipeline.close()
    return found


def tuned(rank: int) -> dict[str, Any]:
    """Trains under kfkb with a group size that is chosen, and under 1f1b."""
    tokens, named = batch()
    losses: dict[str, list[str]] = {}
    found: dict[str, Any] = {}
    for schedule in ("kfkb", "1f1b"):
        pipeline = ModulePipeline(lambda at: part_of(STAGES, at), build(schedule, Size(STAGES, MICRO_BATCHES)), loss)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        if schedule == "1f1b":
            found["ungrouped"] = refusal(GroupTuning, pipeline, optimizer, memory_gib=1.0)
            step = pipeline.step
        else:
            found["unlimited"] = refusal(GroupTuning, pipeline, optimizer)
            pipeline.executor.swap(0.5)  # as one that was made with swap=0.5
            found["swapping"] = refusal(GroupTuning, pipeline, optimizer, memory_gib=1.0)
            pipeline.executor.swaps = None
            tuning = GroupTuning(pipeline, optimizer, memory_gib=1.0, interval=2)
            step = tuning.step
        losses[schedule], sizes = [], []
        for _ in range(5):
            optimizer.zero_grad()
            mean = step(tokens, tokens, **named)
            optimizer.step()
            losses[schedule].append("" if mean is None else mean.item().hex())
            sizes.append(pipeline.program.schedule.group_size)
        if schedule == "kfkb":
            found["sizes"], found["decided"] = sizes, [one.iteration for one in tuning.loop.tuner.retunes]
            found["candidates"] = [one.k for one in tuning.loop.tuner.candidates]
            again = GroupTuning(pipeline, optimizer, memory_gib=1.0, interval=2, state=tuning.state_dict())
            again.step(tokens, tokens, **named)
            found["resumed"] = again.iteration
            small = GroupTuning(pipeline, optimizer, memory_gib=1e-6)
            found["small"] = refusal(small.step, tokens, tokens, **named)
        pipeline.close()
    return found | {"alike": losses["kfkb"] == losses["1f1b"]}


def layer(position: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(position)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(dtype)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def streamed() -> dict[str, Any]:
    """Trains in fp16 under 2bw, and in one process by the same rule: steps a batch late, scales two batches late."""
    drawn = torch.Generator().manual_seed(4)
    batches = [torch.randn(2, MICRO_BATCHES * ROWS, WIDTH, generator=drawn).unbind() for _ in range(9)]
    batches[5][1][0] *= 1e4  # overflows; so does the scale as it starts, and as it grows
    program, found = build("2bw", Size(STAGES, MICRO_BATCHES)), dict[str, Any](scales=[], losses=[])
    pipeline = ModulePipeline(layer, program, squared)
    scaler = PipelineScaler(pipeline, init_scale=2.0**22, growth_interval=2)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    with torch.autocast("cpu", torch.float16):
        for mean in pipeline.two_bw(batches, optimizer, clip_grad=LIMIT):
            found["scales"].append(scaler.get_scale())
            found["losses"].append(mean is not None and mean.item())
    found["called"] = refusal(scaler.step, optimizer)
    half = ModulePipeline(lambda at: layer(at, torch.float16), program, squared)
    PipelineScaler(half)
    found["half"] = refusal(half.two_bw, batches, torch.optim.SGD(half.parameters(), lr=0.1))
    whole = pipeline.full_state_dict()
    return found | {"right": whole and late_in_one_process(batches, found["scales"], whole)}


def late_in_one_process(
    batches: Sequence[Sequence[Tensor]], theirs: Sequence[float], state: dict[str, Tensor]
) -> dict[str, Any]:
    """Return which steps are skipped, and whether scales and weights are the pipeline's to the bit."""
    model, newest = (nn.Sequential(*map(layer, range(STAGES))) for _ in range(2))
    updates = TwoBWUpdates(torch.optim.SGD(newest.parameters(), lr=0.1, momentum=0.9), 1)
    scale, good, skipped, scales = 2.0**22, 0, list[bool](), []
    for number, (inputs, targets) in enumerate(batches):
        if number >= 2:
            good = 0 if skipped[number - 2] else good + 1
            scale, good = (scale / 2, 0) if skipped[number - 2] else (scale * 2, 0) if good == 2 else (scale, good)
        scales.append(scale)
        with torch.no_grad():
            for one, seen in zip(model.parameters(), updates.seen, strict=True):
                one.copy_(seen)
        model.zero_grad()
        for some, target in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
            with torch.autocast("cpu", torch.float16):
                (squared(model(some), target) / MICRO_BATCHES * scale).backward()
        gradients = [one.grad / scale for one in model.parameters()]
        norm = torch.stack([one.double().square().sum() for one in gradients]).sum().sqrt().item()
        skipped.append(not all(one.isfinite().all() for one in gradients))
        if skipped[-1]:
            updates.skip()
        else:
            clip(gradients, norm, LIMIT)
            updates.update(gradients, 0.1)
    same = all(torch.equal(state[name], one) for name, one in newest.state_dict().items())
    return {"skipped": skipped, "scales": scales == theirs, "weights": same}


def run(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: carry_out(name, rank, folder) for name in CASES}

    def failing(position: int) -> nn.Module:
        return nn.Linear(4, 5 if position == 1 else 4)

    pipeline = ModulePipeline(failing, build("1f1b", Size(STAGES, MICRO_BATCHES)), loss)
    value = torch.zeros(MICRO_BATCHES, 4)
    found["failing"] = refusal(pipeline.step, value, value)
    found["twice"] = refusal(
        ModulePipeline, failing, build("1f1b", Size(STAGES, MICRO_BATCHES)), loss, names=lambda position, name: name
    )
    found["streamed"] = streamed()
    dist.barrier()
    return found | {"tuned": tuned(rank)}


if __name__ == "__main__":
    report(STAGES, run)
