"""Variables in the environment that slow a job down, keep it from starting, or hide why it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from evenpipe.doctor.finding import Finding, fine, noted, problem

__all__ = ["environment"]

_NCCL: Final = "NCCL's documentation, environment variables"
_TORCH: Final = "torch's documentation, ProcessGroupNCCL environment variables"
_DISTRIBUTED: Final = "torch's documentation, torch.distributed"
_CUDA: Final = "CUDA's programming guide, environment variables"
_ALLOCATOR: Final = "torch's documentation, CUDA memory management"


class _Row(NamedTuple):
    """A variable that hurts at some values. ``mild``: that is only worth a note; with one node, if ``mild_alone``."""

    name: str
    hurts: Callable[[str], bool]
    why: str
    source: str
    remedy: str = "unset it"
    mild: bool = False
    mild_alone: bool = False


def _among(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in values


def _loopback(value: str) -> bool:
    return value.lstrip("=").split(",") == ["lo"]


_ON, _OFF, _NEVER = _among("1", "true", "y", "yes", "on"), _among("0", "false", "n", "no", "off"), _among("loc", "0")
_OVERRIDES: Final = "overrides what NCCL would choose for each size"
_LOOPBACK: Final = ("the loopback leads to no other node", "name the network between nodes, such as eth0")
_WAITS: Final = "the host waits for every collective"
_FOR_EVER: Final = "when a rank dies, the others wait for ever"
_ROWS: Final = (
    _Row("NCCL_P2P_DISABLE", _ON, "GPUs of a node talk through the host's memory", _NCCL),
    _Row("NCCL_P2P_LEVEL", _NEVER, "GPUs never talk directly", _NCCL),
    _Row("NCCL_SHM_DISABLE", _ON, "GPUs without a direct path talk over the network", _NCCL),
    _Row("NCCL_IB_DISABLE", _ON, "nodes talk over TCP, InfiniBand stays unused", _NCCL, mild_alone=True),
    _Row(
        *("NCCL_NET_GDR_LEVEL", _NEVER, "what goes to another node is copied through the host's memory", _NCCL),
        mild_alone=True,
    ),
    _Row("NCCL_SOCKET_IFNAME", _loopback, _LOOPBACK[0], _NCCL, _LOOPBACK[1], mild_alone=True),
    _Row("GLOO_SOCKET_IFNAME", _loopback, _LOOPBACK[0], _DISTRIBUTED, _LOOPBACK[1], mild_alone=True),
    _Row("NCCL_DEBUG", _among("trace"), "every call is logged", _NCCL, "use WARN"),
    _Row(
        *("NCCL_DEBUG", _among("info"), "logs what every communicator does: long logs on many ranks", _NCCL),
        *("use WARN, but to find a fault", True),
    ),
    _Row("NCCL_ALGO", bool, _OVERRIDES, _NCCL, mild=True),
    _Row("NCCL_PROTO", bool, _OVERRIDES, _NCCL, mild=True),
    _Row(
        "NCCL_BUFFSIZE",
        lambda value: value.isdecimal() and int(value) > 4 << 20,
        "every communicator takes more of the GPU's memory, and links have one each",
        _NCCL,
        mild=True,
    ),
    _Row("CUDA_LAUNCH_BLOCKING", _ON, "the host waits for every kernel, nothing overlaps", _CUDA),
    _Row("CUDA_VISIBLE_DEVICES", _among("", "-1"), "hides all GPUs", _CUDA, mild=True),
    _Row("TORCH_NCCL_BLOCKING_WAIT", _ON, _WAITS, _TORCH),
    _Row("NCCL_BLOCKING_WAIT", _ON, f"{_WAITS} (old name)", _TORCH),
    _Row("TORCH_NCCL_ASYNC_ERROR_HANDLING", _OFF, _FOR_EVER, _TORCH),
    _Row("NCCL_ASYNC_ERROR_HANDLING", _OFF, _FOR_EVER, _TORCH),
    _Row(
        *("TORCH_NCCL_ENABLE_MONITORING", _OFF, "nobody notices when NCCL's watchdog itself is stuck", _TORCH),
        mild=True,
    ),
    _Row(
        *("TORCH_DISTRIBUTED_DEBUG", _among("detail"), "every collective is compared between all ranks first"),
        *(f"{_DISTRIBUTED}, debugging", "unset it, or use INFO"),
    ),
    _Row("TORCH_CPP_LOG_LEVEL", _among("info"), "torch logs a lot", _TORCH, "use WARNING", mild=True),
    _Row(
        *("PYTORCH_NO_CUDA_MEMORY_CACHING", bool, "every tensor is a cudaMalloc, which waits for the device"),
        _ALLOCATOR,
    ),
)


def environment(
    environ: Mapping[str, str], several_nodes: bool, tensor_parallel: int | None = None
) -> Iterator[Finding]:
    """Findings for ``environ``; ``tensor_parallel`` None where it is not known."""
    found = [*_rows(environ, several_nodes), *_connections(environ, tensor_parallel)]
    yield from found or [fine("environment", "nothing in it that is known to hurt")]
    yield from _allocator(environ)


def _rows(environ: Mapping[str, str], several_nodes: bool) -> Iterator[Finding]:
    for row in _ROWS:
        value = environ.get(row.name)
        if value is not None and row.hurts(value):
            said = f"{row.name}={value}: {row.why} ({row.source})"
            mild = row.mild or (row.mild_alone and not several_nodes)
            yield (noted if mild else problem)("environment", said, row.remedy)


def _connections(environ: Mapping[str, str], tensor_parallel: int | None) -> Iterator[Finding]:
    """CUDA_DEVICE_MAX_CONNECTIONS, which is right or wrong by what else runs."""
    value = environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    name = f"CUDA_DEVICE_MAX_CONNECTIONS={value}"
    if value == "1" and tensor_parallel == 1:
        yield problem(
            "environment",
            f"{name} without tensor parallelism: all work passes one queue, where a message holds up what comes behind "
            f"it, so that EvenPipe puts messages off ({_CUDA})",
            "unset it",
        )
    elif value == "1" and tensor_parallel is None:
        yield noted(
            "environment",
            f"{name}: all work passes one queue, which helps tensor parallelism only, before Blackwell ({_CUDA})",
            "keep it with tensor or context parallelism only; --tensor-parallel T tells the doctor",
        )
    elif value is not None and value.isdecimal() and 1 < int(value) <= 8 and tensor_parallel in (None, 1):
        yield noted(
            "environment",
            f"{name}: a rank has streams for compute, each link and each group, and those that share a queue hold each "
            f"other up; EvenPipe counts them at start ({_CUDA})",
            "set it to 32",
        )


def _allocator(environ: Mapping[str, str]) -> Iterator[Finding]:
    names = [name for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if name in environ]
    if len({environ[name] for name in names}) > 1:
        yield problem("allocator", f"{' and '.join(names)} contradict each other", "keep one of them")
    if not names:
        yield noted(
            "allocator",
            f"torch's defaults: segments do not grow, which leaves gaps between sizes ({_ALLOCATOR})",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
        return
    name, value = names[0], environ[names[0]]
    # A key that torch does not know stops the job itself, when it first allocates.
    given = {key.strip(): setting.strip() for key, _, setting in (part.partition(":") for part in value.split(","))}
    if given.get("backend") == "cudaMallocAsync":
        yield noted("allocator", f"{name}={value}: peaks and limits are the driver's, which EvenPipe does not see")
    elif given.get("expandable_segments", "").lower() != "true":
        yield noted("allocator", f"{name}={value}: segments do not grow", "add expandable_segments:True")
    else:
        yield fine("allocator", f"{name}={value}")
