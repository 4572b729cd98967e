"""What of DeepSpeed does not go together with a group size that is tuned, said in one line."""

from __future__ import annotations

from typing import Any

from evenpipe.deepspeed.section import SectionError

__all__ = ["refuse_for_tuning"]


def refuse_for_tuning(engine: Any) -> None:
    """Raise SectionError for the first setting of an initialized engine under which groups cannot be tuned."""
    if engine.evenpipe.memory_gib is None and engine.device.type != "cuda":
        raise SectionError(
            "group_size",
            f'"auto": how much memory it may use is not known on {engine.device.type}: give "memory_gib"',
        )
    if engine.module.dynamic_shape:
        raise SectionError(
            "group_size",
            '"auto": micro-batches of PipelineModule(dynamic_shape=True) differ in what they save, so that the memory '
            "of groups is not known: give a number",
        )
