"""Where stages sit and what their links need and have: as a user reads it, and over two agents' real processes."""

import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

from evenpipe.megatron_lm.link_table import LinkTable, recompute_scope, transfer_need
from evenpipe.megatron_lm.placing import place_process
from evenpipe.runtime.placement import place
from evenpipe.settings.config import EvenPipeConfig
from tests.runtime.locations import printed, processes

EVICTIONS = (4, 0, 0, 0)


def megatrons(**others):
    """Arguments as Megatron-LM leaves them, of the paper's GPT-3 96B."""
    values = {
        "num_layers": 80,
        "num_attention_heads": 104,
        "hidden_size": 9984,
        "seq_length": 2048,
        "micro_batch_size": 2,
        "pipeline_model_parallel_size": 8,
        "tensor_model_parallel_size": 4,
        "context_parallel_size": 1,
        "sequence_parallel": True,
        "params_dtype": torch.bfloat16,
        "recompute_granularity": "selective",
        "recompute_modules": None,
        "transformer_impl": "transformer_engine",
    }
    return Namespace(**values | others)


def test_needs_follow_from_megatrons_arguments():
    """24.25 GB/s (appendix B) for the forward of 143.37 ms that the paper measured, 170 TFLOP/s."""
    need = transfer_need(megatrons(), 171.4e12)
    assert need.strict_gbps == pytest.approx(24.25, rel=0.05)
    assert need.origin == (
        "3,315.0 MiB a micro-batch (equation 5, no attention scores saved, with sequence parallelism, 16 bit) within a "
        "forward, if it ran at the 171 TFLOP/s of a matrix product of this shape"
    )
    assert transfer_need(megatrons(params_dtype=torch.float32), 171.4e12).strict_gbps == 2 * need.strict_gbps
    assert transfer_need(megatrons(context_parallel_size=2), 171.4e12).strict_gbps == need.strict_gbps


@pytest.mark.parametrize(
    ("arguments", "scope"),
    [
        ({}, "selective"),
        ({"transformer_impl": "local"}, "selective"),
        ({"transformer_impl": "local", "recompute_modules": ["mlp"]}, "none"),
        ({"transformer_impl": "local", "recompute_granularity": None}, "none"),
        ({"recompute_granularity": None}, "selective"),
        ({"recompute_granularity": None, "attention_backend": Namespace(name="flash")}, "selective"),
        ({"recompute_granularity": None, "attention_backend": Namespace(name="unfused")}, "none"),
        ({"recompute_granularity": "full"}, "full"),
    ],
)
def test_attention_scores_are_saved_unless_fused_or_recomputed(arguments, scope):
    assert recompute_scope(megatrons(**arguments)) == scope


RECOMPUTE = "recompute more (--recompute-granularity)"
LINES = {
    "unplaced, slow": (
        (None, "ABCD", 0.1),
        {},
        "ranks are in Megatron's own order, not pair-adjacent: --use-tp-pp-dp-mapping numbers ranks in an order of its "
        "own: leave one of them out",
        f"; see above what keeps --pair-adjacent from joining partners on a node, or {RECOMPUTE}",
    ),
    "placed, slow across": (
        (place(4, 4, 1, 4), "ABCD", 0.1),
        {},
        "ranks are placed pair-adjacent: partners are neighbours",
        f"; choose a --tensor-model-parallel-size that divides 2, or {RECOMPUTE}",
    ),
    "odd nodes, slow across": (
        (place(6, 1, 1, 3), "ABCD", 0.1),
        {},
        "ranks are placed pair-adjacent: partners are neighbours",
        f"; {RECOMPUTE}",
    ),
    "placed, slow within, nothing left to recompute": (
        (place(4, 1, 1, 4), "AAAA", 1e-4),
        {"recompute_granularity": "full"},
        "ranks are placed pair-adjacent: partners are neighbours",
        "; use faster links",
    ),
    "fast": ((place(4, 1, 1, 4), "AAAA", 400.0), {}, "ranks are placed pair-adjacent: partners are neighbours", None),
}


@pytest.mark.parametrize("case", LINES)
def test_below_the_table_is_how_ranks_are_placed_and_what_to_do(case):
    (placement, nodes, gbps), arguments, order, remedy = LINES[case]
    args = megatrons(use_tp_pp_dp_mapping=True, **arguments)
    config = EvenPipeConfig(bpipe=True)
    table = LinkTable(args, config, placement or place_process(args, config, {}))
    lines = printed(table.rendered(processes(nodes, 0, gbps), EVICTIONS))
    below = [line.strip() for line in lines[lines.index(next(line for line in lines if line[0] == "└")) + 1 :]]
    assert below[0] == order
    assert [line.split(":")[0] for line in below[2:]] == ["needs", "has", *(["warning"] if remedy else [])]
    if remedy:
        assert below[-1].endswith(remedy)


def test_a_short_pipeline_evicts_nothing():
    table = LinkTable(megatrons(), EvenPipeConfig(bpipe=True), place(2, 1, 1, 2))
    lines = printed(table.rendered(processes("AA"), (0, 0)))
    assert lines[-1] == "  no stage holds more micro-batches than BPipe's bound: nothing will be evicted"


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode refuses machines with CUDA")
def test_two_agents_of_two_processes_train_placed_as_megatron_does(tmp_path):
    """Four stages: outer ones on the first node, inner ones on the second; losses to the last bit; the bound of 3."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launch = ["-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    script = Path(__file__).with_name("train_placed.py")
    agents = [
        subprocess.Popen(
            [sys.executable, *launch, "--node-rank", str(node), script, tmp_path],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    said = [agent.communicate(timeout=800) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    seen = [json.loads((tmp_path / f"slot-{slot}.json").read_text()) for slot in range(4)]
    assert [process["rank"] for process in seen] == [0, 3, 1, 2]
    assert [process["variable"] for process in seen] == ["0", "3", "1", "2"]
    stock, placed = seen[3]["losses"][0], seen[1]["losses"][1]
    assert len(stock) == 2
    assert placed == stock
    assert max(process["live"] for process in seen) == 3
    lines = said[0][0].splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    roles = ["evictor", "alone", "alone", "acceptor"]
    assert [(row[0], row[1][0], *row[2:5]) for row in rows] == [
        (str(stage), node, local, str(stage), role)
        for stage, node, local, role in zip(range(4), "0110", "0011", roles, strict=True)
    ]
    assert all(float(row[8]) > 0 for row in (rows[0], rows[3]))
    assert "  ranks are placed pair-adjacent: partners are neighbours" in lines
    assert said[1][0] == ""
