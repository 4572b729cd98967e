"""What was read for dropped forwards, and nothing else, is read again."""

import weakref

import pytest

from evenpipe.two_bw.inputs import InputError, ReadAhead


def forward(reader, reads=1):
    reader.start_forward()
    return [next(reader) for _ in range(reads)]


def test_only_the_batch_ahead_is_read_again():
    source, reader = iter(range(100)), ReadAhead()
    reader.start_batch(source, 2)
    assert [forward(reader, 2) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    reader.rewind()
    reader.start_batch(source, 2)
    assert [forward(reader, 2) for _ in range(3)] == [[4, 5], [6, 7], [8, 9]]
    reader.rewind()
    reader.rewind()
    reader.start_batch(source, 2)
    assert [forward(reader, 2) for _ in range(2)] == [[8, 9], [10, 11]]


def test_a_batch_goes_on_where_the_one_before_has_read_ahead():
    source, reader = iter(range(100)), ReadAhead()
    reader.start_batch(source, 3)
    assert [forward(reader) for _ in range(5)] == [[0], [1], [2], [3], [4]]
    reader.start_batch(source, 3)
    assert [forward(reader) for _ in range(3)] == [[5], [6], [7]]
    reader.rewind()
    reader.start_batch(source, 3)
    assert forward(reader) == [6]


def test_an_evaluation_on_the_training_s_iterator_reads_what_it_would_with_flushes():
    source, reader = iter(range(100)), ReadAhead()
    other = iter("ab")
    reader.start_batch(source, 2)
    for _ in range(3):
        forward(reader)
    reader.rewind()
    evaluated = reader.standing_before(source)
    assert [next(evaluated), next(evaluated)] == [2, 3]
    assert reader.standing_before(other) is other
    assert reader.standing_before(None) is None
    reader.start_batch(source, 2)
    assert [forward(reader) for _ in range(2)] == [[4], [5]]


def test_the_iterator_is_its_owner_s_to_keep():
    """A data loader's ends its worker processes when it is let go of."""
    source, reader = (number for number in range(100)), ReadAhead()
    known = weakref.ref(source)
    reader.start_batch(source, 2)
    for _ in range(3):
        forward(reader)
    reader.rewind()
    del source
    assert known() is None


def test_a_process_that_reads_nothing_only_counts():
    reader = ReadAhead()
    for _ in range(3):
        reader.start_batch(None, 2)
        reader.start_forward()
        reader.start_forward()


def test_a_source_that_ends_serves_the_batch_ahead_once_more_but_not_the_next():
    source, reader = iter([1, 2]), ReadAhead()
    reader.start_batch(source, 2)
    assert [forward(reader) for _ in range(3)] == [[1], [2], [2]]
    with pytest.raises(InputError, match="the data iterator ended within this batch"):
        reader.start_batch(source, 2)
    reader.rewind()
    reader.start_batch(source, 2)
    with pytest.raises(InputError, match="the data iterator ended within this batch"):
        forward(reader)


def test_another_iterator_is_taken_between_streams_only():
    reader = ReadAhead()
    reader.start_batch(iter([1, 2, 3]), 2)
    for _ in range(3):
        forward(reader)
    with pytest.raises(InputError, match="another data iterator when 1 micro-batches had been read ahead"):
        reader.start_batch(iter([4]), 2)
    reader.rewind()
    reader.start_batch(iter([4]), 2)
    assert forward(reader) == [4]
