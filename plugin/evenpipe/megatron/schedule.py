"""A forward-backward function for megatron-core that carries out EvenPipe schedules."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from evenpipe.megatron.captured import refused_capture
from evenpipe.megatron.grouping import group_size
from evenpipe.megatron.recomputing import obstacle
from evenpipe.megatron.schedule_patches import in_place_of_megatron
from evenpipe.megatron.stage import Batch, ForwardStage, MegatronStage
from evenpipe.megatron.supported import CoreRelease, installed_release
from evenpipe.megatron.unsupported import overlaps, refuse_unsupported
from evenpipe.megatron.vee import check_model, sent_to_the_last
from evenpipe.runtime.connections import connect
from evenpipe.runtime.executor import Executor, Observer
from evenpipe.runtime.weight_gradients import whole_layers
from evenpipe.schedule import (
    GAINING,
    Message,
    Need,
    Places,
    Program,
    Programs,
    Queues,
    Schedule,
    ScheduleError,
    Size,
    Spec,
    Swaps,
    Unit,
    check_offers,
    choose,
    fused_form,
    links,
)

if TYPE_CHECKING:
    from evenpipe.runtime.host_swaps import HostLimit

__all__ = ["Call", "PipelineSchedule", "in_place_of_megatron", "process_groups"]


_GLOBAL: Mapping[str, Callable[[], Any]] = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "embd": functools.partial(parallel_state.get_embedding_group, check_initialized=False),
    "pos_embd": functools.partial(parallel_state.get_position_embedding_group, check_initialized=False),
    "dp_cp": functools.partial(
        parallel_state.get_data_parallel_group, with_context_parallel=True, partial_data_parallel=False
    ),
    "tp_dp_cp": functools.partial(parallel_state.get_tensor_and_data_parallel_group, with_context_parallel=True),
    "dp": functools.partial(
        parallel_state.get_data_parallel_group, with_context_parallel=False, partial_data_parallel=False
    ),
}


def process_groups(release: CoreRelease, communicator: Any, given: Any) -> Any:
    """Return an instance of `release.process_groups_class` with at least tp, pp and cp.

    Like Megatron, takes either both a communicator and groups or neither; raises ValueError otherwise, and for those of
    a pipeline of several modules.
    """
    argument = release.process_groups_argument
    if (communicator is None) != (given is None):
        raise ValueError(f"p2p_communicator and {argument} belong together: give both or neither")
    module, _, name = release.process_groups_class.partition(":")
    kind = getattr(importlib.import_module(module), name)
    if given is None:
        groups = kind()
        for attribute in release.process_groups:
            setattr(groups, attribute, _GLOBAL[attribute]())
        return groups
    for what, value, expected in (("p2p_communicator", communicator, P2PCommunicator), (argument, given, kind)):
        if not isinstance(value, expected):
            raise ValueError(
                f"{what}: EvenPipe schedules pipelines of one model, with a {expected.__name__}, and got a "
                f"{type(value).__name__}: leave EvenPipe's schedule out"
            )
    return given


class Call(NamedTuple):
    """One batch to be trained, the pipeline and the groups it is trained in, and what Megatron passes on."""

    batch: Batch
    pipeline: dist.ProcessGroup
    groups: Any
    embedding: Any
    force_all_reduce: bool


class PipelineSchedule:
    """A drop-in for Megatron's pipelining functions: same arguments, same results, EvenPipe's order and transfers.

    `schedule` is one, a known one's name, or `file:PATH`; "kfkb" goes through `group_size` micro-batches in a row, and
    "1f1b" is interleaved where the model has several chunks a stage. Raises ScheduleError for one that needs more than
    `offers`.
    `swap`: the share of what each micro-batch saves that may go to the host, or a limit that a subclass goes by.
    Keeps its links, pool and memory counter from batch to batch; one instance belongs to one model. With `measure`,
    `executor.counter` knows exactly what this stage holds, and held at most. `measure`, and on all stages alike
    `group_size`, may change between batches.
    `connected` is called once, by all stages of the pipeline, when `executor` and its links have been made.
    """

    offers: ClassVar[frozenset[Need]] = frozenset(["chunks", "groups", "recompute", "split", "vee"])

    def __init__(
        self,
        schedule: str | Spec = "1f1b",
        bpipe: bool = False,
        observer: Observer | None = None,
        measure: bool = False,
        connected: Callable[[PipelineSchedule], None] = lambda schedule: None,
        group_size: int = 1,
        swap: float | HostLimit | None = None,
    ) -> None:
        share = swap if isinstance(swap, (int, float)) else None
        swaps: Swaps = GAINING if share is not None else ()
        self.programs = Programs(choose(schedule) if isinstance(schedule, str) else schedule, bpipe, swaps=swaps)
        self.bpipe = bpipe
        self.swap = swap
        check_offers(self.programs.spec, self.offers, "megatron-core", share)
        self.group_size = group_size
        self.measure = measure
        self.executor: Executor | None = None
        self._observer = observer
        self._connected = connected
        self._release: CoreRelease = installed_release()
        self._model: list[torch.nn.Module] | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """Return what an engine must offer to carry out this schedule."""
        return self.programs.spec.needs

    def program(self, stages: int, micro_batches: int, chunks: int, settings: Any) -> Program:
        """Return the program for so many micro-batches under Megatron's `settings`; verified when first asked for."""
        return self.programs(Size(stages, micro_batches, chunks, group_size(settings, self.group_size)))

    def close(self) -> None:
        """Destroy the links, once no batch is under way."""
        if self.executor is not None:
            self.executor.connections.close()
            self.executor = None

    def __call__(self, *, forward_only: bool = False, **arguments: Any) -> list[Any]:
        """One batch; the arguments and the result are those of Megatron's `forward_backward_pipelining_*` functions.

        Evaluation saves nothing for a backward, so there is nothing to level: it runs on Megatron's own schedule,
        unless parts of the model are where that does not look for them.
        Raises ValueError for a configuration in which this schedule cannot be honoured.
        """
        if not forward_only:
            return self._train(**arguments)
        chunks = len(arguments["model"]) if isinstance(arguments["model"], list) else 1
        if "vee" in self.programs.spec.needed(chunks):
            return self._timed(self._evaluate, self._call(**arguments))
        stock = (
            schedules.forward_backward_pipelining_with_interleaving
            if chunks > 1
            else schedules.forward_backward_pipelining_without_interleaving
        )
        losses: list[Any] = stock(forward_only=True, **arguments)
        return losses

    def _evaluate(self, call: Call) -> list[Any]:
        """The forwards of a batch, without backwards; the losses."""
        batch, pipeline = call.batch, call.pipeline
        executor = self._executor(pipeline, batch)
        places = self._places(pipeline.size(), batch)
        stage = ForwardStage(batch, places, pipeline.rank(), executor.device)
        executor.forward_only(places, batch.num_microbatches, stage)
        return sent_to_the_last(stage.losses, stage.tokens, places, pipeline)[0]

    def _places(self, stages: int, batch: Batch) -> Places:
        """Return where the parts of the model are."""
        return self.programs.spec.places(Size(stages, batch.num_microbatches, len(batch.model)))

    def _train(self, **arguments: Any) -> list[Any]:
        return self._timed(self._carry_out, self._call(**arguments))

    def _timed(self, carry_out: Callable[[Call], list[Any]], call: Call) -> list[Any]:
        """Carry out `call` under the timer that Megatron has around its own schedules."""
        timers = call.batch.config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=call.batch.config.barrier_with_L1_time)
        losses = carry_out(call)
        if timers is not None:
            timers("forward-backward").stop()
        return losses

    def _call(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: P2PCommunicator | None = None,
        force_all_reduce: bool = False,
        **groups_given: Any,
    ) -> Call:
        """Return the checked arguments."""
        chunks = list(model) if isinstance(model, list) else [model]
        iterators = list(data_iterator) if isinstance(data_iterator, list) else [data_iterator]
        config, release = get_model_config(chunks[0]), self._release
        if overlaps(config) and not self.programs.spec.fused:
            self.programs = Programs(fused_form(self.programs.spec, len(chunks)), self.bpipe, self.programs.queues)
        records = self.bpipe or self.measure or self.swap is not None
        refuse_unsupported(config, self.bpipe, chunks, records, "split" in self.needs, self.swap is not None)
        given = groups_given.pop(release.process_groups_argument, None)
        unknown = [
            *groups_given,
            *(["force_all_reduce"] if force_all_reduce and not release.takes_force_all_reduce else []),
        ]
        if unknown:
            raise TypeError(f"unexpected argument {unknown[0]}: megatron-core {release.series} has none")
        if len(chunks) > 1 and (adjust_tensor_shapes_fn is not None or len(iterators) != len(chunks)):
            raise ValueError("interleaved: give one data iterator for each model chunk, and no adjust_tensor_shapes_fn")
        groups = process_groups(release, p2p_communicator, given)
        pipeline = groups.pp if p2p_communicator is None else p2p_communicator.pp_group
        is_last = pipeline.rank() == pipeline.size() - 1
        finalize = config.finalize_model_grads_func
        embedding = schedules.clear_embedding_activation_buffer(config, model, is_last) if finalize else None
        shapes = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            # With several model chunks Megatron goes by `seq_length` alone.
            decoder_seq_length=decoder_seq_length if len(chunks) == 1 else None,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        receive_shapes, send_shapes = shapes, shapes
        if adjust_tensor_shapes_fn is not None:
            receive_shapes, send_shapes = adjust_tensor_shapes_fn(receive_shapes, send_shapes)
        batch = Batch(
            forward_step_func,
            iterators,
            chunks,
            config,
            num_microbatches,
            receive_shapes,
            send_shapes,
            groups.cp.size(),
            collect_non_loss_data,
        )
        return Call(batch, pipeline, groups, embedding, force_all_reduce)

    def _carry_out(self, call: Call) -> list[Any]:
        """All forwards and backwards of a batch, and what Megatron does with its gradients; the losses."""
        batch, pipeline, groups, embedding, force_all_reduce = call
        config, release = batch.config, self._release
        size = pipeline.size(), batch.num_microbatches, len(batch.model), config
        if (refusal := refused_capture(config, lambda: self.program(*size).schedule)) is not None:
            raise ValueError(str(refusal))
        executor = self._executor(pipeline, batch)
        program = self.program(*size)
        stage = self._stage_class(config)(
            batch,
            program.schedule,
            pipeline.rank(),
            executor.device,
            release,
            executor.recording(program) or (lambda unit: nullcontext()),
            self._recomputes(batch, program.schedule, pipeline.rank()),
        )
        try:
            stage.start()
            executor.run(program, stage)
        except BaseException:
            stage.leave_off()
            raise
        stage.finish()
        losses, tokens = sent_to_the_last(stage.losses, stage.tokens, program.schedule.places, pipeline)
        if config.finalize_model_grads_func is not None:
            is_last = pipeline.rank() == pipeline.size() - 1
            schedules.finish_embedding_wgrad_compute(config, embedding, is_last, groups.tp)
            extra = {release.process_groups_argument: groups}
            if release.takes_force_all_reduce:
                extra["force_all_reduce"] = force_all_reduce
            counted = tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(list(batch.model), counted, **extra)
        return losses

    def _stage_class(self, config: Any) -> type[MegatronStage]:
        """Return what computes a batch's units under Megatron's settings."""
        if not overlaps(config):
            return MegatronStage
        from evenpipe.megatron.overlapping import OverlappingStage  # what it imports is for experts

        return OverlappingStage

    def _recomputes(self, batch: Batch, schedule: Schedule, stage: int) -> Callable[[Unit], bool]:
        """Return what says of a unit whether its layers are computed again."""
        chunks = schedule.recomputed_chunks(stage)
        if schedule.recomputed and (found := obstacle(batch.config, batch.model)) is not None:
            raise ScheduleError(
                f"{found}: rules out that parts of the model are computed again, as {schedule.name} does: choose one"
            )
        return lambda unit: unit.chunk in chunks

    def _weights(self, chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
        """Return the tensors that are no activations when autograd saves them: here, the parameters."""
        return [parameter for chunk in chunks for parameter in chunk.parameters()]

    def _held_up(self, config: Any) -> Queues:
        if _synchronises(config):
            return "synchronised"
        # What differs in size makes no room for what comes until it has left, and a load that waits holds compute up.
        return "one" if self.bpipe and self._sizes_differ(config) else "many"

    def _swap(self) -> float | HostLimit | None:
        """Return what the executor swaps from the first batch on."""
        return self.swap

    def _joins_partners(self, batch: Batch) -> bool:
        """Return whether links between partners are opened too."""
        return self.bpipe

    def _sizes_differ(self, config: Any) -> bool:
        """Return whether micro-batches save other sizes than one another."""
        names = ("num_moe_experts", "variable_seq_lengths", "num_microbatches_with_partial_activation_checkpoints")
        return any(getattr(config, name, None) for name in names)

    def _weighs(self, batch: Batch) -> bool:
        """Return whether a batch is measured even without `measure`."""
        return False

    def _executor(self, pipeline: dist.ProcessGroup, batch: Batch) -> Executor:
        chunks = list(batch.model)
        if self._model is not None and [*map(id, self._model)] != [*map(id, chunks)]:
            raise ValueError("this PipelineSchedule belongs to another model: make one for each model")
        if self.executor is None:
            self._model = chunks
            parameters = self._weights(chunks)
            device = parameters[0].device if parameters else torch.device(torch.cuda.current_device())
            backend = "nccl" if device.type == "cuda" else "gloo"
            ranks = dist.get_process_group_ranks(pipeline)
            places = self._places(len(ranks), batch)
            if "vee" in self.programs.spec.needed(len(chunks)):
                check_model(chunks, places, pipeline)
            joined = links(places, self._joins_partners(batch))
            vary = bool(batch.config.variable_seq_lengths)
            connections = connect(ranks, joined, backend, device, vary, self._held_up(batch.config))
            self.programs = self.programs.for_queues(connections.queues)
            self.executor = Executor(
                pipeline.rank(),
                connections,
                device,
                parameters,
                self._observer,
                self.measure,
                partial(_count_wait, batch.config.timers) if _synchronises(batch.config) else None,
            )
            self.executor.swap(self._swap())
            self._connected(self)
            if "split" in self.needs and dist.get_rank() == 0 and (whole := whole_layers(chunks)):
                self.executor.observer.remark(
                    f"{whole} layers of this stage compute the gradients of their weights in the first half of a "
                    "backward: make them with delay_wgrad_compute, as EvenPipe's flags do in scripts of Megatron-LM"
                )
        self.executor.measure = self.measure or self._weighs(batch)
        return self.executor


def _synchronises(config: Any) -> bool:
    """Return whether Megatron's timers around every forward and backward do (`--timing-log-level 2`)."""
    return getattr(config.timers, "_log_level", 0) >= 2


def _count_wait(timers: Any, message: Message, received: bool, waited_ms: float) -> None:
    """Add a wait to Megatron's timer of that name, whose own start would sit it out on a device."""
    timer = timers(f"{message.link.kind}-{'recv' if received else 'send'}", log_level=2)
    timer.start()
    timer._start_time -= waited_ms / 1e3
    timer.stop()
