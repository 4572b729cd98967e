"""What was read for dropped forwards, and nothing else, is read again."""

import pytest

from evenpipe.megatron.two_buffered.inputs import ReadAhead


def forward(reader, micro_batch, reads=1, ahead=False):
    reader.start_forward(micro_batch, ahead)
    return [next(reader) for _ in range(reads)]


def test_only_the_batch_ahead_is_read_again():
    source, reader = iter(range(100)), ReadAhead()
    reader.start_batch(source, 0)
    assert [forward(reader, number, 2) for number in range(3)] == [[0, 1], [2, 3], [4, 5]]  # batch 0 is 0 and 1
    reader.rewind(2)
    reader.start_batch(source, 0)
    assert [forward(reader, number, 2) for number in range(3)] == [[4, 5], [6, 7], [8, 9]]
    reader.rewind(2)
    reader.rewind(2)
    reader.start_batch(source, 0)
    assert [forward(reader, number, 2) for number in range(2)] == [[8, 9], [10, 11]]


def test_a_source_that_ends_serves_the_batch_ahead_once_more_but_not_the_next():
    source, reader = iter([1, 2]), ReadAhead()
    reader.start_batch(source, 0)
    assert [forward(reader, number) for number in range(2)] == [[1], [2]]
    assert forward(reader, 2, ahead=True) == [2]
    with pytest.raises(RuntimeError, match="the data ended before micro-batch 2 "):
        reader.start_batch(source, 2)
    reader.rewind(2)
    reader.start_batch(source, 0)
    with pytest.raises(StopIteration):
        forward(reader, 0)
