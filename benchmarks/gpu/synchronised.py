"""Whether a pipeline comes to its end, whatever waits for the device in the middle of it.

The argument says what waits: "device" (a synchronisation before and after every action), "allocator" (there, a retry of
the caching allocator, which waits and gives memory back), "nothing" but what the part's environment asks for, or
"posted-ahead": the device, with receives k + 1 actions ahead of their use. That must hang, or the others show nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from evenpipe.schedule import Action
from evenpipe.train.engine import FailureContext, Recorder

from .rank import ENDED, UNDER_WAY, Rank
from .training import evicting_group, options_of, train

__all__ = ["run"]

_MODEL: Final = {"layers": 8, "engine": "module", "precision": "bf16", "iterations": 2}
_SIZES: Final = ({"hidden": 256}, {"hidden": 32, "seq_length": 32})
_BLOCK: Final = 64 << 20


def run(rank: Rank, waiting: str) -> None:
    waits = {
        "device": rank.synchronise,
        "posted-ahead": rank.synchronise,
        "allocator": _retry,
        "nothing": lambda: None,
    }[waiting]
    k = evicting_group(rank.ranks)
    cases: dict[str, dict[str, Any]] = {
        "1f1b": {},
        "1f1b with BPipe": {"bpipe": True},
        f"{k}F{k}B with BPipe": {"schedule": "kfkb", "group_size": k, "bpipe": True},
        "2bw": {"schedule": "2bw", "iterations": 3},  # the last of which gathers as in steady state
        "interleaved": {"schedule": "interleaved", "chunks": 2},
        "gpipe": {"schedule": "gpipe"},
        "v-half": {"schedule": "v-half"},
    }
    if waiting == "posted-ahead":
        cases = {"1f1b": {}}
    rank.expect(cases)
    for name, case in cases.items():
        options = options_of(rank, name, **{**_MODEL, **rank.pick(*_SIZES), **case, "stages": rank.ranks})
        if options is None:
            continue
        recorder = Waiting(rank.number, waits, partial(rank.row, name, UNDER_WAY))
        train(rank, options, recorder, _post_ahead if waiting == "posted-ahead" else lambda _: None)
        rank.row(name, ENDED)
    if waiting == "allocator":
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if rank.device.type == "cuda" else 0
        rank.row(f"retries of stage {rank.number}", retries, "retries")


class Waiting(Recorder):
    """Before and after every action, it waits; before the first, `begin` is called."""

    def __init__(self, stage: int, wait: Callable[[], object], begin: Callable[[], object]) -> None:
        super().__init__(FailureContext(stage))
        self._wait = wait
        self._begin: Callable[[], object] | None = begin

    def started(self, action: Action) -> None:
        if self._begin is not None:
            self._begin()
            self._begin = None
        self._wait()
        super().started(action)

    def ended(self, action: Action) -> None:
        super().ended(action)
        self._wait()


def _retry() -> None:
    """Have the caching allocator find no memory for a block until it has given back what it keeps."""
    if not torch.cuda.is_available():
        return
    torch.empty(_BLOCK, dtype=torch.uint8, device="cuda")  # kept from here on, and too small for what follows
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 1.5 * _BLOCK) / total))
    torch.empty(2 * _BLOCK, dtype=torch.uint8, device="cuda")
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def _post_ahead(engine: Any) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "runtime"))
    from synchronised_cases import PostedAhead

    program = engine.pipeline.program
    engine.pipeline.program = PostedAhead(program.schedule, program.pairs)
