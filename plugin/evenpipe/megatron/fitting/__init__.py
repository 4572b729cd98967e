"""Fit for programs: a run of Megatron's is read, from a line or from settings, and answered by settings to change."""

from evenpipe.megatron.fitting.answering import answered, fit
from evenpipe.megatron.fitting.files import is_file_of_a_run, source_of_path
from evenpipe.megatron.fitting.layouts import layout_for
from evenpipe.megatron.fitting.source import Source, kept, option, source_of_line, source_of_settings
from evenpipe.planner.fit.document import TITLES, Answer, Fit, FitError, Found

__all__ = [
    "TITLES",
    "Answer",
    "Fit",
    "FitError",
    "Found",
    "Source",
    "answered",
    "fit",
    "is_file_of_a_run",
    "kept",
    "layout_for",
    "option",
    "source_of_line",
    "source_of_path",
    "source_of_settings",
]
