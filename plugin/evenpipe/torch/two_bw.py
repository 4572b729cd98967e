"""2BW for a pipeline of plain modules: batches without a flush between them, and torch's optimizers a batch late."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenpipe.runtime.exchange import Exchange
from evenpipe.runtime.executor import Executor
from evenpipe.runtime.heartbeat import wait_for
from evenpipe.runtime.stage import ModuleStage
from evenpipe.runtime.weight_versions import WeightVersions
from evenpipe.schedule import DelayCorrection, Program, Stream, find, swapping
from evenpipe.torch.batches import check_gradients, mean_loss
from evenpipe.torch.ties import Ties
from evenpipe.two_bw.gradients import Gradients, LossScale, Outcome, ParameterGradients
from evenpipe.two_bw.stream import BatchState, TwoBW

__all__ = ["PlainGradients", "TwoBWPipeline", "TwoBWTraining", "scaled_to"]


class PlainGradients(Gradients):
    """The gradients of one stage of a pipeline of plain modules, and its optimizers, which may be of any kind.

    2BW says which weights a gradient was taken at; whatever makes a step of gradients steps. Raises ValueError for an
    optimizer that needs more than gradients.

    squares: this stage's sums of squares of `parameter.grad`, in fp64, by piece of the model, zero for pieces on other
    stages, so that their sum over stages is exact. clip_grad: the largest norm of all stages' gradients; 0 for any.
    replicas: the processes with the same stage, whose gradients' mean is taken. ties: gradients shared with stages.
    loss_scale: in fp16; a step is skipped where any stage's gradients are not finite.
    """

    def __init__(
        self,
        versions: WeightVersions,
        optimizers: Sequence[torch.optim.Optimizer],
        squares: Callable[[], Tensor],
        group: dist.ProcessGroup,
        clip_grad: float = 0.0,
        replicas: dist.ProcessGroup | None = None,
        ties: Ties | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        row = squares()
        self.versions = versions
        self.exchange = Exchange(group, len(row), row.device)
        self.loss_scale = loss_scale
        self.decides = clip_grad > 0 or loss_scale is not None
        self.waits = self.decides or (ties is not None and bool(ties))
        self._optimizers = list(optimizers)
        for optimizer in optimizers:
            _check_steps(optimizer)
        if loss_scale is not None and any(
            one.dtype == torch.float16 for group in self.param_groups for one in group["params"]
        ):
            raise ValueError("2bw: gradients in fp16 cannot be unscaled: keep parameters in fp32, under torch.autocast")
        self._squares = squares
        self._limit = clip_grad
        self._replicas = replicas if replicas is not None and replicas.size() > 1 else None
        self._ties = ties
        if versions.in_place and self.waits:
            what, remedy = ("clip_grad", "give 0") if self.decides else ("weights tied over stages", "untie them")
            raise ValueError(
                f"{what}: under paci each stage steps by itself after its own last backward, and this step would wait "
                f"for stages that end the batch later: {remedy}, or use schedule 2bw"
            )
        self._own = ParameterGradients()
        self._works: list[dist.Work] = []

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers

    @property
    def kept(self) -> list[Tensor]:
        """Return the gradients of the submitted batch, until its step is finished."""
        return [gradient for _, gradient in self._own.kept]

    @property
    def held_bytes(self) -> int:
        """Return the bytes of `kept`: they are held where the next batch's first backward comes before the step."""
        return sum(gradient.nbytes for gradient in self.kept)

    def reduce(self) -> None:
        # A learning-rate scheduler of torch's warns where no step came before its own; this one is submitted.
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._ties is not None:
            self._ties.fill()
        self._own.keep(parameter for group in self.param_groups for parameter in group["params"])
        for gradient in self.kept if self._replicas is not None else ():
            work = dist.all_reduce(gradient, group=self._replicas, async_op=True)
            assert work is not None
            self._works.append(work)

    def hold(self) -> Tensor:
        """Return `squares` of the gradients, after their reduction over replicas and tied stages."""
        if self._replicas is not None and self._works:
            wait_for(self._works, self._replicas, "replicas' gradients", self.kept[0].device)
            self._works.clear()
            for gradient in self.kept:
                gradient.div_(self._replicas.size())
        if self._ties is not None:
            # At one place of all stages' order, and not where the last stage submits: a wait of its host for its device
            # would then be one for the first stage, whose batch ends by what the last does next.
            self._ties.start({id(parameter): gradient for parameter, gradient in self._own.kept})
            self._ties.finish()
        with self._own.in_place():
            return self._squares()

    def outcome(self, rows: list[list[float]]) -> Outcome:
        norm = math.sqrt(sum(sum(piece) for piece in zip(*rows, strict=True)))
        if self.loss_scale is None:
            return Outcome(True, norm, None)
        updated = math.isfinite(norm)
        return Outcome(updated, norm / float(self.loss_scale.submitted) if updated else None, None)

    def step(self, outcome: Outcome) -> None:
        if outcome.updated:
            if self.loss_scale is not None:
                unscale = self.loss_scale.submitted.double().reciprocal().float()
                for gradient in self.kept:
                    gradient.mul_(unscale)
            if self._limit:
                assert outcome.grad_norm is not None, "the norm decides"
                scaled_to(self._limit, outcome.grad_norm, self.kept)
            with self._own.in_place():
                for optimizer in self._optimizers:
                    optimizer.step()
        self._own.let_go()


