"""Stage code: a cut model as readable Python, a file a stage, and back to modules that train."""

from evenpipe.partition.trace import tensors_of
from evenpipe.runtime.recompute_swap import Keeping
from evenpipe.stage_code.comparing import compare_stages, compare_with_plan, too_large
from evenpipe.stage_code.loading import State, files_of, load_parts, opened, part_types, write_stages
from evenpipe.stage_code.part import (
    Boundary,
    Draws,
    Part,
    StageCodeError,
    device_of,
    drawing,
    sizes_on_host,
    users_lines,
)

__all__ = [
    "Boundary",
    "Draws",
    "Keeping",
    "Part",
    "StageCodeError",
    "State",
    "compare_stages",
    "compare_with_plan",
    "device_of",
    "drawing",
    "files_of",
    "load_parts",
    "opened",
    "part_types",
    "sizes_on_host",
    "tensors_of",
    "too_large",
    "users_lines",
    "write_stages",
]
