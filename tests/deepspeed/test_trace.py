"""A timeline whose file cannot be written is refused before training, on the rank that would write it."""

from pathlib import Path
from typing import Any

import pytest

from evenpipe.deepspeed.engine import trace_of
from evenpipe.deepspeed.section import SectionError, section_of


class Engine:
    def __init__(self, section: dict[str, Any], global_rank: int) -> None:
        self.evenpipe = section_of({"evenpipe": section})
        self.global_rank = global_rank


def test_a_folder_that_is_not_there_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    section = {"schedule": "1f1b", "trace": f"{folder}/T.json"}
    with pytest.raises(SectionError) as refused:
        trace_of(Engine(section, 0))
    assert str(refused.value) == (
        f"evenpipe.trace: {folder}/T.json: there is no folder {folder}: make it, or name another"
    )
    assert trace_of(Engine(section, 1)) is not None
