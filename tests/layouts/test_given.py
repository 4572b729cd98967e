"""A layout that a user brings is read as Megatron reads it, estimated, and compared with the best."""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpipe.cli.main import main
from evenpipe.descriptions import cluster
from evenpipe.layouts.given import checked, cuts_of
from evenpipe.layouts.gpt import LayoutError
from evenpipe.layouts.layers import Layer, layout_text, parts_of
from evenpipe.layouts.plan import FlagsRead, read_flags
from evenpipe.recipes.megatron import unrolled

DENSE = shlex.split("""--num-layers 14 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope
    --untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 4096 --vocab-size 128256
    --micro-batch-size 1 --global-batch-size 32 --pipeline-model-parallel-size 4 --bf16 --use-distributed-optimizer
    --hidden-dropout 0 --attention-dropout 0""")
LATENT = shlex.split("""--num-layers 7 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16
    --multi-latent-attention --q-lora-rank 768 --kv-lora-rank 256 --qk-head-dim 64 --qk-pos-emb-head-dim 32
    --v-head-dim 64 --swiglu
    --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --seq-length 2048 --vocab-size 32000
    --untie-embeddings-and-output-weights --num-experts 16 --moe-ffn-hidden-size 1024 --moe-router-topk 4
    --moe-layer-freq '([0]*1+[1]*6)' --mtp-num-layers 1 --micro-batch-size 1 --global-batch-size 32 --bf16
    --max-position-embeddings 2048 --pipeline-model-parallel-size 4 --expert-model-parallel-size 2
    --use-distributed-optimizer --hidden-dropout 0 --attention-dropout 0""")


WHERE = cluster("1x8-h100")


@pytest.fixture(scope="module")
def dense() -> FlagsRead:
    return read_flags(DENSE, WHERE.gpus, measure=False)


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("Et*2|(tt|)*3L", ["Ett", "tt", "tt", "tt", "L"]),
        ("E,t|t*2,|mL", ["Et", "tt", "mL"]),
        ("Et||(t|)*2(tt)*2L", ["Et", "", "t", "t", "ttttL"]),
    ],
)
def test_it_is_read_as_megatron_reads_it(layout: str, parts: list[str]) -> None:
    assert unrolled(layout) == parts


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n + 1), max_size=6))))
def test_cuts_and_text_are_each_other_s_reverse(drawn: tuple[int, list[int]]) -> None:
    n, cuts = drawn
    ends = Layer("E", "embedding", 1, 2), Layer("mm", "mtp", 1, 2), Layer("L", "loss", 1, 2)
    layers = (ends[0], *[Layer("t", "dense", 1, 2)] * n, *ends[1:])
    split = tuple(sorted(cuts))
    assert cuts_of(layout_text(parts_of(layers, split)), layers) == split


def test_the_best_is_no_slower_and_an_uneven_one_is_told_of(dense: FlagsRead) -> None:
    bad = checked(dense, "Ettttttt|ttttt|t|tL", WHERE)
    assert bad.slowest == 0
    assert bad.slower > 0.2
    assert bad.problem is not None
    good = checked(dense, bad.best, WHERE)
    assert good.problem is None
    assert good.slower == 0


@pytest.mark.gate
def test_latent_attention_has_layouts_too() -> None:
    found = checked(read_flags(LATENT, WHERE.gpus, measure=False), "Ett|tt|tt|tmL", WHERE)
    assert found.estimate.run.data == 2
    assert found.best_estimate.iteration_ms <= found.estimate.iteration_ms


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("Et*7|t*7|L", "has 3 parts: give a multiple of the 4 stages"),
        ("Et*7|t*6||L", "has 1 E, 13 t, 0 m, 1 L; the model of these flags is 1 E, 14 t, 0 m, 1 L"),
        ("Et*7|t*7|x|L", "'x' in it"),
        ("|Et*7|t*7|L", "Megatron takes no such layout"),
    ],
)
def test_what_is_no_layout_of_the_model_is_one_line(dense: FlagsRead, layout: str, said: str) -> None:
    with pytest.raises(LayoutError) as caught:
        checked(dense, layout, WHERE)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_ends_with_1_where_it_is_no_good(
    dense: FlagsRead, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenpipe.layouts.given.read_flags", lambda *asked, **_: dense)  # a process of 3 s; read above
    words = ["partition", "--megatron", "--cluster", "1x8-h100", "--json", "--check"]
    assert main([*words, "Ettttttt|ttttt|t|tL", "--", *DENSE]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "slower than" in found["problem"]


def test_the_text_has_plain_numbers_and_megatron_s_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*DENSE, "--num-layers", "56", "--global-batch-size", "256", "--micro-batch-size", "4"]
    words = ["partition", "--megatron", "--cluster", "1x8-h100", "--check", "Et*14|t*14|t*14|t*14L"]
    assert main([*words, "--", *flags]) == 1
    shown = capsys.readouterr().out
    assert "e+" not in shown
    assert "give --recompute-granularity full" in shown
