"""A plain model that `evenpipe partition` has cut, trained under the plan's schedule."""

from evenpipe.train.planned.pipeline import PlannedPipeline

__all__ = ["PlannedPipeline"]
