"""Four gloo processes in training, one of which stops, and what each of the others says at its end.

Arguments: a folder, the case, and "bpipe" or "plain". Cases: "amid" (rank 2 stops within a batch), "watched" (the same,
where its neighbours watch it), "before" (rank 2 never opens its links), "opening" (it stops as it opens the one to rank
3, after it has told that it waits for that rank), "one connection" (the same, where stores cannot be cloned), "figures"
(it stops where all exchange figures) and "barrier" (where a script has them wait for each other).
Writes outcome.json: per rank that ended, seconds from when rank 2 stopped, and its standard error.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from evenpipe.runtime import connections, heartbeat
from evenpipe.runtime.exchange import Exchange
from evenpipe.runtime.heartbeat import silent_peer
from evenpipe.schedule import Size, build
from evenpipe.torch.pipeline import ModulePipeline
from evenpipe.upstream.ending import end_with_the_first_error

STAGES, SILENT, TIMEOUT = 4, 2, timedelta(seconds=12)


class Part(torch.nn.Linear):
    """On one rank, stands still in its twentieth forward."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == 20 and dist.get_rank() == SILENT:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(x)


def stopping(open_group: Callable[..., object]) -> Callable[..., object]:
    """The same, where the silent rank stands still at the link to the next."""

    def opened(kind: str, source: int, *arguments: object) -> object:
        if source == SILENT == dist.get_rank():
            time.sleep(TIMEOUT.total_seconds() / 10)
            os.kill(os.getpid(), signal.SIGSTOP)
        return open_group(kind, source, *arguments)

    return opened


def train(rank: int, case: str, bpipe: bool, store: TCPStore) -> None:
    end_with_the_first_error(silent_peer)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=STAGES, timeout=TIMEOUT)
    if case == "before" and rank == SILENT:
        os.kill(os.getpid(), signal.SIGSTOP)
    if case in ("opening", "one connection"):
        connections._open_group = stopping(connections._open_group)
    if case == "one connection":
        heartbeat.apart = lambda store: None
    if case == "watched":  # as where links are NCCL's
        watched = connections.watched
        connections.watched = lambda device, channels: watched("cuda", channels)
    program = build("1f1b", Size(STAGES, 6), bpipe=bpipe)
    mse = torch.nn.functional.mse_loss
    pipeline = ModulePipeline(lambda position: Part(4, 4), program, mse, boundary=torch.empty(2, 4))
    if case in ("figures", "barrier"):
        exchange = Exchange(dist.new_group(backend="gloo"), 1, torch.device("cpu"))  # whose timeout is half an hour
        if rank == SILENT:
            os.kill(os.getpid(), signal.SIGSTOP)
        if case == "barrier":
            dist.barrier()
        exchange.start([1.0])
        exchange.finish()
    for _ in range(10):
        pipeline.step(torch.ones(12, 4), torch.zeros(12, 4))


def main(folder: Path, case: str, bpipe: bool) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port, processes = server.getsockname()[1], []
        for rank in range(STAGES):
            process = os.fork()
            if not process:
                os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
                train(rank, case, bpipe, TCPStore("localhost", port, is_master=False, timeout=TIMEOUT))
                return
            processes.append(process)
        descriptor = server.detach()
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    os.waitpid(processes[SILENT], os.WUNTRACED)
    stopped, ended = time.monotonic(), {}
    while len(ended) < STAGES - 1:
        process, _ = os.wait()
        ended[processes.index(process)] = time.monotonic() - stopped
    os.kill(processes[SILENT], signal.SIGKILL)
    outcome = {rank: (seconds, (folder / f"{rank}.err").read_text()) for rank, seconds in ended.items()}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    del store


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "bpipe")
