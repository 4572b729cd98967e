"""One process of a part: its device, its worlds, and the rows that it writes down.

python -m benchmarks.gpu.rank MODULE ARGUMENT PLACE RANK RANKS FOLDER; FOLDER has the ranks' store and rows.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from .staged import stage_messages

__all__ = ["ENDED", "UNDER_WAY", "Rank"]

UNDER_WAY: Final = "under way"
ENDED: Final = "ended"  # said of a case by each of its ranks
_TIMEOUT: Final = timedelta(minutes=2)
_T = TypeVar("_T")


class Rank:
    """Rank `number` of `ranks`.

    At place "nccl" each has a GPU; at "nccl-shared" all share one, over NCCL; at "shared" all share one, and at "cpu"
    there is none: there messages are staged.
    """

    def __init__(self, place: str, number: int, ranks: int, folder: Path) -> None:
        self.place, self.number, self.ranks = place, number, ranks
        self.folder, self._worlds = folder, Counter[int]()
        self._store = dist.FileStore(str(folder / "store"), ranks)
        self.device = torch.device("cpu")
        if place == "cpu":
            torch.set_num_threads(1)
        else:
            self.device = torch.device("cuda", number if place == "nccl" else 0)
            torch.cuda.set_device(self.device)
        staged = torch.cuda.synchronize if self.over_nccl else stage_messages(self.device)
        #: Wait for all that the device has been given, messages that have been posted as well.
        self.synchronise = staged if place == "cpu" else torch.cuda.synchronize

    @property
    def over_nccl(self) -> bool:
        """Return whether ranks are joined by NCCL."""
        return self.place.startswith("nccl")

    def pick(self, on_gpu: _T, on_cpu: _T) -> _T:
        """Sizes: what is a measurement on a GPU is plumbing on the CPU."""
        return on_cpu if self.place == "cpu" else on_gpu

    def row(
        self,
        what: str,
        value: float | str | Sequence[float],
        unit: str = "",
        predicted: float | Sequence[float] | None = None,
    ) -> None:
        """Write down a number, one of each stage, or a word, which has no unit; a later row on the same replaces it."""
        row = {"what": what, "value": value, "unit": unit, "predicted": predicted}
        self._write({key: each for key, each in row.items() if each not in ("", None)})

    def unchecked(self, what: str, why: str) -> None:
        """Say, once for all ranks, what is not looked at."""
        if self.number == 0:
            self._write({"unchecked": what, "why": why})

    def expect(self, cases: Iterable[str]) -> None:
        """Say beforehand what there will be rows of, so that what a part does not come to can be named."""
        if self.number == 0:
            self._write({"expected": [*cases]})

    def _write(self, entry: dict[str, object]) -> None:
        with open(self.folder / f"rows-{self.number}.jsonl", "a", encoding="utf-8") as file:
            print(json.dumps(entry), file=file)

    def tell(self, key: str, value: str) -> None:
        """Have `heard` give the value on any rank."""
        self._store.set(key, value)

    def heard(self, key: str) -> str:
        """Wait for what a rank has sent, and return it."""
        return self._store.get(key).decode()

    @contextmanager
    def world(self, size: int) -> Iterator[None]:
        """torch.distributed between the first `size` ranks; each world is a new one. All of these enter it."""
        self._worlds[size] += 1
        store = PrefixStore(f"world {self._worlds[size]} of {size}", self._store)
        backend = "cpu:gloo,cuda:nccl" if self.over_nccl else "gloo"
        dist.init_process_group(backend, store=store, rank=self.number, world_size=size, timeout=_TIMEOUT)
        yield
        self.meet()
        dist.destroy_process_group()

    def meet(self) -> None:
        """Wait, on the host, until the others of the world are here."""
        dist.all_reduce(torch.zeros(1))


def _main() -> None:
    module, argument, place, number, ranks, folder = sys.argv[1:]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if place == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        rank = Rank(place, int(number), int(ranks), Path(folder))
        import_module(f"benchmarks.gpu.{module}").run(rank, *([argument] if argument else []))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads that wait for a peer would hold up the end


if __name__ == "__main__":
    _main()
