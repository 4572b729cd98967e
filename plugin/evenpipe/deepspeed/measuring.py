"""A DeepSpeed engine that goes by what it measures in its own batches; its checkpoints have what it decided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from evenpipe.deepspeed.engine import EvenPipeEngine, resumes_training
from evenpipe.deepspeed.section import SectionError
from evenpipe.deepspeed.stage import tensors_of
from evenpipe.deepspeed.static_memory import static_bytes
from evenpipe.schedule import Unit
from evenpipe.settings.contradictions import CONTRADICTIONS_ON_CPU, contradiction_in
from evenpipe.settings.spelling import SECTION
from evenpipe.tuner.loop import AdaptiveLoop
from evenpipe.tuner.part_watch import PartWatch
from evenpipe.tuner.process_memory import Room, limit_bytes, storage_bytes
from evenpipe.tuner.searching import SearchLoop
from evenpipe.tuner.swapping import SwapLoop

__all__ = ["MeasuringEngine"]


class MeasuringEngine(EvenPipeEngine):
    """`_watch` weighs and times the batches that it is set to; `_limit_bytes` is a process' memory.

    The state of its `loop` goes into the client's state of a checkpoint, under `_state_name`; subclasses make the loop,
    and take its state up again.
    """

    _state_name: ClassVar[str]
    loop: AdaptiveLoop | SearchLoop | SwapLoop

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._watch = PartWatch(kept=self._kept_bytes)
        super().__init__(*args, **kwargs)
        self._watch.then, self.executor.observer = self.executor.observer, self._watch
        line = contradiction_in(self.evenpipe, SECTION, CONTRADICTIONS_ON_CPU)
        if self.device.type != "cuda" and line is not None:
            raise SectionError(None, line)
        self._limit_bytes = limit_bytes(self.evenpipe.memory_gib, self.device)

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """DeepSpeed's, with the engine's own state in the client's."""
        client_state = dict(client_state or {})
        if (state := self._state()) is not None:
            client_state[self._state_name] = state
        return super().save_checkpoint(save_dir, tag, client_state, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's; the run goes on by the state of the one that saved, where that is of use."""
        path, client_state = super().load_checkpoint(*args, **kwargs)
        if path is not None:
            state = client_state.pop(self._state_name, None)
            self._go_on_by(state if resumes_training(self, *args, **kwargs) else None)
        return path, client_state

    def _state(self) -> dict[str, Any] | None:
        """Return what goes into a checkpoint; None before there is anything."""
        return self.loop.state_dict()

    def _go_on_by(self, state: Mapping[str, Any] | None) -> None:
        """Take the state of the loop whose checkpoint was loaded; None where there is none."""

    def _with_settings(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return a loop's state with the settings that it was found under."""
        return None if state is None else state | {"settings": self._settings}

    def _is_of_these_settings(self, state: Mapping[str, Any] | None) -> bool:
        """Return whether a state of `_with_settings` is of this memory and these settings."""
        found = {"limit_bytes": self._limit_bytes, "settings": self._settings}
        return state is not None and found.items() <= state.items()

    @property
    def _settings(self) -> dict[str, Any]:
        """Return what times and bytes of a micro-batch depend on."""
        return {
            "stages": self.num_stages,
            "parts": list(self.module.parts),
            "replicas": self.grid.data_parallel_size,
            "micro_batch_size": self.micro_batch_size,
            "precision": [self.bfloat16_enabled(), self.fp16_enabled()],
            "zero": self.zero_optimization(),
            "checkpointed": self.module.activation_checkpoint_interval,
        }

    @property
    def _weighs(self) -> bool:
        """Return whether the store is to know what the micro-batches of the next batch save."""
        return self._watch.store is not None

    def _train(self, micro_batches: int) -> None:
        with self.executor.measuring(self._weighs):
            super()._train(micro_batches)

    def _kept_bytes(self, unit: Unit) -> int:
        """Return bytes of what the engine keeps of a micro-batch beside what autograd saves."""
        buffer = self._schedule(self.micro_batches)[1].buffer_of(unit)
        kept = [tensor for of_kind in self.pipe_buffers.values() for tensor in tensors_of(of_kind[buffer])]
        return storage_bytes(tensor for tensor in kept if isinstance(tensor, Tensor))

    def _static_bytes(self) -> int:
        return static_bytes(self) + self.executor.connections.device_bytes

    def _room(self) -> Room:
        return Room(self._limit_bytes, self._static_bytes())
