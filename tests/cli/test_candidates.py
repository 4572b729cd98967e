"""`evenpipe candidates`: what fits, as JSON and as a picture; and what would have to change where nothing does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from evenpipe.cli.main import main
from tests.refusals import refusal

SMALL = ["candidates", "--stages", "2", "--layers", "2", "--hidden", "32", "--seq-length", "16"]


@pytest.mark.long
def test_the_memory_that_is_asked_for_is_what_the_first_candidate_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = [*SMALL, "--device", "cpu", "--data-parallel", "2", "--global-batch-size", "16", "--memory-gib"]
    said = refusal(capsys, *plan, "0.0001")
    assert "--memory-gib 0.0001: no micro-batch size fits: stage 0 needs" in said
    [asked] = re.findall(r"give at least (\S+) GiB", said)

    main([*plan, asked, "--json", "--picture", str(tmp_path / "curve.png")])
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "evenpipe.candidates/1"
    [only] = document["candidates"]
    assert (only["k"], only["b"], only["m"]) == (1, 1, 8)
    assert len(only["peak_bytes"]) == 2
    assert 0.999 * float(asked) * 2**30 < max(only["peak_bytes"]) <= float(asked) * 2**30
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--global-batch-size", "6", "--data-parallel", "4"],
            "--global-batch-size 6: not divisible by --data-parallel 4",
        ),
        (["--global-batch-size", "0"], "'0' is no whole number of at least 1"),
        (
            ["--global-batch-size", "8", "--layers", "5"],
            "--layers 5: not divisible by --stages 2: make it a multiple of 2",
        ),
        (["--global-batch-size", "8", "--stages", "1"], "--stages 1: one stage is no pipeline: use at least 2"),
        (["--global-batch-size", "8", "--stages", "two"], "--stages two: must be"),
        (["--global-batch-size", "8", "--precision", "fp8"], "--precision fp8: must be 'fp32', 'bf16' or 'fp16'"),
        (["--global-batch-size", "8", "--momentum", "0.9"], "--momentum 0.9: is of SGD"),
        (["--global-batch-size", "8", "--memory-gib", "-1"], "-1 is no amount of memory"),
        (["--global-batch-size", "8", "--picture", "curve.pdf"], "pictures are PNG"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert said in refusal(capsys, *SMALL, "--memory-gib", "1", *flags)
