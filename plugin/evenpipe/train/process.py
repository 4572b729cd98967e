"""The life of one training process: environment, cases one by one, failures reported."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from evenpipe.runtime.heartbeat import silent_peer
from evenpipe.train.engine import FailureContext, engine_module
from evenpipe.train.options import OptionsError, TrainOptions
from evenpipe.train.result import STOPPING, Failure, Iteration, Report, Results, Stopping
from evenpipe.train.run import run_case
from evenpipe.train.saver import StopRequest

__all__ = ["train_cases"]


def train_cases(
    cases: tuple[TrainOptions, ...], device_type: str, rank: int, port: int, run: str, reports: Connection
) -> None:
    """Run `cases` one after the other, each in a torch.distributed world of its own; results are of rank 0 only.

    port: where the store listens in which processes meet. run: names the run in checkpoints; it owns the folders that
    are saved to. With --save, a signal of STOPPING has the case under way save, and is the last. All cases use engines
    of one module. Never raises: an error is reported, and ends the process with status 1.
    """
    gc.freeze()  # what is imported stays: the collector need not walk it in every process, 0.8 s a collection
    failure = FailureContext(0)
    try:
        _end_with_the_parent()
        _environment(device_type, rank, cases)
        device = _device(device_type, rank)
        engine_module(cases[0].engine).prepare(device)
        timeout = timedelta(minutes=cases[0].timeout_minutes)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        stop = StopRequest() if any(options.save is not None for options in cases) else None
        results = []
        for number, options in enumerate(cases):
            failure = FailureContext(rank // (options.data_parallel * options.tensor_parallel))

            def tell(report: Report, case: int = number) -> None:
                reports.send(report._replace(case=case) if isinstance(report, Iteration) else report)

            with _world(PrefixStore(f"case {number}", store), rank, options.world_size, device, timeout) as host_group:
                result = run_case(options, device, failure, tell, host_group, stop, run)
            if result is not None:
                results.append(result)
            if stop is not None and stop.number is not None:
                reports.send(Stopping(stop.number))
                break
        reports.send(Results(results))
    except BaseException as error:
        reports.send(_failure(silent_peer(error) or error, failure))
        # Not sys.exit: process groups wait for their peers when they are torn down.
        os._exit(1)


def _end_with_the_parent() -> None:
    """A parent that is killed cannot end its processes; each of them sees to that itself."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="evenpipe-parent", daemon=True).start()


def _environment(device_type: str, rank: int, cases: tuple[TrainOptions, ...]) -> None:
    # A signal must end a process even while it waits for a peer, where Python's handlers do not run.
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(cases[0].world_size)})
    # Megatron asks for one queue where tensors are sharded; elsewhere each stream is to have its own: CUDA's most.
    sharded = any(options.tensor_parallel > 1 for options in cases)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if sharded else "32"
    if device_type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        # CPU mode is refused where CUDA is available, and too few GPUs are as good as none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _device(device_type: str, rank: int) -> torch.device:
    """This process' device, made ready."""
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


@contextmanager
def _world(
    store: Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> Iterator[dist.ProcessGroup | None]:
    """torch.distributed initialised inside; gives a group for host memory (None: the default group will do).

    A world a case: nothing of a case, its process groups least of all, is left to the next one.
    """
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if cuda else None,
    )
    yield dist.new_group(backend="gloo", timeout=timeout) if cuda else None
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()


def _failure(error: BaseException, context: FailureContext) -> Failure:
    message = str(error).strip().partition("\n")[0]
    of_options = isinstance(error, OptionsError)
    is_line = of_options or getattr(error, "one_line", False)
    return Failure(
        clock=time.monotonic(),
        stage=context.stage,
        position=context.position,
        error=message if is_line else f"{type(error).__name__}: {message}" if message else type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
        of_options=of_options,
    )
