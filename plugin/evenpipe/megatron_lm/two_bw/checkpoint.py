"""The side file of 2BW beside, and then in, a checkpoint of Megatron's."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from evenpipe.megatron_lm.flags import destination
from evenpipe.megatron_lm.hooks import folders_loaded_from
from evenpipe.megatron_lm.log import say
from evenpipe.report.files import move_durably
from evenpipe.settings.config import ConfigError, EvenPipeConfig
from evenpipe.settings.spelling import flag
from evenpipe.two_bw import side_file

if TYPE_CHECKING:
    from evenpipe.two_bw.stream import TwoBW

__all__ = ["has_two_versions", "resume", "save"]

_NAME: Final = "evenpipe_2bw"


class _Share(NamedTuple):
    """The weights of this process that go into the file of that name, which `replica` 0 of those with the same writes.

    `places` are those of the trainable ones among all of the process. `own`: see `side_file.Part`.
    """

    name: str
    replica: int
    weights: Sequence[torch.Tensor]
    places: list[int]
    own: bool = False


def save(iteration: int, model: Sequence[Any], two_bw: TwoBW, folder: str, write: Callable[[], Any]) -> Any:
    """Let `write` save what is Megatron's, once the state of `two_bw`, which has been drained, is safe on disk.

    Megatron's tracker moves on within `write` (or later, for an asynchronous save), so a checkpoint that can be loaded
    has both. It wants its own folder empty, so ours stay beside it until it is done. Raises RuntimeError, with one
    line, when a file cannot be written.
    """
    written = [share for share in _shares(model, two_bw) if share.replica == 0]
    for share in written:
        _, beside = _paths(folder, iteration, share.name)
        part = side_file.Part([beside], share.weights, share.places, share.own)
        side_file.write(beside, iteration, f"of iteration {iteration}", two_bw, part)
    result = write()
    for share in written:
        inside, beside = _paths(folder, iteration, share.name)
        move_durably(beside, inside)
    return result


def resume(
    args: Namespace, model: Sequence[Any], two_bw: TwoBW, saved_with_2bw: bool | None, *, accepts_one_version: bool
) -> bool:
    """Give `two_bw` what was saved with the weights that Megatron has loaded; return whether. All ranks call it.

    `saved_with_2bw` and `accepts_one_version` are those of :func:`side_file.resume`, whose SideFileError this raises.
    """
    if args.load is None or not args.iteration:
        return False
    folders = folders_loaded_from(args)
    parts = []
    for share in _shares(model, two_bw):
        # Beside, where the job was killed after Megatron's tracker had moved on.
        paths = [path for folder in folders for path in _paths(folder, args.iteration, share.name)]
        parts.append(side_file.Part(paths, share.weights, share.places, share.own))
    complete, line = side_file.resume(
        two_bw,
        parts,
        args.iteration,
        saved_with_2bw,
        accepts_one_version=accepts_one_version,
        setting=flag("one_version"),
    )
    if args.rank == 0:
        say(f"{two_bw.name}: checkpoint of iteration {args.iteration}: {line}")
    return complete


def has_two_versions(checkpoint_args: Namespace) -> bool | None:
    """Return whether a checkpoint with these arguments of Megatron's has an older version; None: they do not tell."""
    try:
        return EvenPipeConfig.of(schedule=getattr(checkpoint_args, destination("schedule"), None)).delayed
    except ConfigError:  # a table that is no longer there, or another package's schedule
        return None


def _shares(model: Sequence[Any], two_bw: TwoBW) -> list[_Share]:
    """Return the dense weights, of which there may be none, and the experts, if there are some that are shared out.

    A delay correction of this process' own optimizer has a share beside these.
    """
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    stage = f"stage_{parallel_state.get_pipeline_model_parallel_rank():02d}"

    def share(is_dense: bool, name: str, replica: int) -> _Share:
        weights = [parameter for parameter in parameters if _is_dense(parameter) == is_dense]
        places = [place for place, parameter in enumerate(trainable) if _is_dense(parameter) == is_dense]
        return _Share(f"{stage}_{name}", replica, weights, places)

    shard = parallel_state.get_tensor_model_parallel_rank()
    dense = share(True, f"shard_{shard:02d}", parallel_state.get_data_parallel_rank(with_context_parallel=True))
    versions = two_bw.versions.tensors(two_bw.versions.latest)
    dense.places.extend(range(len(trainable), len(versions)))  # biases of routers
    own = []
    if two_bw.correction is not None and two_bw.correction.own:
        own.append(_Share(f"rank_{dist.get_rank():05d}", 0, parameters, [], own=True))
    if all(map(_is_dense, parameters)):
        return [dense, *own]
    experts, shard = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
    name = f"experts_{experts:02d}_shard_{shard:02d}"
    return [dense, share(False, name, parallel_state.get_expert_data_parallel_rank()), *own]


def _is_dense(parameter: Any) -> bool:
    return bool(getattr(parameter, "allreduce", True))


def _paths(folder: str, iteration: int, name: str) -> tuple[Path, Path]:
    """Inside the checkpoint's own folder, and beside it."""
    inside = Path(folder, f"iter_{iteration:07d}", _NAME, f"{name}.pt")
    return inside, Path(folder, f".{_NAME}", f"{iteration:07d}_{name}.pt")
