"""DeepSpeed's pipeline engine without flushes between batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.utils import groups
from torch import Tensor

from evenpipe.deepspeed.engine import EvenPipeEngine, resumes_training
from evenpipe.deepspeed.log import print_once, step_log
from evenpipe.deepspeed.lowering import StreamSchedule
from evenpipe.deepspeed.section import NAME
from evenpipe.deepspeed.stage import Boundary, EngineStage
from evenpipe.deepspeed.two_bw.drain_at_end import drain_at_the_end, let_go
from evenpipe.deepspeed.two_bw.gradients import EngineGradients, experts_of
from evenpipe.deepspeed.two_bw.optimizer_kinds import kind_of
from evenpipe.deepspeed.unsupported import refuse_for_two_bw
from evenpipe.schedule import BACKWARD, Kind, Stream, Unit
from evenpipe.settings.spelling import SECTION
from evenpipe.two_bw import side_file
from evenpipe.two_bw.inputs import InputError
from evenpipe.two_bw.log import StepLog
from evenpipe.two_bw.stream import TwoBW
from evenpipe.upstream.ending import end_job

__all__ = ["TwoBWEngine"]


class TwoBWEngine(EvenPipeEngine):
    """The engine of a section whose schedule is 2bw.

    A `train_batch` forwards what is left of its batch and the first micro-batches of the next, and backwards all of its
    batch. So data iterators run ahead, by up to p - 1 micro-batches on the first stage, and the weights lack the step
    of the last batch until `drain`. Until it is destroyed, the process keeps the engine, to drain it at its end.
    """

    step_log: StepLog
    data_iterator: Any
    is_pipe_parallel: bool
    _batch_loss: Tensor
    _gradients: EngineGradients
    #: None before the engine has been made, and when the process has failed.
    _two_bw: TwoBW | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_log = step_log(self)
        drain_at_the_end(self)

    def drain(self) -> None:
        """Finish the step of the last batch, and drop what has been forwarded of the next: all ranks call it.

        Afterwards the module's parameters are the newest weights. What had been read for the dropped forwards will be
        read again. Nothing to do twice.
        """
        if self._two_bw is not None:
            self._two_bw.drain()
            self.step_log.gathered()

    def break_off(self) -> None:
        """Settle what other stages are owed, and drop what has been forwarded; the last step stays to be made.

        Waits for nothing that another stage has not started yet.
        """
        if self._two_bw is not None:
            self._two_bw.break_off()

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, on the newest weights."""
        self.drain()
        return super().eval_batch(*args, **kwargs)

    def number_of(self, unit: Unit) -> int:
        """Units are counted along the stream, which may have begun with an earlier batch than the present one."""
        begun = (self.two_bw.first - self.two_bw.batch) * self.micro_batches
        return super().number_of(Unit(begun + unit.micro_batch))

    def reset_activation_shape(self) -> None:
        """Micro-batches that follow have other shapes."""
        self.drain()
        super().reset_activation_shape()

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """DeepSpeed's, with the newest weights, and before it the version before them in files of their own.

        Raises RuntimeError, with one line, when these cannot be written.
        """
        self.drain()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        for part, replica in self._parts(Path(save_dir, tag)) if save_dir else ():
            if replica == 0:
                side_file.write(part.paths[0], self.global_steps, tag, self.two_bw, part)
        client_state = {**client_state, NAME: {"schedule": self.evenpipe.schedule}}
        return super().save_checkpoint(save_dir, tag, client_state, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's; then both weight versions are as they were saved, or the loaded one, and the log says which."""
        self.drain()
        path, client_state = super().load_checkpoint(*args, **kwargs)
        if path is not None:
            saved_with_2bw = None if client_state.pop(NAME, None) is None else True
            if resumes_training(self, *args, **kwargs):
                self._resume(Path(path).parent, saved_with_2bw)
            else:
                self.two_bw.load_state_dict(None)
                print_once("2bw: both weight versions are the loaded one")
            self._gradients.resumed(self.two_bw.outcome)
            self.step_log = step_log(self)
        return path, client_state

    def clip_fp32_gradients(self) -> None:
        """Done when the step is finished."""

    def destroy(self) -> None:
        """Drain, and let go."""
        if self._two_bw is not None:
            self.step_log.close()
        let_go(self)
        self._gradients.close()
        super().destroy()

    def __del__(self) -> None:
        # The process has failed, or its engine has been drained.
        self._two_bw = None
        super().__del__()

    def _parts(self, checkpoint: Path) -> list[tuple[side_file.Part, int]]:
        """Return the parts of what this process has, each with its number among the replicas of it: 0 writes it."""
        weights, experts = list(self.module.parameters()), self._gradients.experts
        # As DeepSpeed names the files of model-parallel ranks.
        shard = f"-model_{self._gradients.shard:02d}" if self.is_model_parallel else ""
        parts = []
        for name in (None, *experts):
            places = [place for place, weight in enumerate(weights) if experts_of(weight) == name]
            # DeepSpeed saves a tied layer as the first stage has it, whose parameters beside the tied one differ.
            saved = [weights[place] for place in places if not getattr(weights[place], "ds_pipe_replicated", False)]
            # Experts are dealt out among a stage's model-parallel ranks too.
            own = f"-{name}_{groups._get_expert_parallel_rank(name):02d}" if name else shard
            path = checkpoint / f"evenpipe_2bw_stage_{self.stage_id:02d}{own}.pt"
            replica = groups._get_expert_data_parallel_rank(name) if name else self.grid.get_data_parallel_id()
            parts.append((side_file.Part([path], saved, places if experts else None), replica))
        if self.two_bw.correction is not None and self.two_bw.correction.own:
            path = checkpoint / f"evenpipe_2bw_rank_{self.global_rank:05d}.pt"
            newest = [weight for part, _ in parts for weight in part.newest]
            parts.append((side_file.Part([path], newest, own=True), 0))
        return parts

    def _resume(self, checkpoint: Path, saved_with_2bw: bool | None) -> None:
        try:
            complete, line = side_file.resume(
                self.two_bw,
                [part for part, _ in self._parts(checkpoint)],
                self.global_steps,
                saved_with_2bw,
                accepts_one_version=self.evenpipe.one_version,
                setting=SECTION.mention("one_version", True),
            )
        except side_file.SideFileError as error:
            let_go(self)
            end_job(str(error))
        print_once(f"{'' if complete else 'warning: '}2bw: {line}")

    @property
    def two_bw(self) -> TwoBW:
        """The stream of batches and the steps of this stage."""
        assert self._two_bw is not None, "the engine has been made"
        return self._two_bw

    def _prepare(self) -> Iterable[Tensor]:
        Stream(self.evenpipe.spec, self.num_stages, self.micro_batches, self.evenpipe.bpipe)
        kind = kind_of(self)
        refuse_for_two_bw(self, kind)
        assert kind is not None
        self._gradients = kind(self)
        swaps = self.cut.plan.swaps if self.cut is not None else ()
        section = self.evenpipe
        self._two_bw = TwoBW(self._gradients, section.spec, section.bpipe, swaps, correction=section.delay_correction)
        return [*self.module.parameters(), *self._gradients.versions.memory]

    def _train(self, micro_batches: int) -> None:
        def stage(stream: Stream) -> _StreamStage:
            return _StreamStage(self, self._boundary, stream, self._gradients.scaled)

        try:
            sizes = self.num_stages, micro_batches
            with self.two_bw.call(self.executor, sizes, self.data_iterator, stage) as called:
                self._take = called.take
                self._exec_schedule(StreamSchedule(called.stream, self.stage_id, called.steps))
        except InputError as error:
            let_go(self)  # others are in the batch: nobody drains
            end_job(str(error))

    def _next_batch(self) -> Any:
        source = self.data_iterator
        if source is None or self._two_bw is None:
            return super()._next_batch()
        inputs = self._two_bw.inputs
        inputs.start_forward()
        self.data_iterator = inputs.standing_before(source)
        try:
            return super()._next_batch()
        finally:
            self.data_iterator = source

    def _submit_step(self, lr_kwargs: Any = None) -> None:
        with self._gradients.submitting(self.two_bw.submit):
            super()._exec_optimizer_step(lr_kwargs)

    def room_for_losses(self) -> Tensor:
        """For what `batch_losses` gives: this replica's loss, that of all replicas, the additional ones."""
        return torch.zeros(2 + len(self.module.get_additional_losses() or ()), device=self.device)

    @torch.no_grad()
    def batch_losses(self) -> Tensor:
        """At the last stage, after the last forward of a batch: its losses in fp32, over all replicas."""
        # They go along with the last gradient: DeepSpeed's broadcast has stages wait for each other.
        broadcasts, self.is_pipe_parallel = self.is_pipe_parallel, False
        try:
            self._batch_loss = super()._aggregate_total_loss()
        finally:
            self.is_pipe_parallel = broadcasts
        additional: Iterable[Tensor] = (self.agg_additional_losses or {}).values()
        return torch.stack([self.dp_group_loss, self._batch_loss, *additional]).float()

    def take_losses(self, losses: Tensor) -> None:
        """At the other stages."""
        self.dp_group_loss, self._batch_loss, *others = losses.unbind()
        named = self.module.get_additional_losses()
        if named is not None:
            self.agg_additional_losses = OrderedDict(zip(named, others, strict=True))

    def _aggregate_total_loss(self) -> Tensor:
        return self._batch_loss

    _INSTRUCTION_MAP = {**EvenPipeEngine._INSTRUCTION_MAP, schedule.OptimizerStep: _submit_step}  # noqa: RUF012


class _StreamStage(EngineStage):
    """Micro-batches are numbered along `stream`. The last gradient of a batch brings its losses from stage to stage."""

    def __init__(self, engine: Any, boundary: Boundary, stream: Stream, scaled: Callable[[Tensor], Tensor]) -> None:
        evicts = stream.program.schedule.evictions[engine.stage_id] > 0
        super().__init__(engine, boundary, StreamSchedule(stream, engine.stage_id).buffer_of, evicts)
        self._scaled = scaled
        self._micro_batches = stream.micro_batches

    def receive_buffers(self, kind: Kind, unit: Unit) -> list[Tensor]:
        """With the last gradient of a batch come its losses."""
        buffers = super().receive_buffers(kind, unit)
        return [*buffers, self._engine.room_for_losses()] if kind == BACKWARD and self._ends_batch(unit) else buffers

    def backward(self, unit: Unit, gradients: list[Tensor] | None) -> list[Tensor]:
        if unit in self._losses:
            self._losses[unit] = self._scaled(self._losses[unit])
        if not self._ends_batch(unit):
            return super().backward(unit, gradients)
        if gradients is None:
            results, losses = super().backward(unit, None), self._engine.batch_losses()
        else:
            *gradients, losses = gradients
            self._engine.take_losses(losses)
            results = super().backward(unit, gradients)
        return results if self._engine.is_first_stage() else [*results, losses]

    def forget(self) -> None:
        """Let go of what has been forwarded and not backwarded."""
        for of_kind in self._engine.pipe_buffers.values():
            of_kind[:] = [None] * len(of_kind)

    def _ends_batch(self, unit: Unit) -> bool:
        return (unit.micro_batch + 1) % self._micro_batches == 0
