"""What flags say about a model's layers, as Megatron reads them."""

import pytest

from evenpipe.partition.layouts import LayoutError, Pipeline, Shape, kinds, work_of
from evenpipe.partition.layouts.flags import parse_flags

GPT3 = (
    *("--num-layers", "96", "--hidden-size", "12288", "--num-attention-heads", "96", "--seq-length", "2048"),
    *("--max-position-embeddings", "2048", "--vocab-size", "50257", "--micro-batch-size", "1", "--bf16"),
)


def shape(*flags, world_size=None):
    return Shape.of(parse_flags([*GPT3, *flags]), world_size)


def test_gpt3_has_175_billion_parameters():
    found = shape()
    nodes = [work_of(found, kind) for kind in ("embedding", *["dense"] * 96)]
    assert kinds(found) == ("embedding", "dense", "loss")
    assert sum(node.parameters + node.words for layer in nodes for node in layer) == pytest.approx(174.6e9, rel=1e-3)


def test_the_vocabulary_is_padded_and_the_null_tokenizer_has_one_token_more():
    assert shape().vocabulary == 50304
    assert shape("--tensor-model-parallel-size", "8").vocabulary == 51200
    assert shape("--vocab-size", "1024").vocabulary == 1024
    assert shape("--vocab-size", "1024", "--tokenizer-type", "NullTokenizer").vocabulary == 1152


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [("1", [1] * 96), ("2", [1, 0] * 48), ("[0]*3+[1]*93", [0] * 3 + [1] * 93), ("([0]+[1]*2)*32", [0, 1, 1] * 32)],
)
def test_moe_layer_freq(frequency, expected):
    assert list(shape("--num-experts", "8", "--moe-layer-freq", frequency).experts) == [bool(one) for one in expected]
    assert not any(shape("--moe-layer-freq", frequency).experts)


def test_stages_virtual_stages_and_micro_batches():
    flags = [*GPT3, "--pipeline-model-parallel-size", "8", "--global-batch-size", "64"]
    for virtual in (("--num-layers-per-virtual-pipeline-stage", "3"), ("--num-virtual-stages-per-pipeline-rank", "4")):
        args = parse_flags([*flags, *virtual])
        assert Shape.of(args).pipeline(args) == Pipeline(8, 4, 64)
        assert Shape.of(args, world_size=16).pipeline(args) == Pipeline(8, 4, 32)
    with pytest.raises(LayoutError, match="world size 12: no multiple of 8"):
        Shape.of(parse_flags(flags), world_size=12)


def test_learned_positions_are_parameters_and_rotary_ones_are_not():
    assert shape().positions == 2048
    assert shape("--position-embedding-type", "rope").positions == 0
    assert shape("--use-rotary-position-embeddings").positions == 0
