"""Arguments: the model and the run that a script of Megatron-LM's arguments describe."""

from evenpipe.planner.arguments.flags import parse_flags
from evenpipe.planner.arguments.model import model_of
from evenpipe.planner.arguments.run import Pipelined, run_of
from evenpipe.planner.arguments.values import FlagError

__all__ = ["FlagError", "Pipelined", "model_of", "parse_flags", "run_of"]
