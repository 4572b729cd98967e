"""All stages of a pipeline in one process, a thread each, on one device, joined by links of this rank to itself.

Executors, stores, pools and channels are those of a job. Memory is filled with NaN as soon as it has been let go of.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, Final, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from evenpipe.runtime.executor import Executor
from evenpipe.runtime.flow import Flow
from evenpipe.runtime.host_memory import Block, HostLink, Passage
from evenpipe.runtime.host_swaps import HostSwaps
from evenpipe.runtime.recompute_swap import Keeper
from evenpipe.runtime.saved import Destination
from evenpipe.runtime.stage import Edges, ModuleStage
from evenpipe.runtime.store import ActivationStore
from evenpipe.schedule import EVICT, RETURN, Action, Program

from .loop import Loops, Turns, sleep_on_device

__all__ = ["Case", "Result", "gradients_of", "keeper_cases", "seen_by_sanitizer", "unwaited", "without_pipeline"]


class Case(NamedTuple):
    """One run: `made` gives the module at each position in the model.

    With `keeping`, stages swap and compute again; with `swap` they swap a share of what they save.
    """

    program: Program
    made: Callable[[int], nn.Module]
    boundary: Tensor
    keeping: Any = None
    swap: float | None = None


def _given(case: Case, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + micro_batch)
    found = torch.randn(case.boundary.shape, generator=generator).to(case.boundary)
    return found.requires_grad_()  # re-entrant checkpoints need one


def _loss(micro_batch: int, output: Tensor) -> Tensor:
    return (output.float() - 0.1 * micro_batch).square().mean()


def _bits(modules: Sequence[nn.Module]) -> list[bytes]:
    gradients = [one.grad for module in modules for one in module.parameters() if one.grad is not None]
    return [one.float().cpu().numpy().tobytes() for one in gradients]


def without_pipeline(case: Case) -> list[bytes]:
    schedule = case.program.schedule
    modules = [case.made(position) for position in range(schedule.stages * schedule.chunks)]
    for micro_batch in range(schedule.micro_batches):
        value = _given(case, micro_batch)
        for module in modules:
            value = module(value)
        _loss(micro_batch, value).backward()
    return _bits(modules)


class Result(NamedTuple):
    bits: list[bytes]
    lasting: Counter[str]


def gradients_of(case: Case, loops: Loops, sanitized: bool = False) -> Result:
    """The gradients, by position in the model, of one batch of all stages; and the bytes that stay, by type."""
    schedule, turns, device = case.program.schedule, Turns(), loops.device
    on_gpu = device.type == "cuda"
    places = schedule.places
    modules = [case.made(position) for position in range(schedule.stages * schedule.chunks)]
    connections = loops.connected(case.program, turns)
    errors, lasting = list[BaseException](), Counter[str]()

    def stage(number: int) -> None:
        mine = [modules[places.position(number, chunk)] for chunk in range(schedule.chunks)]
        parameters = [parameter for module in mine for parameter in module.parameters()]
        executor = Executor(number, connections[number], device, parameters)
        of_class: Any = ModuleStage if case.keeping is None else keeper_cases().KeptStage
        loss_chunk = places.last.chunk if number == places.last.stage else None
        edges = Edges.alike(case.boundary, schedule.chunks)
        part = of_class(mine, edges, lambda i: _given(case, i), _loss, loss_chunk)
        if case.keeping is not None:
            executor.keeper = part.keeper = Keeper(executor.store, device, _LateHostLink(device))
            part.keeping = case.keeping
        if case.swap is not None:
            executor.swaps = HostSwaps(executor.store, device, case.swap, _LateHostLink(device))
        executor.run(case.program, part)
        executor.store.assert_empty()
        lasting.update(executor.store.lasting_bytes)

    def work(number: int) -> None:
        with turns.turn:
            try:
                with _stream_of_its_own(device), _sanitizing(sanitized):
                    stage(number)
            except BaseException as error:
                errors.append(error)
                turns.failed.set()

    if on_gpu:
        torch.cuda.synchronize()
    with _poisoned():
        threads = [Thread(target=work, args=(number,), daemon=True) for number in range(schedule.stages)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if on_gpu:
        torch.cuda.synchronize()
    if errors:
        raise errors[0]
    return Result(_bits(modules), lasting)


@contextmanager
def _stream_of_its_own(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


@contextmanager
def _poisoned() -> Iterator[None]:
    """Memory that has left, or whose guest has, is NaN from when the stage has waited for that.

    What has been packed is free at once: memory like it is taken, filled and let go of.
    """
    let_go, complete = Flow.let_go, Flow.complete
    ship, release = ActivationStore.ship, ActivationStore.release

    def completing(flow: Flow, message: Any) -> None:
        flow.completes = True  # type: ignore[attr-defined]
        complete(flow, message)
        flow.completes = False  # type: ignore[attr-defined]

    def letting_go(flow: Flow, action: Action) -> Any:
        slot = flow.guests[action.unit].slot if action.kind == RETURN else None
        vacated = let_go(flow, action)
        if getattr(flow, "completes", False):  # else something else is on its way into it
            for storage in vacated:
                storage.fill_(0xFF)  # type: ignore[attr-defined]
            if slot is not None:
                slot.buffer.fill_(0xFF)
        return vacated

    def shipping(store: ActivationStore, key: Any, to: Destination = "partner") -> Any:
        recording = store._recordings.get(key)
        sizes = [
            saved.nbytes
            for one in (recording.departures[to].sealed if recording else ())
            if (saved := one()) is not None
        ]
        message = ship(store, key, to)
        for nbytes in sizes:
            torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=store._device)
        return message

    def releasing(store: ActivationStore, key: Any, to: Destination = "partner") -> Any:
        vacated = release(store, key, to)
        for storage in vacated if to == "host" else ():
            storage.fill_(0xFF)  # type: ignore[attr-defined]
        return vacated

    with (
        patch.object(Flow, "complete", completing),
        patch.object(Flow, "let_go", letting_go),
        patch.object(ActivationStore, "ship", shipping),
        patch.object(ActivationStore, "release", releasing),
    ):
        yield


@contextmanager
def unwaited() -> Iterator[None]:
    """Evictions are let go of without a wait: what must not be."""
    complete = Flow.complete

    def completing(flow: Flow, message: Any) -> None:
        action = flow.actions.get(message)
        if action is not None and action.kind == EVICT:
            held = flow.under_way[message]
            flow.under_way[message] = cast(Any, _Through(held))
        complete(flow, message)

    with patch.object(Flow, "complete", completing):
        yield


class _Through:
    """A transfer that is taken to be through, and keeps its tensors alive."""

    kept: Final = list[Any]()

    def __init__(self, transfer: Any) -> None:
        self.kept.append(transfer)

    def wait(self) -> None:
        """It is not."""


class _LateHostLink(HostLink):
    """Copies start late on a GPU; on the host they are done when they have started."""

    def out(self, memory: Tensor) -> Passage:
        self._hold_up(memory)
        return super().out(memory)

    def back(self, host: Block, memory: Tensor) -> Passage:
        self._hold_up(memory)
        return super().back(host, memory)

    def _hold_up(self, memory: Tensor) -> None:
        if memory.is_cuda:
            for stream in (self._out, self._back):
                with torch.cuda.stream(cast(Any, stream)):
                    sleep_on_device(5e-4)


def keeper_cases() -> Any:
    folder = str(Path(__file__).parents[2] / "tests" / "runtime")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return import_module("keeper_cases")


@contextmanager
def _sanitizing(on: bool) -> Iterator[None]:
    """The process' sanitizer, in this thread too."""
    if not on:
        yield
        return
    from torch.utils._python_dispatch import TorchDispatchMode

    dispatch = _dispatch()

    class InThisThread(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten.set_:  # taken for a write, of memory that may still leave
                return func(*args, **(kwargs or {}))
            return dispatch.__torch_dispatch__(func, types, args, kwargs)

    with InThisThread():
        yield


def _dispatch() -> Any:
    from torch.cuda._sanitizer import cuda_sanitizer

    assert "TORCH_CUDA_SANITIZER" in os.environ, "streams and events are traced from the start"
    return cuda_sanitizer.dispatch


def seen_by_sanitizer(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Tell the sanitizer what a message reads and writes on the current stream."""
    read, written = ({tensor.data_ptr() for tensor in tensors} for tensors in (sources, targets))
    aliases = {pointer: ["message"] for pointer in read | written}
    stream = torch.cuda.current_stream().cuda_stream
    errors = _dispatch().event_handler._handle_kernel_launch(stream, read - written, written, set(), "message", aliases)
    if errors:
        from torch.cuda._sanitizer import CUDASanitizerErrors

        for error in errors:
            print(error, file=sys.stderr)
        raise CUDASanitizerErrors(errors)
