"""The state of 2BW that a checkpoint lacks, such as the older weight version: a file for each stage and shard."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evenpipe.report.files import DamagedFile, check_seal, lacks_room, sealed, write_durably
from evenpipe.two_bw.stream import TwoBW

__all__ = ["Part", "SideFileError", "resume", "write"]

_FORMAT: Final = "evenpipe.delayed/2"


class SideFileError(RuntimeError):
    """A checkpoint was saved with 2bw, and its older weight version cannot be had; one line, the same on all ranks."""


class Part(NamedTuple):
    """Weights of a process that have a file of their own: where it may lie, and the `newest` it is used with only.

    `places` are those of the trainable ones among all of the process; None: all. `own`: the file has nothing but what
    the delay correction keeps of the process' own optimizer.
    """

    paths: Sequence[Path]
    newest: Sequence[Tensor]
    places: Sequence[int] | None = None
    own: bool = False


class _Unusable(Exception):
    """A file is there, but is not the one that goes with these weights."""


def write(path: Path, iteration: int, checkpoint: str, two_bw: TwoBW, part: Part) -> None:
    """Put the state of `two_bw`, which has been drained, at `path`: safe on disk as a whole when this returns, or not.

    It ends in its own digest. Raises RuntimeError, with one line that names `checkpoint`, when it cannot be written.
    """
    content = {
        "format": _FORMAT,
        "iteration": iteration,
        "newest": _fingerprint(part.newest),
        "state": two_bw.own_state() if part.own else two_bw.state_dict(part.places),
    }
    try:
        write_durably(path, sealed(lambda file: torch.save(content, file)))
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        # Torch's own errors do not tell the system's.
        room = "" if isinstance(error, OSError) and not lacks_room(error) else "make room, and "
        raise RuntimeError(
            f"the checkpoint {checkpoint} could not be saved: {path}: {reason}: "
            f"{room}go on from the one before, which is whole"
        ) from error


def resume(
    two_bw: TwoBW,
    parts: Sequence[Part],
    iteration: int,
    saved_with_2bw: bool | None,
    *,
    accepts_one_version: bool,
    setting: str,
) -> tuple[bool, str]:
    """Give `two_bw` the older weights of each of the `parts`, which are all of this process: all ranks call it.

    `saved_with_2bw` is what the checkpoint says of itself. None: it says nothing, and any rank's file says that it was.
    Both versions are the loaded one after a save without 2bw, and, if `accepts_one_version`, where a rank has no usable
    file. Otherwise that raises SideFileError, which names the `setting` that accepts it. Returns whether a file's state
    was given, and a line for the log. With versions in place there is no older one: a file that is missing or goes with
    other parallel sizes is no error.
    """
    state, obstacle = None, None
    try:
        shared = [part for part in parts if not part.own]
        state = _together(shared, [_first(part, iteration) for part in shared])
        if two_bw.correction is not None and two_bw.corrected_alike(state):
            own = [_first(part, iteration) for part in parts if part.own]
            state = {**state, **{name: value for one in own for name, value in one.items()}}
    except (_Unusable, FileNotFoundError) as error:
        obstacle = str(error)
    exists = any(path.exists() for part in parts for path in part.paths)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (obstacle, exists))
    if saved_with_2bw is None:
        saved_with_2bw = any(exists for _, exists in ranks)
    obstacle = next((obstacle for obstacle, _ in ranks if obstacle is not None), None)
    if two_bw.versions.in_place:
        two_bw.load_state_dict(state if obstacle is None else None)
        return obstacle is None, "it goes on from the loaded weights, the one version that there is"
    if saved_with_2bw and obstacle is not None and not accepts_one_version:
        raise SideFileError(
            f"2bw: the checkpoint of iteration {iteration} was saved with 2bw, but {obstacle}: put its file there, "
            f"load another checkpoint, or add {setting}, with which both weight versions are the loaded one"
        )
    two_bw.load_state_dict(state if saved_with_2bw and obstacle is None else None)
    if not saved_with_2bw:
        return False, "it was saved without 2bw: both weight versions are the loaded one"
    if obstacle is None:
        anew = two_bw.correction is not None and not two_bw.corrected_alike(state)
        return True, "both weight versions are as they were saved" + anew * "; the delay correction begins anew"
    return False, f"both weight versions are the loaded one, as {obstacle}"


def _first(part: Part, iteration: int) -> Mapping[str, Any]:
    """Return the state in the first usable file. Raises FileNotFoundError, or _Unusable."""
    wrong: str | None = None
    for path in part.paths:
        try:
            return _read(path, part.newest, iteration)
        except FileNotFoundError:
            continue
        except OSError as error:
            wrong = wrong or f"{path} cannot be read ({error.strerror})"
        except (_Unusable, DamagedFile) as error:
            wrong = wrong or str(error)
    if wrong is None:
        raise FileNotFoundError(f"there is no file {part.paths[0]}")
    raise _Unusable(wrong)


def _together(parts: Sequence[Part], states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One state of those of all parts, which agree in all but the weights."""
    together = dict(states[0])
    for name in ("before", "corrected"):
        found = [state.get(name) for state in states]
        if len(parts) == 1 or None in found:
            continue
        placed = {
            place: weight
            for part, weights in zip(parts, found, strict=True)
            for place, weight in zip(part.places or (), weights or (), strict=False)
        }
        together[name] = [placed[place] for place in sorted(placed)]
    return together


def _read(path: Path, newest: Sequence[Tensor], iteration: int) -> Mapping[str, Any]:
    """Return the state in a file, once its digest is found right. Raises as `_first` catches."""
    check_seal(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        form = content["format"]
    except (OSError, MemoryError):
        raise
    except Exception:  # torch raises whatever damaged bytes lead it to
        raise DamagedFile(f"{path} is damaged") from None
    if form != _FORMAT:
        raise _Unusable(f"{path} is of the format {form}, which this version of EvenPipe does not know")
    if content["iteration"] != iteration:
        raise _Unusable(f"{path} is of iteration {content['iteration']}")
    if content["newest"] != _fingerprint(newest):
        raise _Unusable(
            f"{path} goes with other weights, as of another iteration or of other parallel sizes (tensor, pipeline, "
            "expert)"
        )
    state: Mapping[str, Any] = content["state"]
    return state


def _fingerprint(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
