"""Which needs of a schedule the pipelines of plain torch meet."""

from __future__ import annotations

from typing import Final

from evenpipe.schedule import Need

__all__ = ["MODULE_OFFERS", "PLANNED_OFFERS"]

MODULE_OFFERS: Final[frozenset[Need]] = frozenset(["chunks", "groups", "split", "stream", "vee"])
PLANNED_OFFERS: Final[frozenset[Need]] = MODULE_OFFERS | {"swap"}
