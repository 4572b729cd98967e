"""Flags as Megatron reads them, and the planner's description of the layers that they ask for."""

from __future__ import annotations

import pytest

from evenpipe.descriptions import device, node_of
from evenpipe.layouts.gpt import Gpt, LayoutError, Pipeline, parse_flags
from evenpipe.layouts.layers import described, kinds, layers_of, nodes_of, profile_of
from evenpipe.layouts.written import Shape
from evenpipe.planner.estimate import estimate
from evenpipe.planner.operations.operation import total

GPT3 = (
    *("--num-layers", "96", "--hidden-size", "12288", "--num-attention-heads", "96", "--seq-length", "2048"),
    *("--max-position-embeddings", "2048", "--vocab-size", "50257", "--micro-batch-size", "1", "--bf16"),
)


def gpt(*flags: str, world_size: int | None = None) -> Gpt:
    return Gpt.of(parse_flags([*GPT3, *flags]), world_size)


def test_gpt3_has_175_billion_parameters() -> None:
    found = gpt()
    assert kinds(found) == ("embedding", "dense", "loss")
    counts = {kind: sum(total(node).all for node in nodes_of(found, kind).values()) for kind in kinds(found)}
    assert counts["embedding"] + 96 * counts["dense"] == pytest.approx(174.6e9, rel=1e-3)


def test_the_vocabulary_is_padded_and_the_null_tokenizer_has_one_token_more() -> None:
    assert gpt().model.vocabulary == 50304
    assert gpt("--tensor-model-parallel-size", "8").model.vocabulary == 51200
    assert gpt("--vocab-size", "1024").model.vocabulary == 1024
    assert gpt("--vocab-size", "1024", "--tokenizer-type", "NullTokenizer").model.vocabulary == 1152


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [("1", [1] * 96), ("2", [1, 0] * 48), ("[0]*3+[1]*93", [0] * 3 + [1] * 93), ("([0]+[1]*2)*32", [0, 1, 1] * 32)],
)
def test_moe_layer_freq(frequency: str, expected: list[int]) -> None:
    flags = ("--moe-layer-freq", frequency)
    assert list(Shape.of(gpt("--num-experts", "8", *flags)).experts) == [bool(one) for one in expected]
    assert not any(Shape.of(gpt(*flags)).experts)


def test_stages_virtual_stages_and_micro_batches() -> None:
    flags = [*GPT3, "--pipeline-model-parallel-size", "8", "--global-batch-size", "64"]
    for virtual in (("--num-layers-per-virtual-pipeline-stage", "3"), ("--num-virtual-stages-per-pipeline-rank", "4")):
        args = parse_flags([*flags, *virtual])
        assert Gpt.of(args).pipeline(args) == Pipeline(8, 4, 64)
        assert Gpt.of(args, world_size=16).pipeline(args) == Pipeline(8, 4, 32)
    vee = ("--evenpipe-schedule", "zbv")
    assert Gpt.of(parse_flags([*flags, *vee])).pipeline(parse_flags([*flags, *vee])) == Pipeline(8, 2, 64, "zbv")
    four = parse_flags([*flags, *vee, "--num-virtual-stages-per-pipeline-rank", "4"])
    with pytest.raises(LayoutError, match="zbv: has 2 model chunks a stage, and these flags 4"):
        Gpt.of(four).pipeline(four)
    with pytest.raises(LayoutError, match="world size 12: no multiple of 8"):
        Gpt.of(parse_flags(flags), world_size=12)


def test_learned_positions_are_parameters_and_rotary_ones_are_not() -> None:
    assert Shape.of(gpt()).positions == 2048
    assert Shape.of(gpt("--position-embedding-type", "rope")).positions == 0
    assert Shape.of(gpt("--use-rotary-position-embeddings")).positions == 0


def test_layers_take_as_long_and_hold_as_much_as_the_planner_estimates() -> None:
    """Of one stage on one node, so that nothing but layers counts; the profile's nodes add up to the same."""
    split = ("--tensor-model-parallel-size", "8", "--sequence-parallel")
    found, h100 = gpt(*split, "--untie-embeddings-and-output-weights"), device("h100")
    times = described(found, h100)
    layers = layers_of(found, times)
    shown = estimate(found.model, node_of(h100, 8), found.run).stages[0]
    assert sum(layer.forward_ms for layer in layers) == pytest.approx(shown.forward_ms)
    assert sum(layer.backward_ms for layer in layers) == pytest.approx(shown.backward_ms)
    assert sum(layer.saved_bytes for layer in layers) == pytest.approx(shown.bytes.activations)
    held = shown.bytes.weights + shown.bytes.gradients + shown.bytes.optimizer
    assert sum(layer.static_bytes for layer in layers) + layers[0].words_bytes == pytest.approx(held)
    halves = layers_of(found, times, halves=True)
    assert sum(half.total_ms for half in halves) == pytest.approx(sum(layer.total_ms for layer in layers))
    nodes = profile_of(found, times, device="h100", versions={}).nodes
    assert sum(node.parameter_bytes + node.gradient_bytes + node.optimizer_bytes for node in nodes) == pytest.approx(
        held
    )
    assert sum(node.activation_bytes for node in nodes) == sum(layer.saved_bytes for layer in layers)
