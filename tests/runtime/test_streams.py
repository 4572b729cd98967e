"""Streams, events, pinned memory and allocators of devices are known to one module of the runtime only."""

import ast
import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evenpipe import runtime
from evenpipe.runtime import streams

HOST = torch.device("cpu")
ROOM = Path(runtime.__file__).parent
#: Attributes and keyword arguments by which one gets at a device's streams or memory.
OF_STREAMS = {"cuda", "accelerator", "get_device_module", "is_cuda", "pin_memory", "record_stream"}
#: The same of torch itself, where `streams` has names like them; and the start of the names of its C functions.
OF_TORCH = {"Stream", "Event"}
OF_C = "_cuda_"


def uses(source: str) -> list[int]:
    """The lines of `source` that get at streams, pinned memory or allocators by other ways than `streams`.

    Lines that copy to the host by `to` count too: the checker of races runs on CPU tensors, where that is no operation.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "to" and "'cpu'" in ast.unparse(node):
            found.append(node.lineno)
        names = {getattr(node, "attr", None), getattr(node, "arg", None)}
        if isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) else getattr(node, "module", None)
        known = OF_STREAMS | (OF_TORCH if owner == "torch" else set())
        if names & known or any(name and name.startswith(OF_C) for name in names):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.Stream()",
        "import torch.cuda",
        "from torch import cuda as c",
        "from torch.cuda import Event",
        "tensor.record_stream(stream)",
        "tensor.pin_memory()",
        "torch.empty(1, pin_memory=True)",
        "tensor.is_cuda",
        "torch.Stream(device)",
        "torch.Event(device)",
        "from torch import Event as E",
        "torch.get_device_module(device)",
        "torch._C._cuda_getCurrentRawStream(0)",
        "from torch._C import _cuda_setStream",
        'tensor.to("cpu", non_blocking=True)',
        "tensor.to(device=torch.device('cpu'))",
    ],
)
def test_every_way_to_streams_is_seen(source: str) -> None:
    assert uses(source) == [1]


def test_streams_of_the_runtime_are_no_way_to_torch_s() -> None:
    assert uses("def opened(stream: streams.Stream) -> streams.Event: ...") == []


def test_no_other_module_of_the_runtime_gets_at_streams() -> None:
    found = {path.name: lines for path in ROOM.glob("*.py") if (lines := uses(path.read_text()))}
    assert set(found) == {"streams.py"}, found


def test_on_the_host_all_is_done_at_once() -> None:
    stream = streams.opened(HOST)
    assert not streams.is_asynchronous(HOST)
    stream.wait_stream(streams.current(HOST))
    with streams.on(stream):
        memory = streams.pinned(HOST, 3)
        event = stream.record_event()
    streams.current(HOST).wait_event(event)
    assert memory.dtype == torch.uint8
    assert memory.numel() == 3
    start, end = streams.timed_event(HOST), streams.timed_event(HOST)
    assert 0.0 <= start.elapsed_time(end) < 1e3


def test_streams_that_are_one_to_the_device_are_named() -> None:
    """By their handles, where they show them, as torch's streams of CUDA do and those of the host do not."""
    dealt = [SimpleNamespace(cuda_stream=handle) for handle in (0, 7, 9, 7, 0)]
    compute, load, evict, layer, default = dealt
    assert streams.sharing({"compute": compute, "load": load, "evict": evict}) == ""
    assert streams.sharing({"one": streams.opened(HOST), "other": streams.opened(HOST)}) == ""
    said = streams.sharing({"compute": compute, "load": load, "layer": layer, "evict": evict, "default": default})
    assert said == (
        "streams: compute and default; load and layer share one cudaStream, so that each waits for the other: torch "
        "deals 32 of a priority in turn; have other code open fewer streams of priority -1"
    )


def flags_of(address: int) -> list[str]:
    """Return the flags of the mapping at this address (proc_pid_smaps(5)); "dc": a fork does not copy it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(one, 16) for one in span.groups())
            inside = start <= address < end
        if inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("nothing is mapped there")


def test_pinned_memory_is_registered_until_nobody_has_it_and_no_larger_than_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Views have it too. A driver that keeps book stands for CUDA's, and reads what it is given."""
    registered = dict[int, int]()

    def unregister(address: int) -> None:
        ctypes.string_at(address, registered.pop(address))  # a fault, were it no longer mapped

    driver = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: registered.__setitem__(address, nbytes),
        cudaHostUnregister=unregister,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    waited, device = list[torch.device](), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    memory = streams.KINDS["cuda"].pinned(device, 3 << 20)
    assert registered == {memory.data_ptr(): 3 << 20}
    assert "dc" in flags_of(memory.data_ptr()), "a child would have a copy"
    part = memory[-64:]
    del memory
    assert len(registered) == 1
    part.fill_(1)
    del part
    assert registered == {}
    assert waited == [device], "which need not be the current one"


def test_events_are_of_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the current one, of which `record` takes a stream where it is given none."""
    recorded = list[object]()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(record=recorded.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    streams.timed_event(torch.device("cuda", 1))
    assert recorded == ["stream of cuda:1"]
