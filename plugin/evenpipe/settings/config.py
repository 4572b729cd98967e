"""EvenPipeConfig: the one typed model of what a user can ask for; Megatron's flags and JSON keys derive from it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from evenpipe.schedule import DelayCorrection, ScheduleError, Spec, choose
from evenpipe.wording.validation import plain_message

__all__ = ["ConfigError", "EvenPipeConfig", "first_problem"]


class ConfigError(ValueError):
    """A setting has a value that it cannot have. `setting` is the field; the message says why and what to do."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting


class EvenPipeConfig(BaseModel):
    """The settings that a user gives EvenPipe; immutable. With the defaults alone, a run is one without EvenPipe.

    Descriptions are the help of the flags; `flag` is the name on Megatron's command line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schedule: str | None = Field(
        None,
        description="pipeline schedule: 1f1b | gpipe | interleaved (the name of 1f1b with virtual stages) | kfkb "
        "(1f1b with --group-size micro-batches in a row) | 2bw (no flushes: two weight versions, each step finished "
        "while the next batch runs) | zb-h1 (backwards in two halves: less of a bubble) | zb-h2 (the same, stages "
        "further ahead) | interleaved-zb (zb-h1 with virtual stages) | v-half, v-min, zbv, dualpipev (two virtual "
        "stages, there and back) | searched (an order made for the run's own times and --memory-gib) | auto (the "
        "fastest of these for the run's own times and memory) | file:PATH (a table that `evenpipe schedule "
        "--out` wrote) | the name of an installed package's",
        json_schema_extra={"flag": "--evenpipe-schedule", "short": "--evenpipe", "metavar": "NAME"},
    )
    bpipe: bool = Field(
        False,
        description="level the memory of pipeline stages: early stages evict saved activations to a partner stage",
        json_schema_extra={"flag": "--bpipe"},
    )
    swap: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | Literal["auto"] | None = Field(
        None,
        description="the share of each micro-batch's saved activations that may wait for its backward in the memory of "
        "the host: 0.5 is half of the bytes; auto: stage by stage, the swaps and the recomputed layers that keep each "
        "under --memory-gib (default: nothing is swapped)",
        json_schema_extra={"flag": "--evenpipe-swap", "metavar": "SHARE|auto"},
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
        description="iterations between two choices of --group-size auto, or two looks at the times of searched "
        "(default: as many as an hour takes)",
        json_schema_extra={"flag": "--retune-interval", "metavar": "N"},
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="memory that --group-size auto, searched, auto or --evenpipe-swap auto may use on each device "
        "(default: nine tenths of a GPU's)",
        json_schema_extra={"flag": "--memory-gib", "metavar": "GIB"},
    )
    one_version: bool = Field(
        False,
        description="2bw: go on from a checkpoint that was saved with 2bw though its older weight version is missing, "
        "damaged or of other parallel sizes: both versions are then the loaded one (default: an error)",
        json_schema_extra={"flag": "--evenpipe-one-version"},
    )
    delay_correction: DelayCorrection = Field(
        "none",
        description="2bw: what is done about gradients that are a batch late: a step adds the error of the one before; "
        "or forwards run on weights that are ahead by the last step, or by the momentum's part of it; each keeps one "
        "more copy of the weights (default: nothing)",
        json_schema_extra={
            "flag": "--evenpipe-delay-correction",
            "metavar": "none|error-feedback|weight-prediction|nesterov",
        },
    )
    pair_adjacent: bool | None = Field(
        None,
        description="put the two stages of a pair on one node, next to each other (default: with --bpipe, where a "
        "node has room for more than one stage)",
        json_schema_extra={"flag": "--pair-adjacent"},
    )
    partition: Path | tuple[int, ...] | None = Field(
        None,
        description="train with the layout that `evenpipe partition --megatron --out P.json` planned, under EvenPipe's "
        "schedule; the log has predicted beside measured time and memory of each stage",
        json_schema_extra={"flag": "--evenpipe-partition", "metavar": "P.json"},
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
            if name is not None:
                choose(name)
        except ScheduleError as error:
            raise ValueError(str(error).partition("\n")[0].removeprefix(f"schedule={name}: ")) from None
        return name

    @classmethod
    def of(cls, **values: Any) -> EvenPipeConfig:
        """Checked settings. Raises ConfigError for the first that is not one."""
        try:
            return cls(**values)
        except ValidationError as error:
            (setting, *_), given, wrong = first_problem(error)
            raise ConfigError(str(setting), f"{given}: {wrong}") from None

    @cached_property
    def spec(self) -> Spec:
        """The schedule that is carried out: 1f1b, where none is named."""
        return choose(self.schedule if self.schedule is not None else "1f1b")

    @property
    def streams(self) -> bool:
        """Return whether batches are not flushed."""
        return "stream" in self.spec.needs

    @property
    def delayed(self) -> bool:
        """Return whether weights have two versions, and gradients are a batch late."""
        return self.spec.weight_versions > 1

    @property
    def measures(self) -> bool:
        """Return whether the run goes by times and memory that it measures."""
        return self.group_size == "auto" or "times" in self.spec.needs

    @property
    def active(self) -> bool:
        """Return whether EvenPipe carries out the pipeline schedule."""
        return self.bpipe or self.swap is not None or self.schedule is not None or self.partition is not None


def first_problem(error: ValidationError) -> tuple[tuple[int | str, ...], Any, str]:
    """Return the path of the first setting that is not one, what it was given, and what is wrong with that."""
    setting = error.errors()[0]["loc"][0]
    # A setting of several types has something to say for each of them: that counts which fits up to a place in a list.
    of_types = [found for found in error.errors() if found["loc"][0] == setting]
    first = max(of_types, key=_places)
    said = [plain_message(found) for found in of_types if _places(found) == _places(first)]
    return first["loc"], first["input"], " or ".join((said[0], *(one.removeprefix("must be ") for one in said[1:])))


def _places(found: Any) -> int:
    """In how many lists its path is."""
    return sum(isinstance(step, int) for step in found["loc"])
