"""Eight gloo processes that carry out one schedule after the other and write down what came of each.

Arguments: a folder (cases.json in, rank-<rank>.json out).
"""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from evenpipe.runtime import executor as executor_module
from evenpipe.runtime import streams
from evenpipe.runtime.channel import Channel, Transfer
from evenpipe.runtime.connections import Connections, connect
from evenpipe.runtime.exchange import gather
from evenpipe.runtime.executor import Executor, Observer
from evenpipe.runtime.flow import Flow
from evenpipe.runtime.host_swaps import HostSwaps
from evenpipe.runtime.resources import StageFigures, per_stage
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.runtime.store import SMALL_BYTES
from evenpipe.schedule import Schedule, verify

sys.path.insert(0, str(Path(__file__).parent))
from compositions import Flattened, Product, Quantized
from ranks import each_case, report

WORLD = 8
ROWS, WIDTH = 8, 16  # tensors of multiples of 64 bytes, to which the pool aligns


class Routed(torch.nn.Module):
    """An expert for some of the rows, as many as the data says: every micro-batch saves as much as it has.

    Now and then a thread holds what has been saved, as those of collectives do, and lets go of it soon after.
    """

    def __init__(self) -> None:
        super().__init__()
        self.expert = torch.nn.Linear(WIDTH, WIDTH)
        self.forwarded = 0

    def forward(self, value: Tensor) -> Tensor:
        chosen = (value[:, 0] > 0).nonzero()[:, 0]
        hidden = torch.nn.functional.gelu(value[chosen])
        self.forwarded += 1
        if self.forwarded % 3 == 1:
            held = [hidden]
            threading.Timer(random.uniform(0, 0.02), held.clear).start()
        return value.index_add(0, chosen, self.expert(hidden))


class Wide(torch.nn.Module):
    """Saves a storage that is not small."""

    def forward(self, value: Tensor) -> Tensor:
        times = SMALL_BYTES // value.nbytes
        return torch.nn.functional.gelu(value.repeat(1, times)).view(*value.shape, times).mean(2)


class Cast(torch.nn.Module):
    """Saves a tensor that consists of others: of torch's protocol in one half of the model's pieces."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(WIDTH))
        self.kind = Flattened if place % 2 else Quantized

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = Product.apply(value, self.weight, self.kind)
        return result


class Beside(torch.nn.Module):
    """An expert that all rows share, on a stream of its own, beside what the current stream does meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.routed = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.stream: streams.Stream | None = None

    def forward(self, value: Tensor) -> Tensor:
        current = streams.current(value.device)
        if self.stream is None:
            self.stream = streams.opened(value.device)
        self.stream.wait_stream(current)
        with streams.on(self.stream):
            shared = torch.nn.functional.gelu(self.shared(value))
        routed = self.routed(value).tanh() * value
        with streams.on(self.stream):  # in the backward before what `routed` was, and the rest behind it
            shared = shared.square()
        current.wait_stream(self.stream)
        return shared + routed


class Replay(torch.autograd.Function):
    """A graph: its output, and what it saves, are memory of its own, which each replay writes."""

    @staticmethod
    def forward(ctx, value, output):  # type: ignore[no-untyped-def]
        ctx.kept = output
        torch.tanh(value.detach(), out=output)
        return output.detach()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * (1 - ctx.kept.square()), None


class Captured(torch.nn.Module):
    """Part of a layer in CUDA graphs, as Transformer Engine captures them: one for each micro-batch under way."""

    UNDER_WAY = 4  # the most of 1F1B's first stage of four

    def __init__(self) -> None:
        super().__init__()
        self.outputs = [torch.empty(ROWS, 2 * WIDTH) for _ in range(self.UNDER_WAY)]
        self.replayed = 0

    def forward(self, value: Tensor) -> Tensor:
        self.replayed += 1
        result: Tensor = Replay.apply(value, self.outputs[self.replayed % self.UNDER_WAY])
        return result


