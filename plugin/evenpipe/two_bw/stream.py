"""2BW on one stage: batches in one stream without flushes, and steps that are finished one batch later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from evenpipe.runtime.executor import Executor
from evenpipe.runtime.stage import Stage
from evenpipe.schedule import DelayCorrection, Spec, Step, Stream, Swaps, Unit, batch_of
from evenpipe.two_bw.delay_correction import correction_of
from evenpipe.two_bw.gradients import Gradients, Outcome
from evenpipe.two_bw.inputs import ReadAhead

__all__ = ["BatchState", "Call", "StreamStage", "TwoBW"]

_Settings = list[dict[str, Any]]
_NOTHING_KNOWN = Outcome(True, None, None)


class StreamStage(Stage, Protocol):
    """A framework's stage. Micro-batches are numbered along the stream, from 0 where it begins."""

    def forget(self) -> None:
        """Let go of what has been forwarded and not backwarded."""


class BatchState(Protocol):
    """State that forwards leave in a model beside their outputs: buffers, sums of losses; each batch has its own."""

    def use(self, batch: int) -> None:
        """A unit of `batch`, as `TwoBW` counts, is about to be computed."""

    def gather(self, batch: int) -> None:
        """All stages have backwarded `batch`, and are at one place of their order."""

    def drop(self, first: int) -> None:
        """The forwards of `first` and later batches are dropped, and will be computed again."""


class Call(NamedTuple):
    """One batch: its `steps` in `stream`, what carries out the next of them, and the stream's `stage`."""

    stream: Stream
    steps: list[Step]
    take: Callable[[Step], None]
    stage: Any


