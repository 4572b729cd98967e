"""What a user asks EvenPipe for: one typed model, the table of contradictions, and how front ends write them."""

from evenpipe.settings.config import ConfigError, EvenPipeConfig, first_problem
from evenpipe.settings.contradictions import (
    CONTRADICTIONS,
    CONTRADICTIONS_ON_CPU,
    Contradiction,
    contradiction_in,
    only_tuned,
)
from evenpipe.settings.spelling import COMMAND, FLAGS, SECTION, Spelling, flag, in_flags

__all__ = [
    "COMMAND",
    "CONTRADICTIONS",
    "CONTRADICTIONS_ON_CPU",
    "FLAGS",
    "SECTION",
    "ConfigError",
    "Contradiction",
    "EvenPipeConfig",
    "Spelling",
    "contradiction_in",
    "first_problem",
    "flag",
    "in_flags",
    "only_tuned",
]
