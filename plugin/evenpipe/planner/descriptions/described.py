"""What all descriptions are: frozen, typed, without keys that nobody reads, and with the source of their constants."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Described", "Values"]


class Values(BaseModel):
    """A part of a description."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Described(Values):
    """A whole description. ``sources``: by key, where its value is from; ``all`` stands for every key without one."""

    name: str = Field(min_length=1)
    sources: Mapping[str, str] = Field(default_factory=dict)

    def unsourced(self) -> list[str]:
        """The keys that are given and have no source."""
        given = self.model_fields_set - {"name", "sources"}
        return [] if "all" in self.sources else sorted(given - set(self.sources))
