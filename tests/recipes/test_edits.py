"""A changed line says the changed run, and only the flags that have to change are changed."""

from __future__ import annotations

import shlex
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from evenpipe.descriptions import cluster, framework
from evenpipe.fitting.moves import ASPECTS, changed
from evenpipe.planner.possible import check
from evenpipe.planner.run import EstimateError, Run
from evenpipe.recipes.edits import edited, flag_changes
from evenpipe.recipes.line import Line, read_line
from evenpipe.recipes.megatron import described_by

NODES = cluster("2x8-h100")
TYPED = shlex.split(
    "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
    "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --lr=1e-4 "
    "--data-path '/a b' --bf16 --vocab-size 128256 "
    "--tensor-model-parallel-size=2 --sequence-parallel --pipeline-model-parallel-size 4 --micro-batch-size 1 "
    "--num-layers-per-virtual-pipeline-stage 4 --global-batch-size 64 --use-distributed-optimizer "
    "--recompute-activations --accumulate-allreduce-grads-in-fp32 --hidden-dropout 0 --attention-dropout 0"
)


def described(line: Line) -> Run:
    words = " ".join(line.before).lower()
    found = described_by(line.flags, "own", True, 16, expandable="expandable_segments:true" in words)
    return found.run.of(framework("megatron"))


LINE = read_line(TYPED)
assert LINE is not None
OLD = described(LINE)
MODEL = described_by(LINE.flags, "own", True, 16).model


@st.composite
def runs(draw: st.DrawFn) -> Run:
    t, p, c = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2, 4), (1, 2)))
    v = draw(st.sampled_from((1, 2, 4))) if p > 1 else 1
    layout = None
    if p > 1 and draw(st.booleans()):
        layout = (32 // (p * v) - 1, *[32 // (p * v)] * (p * v - 2), 32 // (p * v) + 1)
    recompute, modules, layers = draw(
        st.sampled_from(
            (
                ("none", Run.recomputed_modules, None),
                ("selective", Run.recomputed_modules, None),
                ("selective", ("layernorm", "mlp"), None),
                ("full", Run.recomputed_modules, None),
                ("full", Run.recomputed_modules, 2),
            )
        )
    )
    sharded = draw(st.booleans())
    overlap = draw(st.booleans())
    names = ("1f1b", "kfkb", "zb-h1") if v == 1 else ("interleaved", *["zbv"] * (v == 2))
    host = sharded and draw(st.booleans())
    schedule = draw(st.sampled_from(names)) if p > 1 else "1f1b"
    own = p > 1 and (schedule in ("kfkb", "zb-h1", "zbv") or draw(st.booleans()))
    new = replace(
        OLD,
        tensor=t,
        sequence_parallel=t > 1 and draw(st.booleans()),
        stages=p,
        context=c,
        data=16 // (t * p * c),
        chunks=v,
        layout=layout,
        micro_batch=draw(st.sampled_from((1, 2))),
        recompute=recompute,
        recomputed_modules=modules,
        recomputed_layers=layers,
        sharded_optimizer=sharded,
        overlap_gradients=overlap,
        overlap_parameters=overlap and sharded,
        gradients_in_fp32=draw(st.booleans()),
        moment_bytes=2 if sharded and not host and draw(st.booleans()) else 4,
        optimizer_offload=draw(st.sampled_from((0.5, 1.0))) if host else 0.0,
        offload_modules=() if own else draw(st.sampled_from(((), ("core_attn", "attn_proj")))),
        expandable_segments=draw(st.booleans()),
        schedule=schedule,
        group_size=2 if schedule == "kfkb" else 1,
        bpipe=own and schedule in ("1f1b", "kfkb") and draw(st.booleans()),
        blocking=() if own else OLD.blocking,
    )
    try:
        check(new, MODEL, NODES)
    except EstimateError:
        assume(False)
    return new


@given(runs())
def test_a_changed_line_says_the_changed_run(new: Run) -> None:
    assert LINE is not None
    line = edited(LINE, MODEL, OLD, new, {})
    again = described(line)
    differ = {field for aspect in changed(new, again) for field in ASPECTS[aspect]}
    # A layout has a place for further tokens, of which there are none.
    assert {f for f in differ if getattr(new, f) != getattr(again, f)} <= {"further_part"}, line.command
    assert shlex.split(line.command) == [*line.before, line.script, *line.flags]
    kept = ["--lr=1e-4", "--data-path", "/a b", "--num-layers", "32"]
    assert [word for word in line.flags if word in kept] == [word for word in LINE.flags if word in kept]


@given(runs())
def test_back_again_is_the_same_run_and_the_same_run_is_the_same_line(new: Run) -> None:
    assert LINE is not None
    assert edited(LINE, MODEL, OLD, OLD, {}) == LINE
    there = edited(LINE, MODEL, OLD, replace(new, expandable_segments=False), {})
    back = described(edited(there, MODEL, described(there), OLD, {}))
    assert changed(OLD, replace(back, expandable_segments=OLD.expandable_segments)) <= {"layout"}
    assert OLD.layers_of(MODEL) == back.layers_of(MODEL)


def test_a_flag_is_changed_in_its_place_and_one_is_one_change() -> None:
    assert LINE is not None
    line = edited(LINE, MODEL, OLD, replace(OLD, micro_batch=2), {})
    at = LINE.flags.index("--micro-batch-size")
    assert line.flags == (*LINE.flags[: at + 1], "2", *LINE.flags[at + 2 :])
    assert flag_changes(LINE, line) == 1


def test_activations_on_the_host_leave_the_weights_where_they_are() -> None:
    """`validate_args` of Megatron-LM 0.16 asks for the variable, so that Transformer Engine offloads no weights."""
    assert LINE is not None
    away = replace(OLD, offload_modules=("core_attn", "attn_proj"))
    assert edited(LINE, MODEL, OLD, away, {}).variable("NVTE_CPU_OFFLOAD_V1") == "1"
    assert edited(LINE, MODEL, OLD, away, {"NVTE_CPU_OFFLOAD_V1": "1"}).variable("NVTE_CPU_OFFLOAD_V1") is None
    assert edited(LINE, MODEL, away, away, {}).variable("NVTE_CPU_OFFLOAD_V1") is None


def test_variables_of_the_line_and_of_who_starts_it_are_kept() -> None:
    assert LINE is not None
    given = replace(LINE, before=("A=1", "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512", *LINE.before))
    more = replace(OLD, expandable_segments=True)
    line = edited(given, MODEL, OLD, more, {})
    assert line.before[:2] == ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512,expandable_segments:True", "A=1")
    line = edited(LINE, MODEL, OLD, more, {"PYTORCH_ALLOC_CONF": "backend:native"})
    assert line.before[0] == "PYTORCH_ALLOC_CONF=backend:native,expandable_segments:True"
    one = replace(OLD, tensor=1, sequence_parallel=False, data=4)
    assert edited(LINE, MODEL, one, OLD, {}).before[0] == "CUDA_DEVICE_MAX_CONNECTIONS=1"
    assert edited(LINE, MODEL, one, OLD, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}).before == LINE.before
