"""What `evenpipe train` runs: one frozen, checked set of options."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evenpipe.schedule import SCHEDULES, Action, Schedule, ScheduleError, build, parse

__all__ = ["BUILTIN_TEXT", "Fault", "OptionsError", "TrainOptions", "flag", "in_flags"]

BUILTIN_TEXT: Final = "builtin"


#: Beyond any machine's GPUs; a typing error should not start a thousand processes.
MOST_PROCESSES: Final = 256


class OptionsError(ValueError):
    """Options that cannot be run; one line that names the flag and what to do."""


class Fault(NamedTuple):
    """A rehearsed failure: `stage` raises at `action` in iteration `iteration` (from 0: the second one)."""

    stage: int
    action: Action
    iteration: int = 1


class TrainOptions(BaseModel):
    """A training run; immutable. `TrainOptions.of(...)` gives one-line errors, the constructor pydantic's own.

    The fields' descriptions are the help of the command-line flags.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Literal["gpt", "bert"] = Field("gpt", description="gpt | bert")
    layers: int = Field(8, ge=1, description="transformer layers of the whole model")
    hidden: int = Field(128, ge=1, description="hidden size")
    heads: int = Field(4, ge=1, description="attention heads")
    seq_length: int = Field(128, ge=2, description="tokens (bytes of text) in a sample")
    untie_embeddings: bool = Field(False, description="give the output layer weights of its own")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of hidden states and attention")
    data: str = Field(BUILTIN_TEXT, description="a text file, or builtin: text that comes with Python")

    stages: int = Field(4, ge=1, description="pipeline stages")
    data_parallel: int = Field(1, ge=1, description="data-parallel replicas")
    tensor_parallel: int = Field(1, ge=1, description="tensor-parallel ranks of every stage")
    chunks: int = Field(1, ge=1, description="model chunks a stage (interleaved only)")

    micro_batch_size: int = Field(1, ge=1, description="samples in a micro-batch")
    micro_batches: int = Field(8, ge=1, description="micro-batches in an iteration of each replica")
    iterations: int = Field(5, ge=1, description="optimizer steps")
    seed: int = Field(1234, ge=0, lt=2**31, description="of weights, samples and dropout")
    lr: float = Field(1e-3, gt=0, description="learning rate of Adam")
    clip_grad: float = Field(1.0, ge=0, description="clip the gradient to this norm; 0 does not clip")

    schedule: str = Field("1f1b", description=" | ".join(SCHEDULES))
    engine: Literal["evenpipe", "megatron"] = Field(
        "evenpipe", description="who carries the schedule out: evenpipe | megatron (its own functions)"
    )
    bpipe: bool = Field(False, description="level the stages' memory by evicting to partner stages")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="what the backward computes again: none | selective (attention) | full (each layer)"
    )
    overlap_grad_reduce: bool = Field(False, description="reduce gradients between replicas during the last backward")
    fault_at: str | None = Field(
        None, description="fault drill: raise at STAGE:ACTION (1:B3, 0:E1) in the 2nd iteration, to rehearse a failure"
    )

    @classmethod
    def of(cls, **values: Any) -> TrainOptions:
        """Checked options. Raises OptionsError: one line that names the flag and what to do."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise OptionsError(_one_line(error)) from None

    @property
    def world_size(self) -> int:
        """Processes: stages × data-parallel × tensor-parallel."""
        return self.stages * self.data_parallel * self.tensor_parallel

    @cached_property
    def plan(self) -> Schedule:
        """The verified schedule that these options ask for. Raises ScheduleError when there is none."""
        return build(self.schedule, self.stages, self.micro_batches, self.chunks, self.bpipe)

    @cached_property
    def fault(self) -> Fault | None:
        """The rehearsed failure, if one is asked for."""
        if self.fault_at is None:
            return None
        stage, _, action = self.fault_at.partition(":")
        return Fault(int(stage), parse(action))

    @model_validator(mode="after")
    def _one_machine_can_run_it(self) -> TrainOptions:
        if self.world_size > MOST_PROCESSES:
            raise ValueError(
                f"--stages {self.stages}: with --data-parallel {self.data_parallel} and --tensor-parallel "
                f"{self.tensor_parallel} {self.world_size} processes on this machine: use at most {MOST_PROCESSES}"
            )
        if not self.data:
            raise ValueError(f"--data: no file named: give a text file, or {BUILTIN_TEXT}")
        return self

    @model_validator(mode="after")
    def _model_fits_its_ranks(self) -> TrainOptions:
        parts = self.stages * self.chunks
        if self.layers % parts:
            what = f"--stages {self.stages}" + (f" × --chunks {self.chunks}" if self.chunks > 1 else "")
            raise ValueError(f"--layers {self.layers}: not divisible by {what}: make it a multiple of {parts}")
        if self.hidden % self.heads:
            raise ValueError(
                f"--hidden {self.hidden}: not divisible by --heads {self.heads}: make it a multiple of {self.heads}"
            )
        if self.tensor_parallel > self.heads:
            raise ValueError(
                f"--tensor-parallel {self.tensor_parallel}: more ranks than --heads {self.heads}: "
                f"use at most {self.heads}"
            )
        if self.heads % self.tensor_parallel:
            raise ValueError(
                f"--tensor-parallel {self.tensor_parallel}: does not divide --heads {self.heads}: use a divisor of it"
            )
        return self

    @model_validator(mode="after")
    def _schedule_exists(self) -> TrainOptions:
        if self.chunks > 1 and self.schedule != "interleaved":
            raise ValueError(
                f"--chunks {self.chunks}: --schedule {self.schedule} has one model chunk a stage: "
                "use --schedule interleaved, or leave --chunks out"
            )
        if self.schedule == "gpipe" and self.stages == 1:
            raise ValueError("--schedule gpipe: one stage is no pipeline: use --schedule 1f1b, or at least 2 stages")
        if self.engine == "megatron" and self.schedule == "gpipe":
            raise ValueError("--schedule gpipe: Megatron has no such schedule: use --engine evenpipe")
        if self.engine == "megatron" and self.bpipe:
            raise ValueError("--bpipe: Megatron has no such schedule: use --engine evenpipe")
        try:
            _ = self.plan
        except ScheduleError as error:
            raise ValueError(in_flags(error)) from None
        return self

    @model_validator(mode="after")
    def _fault_happens(self) -> TrainOptions:
        if self.fault_at is None:
            return self
        try:
            fault = self.fault
        except ValueError:
            fault = None
        if fault is None:
            raise ValueError(f"--fault-at {self.fault_at}: expected STAGE:ACTION such as 1:B3 or 0:E1")
        if self.iterations <= fault.iteration:
            raise ValueError(
                f"--fault-at {self.fault_at}: raises in the 2nd iteration, but --iterations is {self.iterations}: "
                "use at least 2"
            )
        if fault.stage >= self.stages or fault.action not in self.plan.actions[fault.stage]:
            raise ValueError(
                f"--fault-at {self.fault_at}: no such action in this run: "
                "choose one that `evenpipe schedule` shows for that stage"
            )
        return self


def flag(field: str) -> str:
    """The command-line flag of a field of TrainOptions: `micro_batches` is --micro-batches."""
    return "--" + field.replace("_", "-")


def in_flags(error: ScheduleError) -> str:
    """The first line of `error`, with `chunks=1:` written as the user wrote it: `--chunks 1:`."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^(\w+)(?:=(\S+))?:", lambda m: " ".join(filter(None, (flag(m[1]), m[2]))) + ":", line)


def _one_line(error: ValidationError) -> str:
    """The first thing that pydantic found, as a line of ours."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    field = str(first["loc"][0])
    said = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"{flag(field)}: no such option: see evenpipe train --help"
    return f"{flag(field)} {first['input']}: must be {said}"
