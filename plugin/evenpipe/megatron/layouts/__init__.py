"""Layouts: the best `--pipeline-model-parallel-layout` for the flags of a script of Megatron's."""

from evenpipe.megatron.layouts.planned import best_layout

__all__ = ["best_layout"]
