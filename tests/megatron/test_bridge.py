"""The callback for Megatron-Bridge: in its own `pretrain`, bit for bit what Megatron's schedule computes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from evenpipe.megatron.bridge import EvenPipe
from evenpipe.settings.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.ports import free_port  # noqa: E402

#: An interpreter that has megatron-bridge, which no CPU installation of Megatron has.
PYTHON = os.environ.get("MEGATRON_BRIDGE_PYTHON", "")

bridge = pytest.mark.skipif(
    not PYTHON, reason="MEGATRON_BRIDGE_PYTHON names no interpreter that has megatron-bridge (CONTRIBUTING.md)"
)


@functools.cache
def trained(evenpipe: str, chunks: int | None = None) -> tuple[list[dict[str, Any]], str]:
    """What each of four ranks has seen, and the log; `evenpipe` is JSON."""
    with tempfile.TemporaryDirectory() as out:
        given = json.dumps({"evenpipe": json.loads(evenpipe), "out": out, "chunks": chunks})
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", str(free_port())]
        done = subprocess.run(
            [PYTHON, *launch, str(Path(__file__).with_name("bridge_case.py")), given],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'plugin'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(4)], done.stdout


@bridge
@pytest.mark.long
@pytest.mark.parametrize(
    ("evenpipe", "chunks"),
    [
        ({"bpipe": True}, None),
        ({"schedule": "kfkb", "group_size": 2}, None),
        ({"schedule": "kfkb", "group_size": 2, "bpipe": True}, None),
        ({"bpipe": True}, 2),
    ],
    ids=["1f1b and bpipe", "kfkb", "kfkb and bpipe", "interleaved and bpipe"],
)
def test_bridges_pretrain_computes_what_it_computes_without(evenpipe: dict[str, Any], chunks: int | None) -> None:
    stock, said = trained("null", chunks)
    ours, told = trained(json.dumps(evenpipe), chunks)
    assert "[evenpipe]" not in said
    for theirs, mine in zip(stock, ours, strict=True):
        assert mine["weights"] == theirs["weights"] != ""
        assert mine["losses"] == theirs["losses"]
        assert (mine["batches"], "batches" in theirs) == (3, False)
    assert len(stock[-1]["losses"]) == 3
    for iteration in (1, 2, 3):
        assert f"[evenpipe] iteration {iteration} | peak live: " in told
    evicted = [line.partition("evicted MiB: ")[2].split()[0] for line in told.splitlines() if "[evenpipe]" in line]
    assert all((float(one) > 0) is evenpipe.get("bpipe", False) for one in evicted)


def test_megatrons_choice_is_replaced_when_it_is_made_and_put_back_when_training_has_ended() -> None:
    """Bridge has asked for the schedule before it calls any callback."""
    from megatron.core.pipeline_parallel import schedules

    stock = schedules.get_forward_backward_func
    ours = EvenPipe(bpipe=True)
    try:
        assert schedules.get_forward_backward_func is not stock
    finally:
        ours.on_train_end(None)
    assert schedules.get_forward_backward_func is stock


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"schedule": "2bw"}, ValueError, "schedule=2bw: "),
        ({"schedule": "kfkb", "group_size": "auto"}, ValueError, "group_size=auto: "),
        ({"schedule": "none-such"}, ConfigError, "none-such"),
        ({"group_size": 0}, ConfigError, "0: must be"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_replaced(
    given: dict[str, Any], error: type[Exception], said: str
) -> None:
    from megatron.core.pipeline_parallel import schedules

    stock = schedules.get_forward_backward_func
    with pytest.raises(error, match=said) as raised:
        EvenPipe(**given)
    assert len(str(raised.value).splitlines()) == 1
    assert schedules.get_forward_backward_func is stock
