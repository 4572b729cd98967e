"""Fit: reads a run that is there, from a line, a file or settings, and answers by changes that fit it and make it fast.

`moves` has the changes, `weighing` estimates them, `answers` takes the best; none of the three knows a framework.
`source` and `files` read a run of Megatron's, and `megatron` writes its answers; `deepspeed` does both for DeepSpeed's
configurations.
"""

from evenpipe.fitting.document import TITLES, Answer, Fit, FitError, Found
from evenpipe.fitting.files import is_file_of_a_run, source_of_path
from evenpipe.fitting.layouts import layout_for
from evenpipe.fitting.megatron import answered, fit
from evenpipe.fitting.source import Source, kept, option, source_of_line, source_of_settings

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
