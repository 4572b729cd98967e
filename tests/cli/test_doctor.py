"""``evenpipe doctor``: alone, and with real ranks, of which some are missing, stopped, late or wrong about the time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.ports import free_port  # noqa: E402
from tests.refusals import refusal  # noqa: E402

#: The frameworks' looks, which take seconds to import, are `evenpipe patches`' own.
BARE = """
import sys
import evenpipe.cli.doctor as doctor
doctor._megatron = doctor._deepspeed = lambda: None
{before}
from evenpipe.cli.main import main
raise SystemExit(main(["doctor", *sys.argv[1:]]))
"""


def environ(**others: str) -> dict[str, str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "NCCL_", "PYTORCH_"))}
    path = os.pathsep.join([str(ROOT / "plugin"), os.environ.get("PYTHONPATH", "")])
    return {**bare, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **others}


def run(*options: str, **others: str) -> tuple[int, str]:
    """Exit status and output; in a process of its own, since a check that hangs ends that at once."""
    command = [sys.executable, "-c", BARE.format(before=""), *options]
    done = subprocess.run(command, env=environ(**others), capture_output=True, text=True, timeout=600)
    assert done.stderr == ""
    return done.returncode, done.stdout


def start(rank: int, world: int, port: int, *options: str, per_node: int | None = None, before: str = "") -> Any:
    """A rank as a launcher without an agent starts it, such as srun."""
    size = per_node or world
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": str(rank // size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    code = BARE.format(before=f"doctor._LATE_SECONDS = 4.0\n{before}")
    return subprocess.Popen(
        [sys.executable, "-c", code, "--json", *options],
        env=environ(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(ranks: list[Any], seconds: float = 300) -> list[tuple[int, str]]:
    """Exit status and output of each; none of them is left behind."""
    try:
        return [(rank.wait(seconds), rank.communicate()[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def verdicts(document: dict[str, Any], check: str) -> list[str]:
    return [each["verdict"] for each in document["findings"] if each["check"] == check]


def test_one_machine(tmp_path: Path) -> None:
    status, printed = run("--json", "--checkpoint-dir", str(tmp_path), "--checkpoint-gib", "0.001")
    document = json.loads(printed)
    assert document["format"] == "evenpipe.doctor/1"
    assert (document["ranks"], document["missing"], document["pairs"]) == (1, [], [])
    assert verdicts(document, "checkpoints")[0] in ("fine", "note")
    assert (status == 0) is document["ok"]


def test_the_table_for_people_ends_with_what_there_is_to_do() -> None:
    status, printed = run(CUDA_LAUNCH_BLOCKING="1", NCCL_P2P_DISABLE="1", COLUMNS="200")
    assert status == 1
    assert "CUDA_LAUNCH_BLOCKING=1: the host waits for every kernel" in printed
    assert "NCCL_P2P_DISABLE=1" in printed
    assert "→ unset it" in printed
    assert re.search(r"^[2-9]\d* problems$", printed.splitlines()[-1])


@pytest.mark.parametrize(
    ("variables", "said"),
    [({"RANK": "two"}, "RANK=two"), ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 is not below")],
)
def test_ranks_that_are_no_ranks(
    variables: dict[str, str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert said in refusal(capsys, "doctor")


def test_four_ranks_on_two_nodes() -> None:
    """What links carry is compared with what a model needs, and placed pairs share a node."""
    port = free_port()
    options = ("--model", "gpt3-96b", "--tensor-parallel", "1", "--limit-s", "20")
    ranks = [start(rank, 4, port, *options, per_node=2) for rank in range(4)]
    (status, printed), *others = ended(ranks)
    document = json.loads(printed)
    assert others == [(0, "")] * 3
    assert document["missing"] == []
    [placed] = [each for each in document["findings"] if each["check"] == "BPipe pairs"]
    assert placed["verdict"] == "fine"
    assert placed["said"].startswith(
        "0 of 2 cross nodes (placed pair-adjacent; 2 in Megatron's order, 4 stages on 2 nodes"
    )
    assert [(each["stages"], each["ranks"], each["crosses_nodes"]) for each in document["pairs"]] == [
        ([0, 3], [0, 1], False),
        ([1, 2], [2, 3], False),
    ]
    for pair in document["pairs"]:
        assert pair["gbps"] > 0
        assert pair["needs_gbps"] == pytest.approx(pair["hides_all_gbps"] * 2 / 3)
    slow = any(pair["gbps"] < pair["needs_gbps"] for pair in document["pairs"])
    assert ("problem" in verdicts(document, "links")) is slow
    assert verdicts(document, "clocks") == ["fine"]
    assert (status == 0) is document["ok"]


@pytest.mark.long
def test_pairs_cross_nodes_of_one_rank() -> None:
    port = free_port()
    ranks = [start(rank, 2, port, "--limit-s", "20", per_node=1) for rank in range(2)]
    (_, printed), _ = ended(ranks)
    document = json.loads(printed)
    [pair] = document["pairs"]
    assert pair["crosses_nodes"] is True
    assert pair["needs_gbps"] is None
    [crossing] = [each for each in document["findings"] if each["check"] == "BPipe pairs"]
    assert crossing["verdict"] == "note"
    assert "stages 0-1 (ranks 0 and 1)" in crossing["said"]


def test_a_rank_that_never_comes_is_named() -> None:
    port = free_port()
    (status, printed), *_ = ended([start(rank, 3, port, "--limit-s", "2") for rank in (0, 2)])
    document = json.loads(printed)
    assert status == 1
    assert document["missing"] == [1]
    [missing] = [each for each in document["findings"] if each["check"] == "ranks"]
    assert missing["said"] == "rank 1 of 3 has not come"


@pytest.mark.long
def test_where_rank_0_never_comes_each_says_so() -> None:
    [(status, printed)] = ended([start(1, 2, free_port(), "--limit-s", "2")])
    assert status == 1
    [alone] = [each for each in json.loads(printed)["findings"] if each["check"] == "ranks"]
    assert "nobody answers at MASTER_ADDR:MASTER_PORT" in alone["said"]


@pytest.mark.long
def test_a_rank_that_stops_amid_the_looks_is_named() -> None:
    """It has come, and then stands still: the others wait for as long as they were told, and no longer."""
    port = free_port()
    stop = """