def chunk_module(place: int, kind: str = "dense") -> torch.nn.Module:
    """The piece of the model at `place`, counted from its start.

    One that is "saving its output" ends in a ReLU, which saves what is being sent to the next stage.
    """
    torch.manual_seed(place)
    lasts = {
        "dense": torch.nn.Identity,
        "saving its output": torch.nn.ReLU,
        "routed": Routed,
        "wide": Wide,
        "beside": Beside,
        "captured": torch.nn.Identity,
    }
    last = Cast(place) if kind == "cast" else lasts[kind]()
    graphs = [Captured()] if kind == "captured" else []
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 2 * WIDTH), *graphs, torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH), last
    )


def sample(micro_batch: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 + micro_batch))


def loss(micro_batch: int, output: Tensor) -> Tensor:
    return (output - 0.1 * micro_batch).square().mean()


class SlowTransfer(Transfer):
    """Takes `ms` from its start, at least; tells `slept_ms` how long it was waited for because of that."""

    __slots__ = ("_arrives", "_slept_ms")

    def __init__(self, transfer: Transfer, ms: float, slept_ms: list[float]) -> None:
        super().__init__([transfer], [])
        self._arrives = time.monotonic() + ms / 1e3
        self._slept_ms = slept_ms

    def wait(self) -> None:
        self._slept_ms.append(self._left * 1e3)
        super().wait()

    def finish(self) -> None:
        time.sleep(self._left)
        super().finish()

    @property
    def _left(self) -> float:
        return max(0.0, self._arrives - time.monotonic())


class SlowChannel:
    """`channel`, at the end of a link on which a message takes `ms`."""

    def __init__(self, channel: Channel, ms: float, slept_ms: list[float]) -> None:
        self._channel = channel
        self._ms = ms
        self._slept_ms = slept_ms

    def send(self, tensors: Sequence[Tensor]) -> Transfer:
        return SlowTransfer(self._channel.send(tensors), self._ms, self._slept_ms)

    def receive(self, buffers: Sequence[Tensor], after: Sequence[Transfer] = ()) -> Transfer:
        return SlowTransfer(self._channel.receive(buffers, after), self._ms, self._slept_ms)

    def give_up(self) -> None:
        self._channel.give_up()

    def close(self) -> None:
        self._channel.close()


class Counted:
    """A channel's `group`, whose operations are counted."""

    def __init__(self, group, operations: Counter, kind: str) -> None:  # type: ignore[no-untyped-def]
        self._group, self._operations, self._kind = group, operations, kind

    def send(self, *arguments):  # type: ignore[no-untyped-def]
        self._operations[self._kind] += 1
        return self._group.send(*arguments)

    def recv(self, *arguments):  # type: ignore[no-untyped-def]
        self._operations[self._kind] += 1
        return self._group.recv(*arguments)

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)


class Remarks(Observer):
    """Keeps what people are told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def remark(self, line: str) -> None:
        self.lines.append(line)


def slowed(connections: Connections, kinds: Sequence[str], ms: float, slept_ms: list[float]) -> Connections:
    """`connections` with slow links of these kinds, which write down how long they were waited for."""
    channels = {
        link: SlowChannel(channel, ms, slept_ms) if link.kind in kinds else channel
        for link, channel in connections.channels.items()
    }
    return replace(connections, channels=channels)


def bytes_there(flow: Flow) -> int:
    """What a stage's memory has of micro-batches: what is saved, and what leaves or comes, each storage once."""
    store, known = flow.resources.store, {}
    saved = (one for known_as in store._owners.values() if (one := known_as()) is not None)
    storages = [one.storage for one in saved if one.storage is not None]
    departures = [departure for one in store._recordings.values() for departure in one.departures.values()]
    storages += [tensor.untyped_storage() for one in departures for tensor in one.message]
    moving = [flow.under_way[message] for message in flow.actions]
    moving += [one.transfer for departed in flow.followed.values() for one in departed]
    storages += [tensor.untyped_storage() for transfer in moving for tensor in transfer._tensors]
    for storage in storages:
        known[storage.data_ptr()] = storage.nbytes()
    return sum(known.values())


class WatchedFlow(Flow):
    """Notes the most that its memory has had when a load had begun."""

    most = 0

    def load(self, message, unit) -> None:  # type: ignore[no-untyped-def]
        super().load(message, unit)
        WatchedFlow.most = max(WatchedFlow.most, bytes_there(self))


