"""The engines by name.

An engine is a module that `ENGINES` names by its path, so that nothing of it is imported before a process trains with
it. It fulfils `evenpipe.train.engine.EngineModule`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from evenpipe.schedule import Need
from evenpipe.torch.offers import MODULE_OFFERS, PLANNED_OFFERS

__all__ = ["ENGINES", "EnginePackage"]


class EnginePackage(NamedTuple):
    """Where an engine is: the path of its module, and whose checkpoints it goes on from.

    `called` is its name in a line, `offers` what schedules may need of it, `requires` what must be installed: (import
    name, what to say if not).
    """

    framework: str
    path: str
    called: str
    offers: frozenset[Need]
    requires: tuple[str, str] | None = None


_MEGATRON: Final = "evenpipe.megatron.train_engine.engine"
_PLAIN: Final = "evenpipe.train.plain"
_MEGATRON_CORE: Final = ("megatron.core", "megatron-core is not installed: pip install 'evenpipe[megatron]'")
#: By the value of --engine.
ENGINES: Final[Mapping[str, EnginePackage]] = MappingProxyType(
    {
        "evenpipe": EnginePackage(
            "megatron",
            _MEGATRON,
            "megatron-core",
            frozenset(["chunks", "groups", "in_place", "split", "stream", "vee"]),
            _MEGATRON_CORE,
        ),
        "megatron": EnginePackage("megatron", _MEGATRON, "--engine megatron", frozenset(["chunks"]), _MEGATRON_CORE),
        "module": EnginePackage("module", _PLAIN, "--engine module", MODULE_OFFERS),
        "planned": EnginePackage("planned", _PLAIN, "a plan of a plain model", PLANNED_OFFERS),
    }
)
