"""A PipelineModule in the parts into which a plan of `evenpipe partition` cuts it, inside layers too."""

from evenpipe.deepspeed.planned.whole_model import WholeModel

__all__ = ["WholeModel"]