def gradients(module: torch.nn.Module) -> list[str]:
    return [parameter.grad.numpy().tobytes().hex() for parameter in module.parameters()]


def reference(places: int, micro_batches: int, kind: str) -> tuple[list[str], list[list[str]]]:
    """Losses and gradients without any pipeline."""
    modules = [chunk_module(place, kind) for place in range(places)]
    losses = []
    for micro_batch in range(micro_batches):
        value = sample(micro_batch)
        for module in modules:
            value = module(value)
        result = loss(micro_batch, value)
        result.backward()
        losses.append(result.item().hex())
    return losses, [gradients(module) for module in modules]


class FusedStage(ModuleStage):
    """Counts the forwards and backwards that it is told to compute together."""

    together = 0

    def forward_and_backward(self, unit, inputs, other, gradients):  # type: ignore[no-untyped-def]
        self.together += 1
        return self.forward(unit, inputs), self.backward(other, gradients)


def carry_out(case: dict, rank: int) -> dict:
    """Run a schedule once for each of `measure`; this rank's losses, gradients, memory and waits after each."""
    program = verify(Schedule.parse(case["schedule"]), fused=case["fused"])
    schedule = program.schedule
    stages, chunks = schedule.stages, schedule.chunks
    if rank >= stages:
        return {}
    connections = connect(range(stages), program.links, "gloo", torch.device("cpu"))
    slept_ms: list[float] = []
    operations: Counter[str] = Counter()
    for link, channel in connections.channels.items():
        channel._group = Counted(channel._group, operations, link.kind)
    connections = slowed(connections, case["slow"], case["ms"], slept_ms)
    modules = [chunk_module(schedule.places.position(rank, chunk), case["model"]) for chunk in range(chunks)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    remarks = Remarks()
    executor = Executor(rank, connections, torch.device("cpu"), parameters, remarks)
    if share := case.get("swap"):
        executor.swaps = HostSwaps(executor.store, torch.device("cpu"), share)
    last = schedule.places.last
    batches = []
    for measure, rows in zip(case["measure"], case["rows"], strict=True):
        for parameter in parameters:
            parameter.grad = None
        executor.counter.reset_peak()
        executor.measure = measure
        slept_ms.clear()
        operations.clear()
        WatchedFlow.most = 0
        remarks.lines.clear()
        start = time.monotonic()
        loss_chunk = last.chunk if rank == last.stage else None
        edges = Edges.alike(torch.empty(rows, WIDTH), chunks)
        recording = executor.recording(program)
        stage = FusedStage(modules, edges, lambda i, rows=rows: sample(i)[:rows].clone(), loss, loss_chunk, recording)
        executor.run(program, stage)
        memory = executor.counter
        batches.append(
            {
                "losses": [stage.losses[i].item().hex() for i in sorted(stage.losses)],
                "gradients": [gradients(module) for module in modules],
                "memory": asdict(memory),
                "bytes_there": WatchedFlow.most,
                "ms": (time.monotonic() - start) * 1e3,
                "exposed_ms": executor.exposed.total_ms(),
                "slept_ms": sum(slept_ms),
                "together": stage.together,
                "leftover": [str(key) for key in executor.store.leftover()],
                "operations": dict(operations),
                "remarks": list(remarks.lines),
                "pool_bytes": executor.pool.allocated_bytes,
                "pool_addresses": sorted(slot.buffer.data_ptr() for slot in executor.pool._free),
            }
        )
    connections.close()
    return {"batches": batches}


def maxima(rank: int) -> list[StageFigures]:
    """Two ranks a stage, each with the larger of some figures."""
    mine = StageFigures(rank, 2**50 + rank, 100 - rank, rank / 8, rank / 4)
    return list(per_stage(mine, rank % 4, 4, torch.device("cpu")))


def outcomes(rank: int, folder: Path) -> dict:
    executor_module.Flow = WatchedFlow  # type: ignore[misc]
    found = each_case(folder, lambda case: carry_out(case, rank))
    texts = [gather(f"{word} of {rank}") for word in ("first", "second")]
    return {name: result for name, result in found.items() if result} | {"maxima": maxima(rank), "texts": texts}


if __name__ == "__main__":
    report(WORLD, outcomes)
