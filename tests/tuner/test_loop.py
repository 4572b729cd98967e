"""All ranks measure the same sizes, take the same decisions, and log them; no framework is needed for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from evenpipe.tuner.loop import decision_line
from evenpipe.tuner.tuner import Retune
from tests.reports import reports

RETUNE = Retune(11, 2, 2, {"k1b4": 1234.4, "k2b2": 98.76})
LINE = r"iteration {}: k=\d, b=\d{}; estimates: (k\db\d [\d.,]+ ms(, )?)+; links measured in \d+\.\d s"


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found."""
    folder: Path = tmp_path_factory.mktemp("loop")
    script = Path(__file__).with_name("loop_cases.py")
    return reports(script, folder, 2)


def test_all_ranks_find_the_same(stages: list[dict[str, Any]]) -> None:
    first, second = stages
    said = first.pop("said"), second.pop("said")
    assert [[re.sub("in .* s", "", str(line)) for line in of_run] for of_run in said[0]] == [
        [re.sub("in .* s", "", str(line)) for line in of_run] for of_run in said[1]
    ]
    assert first == second
    first["said"], second["said"] = said


def test_sizes_are_measured_and_decisions_are_taken_when_due(stages: list[dict[str, Any]]) -> None:
    found = stages[0]
    assert found["before"] is None
    assert found["wanted"] == [1, 2, 4]
    assert found["decided"] == [0, 2, 4]
    assert all(k * b <= 4 and m * b == 4 for k, b, m in found["chosen"])
    # The highest of all ranks: 100 bytes a sample, and the one byte that does not grow with them on stage 1.
    assert found["state"]["memory"] == [[1000, 0, 0, 100, 64, 0], [1000, 0, 1, 100, 64, 0]]
    k, b, m = found["chosen"][-1]
    assert found["predicted"][0] >= min(2 * k, m) * 100 * b


def test_each_decision_is_one_line(stages: list[dict[str, Any]]) -> None:
    for said in (of_stage["said"][0] for of_stage in stages):
        assert len(said) == 3
        assert re.fullmatch(LINE.format(1, ""), said[0])
        for number, line in zip((3, 5), said[1:], strict=True):
            assert re.fullmatch(LINE.format(number, r" \((was k=\d, b=\d|as before)\)"), line)


def test_a_loaded_state_is_gone_on_with(stages: list[dict[str, Any]]) -> None:
    """Only what tells whether it fits is measured; the next decision is due when it was."""
    found = stages[0]
    assert found["wanted later"] == [1, 2]
    assert found["chosen later"][0] == found["chosen"][-1]
    goes_on, line = found["said"][1]
    assert goes_on is True
    assert re.fullmatch(LINE.format(7, r" \((was k=\d, b=\d|as before)\)"), line)


def test_under_another_limit_it_is_not(stages: list[dict[str, Any]]) -> None:
    goes_on, line = stages[0]["said"][2]
    assert goes_on is False
    assert re.fullmatch(LINE.format(6, ""), line)


def test_what_does_not_fit_a_larger_micro_batch_is_left_out(stages: list[dict[str, Any]]) -> None:
    """Stage 1 alone has seen it; where nothing fits any more, the run goes on without groups."""
    for found in stages:
        assert found["grows"] == [[1, 2, 3, 4], [1, 2, 3], [1]]
        more, none = found["grown"]
        assert more == "iteration 2: micro-batches save more than all before: groups of more than 3 no longer fit"
        assert none.startswith(
            "iteration 3: micro-batches save more than all before: no micro-batch size fits: stage 1 "
        )


def test_another_batch_or_too_little_memory_is_one_line(stages: list[dict[str, Any]]) -> None:
    assert stages[0]["another batch"].startswith("a batch of 8 samples after one of 4: group sizes that are tuned need")
    assert stages[0]["no memory"].startswith("no micro-batch size fits: stage ")


@pytest.mark.parametrize(
    ("before", "was"), [(None, ""), ((1, 4), " (was k=1, b=4)"), ((2, 2), " (as before)"), ((2, 4), " (was k=2, b=4)")]
)
def test_a_line_counts_iterations_from_one(before: tuple[int, int] | None, was: str) -> None:
    line = f"iteration 12: k=2, b=2{was}; estimates: k1b4 1,234 ms, k2b2 98.8 ms; links measured in 1.3 s"
    assert decision_line(RETUNE, before, 1.26) == line
