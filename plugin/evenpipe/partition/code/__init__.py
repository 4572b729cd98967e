"""Stage code: a cut model as readable Python, a file a stage, and back to modules that train."""

from evenpipe.partition.code.comparing import compare_stages, too_large
from evenpipe.partition.code.draws import Draws, drawing
from evenpipe.partition.code.errors import StageCodeError
from evenpipe.partition.code.files import load_parts, part_types, tensors_of, write_stages
from evenpipe.partition.code.part import Boundary, Part, device_of, sizes_on_host, users_lines
from evenpipe.partition.code.placing import State
from evenpipe.partition.code.writing import stage_sources
from evenpipe.runtime.recompute_swap import Keeping

__all__ = [
    "Boundary",
    "Draws",
    "Keeping",
    "Part",
    "StageCodeError",
    "State",
    "compare_stages",
    "device_of",
    "drawing",
    "load_parts",
    "part_types",
    "sizes_on_host",
    "stage_sources",
    "tensors_of",
    "too_large",
    "users_lines",
    "write_stages",
]
