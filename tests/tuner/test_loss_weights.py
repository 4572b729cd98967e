"""Only where all samples count the same tokens does the size of micro-batches not change a batch's loss."""

import pytest
import torch

from evenpipe.tuner.loss_weights import LossWeights

CPU = torch.device("cpu")
FULL, PADDED = [1.0, 1, 1], [1.0, 1, 0]


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
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)


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
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.add_(torch.tensor(elsewhere)))
    weights = LossWeights()
    list(weights.watch(MicroBatches([FULL], [FULL])))
    assert weights.even(CPU) == even