class TwoBW:
    """One stage's batches and its optimizer: W(t+1) = W(t) - step of the gradients at W(t-1) (PipeDream-2BW §3.1).

    With versions in place (PACI), a stage submits a batch and makes its step at once, at the end of the call. Backwards
    use the newest weights; forwards of batch t + 1 in the call of batch t use W(t). `drain` drops these, and they are
    computed again on W(t+1): a run's bits depend on where it drains. Figures are gathered for the log alone.

    A call of batch t backwards all of it, and forwards the first micro-batches of batch t + 1 too. So `inputs` run
    ahead of the calls, by up to p - 1 micro-batches on the first stage. At its end, the batch's step is *submitted*.
    What other stages have to know of its gradients is *gathered* in the background, at a place of the schedule by which
    all stages have submitted. The step is finished, with the learning rate of its own batch, where the schedule has its
    *update*: what a stage then needs of others has been under way for long. `drain` finishes it at once, and ends the
    stream; the next call begins another.
    """

    def __init__(
        self,
        gradients: Gradients,
        spec: Spec,
        bpipe: bool,
        swaps: Swaps = (),
        states: Sequence[BatchState] = (),
        correction: DelayCorrection = "none",
    ) -> None:
        self.gradients = gradients
        self.versions = gradients.versions
        self.correction = correction_of(
            correction, self.versions, lambda: gradients.param_groups, lambda: gradients.optimizers
        )
        self.inputs = ReadAhead()
        self.batch = 0  # the next to be submitted: 0 where both versions begin equal, 1 after a resume with both
        self.loaded_at = 0
        #: The batch with which the present stream began.
        self.first = 0
        #: Of the step that was finished last, here or before a resume; schedules of the rate count a first as made.
        self.outcome = _NOTHING_KNOWN
        self._spec = spec
        self._bpipe = bpipe
        self._swaps = swaps
        self._states = states
        self._stream: tuple[Stream, StreamStage, Executor] | None = None
        self._called = 0  # batches of the stream
        self._settings: _Settings | None = None  # of the submitted step's own batch
        self._row: Tensor | None = None  # of figures, from when they are known until they are sent
        self._ungathered = False  # whether the submitted step's figures are still to be sent
        self._with_figures: dict[object, Callable[[], None]] = {}  # by whose exchange it is
        self._unread: int | None = None  # a batch whose step is finished, but not what was gathered of it
        self._finished: int | None = None

    @property
    def name(self) -> str:
        """Return the schedule's name."""
        return self._spec.name

    @property
    def finished(self) -> tuple[int, Outcome] | None:
        """The last batch of whose step everything is known, counted from 0 since the weights were made or loaded."""
        return None if self._finished is None else (self._finished - self.loaded_at, self.outcome)

    @contextmanager
    def call(
        self,
        executor: Executor,
        sizes: tuple[int, int],
        source: Iterator[Any] | None,
        make_stage: Callable[[Stream], StreamStage],
    ) -> Iterator[Call]:
        """The next batch of a pipeline of `sizes` (stages, micro-batches), to be carried out inside.

        Goes on with the stream if that has these sizes; else `make_stage` makes the stage of a new one. `source` is
        the data iterator, where this process reads. Raises InputError for one that cannot be, before anything is done.
        """
        if self._stream is not None and self._stream[0].micro_batches != sizes[1]:
            self.drain()
        if self._stream is None:
            self._called, self.first = 0, self.batch
            stream = Stream(self._spec, *sizes, self._bpipe, executor.connections.queues, self._swaps)
            self._stream = stream, make_stage(stream), executor
            if self.gradients.exchange is not None:
                executor.connections.compare(self.gradients.exchange.named)
        stream, stage, _ = self._stream
        self.inputs.start_batch(source, sizes[1])
        if self.correction is not None:
            self.correction.hide()
        self._start_batch()
        place = executor.stage_index
        steps = stream.call(place, self._called, self.gradients.update_early(place))
        with executor.stretch(stream.program, stage, self) as take:
            yield Call(stream, steps, take, stage)
        self._called += 1
        # Outside of a call the parameters are what the last finished step made of them, or ahead of it.
        self.versions.use(self.versions.latest)

    def use(self, unit: Unit) -> None:
        """Point the parameters at the weights that all of the unit's batch uses."""
        assert self._stream is not None, "a call is being carried out"
        batch = self.first + batch_of(unit.micro_batch, self._stream[0].micro_batches)
        version = self.versions.needed(batch)
        if version == self.versions.latest:
            self.gradients.settle()
        self.versions.use(version)
        for state in self._states:
            state.use(batch)

    @torch.no_grad()
    def submit(self) -> Outcome:
        """Stand in for `optimizer.step()` after all backwards of a batch; return the outcome of the step before."""
        if not self.versions.in_place:  # else `update` has done it
            self._submit()
        return self.outcome

    def _submit(self) -> None:
        self._read()
        assert self._settings is None, "the schedule finishes one step before the next is submitted"
        # A rate may be a tensor, which schedules write to.
        self._settings = deepcopy(_settings_of(self.gradients.param_groups))
        self.batch += 1
        self._ungathered = True
        if self.gradients.loss_scale is not None:
            self.gradients.loss_scale.submit()
        self.gradients.reduce()

    @torch.no_grad()
    def gather(self) -> None:
        """Bring the submitted step's figures under way, if they are not: all stages at the same place of an order."""
        if not self._ungathered:
            return
        self._hold()
        self._ungathered = False
        row, self._row = self._row, None
        if self.gradients.exchange is not None and row is not None:
            self.gradients.exchange.start(row)
        for state in self._states:
            state.gather(self.batch - 1)
        for owner in tuple(self._with_figures):
            self.start_waiting(owner)

    @torch.no_grad()
    def update(self) -> None:
        """Write the submitted step's weights over the older version; in place, submit the batch and step with it."""
        if self.versions.in_place:
            self._submit()
        self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Make the submitted step; nothing to do without one."""
        if self._settings is None:
            return
        self._hold()
        decides, scale = self.gradients.decides, self.gradients.loss_scale
        if decides:
            self.gather()
        settings, self._settings = self._settings, None
        self._unread = self.batch - 1
        if decides:
            self._read()
        outcome = self.outcome if decides else _NOTHING_KNOWN
        self.gradients.settle()
        correcting = nullcontext() if self.correction is None else self.correction.stepping()
        with self.versions.writing(), _with_settings(self.gradients.param_groups, settings), correcting:
            self.gradients.step(outcome)
            if self.correction is not None:
                self.gradients.settle()
        if scale is not None:
            scale.step_ended(self.batch - 1, outcome.overflow)

    def start_with_figures(self, owner: object, exchange: Callable[[], None]) -> None:
        """Start the `owner`'s `exchange` between all stages where the submitted step is gathered, or now if it was.

        The last stage would begin it between two batches, and then a wait of its host for its device would wait for the
        first stage. Under BPipe, that one ends its batch by what the last does in the next.
        """
        self._with_figures[owner] = exchange
        if not self._ungathered:
            self.start_waiting(owner)

    def start_waiting(self, owner: object) -> None:
        """Start the `owner`'s exchange, if one waits for the figures of a step; all stages alike call it."""
        if (exchange := self._with_figures.pop(owner, None)) is not None:
            exchange()

    def drain(self) -> None:
        """Finish the submitted step, drop what has been forwarded of the next batch, and leave the newest weights.

        All ranks call it, between two batches. What had been read for the dropped forwards will be read again. Nothing
        to do twice.
        """
        self.break_off()
        self.gather()
        self._finish()
        self._read()
        self.versions.use(self.versions.latest)
        self.gradients.settle()
        if self.correction is not None:
            self.correction.show()
        self._start_batch()  # a checkpoint is to have what the scaler knows then

    def break_off(self) -> None:
        """Settle what other stages are owed, and drop what has been forwarded; the last step stays to be made.

        Waits for nothing that another stage has not started yet. The next call reads again what this one read ahead.
        """
        if self._stream is None:
            return
        stream, stage, executor = self._stream
        executor.break_off(stream.owed(executor.stage_index, self._called - 1))
        stage.forget()
        for state in self._states:
            state.drop(self.batch)
        self.inputs.rewind()
        self._stream = None

    def state_dict(self, places: Sequence[int] | None = None) -> dict[str, Any]:
        """Return, after `drain`, what a checkpoint needs beside the framework's own, which has the newest weights.

        With `places`, the older version has the parameters at these places only.
        """
        kept = self.batch > 0 and not self.versions.in_place
        before = self.versions.tensors(self.versions.latest - 1) if kept else None
        scale, correction = self.gradients.loss_scale, self.correction
        state: dict[str, Any] = {
            "before": None if before is None else _on_host(before, places),
            "outcome": list(self.outcome),
            "unlearnt": [] if scale is None else scale.unlearnt,
        }
        if correction is not None:
            state["correction"] = correction.name
            if not correction.own:
                corrected = correction.state()  # of parameters alone, behind which versions have buffers
                its = None if places is None else [place for place in places if place < len(corrected)]
                state["corrected"] = _on_host(corrected, its)
        return state

    def own_state(self) -> dict[str, Any]:
        """Return what a checkpoint of this process alone needs beside: parts of an optimizer that is shared out."""
        correction = self.correction
        return {"corrected": _on_host(correction.state(), None)} if correction is not None and correction.own else {}

    def corrected_alike(self, state: Mapping[str, Any] | None) -> bool:
        """Return whether `state` was saved with this delay correction."""
        name = None if self.correction is None else self.correction.name
        return state is not None and state.get("correction") == name

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint whose newest weights have been loaded; None: both versions are these.

        Raises ValueError for weights of other shapes.
        """
        before = None if state is None or self.versions.in_place else state["before"]
        newest = self.versions.tensors(self.versions.latest)
        if before is not None and [tensor.shape for tensor in before] != [tensor.shape for tensor in newest]:
            raise ValueError("the older weight version in the checkpoint has other shapes than this stage's parameters")
        self.outcome = _NOTHING_KNOWN if state is None else Outcome(*state["outcome"])
        # Version 0 is the older one: batch 1 runs on it.
        self.batch = self.loaded_at = 0 if before is None else 1
        self._finished = None
        self.versions.restart(self.batch, before)
        if self.correction is not None:
            self.correction.restart(state["corrected"] if state is not None and self.corrected_alike(state) else None)
        if self.gradients.loss_scale is not None:
            self.gradients.loss_scale.restart(self.batch, () if state is None else state["unlearnt"])

    def _start_batch(self) -> None:
        if self.gradients.loss_scale is not None:
            self.gradients.loss_scale.start_batch(self.batch)

    def _hold(self) -> None:
        """Compute the figures, while the gradients are there."""
        if self._ungathered and self._row is None:
            self._row = self.gradients.hold()

    def _read(self) -> None:
        """Wait for what was gathered of the step that is finished, or about to be: the outcome."""
        if self._unread is None:
            return
        self._finished, self._unread = self._unread, None
        exchange = self.gradients.exchange
        self.outcome = _NOTHING_KNOWN if exchange is None else self.gradients.outcome(exchange.finish())


def _settings_of(groups: Sequence[Mapping[str, Any]]) -> _Settings:
    """Return the settings, of any optimizer, that loops and schedules may change: numbers, tensors, tuples of them."""
    return [{name: value for name, value in group.items() if _is_setting(value)} for group in groups]


def _is_setting(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(one, int | float) for one in value)
    return isinstance(value, int | float | Tensor)


@contextmanager
def _with_settings(groups: Sequence[dict[str, Any]], settings: _Settings) -> Iterator[None]:
    """Inside, parameter groups have `settings`: a training loop has set those of the next iteration by now.

    Only what the loop has changed since is exchanged: an optimizer may count its own steps in a group.
    """
    present = [
        {name: group[name] for name, value in values.items() if isinstance(value, Tensor) or value != group[name]}
        for group, values in zip(groups, settings, strict=True)
    ]
    for group, values, changed in zip(groups, settings, present, strict=True):
        group.update((name, values[name]) for name in changed)
    try:
        yield
    finally:
        for group, changed in zip(groups, present, strict=True):
            group.update(changed)


def _on_host(tensors: Sequence[Tensor], places: Sequence[int] | None) -> list[Tensor]:
    """Return copies that take no memory of a device, of all `tensors` or those at `places`."""
    some = tensors if places is None else [tensors[place] for place in places]
    return [torch.empty_like(tensor, device="cpu").copy_(tensor.detach()) for tensor in some]
