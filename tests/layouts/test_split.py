"""What stages hold under a split, and which splits there are."""

import dataclasses

import numpy as np
import pytest

from evenpipe.layouts.gpt import LayoutError, Pipeline
from evenpipe.layouts.layers import Layer, layout_text, parts_of
from evenpipe.layouts.split import Problem

EMBEDDING = Layer("E", "embedding", 1, 2, saved_bytes=1, static_bytes=100, words_bytes=1000)
DENSE = Layer("t", "dense", 10, 20, saved_bytes=10, static_bytes=200)
MTP = Layer("mm", "mtp", 15, 25, saved_bytes=20, static_bytes=300, words_bytes=1000)
LOSS = Layer("L", "loss", 5, 6, saved_bytes=50, static_bytes=7, words_bytes=1000)


def problem(layers, stages, chunks=1, micro_batches=8, mtp_apart=True):
    pipeline = Pipeline(stages, chunks, micro_batches)
    return Problem(tuple(layers), pipeline, mtp_apart)


def test_a_stage_holds_its_weights_and_as_many_activations_as_it_is_ahead():
    costs = problem([EMBEDDING, *[DENSE] * 4, LOSS], stages=2).costs((3,))
    assert costs[0] == (21, 42, 100 + 2 * 200 + 1000 + 2 * (1 + 20), 0)
    assert costs[1] == (25, 46, 7 + 2 * 200 + 1000 + 1 * (50 + 20), 0)


def test_in_a_v_the_first_stage_has_both_ends():
    pipeline = Pipeline(2, 2, 8, "v-half")
    costs = Problem((EMBEDDING, *[DENSE] * 6, LOSS), pipeline, True).costs((2, 4, 6))
    assert [stage.forward_ms for stage in costs] == [1 + 10 + 10 + 5, 4 * 10]
    assert costs[0].peak_bytes > 100 + 7 + 2 * 200 + 1000
    assert pipeline.owners == [0, 1, 1, 0]


def test_a_stage_computes_as_many_layers_again_as_it_needs_to_fit():
    """The first one holds two micro-batches, each of which is 8 smaller for every layer that keeps its input alone."""
    layers = (EMBEDDING, *[dataclasses.replace(DENSE, input_bytes=2)] * 4, LOSS)
    whole = 100 + 2 * 200 + 1000 + 2 * (1 + 20)
    for within, again, held in [
        (whole, 0, whole),
        (whole - 1, 1, whole - 16),
        (whole - 17, 2, whole - 32),
        (9, 2, None),
    ]:
        costs = Problem(layers, Pipeline(2, 1, 8), True, recompute_within=within).costs((3,))
        assert costs[0] == (21, 42 + again * 10, held or whole - 32, again)
        assert costs[1].recompute_layers == (2 if within == 9 else 0)


def test_every_chunk_computes_as_many_of_its_layers_again():
    """Of its first chunk, which has three layers, and of its second, which has one."""
    layers = (EMBEDDING, *[dataclasses.replace(DENSE, input_bytes=2)] * 7, LOSS)
    one = Problem(layers, Pipeline(2, 2, 8), True, recompute_within=0).costs((4, 5, 6))
    assert [stage.recompute_layers for stage in one] == [3, 2]
    assert [stage.backward_ms for stage in one] == [2 + 4 * 20 + 4 * 10, 3 * 20 + 6 + 3 * 10]


def test_a_stage_has_one_copy_of_the_word_embeddings_however_many_layers_use_them():
    one = problem([EMBEDDING, DENSE, LOSS], stages=1).costs(())[0].peak_bytes
    assert one == (100 + 200 + 7) + 1000 + (1 + 10 + 50)
    apart = problem([EMBEDDING, DENSE, MTP, LOSS], stages=3).costs((2, 3))
    assert [stage.peak_bytes > 1000 for stage in apart] == [True, True, True]


def test_virtual_stages_hold_what_the_interleaved_schedule_has_live():
    """Two stages with two chunks: the first holds five micro-batches, three or four of them of its first chunk."""
    shared = problem([EMBEDDING, *[DENSE] * 4, LOSS], stages=2, chunks=2)
    assert [rows.tolist() for rows in shared.live] == [
        [[3, 0, 2, 0], [4, 0, 1, 0]],
        [[0, 2, 0, 1], [0, 3, 0, 0]],
    ]
    first, last = shared.costs((2, 3, 4))
    assert first.peak_bytes == 100 + 400 + 1000 + 4 * 11 + 1 * 10
    assert last.peak_bytes == 7 + 400 + 1000 + 2 * 10 + 1 * 60


def test_the_even_split_is_megatrons():
    split = problem([EMBEDDING, *[DENSE] * 8, MTP, LOSS], stages=2, chunks=2)
    assert layout_text(parts_of(split.layers, split.even)) == "Ett|tt|tt|ttmmL"


def test_between_the_halves_of_a_layer_no_part_is_empty_and_the_even_split_has_whole_ones():
    attention, mlp = DENSE, Layer("", "dense", 12, 24, saved_bytes=5, static_bytes=300)
    split = problem([EMBEDDING, *[attention, mlp] * 4, LOSS], stages=4)
    assert split.allowed(np.array([[2, 5, 7], [2, 2, 7], [3, 3, 7]])).tolist() == [True, False, True]
    assert layout_text(parts_of(split.layers, split.even)) == "Et|t|t|tL"
    assert split.even == (3, 5, 7)


@pytest.mark.parametrize(
    ("cuts", "apart", "together"),
    [((2, 3, 4), True, True), ((2, 3, 5), False, False), ((2, 2, 3), True, True), ((0, 1, 2), False, False)],
)
def test_mtp_layers_are_in_the_last_chunk_of_a_stage_that_is_not_the_first(cuts, apart, together):
    layers = [EMBEDDING, *[DENSE] * 3, MTP, LOSS]
    rows = np.array([cuts])
    assert problem(layers, stages=2, chunks=2).allowed(rows)[0] == apart
    assert problem(layers, stages=2, chunks=2, mtp_apart=False).allowed(rows)[0] == together


def test_mtp_layers_apart_from_the_loss_need_a_release_that_can():
    rows = np.array([[2, 3, 5]])
    layers = [EMBEDDING, *[DENSE] * 3, MTP, LOSS]
    assert problem(layers, stages=4).allowed(rows)[0]
    assert not problem(layers, stages=4, mtp_apart=False).allowed(rows)[0]


def test_more_stages_than_layers():
    with pytest.raises(LayoutError, match=r"8 \(virtual\) stages: the model has only 6 layers"):
        problem([EMBEDDING, *[DENSE] * 4, LOSS], stages=4, chunks=2)
