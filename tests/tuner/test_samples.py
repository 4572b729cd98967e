"""Micro-batches of another size hold the loader's samples, the same ones in the same order.

Only where all samples count the same tokens does their size not change a batch's loss.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from evenpipe.tuner.samples import LossWeights, items_of, micro_batches_of

SEQUENCE = 3
CPU = torch.device("cpu")
FULL, PADDED = [1.0, 1, 1], [1.0, 1, 0]


def gpt_sample(number):
    """What Megatron's GPTDataset gives, blended."""
    tokens = torch.arange(SEQUENCE + 1) + 10 * number
    return {
        "dataset_id": number % 2,
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "attention_mask": torch.ones(1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril(),
        "loss_mask": torch.ones(SEQUENCE),
        "position_ids": torch.arange(SEQUENCE),
    }


def bert_sample(number):
    """What Megatron's BERTMaskedWordPieceDataset gives: NumPy's arrays and Python's numbers."""
    text = (torch.arange(SEQUENCE) + 10 * number).numpy()
    return {
        "text": text,
        "types": text % 2,
        "labels": text + 1,
        "is_random": number % 2,
        "padding_mask": text * 0 + 1,
        "loss_mask": text % 3,
        "truncated": 0,
    }


def loader(sample, size, batches):
    return [default_collate([sample(size * batch + n) for n in range(size)]) for batch in range(batches)]


def same(one, other):
    return (
        type(one) is type(other)
        and list(one) == list(other)
        and all(one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one)
    )


@pytest.mark.parametrize("sample", [gpt_sample, bert_sample])
@given(given_size=st.integers(1, 8), size=st.integers(1, 8), times=st.integers(1, 3))
def test_they_are_what_the_loader_would_have_made_of_that_size(sample, given_size, size, times):
    samples = times * given_size * size
    source = iter(loader(sample, given_size, samples // given_size))
    assert all(
        same(made, wanted)
        for made, wanted in zip(
            micro_batches_of(size, given_size, source), loader(sample, size, samples // size), strict=True
        )
    )


def test_nothing_is_touched_where_the_sizes_are_equal():
    source = iter(loader(gpt_sample, 2, 2))
    assert micro_batches_of(2, 2, source) is source
    assert micro_batches_of(4, 2, None) is None


def test_nothing_is_read_before_it_is_needed():
    read = []

    def source():
        for number in range(100):
            read.append(number)
            yield torch.full((4, 1), number)

    made = micro_batches_of(6, 4, source())
    assert read == []
    assert next(made).flatten().tolist() == [0] * 4 + [1] * 2
    assert read == [0, 1]
    assert next(made).flatten().tolist() == [1] * 2 + [2] * 4
    assert read == [0, 1, 2]


def test_what_is_not_there_stays_so_in_any_nest():
    source = iter([{"tokens": torch.arange(2), "rest": (None, [torch.ones(2, 1)])}] * 2)
    [made] = micro_batches_of(4, 2, source)
    assert made["tokens"].tolist() == [0, 1, 0, 1]
    assert made["rest"][0] is None
    assert made["rest"][1][0].shape == (4, 1)


def test_pieces_share_the_memory_of_what_was_read():
    whole = torch.arange(4)
    assert next(micro_batches_of(2, 4, iter([whole]))).data_ptr() == whole.data_ptr()


@pytest.mark.parametrize(
    ("micro_batch", "said"),
    [
        (
            {"tokens": torch.ones(4, 2), "cu_seqlens": torch.ones(1, 7)},
            r"\['cu_seqlens'\] \(of shape \(1, 7\)\) is no ",
        ),
        ({"max_seqlen": torch.tensor(7)}, r"\['max_seqlen'\] \(of shape \(\)\) is no tensor of 4"),
        ({"names": ["a", "b", "c", "d"]}, r"\['names'\]\[0\] \(str\) is no tensor of 4 samples"),
    ],
)
def test_what_cannot_be_cut_is_named(micro_batch, said):
    with pytest.raises(ValueError, match=f"^micro-batches of 4 samples cannot be made ones of 2: {said}") as error:
        next(micro_batches_of(2, 4, iter([micro_batch])))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("other", [torch.ones(2, 3), torch.ones(2, 2, dtype=torch.int64), None])
def test_what_is_not_alike_is_not_joined(other):
    source = iter([{"tokens": torch.ones(2, 2)}, {"tokens": other}])
    with pytest.raises(ValueError, match="other tensors, or other shapes"):
        next(micro_batches_of(4, 2, source))


def test_what_only_has_a_next_can_be_gone_through():
    class Reader:
        def __init__(self):
            self._left = [1, 2]

        def __next__(self):
            if not self._left:
                raise StopIteration
            return self._left.pop(0)

    reader = Reader()
    assert next(items_of(reader)) == 1
    assert list(items_of(reader)) == [2]


class MicroBatches:
    """Of these masks, told apart by their tokens; as of Megatron's RerunDataIterator, only the next is to be had."""

    def __init__(self, *masks):
        self._left = list(enumerate(masks))

    def __next__(self):
        if not self._left:
            raise StopIteration
        number, mask = self._left.pop(0)
        return {"tokens": torch.arange(number), "loss_mask": torch.tensor(mask)}


@pytest.fixture
def alone(monkeypatch):
    """One rank."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, *_, **__: None)


@pytest.mark.parametrize(
    ("masks", "even"),
    [
        (([FULL, FULL], [FULL, FULL]), True),
        (([PADDED], [PADDED]), True),
        (([FULL, FULL], [FULL, PADDED]), False),
        (([FULL], [FULL[:2]]), False),
        (([FULL], []), False),
        ((), False),
    ],
)
def test_all_samples_have_to_count_the_same_tokens(alone, masks, even):
    weights = LossWeights()
    read = list(weights.watch(MicroBatches(*masks)))
    assert [len(micro_batch["tokens"]) for micro_batch in read] == list(range(len(masks)))
    assert weights.even(CPU) == even
    assert weights.even_here == (even or not masks)


@pytest.mark.parametrize("micro_batch", [{"text": torch.ones(2, 3)}, {"loss_mask": None}, torch.ones(2, 3), None])
def test_what_does_not_say_is_not_even(alone, micro_batch):
    weights = LossWeights()
    list(weights.watch(iter([micro_batch])))
    assert not weights.even(CPU)


def test_what_is_read_later_is_watched(alone):
    weights = LossWeights()
    watched = weights.watch(MicroBatches([FULL], [FULL], [PADDED]))
    assert len(next(watched)["tokens"]) == 0
    next(watched)
    assert weights.even(CPU)
    next(watched)
    assert not weights.even(CPU)


@pytest.mark.parametrize(("elsewhere", "even"), [([0.0, 0], True), ([0.0, 3], True), ([1.0, 3], False)])
def test_one_rank_speaks_for_all(monkeypatch, elsewhere, even):
    def highest(tensor, *_, **__):
        tensor.clamp_(min=torch.tensor(elsewhere))

    monkeypatch.setattr(torch.distributed, "all_reduce", highest)
    weights = LossWeights()
    list(weights.watch(MicroBatches([FULL], [FULL])))
    assert weights.even(CPU) == even
