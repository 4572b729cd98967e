"""Which layers of a Megatron GPT each (virtual) stage gets: the layout whose slowest stage is fastest."""

from evenpipe.partition.layouts.layers import Layer, Time, Times, layers_of, layout_text, parts_of, roofline
from evenpipe.partition.layouts.plan import LayoutPlan, Split, StagePlan, even_layout, plan_layout
from evenpipe.partition.layouts.profiled import profile_of
from evenpipe.partition.layouts.shape import LayoutError, Pipeline, Shape
from evenpipe.partition.layouts.work import Work, kinds, work_of

__all__ = [
    "Layer",
    "LayoutError",
    "LayoutPlan",
    "Pipeline",
    "Shape",
    "Split",
    "StagePlan",
    "Time",
    "Times",
    "Work",
    "even_layout",
    "kinds",
    "layers_of",
    "layout_text",
    "parts_of",
    "plan_layout",
    "profile_of",
    "roofline",
    "work_of",
]