import os, signal
from evenpipe.doctor import links
links.clocks = lambda *_: os.kill(os.getpid(), signal.SIGSTOP) or []
"""
    ranks = [start(rank, 2, port, "--limit-s", "4", before=stop if rank == 1 else "") for rank in range(2)]
    started = time.monotonic()
    try:
        printed, _ = ranks[0].communicate(timeout=300)
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
            rank.kill()
    assert time.monotonic() - started < 60
    assert ranks[0].returncode == 1
    said = [each["said"] for each in json.loads(printed)["findings"] if each["check"] == "ranks"]
    assert any("rank 1 came, and then said nothing" in each for each in said)


def test_a_clock_that_is_wrong_is_named() -> None:
    port = free_port()
    wrong = "import time\nright = time.time\ntime.time = lambda: right() + 30"
    ranks = [start(rank, 2, port, "--limit-s", "20", before=wrong if rank == 1 else "") for rank in range(2)]
    (status, printed), _ = ended(ranks)
    assert status == 1
    assert json.loads(printed)["ok"] is False
    [clock] = [each for each in json.loads(printed)["findings"] if each["check"] == "clocks"]
    assert clock["verdict"] == "problem"
    assert clock["remedy"]
    # How long an answer took bounds how exact the offset is: some milliseconds where the cores are busy.
    found = re.match(r"the clock of rank 1 is ([+-][\d,.]+) ms off", clock["said"])
    assert found
    assert abs(float(found[1].replace(",", "")) - 30_000) < 500


@pytest.mark.long
def test_ranks_that_no_pipeline_divides() -> None:
    port = free_port()
    (status, printed), _ = ended([start(rank, 2, port, "--stages", "4", "--limit-s", "20") for rank in range(2)])
    assert status == 1
    assert verdicts(json.loads(printed), "BPipe pairs") == ["problem"]
