"""Variables in the environment that slow a job down, keep it from starting, or hide why it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from evenpipe.doctor.finding import Finding, fine, noted, problem

__all__ = ["environment"]

_NCCL: Final = "NCCL's documentation, environment variables"
_TORCH: Final = "torch's documentation, ProcessGroupNCCL environment variables"
_CUDA: Final = "CUDA's programming guide, environment variables"
_ALLOCATOR: Final = "torch's documentation, CUDA memory management"

#: Keys of PYTORCH_CUDA_ALLOC_CONF; torch stops at others when it first allocates.
_ALLOCATOR_KEYS: Final = frozenset(
    (
        *("backend", "max_split_size_mb", "max_non_split_rounding_mb", "roundup_power2_divisions"),
        *("roundup_bypass_threshold_mb", "garbage_collection_threshold", "expandable_segments"),
        *("release_lock_on_cudamalloc", "pinned_use_cuda_host_register", "pinned_num_register_threads"),
        *("pinned_use_background_threads", "pinned_reserve_segment_size_mb", "graph_capture_record_stream_reuse"),
        *("per_process_memory_fraction", "pinned_max_power2_size_mb", "pinned_max_round_threshold_mb"),
    )
)


class _Row(NamedTuple):
    """A variable that hurts at some values. ``nodes``: with one node it is only worth a note."""

    name: str
    hurts: Callable[[str], bool]
    why: str
    remedy: str
    source: str
    nodes: bool = False
    note: bool = False


def _on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "y", "yes", "on")


def _off(value: str) -> bool:
    return value.strip().lower() in ("0", "false", "n", "no", "off")


def _loopback(value: str) -> bool:
    return value.lstrip("=").split(",") == ["lo"]


_ROWS: Final = (
    _Row("NCCL_P2P_DISABLE", _on, "GPUs of a node talk through the host's memory", "unset it", _NCCL),
    _Row("NCCL_P2P_LEVEL", lambda v: v.upper() in ("LOC", "0"), "GPUs never talk directly", "unset it", _NCCL),
    _Row("NCCL_SHM_DISABLE", _on, "GPUs without a direct path talk over the network", "unset it", _NCCL),
    _Row("NCCL_IB_DISABLE", _on, "nodes talk over TCP, InfiniBand stays unused", "unset it", _NCCL, nodes=True),
    _Row(
        "NCCL_NET_GDR_LEVEL",
        lambda v: v.upper() in ("LOC", "0"),
        "what goes to another node is copied through the host's memory",
        "unset it",
        _NCCL,
        nodes=True,
    ),
    _Row(
        "NCCL_SOCKET_IFNAME",
        _loopback,
        "the loopback leads to no other node",
        "name the network between nodes, such as eth0",
        _NCCL,
        nodes=True,
    ),
    _Row(
        "GLOO_SOCKET_IFNAME",
        _loopback,
        "the loopback leads to no other node",
        "name the network between nodes, such as eth0",
        "torch's documentation, torch.distributed",
        nodes=True,
    ),
    _Row("NCCL_DEBUG", lambda v: v.upper() == "TRACE", "every call is logged", "use WARN", _NCCL),
    _Row(
        "NCCL_DEBUG",
        lambda v: v.upper() == "INFO",
        "logs what every communicator does: long logs on many ranks",
        "use WARN, but to find a fault",
        _NCCL,
        note=True,
    ),
    _Row("NCCL_ALGO", bool, "overrides what NCCL would choose for each size", "unset it", _NCCL, note=True),
    _Row("NCCL_PROTO", bool, "overrides what NCCL would choose for each size", "unset it", _NCCL, note=True),
    _Row(
        "NCCL_BUFFSIZE",
        lambda v: v.isdecimal() and int(v) > 4 << 20,
        "every communicator takes more of the GPU's memory, and links have one each",
        "unset it",
        _NCCL,
        note=True,
    ),
    _Row("CUDA_LAUNCH_BLOCKING", _on, "the host waits for every kernel, nothing overlaps", "unset it", _CUDA),
    _Row("CUDA_VISIBLE_DEVICES", lambda v: v.strip() in ("", "-1"), "hides all GPUs", "unset it", _CUDA, note=True),
    _Row("TORCH_NCCL_BLOCKING_WAIT", _on, "the host waits for every collective", "unset it", _TORCH),
    _Row("NCCL_BLOCKING_WAIT", _on, "the host waits for every collective (old name)", "unset it", _TORCH),
    _Row(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _off,
        "when a rank dies, the others wait for ever",
        "unset it",
        _TORCH,
    ),
    _Row("NCCL_ASYNC_ERROR_HANDLING", _off, "when a rank dies, the others wait for ever", "unset it", _TORCH),
    _Row(
        "TORCH_NCCL_ENABLE_MONITORING",
        _off,
        "nobody notices when NCCL's watchdog itself is stuck",
        "unset it",
        _TORCH,
        note=True,
    ),
    _Row(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda v: v.upper() == "DETAIL",
        "every collective is compared between all ranks first",
        "unset it, or use INFO",
        "torch's documentation, torch.distributed, debugging",
    ),
    _Row("TORCH_CPP_LOG_LEVEL", lambda v: v.upper() == "INFO", "torch logs a lot", "use WARNING", _TORCH, note=True),
    _Row(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        bool,
        "every tensor is a cudaMalloc, which waits for the device",
        "unset it",
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
            mild = row.note or (row.nodes and not several_nodes)
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
    elif value not in (None, "1") and (tensor_parallel or 1) > 1:
        yield noted(
            "environment",
            f"{name}: with tensor parallelism Megatron refuses it on GPUs before Blackwell",
            "set it to 1 on these",
        )
    elif value is not None and value.isdecimal() and 1 < int(value) <= 8:
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
    given = {key.strip(): said.strip() for key, _, said in (part.partition(":") for part in value.split(",")) if key}
    unknown = [key for key in given if key not in _ALLOCATOR_KEYS]
    if unknown or not all(given.values()):
        wrong = unknown[0] if unknown else next(key for key, said in given.items() if not said)
        yield problem(
            "allocator",
            f"{name}={value}: {wrong} is no setting, at which torch stops when it first allocates ({_ALLOCATOR})",
            "correct it; it is KEY:VALUE,KEY:VALUE, such as expandable_segments:True",
        )
    elif given.get("backend") == "cudaMallocAsync":
        yield noted("allocator", f"{name}={value}: peaks and limits are the driver's, which EvenPipe does not see")
    elif given.get("expandable_segments", "").lower() != "true":
        yield noted("allocator", f"{name}={value}: segments do not grow", "add expandable_segments:True")
    else:
        yield fine("allocator", f"{name}={value}")
