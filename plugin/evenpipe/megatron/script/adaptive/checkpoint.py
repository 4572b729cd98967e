"""What a Megatron checkpoint lacks of a tuned run: the tuner's state, in a small file beside what Megatron saves."""

from __future__ import annotations

import contextlib
import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from evenpipe.megatron.script.adaptive.checks import why_one_size
from evenpipe.megatron.script.hooks import folders_loaded_from
from evenpipe.report import write_atomically

__all__ = ["resumed", "save"]

_NAME: Final = "evenpipe_tuner"
_FORMAT: Final = "evenpipe.script_tuner/1"
#: What a state is of no use without: memory and times were found with these.
_SETTINGS: Final = (
    *("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size", "data_parallel_size"),
    *("global_batch_size", "micro_batch_size", "seq_length", "num_layers", "hidden_size", "padded_vocab_size"),
    *("bf16", "fp16", "sequence_parallel", "use_distributed_optimizer", "optimizer", "transformer_impl"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("calculate_per_token_loss", "bpipe"),
)


def save(args: Namespace, iteration: int, folder: str, state: Any, write: Callable[[], Any]) -> Any:
    """Let `write` save what is Megatron's, once `state` is on disk; rank 0 calls it, `folder` is of all checkpoints.

    Megatron's tracker moves on within `write`, or later, so a checkpoint that can be loaded has both. It wants its own
    folder empty, so the state stays beside it until it is done. A state that cannot be written costs a tuning anew.
    """
    beside, inside = _beside(folder, iteration), _inside(folder, iteration)
    content = {"format": _FORMAT, "settings": _settings(args), "state": state}
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(beside, json.dumps(content))
    except OSError as error:
        print(f" [evenpipe] {beside}: {error.strerror}: a resumed run will tune anew", flush=True)
        return write()
    result = write()
    # It is found beside, too.
    with contextlib.suppress(OSError):
        inside.parent.mkdir(parents=True, exist_ok=True)
        os.replace(beside, inside)
    return result


def resumed(args: Namespace, limit_bytes: int) -> dict[str, Any] | None:
    """The state that was saved with what Megatron has loaded, under the settings of `args` and this limit of memory.

    All ranks call it; rank 0 reads it for all. None, which rank 0 says, where there is none.
    """
    if args.load is None or not args.iteration:
        return None
    found: list[Any] = [_read(args, limit_bytes) if args.rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    state: dict[str, Any] | None = found[0]
    if args.rank == 0:
        said = (
            "goes on tuning as it was saved"
            if state is not None
            else "has no tuner's state of these settings: tunes anew"
        )
        print(f" [evenpipe] --group-size auto: checkpoint of iteration {args.iteration}: {said}", flush=True)
    return state


def _read(args: Namespace, limit_bytes: int) -> Any:
    wanted = {"format": _FORMAT, "settings": _settings(args)}
    for path in _candidates(args):
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if wanted.items() <= content.items() and content["state"]["limit_bytes"] == limit_bytes:
            return content["state"]
    return None


def _candidates(args: Namespace) -> Iterator[Path]:
    for folder in folders_loaded_from(args):
        # Beside, where the job was killed after Megatron's tracker had moved on.
        yield from (_inside(folder, args.iteration), _beside(folder, args.iteration))


def _settings(args: Namespace) -> dict[str, Any]:
    """As JSON gives them back."""
    found = {name: getattr(args, name, None) for name in _SETTINGS} | {"one_size": why_one_size(args)}
    settings: dict[str, Any] = json.loads(json.dumps(found))
    return settings


def _inside(folder: str, iteration: int) -> Path:
    return Path(folder, f"iter_{iteration:07d}", f"{_NAME}.json")


def _beside(folder: str, iteration: int) -> Path:
    return Path(folder, f".{_NAME}", f"{iteration:07d}.json")
