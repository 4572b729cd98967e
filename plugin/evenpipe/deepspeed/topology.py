"""Which rank runs which stage of which replica, with the stages of a BPipe pair next to each other."""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from evenpipe.deepspeed.section import Section, SectionError
from evenpipe.runtime.placement import NotPlacedError, place

__all__ = ["PairAdjacentTopology", "wanted_topology"]


class PairAdjacentTopology(PipeDataParallelTopology):  # type: ignore[misc]
    """`num_pp` stages and `num_dp` replicas on nodes of `ranks_per_node` ranks, numbered node after node.

    Raises ValueError where they do not fill whole nodes.
    """

    def __init__(self, num_pp: int, num_dp: int, ranks_per_node: int) -> None:
        super().__init__(num_pp=num_pp, num_dp=num_dp)
        slots = place(num_pp, 1, num_dp, ranks_per_node).slots
        self.mapping = {
            self.ProcessCoord(pipe=coordinate.pp, data=coordinate.dp): rank for rank, coordinate in enumerate(slots)
        }


def wanted_topology(
    section: Section, present: PipeDataParallelTopology, environ: Mapping[str, str]
) -> PairAdjacentTopology | None:
    """The topology that the section asks for; None where ranks stay as they are.

    Left to itself, it is asked for with bpipe on several nodes that have room for pairs, if there are pairs that trade
    (from 4 stages). Raises SectionError where it was asked for in so many words and cannot be.
    """
    try:
        return _paired(section, present, environ)
    except NotPlacedError as obstacle:
        if section.pair_adjacent:
            raise SectionError("pair_adjacent", f"{obstacle}") from None
        return None


def _paired(
    section: Section, present: PipeDataParallelTopology, environ: Mapping[str, str]
) -> PairAdjacentTopology | None:
    stages, replicas = present.get_dim("pipe"), present.get_dim("data")
    # torchrun's name, and that of DeepSpeed's launcher.
    given = environ.get("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE"))
    if section.pair_adjacent is None:
        per_node = int(given or 0)
        if not section.bpipe or stages < 4 or per_node < 2 or per_node >= present.world_size():
            return None
    if section.pair_adjacent is False:
        return None
    if type(present) is not PipeDataParallelTopology:
        raise NotPlacedError(
            f"PipelineModule was given a {type(present).__name__}, which places ranks itself: give it num_stages, or "
            "leave this out"
        )
    if given is None:
        raise NotPlacedError("LOCAL_WORLD_SIZE is not set: start the processes with torchrun or deepspeed")
    try:
        return PairAdjacentTopology(stages, replicas, int(given))
    except ValueError as error:
        raise NotPlacedError(str(error)) from None
