"""A small file beside Megatron's checkpoint: what the run has measured and decided."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from evenpipe.megatron.unsupported import why_one_size
from evenpipe.megatron_lm.hooks import folders_loaded_from
from evenpipe.megatron_lm.log import say
from evenpipe.tuner.tuner import read_state, save_with

__all__ = ["SavedState"]

#: What a state is of no use without: memory and times were found with these.
_SETTINGS: Final = (
    *("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size", "data_parallel_size"),
    *("global_batch_size", "micro_batch_size", "seq_length", "num_layers", "hidden_size", "padded_vocab_size"),
    *("bf16", "fp16", "sequence_parallel", "use_distributed_optimizer", "optimizer", "transformer_impl"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("calculate_per_token_loss", "bpipe"),
)


class SavedState(NamedTuple):
    """One kind of state: the flag that asked for it, the name of its file, and what is said of one found, or not.

    `more` returns settings, by name, that it depends on beside those of every such state.
    """

    asked: str
    name: str
    found: str
    missing: str
    more: Callable[[Namespace], dict[str, Any]] = lambda args: {}

    def save(self, args: Namespace, iteration: int, folder: str, state: Any, write: Callable[[], Any]) -> Any:
        """Let `write` save what is Megatron's, once `state` is on disk; rank 0 calls it.

        `folder` is of all checkpoints.
        """
        inside, beside = self._paths(folder, iteration)
        return save_with(write, state, self._values(args), beside, inside, say)

    def resumed(self, args: Namespace, limit: int) -> dict[str, Any] | None:
        """Return the state that was saved with what Megatron has loaded, under the settings of `args` and this `limit`.

        All ranks call it; rank 0 reads it for all. None, which rank 0 logs, where there is none.
        """
        if args.load is None or not args.iteration:
            return None
        found: list[Any] = [None]
        if args.rank == 0:
            # Beside, where the job was killed after Megatron's tracker had moved on.
            paths = [path for folder in folders_loaded_from(args) for path in self._paths(folder, args.iteration)]
            found = [read_state(paths, self._values(args), limit)]
            goes_on = self.found if found[0] else self.missing
            say(f"{self.asked}: checkpoint of iteration {args.iteration}: {goes_on}")
        dist.broadcast_object_list(found, src=0)
        state: dict[str, Any] | None = found[0]
        return state

    def _values(self, args: Namespace) -> dict[str, Any]:
        values = {name: getattr(args, name, None) for name in _SETTINGS}
        return values | {"one_size": why_one_size(args)} | self.more(args)

    def _paths(self, folder: str, iteration: int) -> tuple[Path, Path]:
        """Inside the checkpoint's own folder, and beside it."""
        inside = Path(folder, f"iter_{iteration:07d}", f"{self.name}.json")
        return inside, Path(folder, f".{self.name}", f"{iteration:07d}.json")
