"""Which layers of a Megatron GPT each (virtual) stage gets: the layout whose slowest stage is fastest."""

from evenpipe.partition.layouts.layers import Layer, Roofline, Time, layers_of, layout_text, parts_of, roofline
from evenpipe.partition.layouts.plan import LayoutPlan, Split, StagePlan, even_layout, plan_layout
from evenpipe.partition.layouts.shape import LayoutError, Pipeline, Shape
from evenpipe.partition.layouts.work import Work, kinds, work_of

__all__ = [
    "Layer",
    "LayoutError",
    "LayoutPlan",
    "Pipeline",
    "Roofline",
    "Shape",
    "Split",
    "StagePlan",
    "Time",
    "Work",
    "even_layout",
    "kinds",
    "layers_of",
    "layout_text",
    "parts_of",
    "plan_layout",
    "roofline",
    "work_of",
]
