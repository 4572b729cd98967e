"""DeepSpeed's pipeline engine with EvenPipe's schedules in it."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ForwardPass, TrainSchedule
from torch import Tensor

from evenpipe.deepspeed.checkpointing import show_saved_tensors
from evenpipe.deepspeed.log import log_batch, print_line, print_once
from evenpipe.deepspeed.lowering import ACTIONS, ProgramSchedule
from evenpipe.deepspeed.planned.checkpoint import load_layers, save_layers
from evenpipe.deepspeed.planned.predicted_vs_measured import PlanComparison
from evenpipe.deepspeed.planned.stage import CutStage
from evenpipe.deepspeed.section import Section, SectionError, section_of, with_deepspeeds_names
from evenpipe.deepspeed.stage import Boundary, EngineStage
from evenpipe.deepspeed.unsupported import refuse_unsupported
from evenpipe.report.files import check_writable
from evenpipe.runtime.connections import connect
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.host_swaps import HostLimit
from evenpipe.schedule import (
    GAINING,
    Program,
    Programs,
    Queues,
    ScheduleError,
    Size,
    Step,
    Swaps,
    Unit,
    links,
    loop,
)
from evenpipe.tracing.iteration import IterationTrace, Place, TracedJob
from evenpipe.two_bw.log import StepLog
from evenpipe.upstream.ending import end_job

__all__ = ["EvenPipeEngine", "resumes_training", "trace_of"]


class EvenPipeEngine(PipelineEngine):  # type: ignore[misc]
    """The engine of a configuration with a section "evenpipe".

    `train_batch` carries out a verified program of EvenPipe in the place of DeepSpeed's schedule; forward and backward
    passes, what ends a batch, evaluation and checkpoints are DeepSpeed's own. `executor.counter` knows what this stage
    holds if `executor.measure` is set.
    """

    #: What follows DeepSpeed's log under a schedule without flushes.
    step_log: StepLog | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        section = section_of(self._config._param_dict)
        assert section is not None, "this engine is chosen by a section"
        self.evenpipe: Section = section
        first = self.module.forward_funcs[0]
        #: What a stage computes that a plan has cut out of the model; None where layers are whole.
        self.cut = first if isinstance(first, CutStage) else None
        refuse_unsupported(self)
        if section.bpipe or section.swap is not None or "times" in section.spec.needs:
            show_saved_tensors(self.module)
        self.group_size = 1 if section.group_size == "auto" else section.group_size
        shared: Swaps = GAINING if isinstance(section.swap, float) else ()
        swaps: Swaps = self.cut.plan.swaps if self.cut is not None else shared
        self._programs = Programs(section.spec, section.bpipe, swaps=swaps)
        self._schedules: dict[Size, tuple[Program, ProgramSchedule]] = {}
        self.executor = _executor(self, self._prepare())
        self.executor.swap(self._swap())
        self._programs = self._programs.for_queues(self.executor.connections.queues)
        if self.cut is not None:
            program, _ = self._schedule(self.micro_batches)
            self.cut.keep_as_planned(self.executor, program.schedule.actions[self.stage_id])
        #: What a plan predicted, to be said beside what is measured.
        self.truth = PlanComparison(self, self.cut.plan) if self.cut is not None else None
        self._boundary = Boundary(self)
        self._take: Callable[[Step], None] | None = None

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """DeepSpeed's, under EvenPipe's schedule."""
        with log_batch(self):
            loss: Tensor = super().train_batch(data_iter)
        return loss

    def eval_batch(
        self, data_iter: Any, return_logits: bool = False, compute_loss: bool = True, *more: Any, **named: Any
    ) -> Any:
        """DeepSpeed's; of a cut model that is the same in evaluation as in training, its loss."""
        if self.cut is not None:
            self.cut.check_evaluation(return_logits or not compute_loss)
        return super().eval_batch(data_iter, return_logits, compute_loss, *more, **named)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """DeepSpeed's, which writes a file a layer."""
        if self.cut is None:
            return super().module_state_dict(exclude_frozen_parameters)
        save_layers(self, self._curr_ckpt_path, exclude_frozen_parameters)
        return None

    def load_module_state_dict(self, checkpoint: Any, strict: bool = True, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, which reads them."""
        if self.cut is None:
            return super().load_module_state_dict(checkpoint, strict, *args, **kwargs)
        load_layers(self, self._curr_ckpt_path, strict)
        return None

    def number_of(self, unit: Unit) -> int:
        """Return which of all batches' micro-batches this one of the present batch is; other replicas' are between."""
        own: int = self.global_steps * self.micro_batches + unit.micro_batch
        replicas, replica = self.grid.data_parallel_size, self.grid.data_parallel_id
        return own * int(replicas) + int(replica)

    def reset_activation_shape(self) -> None:
        """Micro-batches that follow have other shapes."""
        super().reset_activation_shape()
        self._boundary = Boundary(self)
        self.executor.forget_sizes()

    def destroy(self) -> None:
        """DeepSpeed's, and close the links: no batch is under way."""
        if hasattr(self, "executor"):
            self.executor.connections.close()
        super().destroy()

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        """EvenPipe's program in the place of DeepSpeed's training schedule; others, as for evaluation, as they are."""
        if isinstance(pipe_schedule, TrainSchedule):
            try:
                self._train(pipe_schedule.micro_batches)
            except SectionError as error:  # since the batch size has been set anew
                end_job(str(error))
            except ScheduleError as error:
                end_job(with_deepspeeds_names(error))
        else:
            super()._exec_schedule(pipe_schedule)

    def _exec_forward_pass(self, buffer_id: int) -> None:
        if self.cut is not None:
            self.cut.labels = self.pipe_buffers["labels"][buffer_id]
        super()._exec_forward_pass(buffer_id)

    def _prepare(self) -> Iterable[Tensor]:
        """Refuse now, and not in the first batch, what cannot be; returns what is no activation."""
        self._schedule(self.micro_batches)
        weights: Iterable[Tensor] = self.module.parameters()
        return weights

    def _swap(self) -> float | HostLimit | None:
        """Return what says how much the executor swaps."""
        return self.evenpipe.swap if isinstance(self.evenpipe.swap, float) else None

    def _joins_partners(self) -> bool:
        """Return whether links between partners are opened too."""
        return bool(self.evenpipe.bpipe)

    def _train(self, micro_batches: int) -> None:
        """Carry out the program of a batch."""
        program, ours = self._schedule(micro_batches)
        moves = program.schedule.evictions[self.stage_id] > 0 or self.executor.swaps_in(program) is not None
        stage = EngineStage(self, self._boundary, ours.buffer_of, moves, self.executor.recording(program))
        with self.executor.batch(program, stage) as self._take:
            self._exec_schedule(ours)

    def _schedule(self, micro_batches: int) -> tuple[Program, ProgramSchedule]:
        if self.cut is not None:
            self.cut.check_batch(micro_batches, self.micro_batch_size)
        size = Size(self.num_stages, micro_batches, group_size=self.group_size)
        program = self._program(size)
        if size not in self._schedules or self._schedules[size][0] is not program:
            self._schedules[size] = program, ProgramSchedule(program, self.stage_id)
        return self._schedules[size]

    def _program(self, size: Size) -> Program:
        return self._programs(size)

    def _exec_step(self, step: Step, buffer_id: int | None = None) -> None:
        assert self._take is not None
        self._take(step)

    _INSTRUCTION_MAP = {  # noqa: RUF012
        **PipelineEngine._INSTRUCTION_MAP,
        ForwardPass: _exec_forward_pass,
        **dict.fromkeys(ACTIONS, _exec_step),
    }


def resumes_training(*args: Any, **kwargs: Any) -> bool:
    """Return whether arguments of `load_checkpoint`, the engine too, have a run go on, not only its weights loaded."""
    given = inspect.signature(PipelineEngine.load_checkpoint).bind(*args, **kwargs).arguments
    return bool(given.get("load_optimizer_states", True) and not given.get("load_module_only", False))


def _executor(engine: EvenPipeEngine, weights: Iterable[Tensor]) -> Executor:
    device = engine.device
    ranks = [engine.grid.stage_to_global(stage) for stage in range(engine.num_stages)]
    backend = "nccl" if device.type == "cuda" else "gloo"
    trace = trace_of(engine)
    joined = links(loop(engine.num_stages), engine._joins_partners())
    shapes_vary = bool(engine.module.dynamic_shape)
    # What differs in size makes no room for what comes until it has left, and a load that waits holds compute up.
    held_up: Queues = "one" if shapes_vary and engine.evenpipe.bpipe else "many"
    connections = connect(ranks, joined, backend, device, shapes_vary, held_up)
    print_once(connections.line)
    return Executor(engine.stage_id, connections, device, weights, trace, measure=False)


def trace_of(engine: Any) -> IterationTrace | None:
    """Return what records the timeline that the section of `engine` asks for; None where it asks for none.

    An iteration is the `train_batch` that makes `global_steps` its number. Raises SectionError on rank 0 where it could
    not write the file.
    """
    path = engine.evenpipe.trace
    if path is None:
        return None
    # The other nodes need not have the folder.
    if engine.global_rank == 0 and (obstacle := check_writable(path)) is not None:
        raise SectionError("trace", f"{path}: {obstacle}")
    # What waits for the end of the process would else keep the engine until then.
    known = weakref.proxy(engine)
    job = TracedJob(engine.global_rank, lambda: known.global_steps + 1, lambda: _place(known), print_line)
    return IterationTrace(path, engine.evenpipe.trace_iteration, job)


def _place(engine: Any) -> Place:
    grid, stage = engine.grid, engine.stage_id
    data, shard = grid.data_parallel_id, grid.get_slice_parallel_rank()
    name = f"stage {stage}, data {data}"
    return Place((data, shard, stage), f"{name}, model {shard}" if engine.is_model_parallel else name)
