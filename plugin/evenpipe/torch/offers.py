"""Which needs of a schedule the pipelines of plain torch meet."""

from __future__ import annotations

from typing import Final

from evenpipe.schedule import Need

__all__ = ["MODULE_OFFERS", "PLANNED_OFFERS"]

_BOTH: Final[frozenset[Need]] = frozenset(["chunks", "groups", "in_place", "split", "stream", "vee"])
MODULE_OFFERS: Final[frozenset[Need]] = _BOTH | {"recompute"}
#: What is recomputed, its plan says.
PLANNED_OFFERS: Final[frozenset[Need]] = _BOTH | {"swap"}
