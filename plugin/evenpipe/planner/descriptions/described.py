"""What all descriptions are: frozen, typed, without keys that nobody reads, and with the source of their constants."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

__all__ = ["Described", "Values"]

_ALL = "all"


class Values(BaseModel):
    """A part of a description."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Described(Values):
    """A whole description. ``sources``: by key, where its value is from; ``all`` stands for every key without one."""

    name: str = Field(min_length=1)
    sources: Mapping[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sources_are_of_keys(self) -> Self:
        for key in self.sources:
            if key not in (_ALL, *type(self).model_fields):
                raise ValueError(f"sources.{key}: is no key of it: correct its name")
        return self

    def unsourced(self) -> list[str]:
        """The keys that are given and have no source."""
        given = self.model_fields_set - {"name", "sources"}
        return [] if _ALL in self.sources else sorted(given - set(self.sources))
