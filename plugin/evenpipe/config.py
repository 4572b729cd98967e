"""EvenPipe's settings: the one typed model from which Megatron's flags and other front ends are derived."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from evenpipe.schedule import ScheduleError, named

__all__ = ["ConfigError", "EvenPipeConfig"]


class ConfigError(ValueError):
    """A setting has a value that it cannot have. `setting` is the field; the message says why and what to do."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting


class EvenPipeConfig(BaseModel):
    """What a user asks EvenPipe for; immutable. Everything left alone is a run without EvenPipe.

    Descriptions are the help of the flags; `flag` is the name on Megatron's command line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schedule: str | None = Field(
        None,
        description="pipeline schedule: 1f1b | gpipe | interleaved (the name of 1f1b with virtual stages) | kfkb "
        "(1f1b with --group-size micro-batches in a row) | 2bw (no flushes: two weight versions, each step finished "
        "while the next batch runs)",
        json_schema_extra={"flag": "--evenpipe-schedule", "metavar": "NAME"},
    )
    bpipe: bool = Field(
        False,
        description="level the memory of pipeline stages: early stages evict saved activations to a partner stage",
        json_schema_extra={"flag": "--bpipe"},
    )
    group_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        1,
        description="kfkb: micro-batches whose forwards, and then backwards, a stage runs in a row; auto measures the "
        "links, chooses this and the micro-batch size, and chooses again as links change",
        json_schema_extra={"flag": "--group-size", "metavar": "K|auto"},
    )
    retune_interval: int | None = Field(
        None,
        ge=1,
        description="iterations between two choices of --group-size auto (default: as many as an hour takes)",
        json_schema_extra={"flag": "--retune-interval", "metavar": "N"},
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="memory that --group-size auto may use on each device (default: nine tenths of a GPU's)",
        json_schema_extra={"flag": "--memory-gib", "metavar": "GIB"},
    )
    pair_adjacent: bool | None = Field(
        None,
        description="put the two stages of a pair on one node, next to each other (default: with --bpipe, where a "
        "node has room for more than one stage)",
        json_schema_extra={"flag": "--pair-adjacent"},
    )
    trace: Path | None = Field(
        None,
        description="write the timeline of one iteration, from all ranks, to this file (for ui.perfetto.dev)",
        json_schema_extra={"flag": "--evenpipe-trace", "metavar": "T.json"},
    )
    trace_iteration: int | None = Field(
        None,
        ge=1,
        description="the iteration to trace, as Megatron's log counts (default: the second of this run)",
        json_schema_extra={"flag": "--evenpipe-trace-iteration", "metavar": "N"},
    )

    @field_validator("schedule")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        try:
            return name if name is None else named(name)
        except ScheduleError as error:
            raise ValueError(str(error).partition(": ")[2]) from None

    @classmethod
    def of(cls, **values: Any) -> EvenPipeConfig:
        """Checked settings. Raises ConfigError for the first that is not one."""
        try:
            return cls(**values)
        except ValidationError as error:
            first, *others = error.errors()
            # A setting of several types has something to say for each of them.
            more = [
                found["msg"].removeprefix("Input should be ") for found in others if found["loc"][0] == first["loc"][0]
            ]
            said = first["msg"].removeprefix("Value error, ").replace("Input should be ", "must be ")
            said = " or ".join((said, *more))
            raise ConfigError(str(first["loc"][0]), f"{first['input']}: {said}") from None

    @property
    def active(self) -> bool:
        """Whether EvenPipe carries out the pipeline schedule."""
        return self.bpipe or self.schedule is not None