def _check_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that does not step from a batch's gradients alone."""
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"2bw: {name}.step needs a closure, which computes the loss again on new weights while the pipeline is "
            "amid the next batch: use an optimizer that steps without one"
        )
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in every):
        raise ValueError(
            f"2bw: a parameter of {name} has hooks that run after each micro-batch's gradient, as an optimizer that "
            "steps in the backward has: step by optimizer.step alone"
        )


def scaled_to(limit: float, norm: float, gradients: Sequence[Tensor]) -> None:
    """Scale gradients of this norm so that it is at most `limit`."""
    if limit and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / (norm + 1e-6))


class TwoBWPipeline(Protocol):
    """The pipeline, as far as `TwoBWTraining` needs it."""

    program: Program
    versions: WeightVersions | None
    executor: Executor
    chunks: list[nn.Module]
    batches: int
    stride: int
    is_last: bool
    losses: list[Tensor]

    def shared(self, batch: Any) -> Sequence[Any]:
        """Return each micro-batch's share of a batch."""

    def stage_for(self, item: Callable[[int], Any], losses: dict[int, Tensor], first: int) -> ModuleStage:
        """Return a stage whose micro-batch i gets `item(i)`, and leaves its loss in `losses[i]`.

        first: the number of the batch that begins with micro-batch 0.
        """


class TwoBWTraining(Iterator[Tensor | None]):
    """Trains on one of `batches` after the other: gives the mean loss of each where the model ends, None elsewhere.

    Micro-batches of the next batch are forwarded before the present one's last backwards, so that `batches` is read
    one batch ahead. Batch t's step, with the learning rate that the optimizer has when its loss is given, is finished
    while batch t + 1 runs: W(t+1) = W(t) - step of the gradients at W(t-1). Under paci it is made when the loss is
    given, with the learning rate that the optimizer had before (`TwoBW`). When `batches` have ended, or `drain` is
    called (by all ranks alike), all steps are made.
    """

    def __init__(
        self,
        pipeline: TwoBWPipeline,
        batches: Iterable[Any],
        gradients: PlainGradients,
        delay_correction: DelayCorrection = "none",
    ) -> None:
        schedule = pipeline.program.schedule
        self.gradients = gradients
        self._pipeline = pipeline
        self._batches = iter(batches)
        self._sizes = schedule.stages, schedule.micro_batches
        self._buffers = _Buffers(pipeline.chunks)
        if delay_correction != "none" and pipeline.versions is not None and pipeline.versions.in_place:
            raise ValueError(
                f"delay_correction={delay_correction}: corrects gradients that are a batch late, and those of paci are "
                "not: leave it out"
            )
        paired, swaps = bool(pipeline.program.pairs), swapping(schedule)
        self.two_bw = TwoBW(gradients, find(schedule.name), paired, swaps, [self._buffers], delay_correction)
        self._ahead: Sequence[Any] | None = None
        self._losses: dict[int, Tensor] = {}
        self._items: dict[int, Sequence[Any]] = {}  # of the present batch and the next, along the stream
        self._called = 0  # batches of the stream
        self.two_bw.load_state_dict(None)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what `state_dict` gave; the pipeline's parameters have the newest weights already."""
        self.drain()
        self.two_bw.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside parameters and the optimizer's state; all steps are made."""
        self.drain()
        return self.two_bw.state_dict() | self.two_bw.own_state()

    def drain(self) -> None:
        """Finish the last step; what has been forwarded of the next batch is dropped, and forwarded again."""
        self.two_bw.drain()
        self._called = 0
        self._items.clear()
        self._losses.clear()

    def __next__(self) -> Tensor | None:
        check_gradients()
        pipeline, count = self._pipeline, self._sizes[1]
        present = self._ahead if self._ahead is not None else self._read()
        if present is None:
            self.drain()
            raise StopIteration
        self._ahead = self._read()
        self._buffers.keep(self.two_bw.batch)
        # The last batch stands in for the one after it, whose forwards are dropped.
        self._items[self._called], self._items[self._called + 1] = present, self._ahead or present
        with self.two_bw.call(pipeline.executor, self._sizes, None, self._stage) as called:
            for step in called.steps:
                called.take(step)
        called.stage.losses.clear()
        self.two_bw.submit()
        del self._items[self._called]
        first = self._called * count
        pipeline.losses = [self._losses.pop(first + number) for number in range(count)] if pipeline.is_last else []
        self._called += 1
        pipeline.batches += pipeline.stride
        return mean_loss(pipeline.losses, present) if pipeline.is_last else None

    def _read(self) -> Sequence[Any] | None:
        for batch in self._batches:
            return self._pipeline.shared(batch)
        return None

    def _stage(self, stream: Stream) -> ModuleStage:
        def item(number: int) -> Any:
            return self._items[number // stream.micro_batches][number % stream.micro_batches]

        return self._pipeline.stage_for(item, self._losses, self._pipeline.batches)


class _Buffers(BatchState):
    """The buffers of `chunks`, which are put back where forwards of the batch ahead are dropped."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = chunks
        self._present = 0
        self._before: list[tuple[Tensor, Tensor]] = []  # and what they were before the batch ahead

    def keep(self, batch: int) -> None:
        """Keep what the forwards so far have made of them; `batch` is the present one."""
        self._present = batch
        self._before = []

    def use(self, batch: int) -> None:
        if batch > self._present and not self._before:
            buffers = (buffer for chunk in self._chunks for buffer in chunk.buffers())
            self._before = [(buffer, buffer.clone()) for buffer in buffers]

    def gather(self, batch: int) -> None:
        """Nothing of them is brought to other stages."""

    def drop(self, first: int) -> None:
        for buffer, before in self._before:
            buffer.copy_(before)
        self.keep(first)
