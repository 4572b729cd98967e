"""Text to samples: deterministic, in range, and refused in one line where there is not enough of it."""

from pathlib import Path

import numpy as np
import pytest

from evenpipe.train.data import MASK_TOKEN, load, sample_bytes
from evenpipe.train.options import OptionsError, TrainOptions


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_a_micro_batch_is_a_function_of_seed_iteration_number_and_replica(model: str) -> None:
    corpus = load(TrainOptions.of(model=model, micro_batch_size=2))
    other_seed = load(TrainOptions.of(model=model, micro_batch_size=2, seed=1))

    def same(left: object, right: object) -> bool:
        return all(map(np.array_equal, left, right))  # type: ignore[call-overload]

    first = corpus.micro_batch(3, 5, 1)
    assert same(first, corpus.micro_batch(3, 5, 1))
    others = [corpus.micro_batch(2, 5, 1), corpus.micro_batch(3, 4, 1), corpus.micro_batch(3, 5, 0)]
    others.append(other_seed.micro_batch(3, 5, 1))
    assert not any(same(first, other) for other in others)
    assert same(list(corpus.micro_batches(3, 1))[5], first)


def test_gpt_predicts_each_following_byte() -> None:
    batch = load(TrainOptions.of(seq_length=32, micro_batch_size=3)).micro_batch(0, 0, 0)
    assert batch.tokens.shape == batch.labels.shape == batch.counted.shape == (3, 32)
    assert np.array_equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.counted.all()


def test_bert_counts_the_masked_bytes_only_and_knows_what_stood_there(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 400)
    options = TrainOptions.of(model="bert", seq_length=20_000, data=str(text))
    batch = load(options).micro_batch(0, 0, 0)
    counted = batch.counted == 1
    hidden = batch.tokens == MASK_TOKEN
    assert 0.14 < counted.mean() < 0.16
    assert 0.78 < hidden[counted].mean() < 0.82
    assert not hidden[~counted].any()
    assert np.array_equal(batch.tokens[~counted], batch.labels[~counted])
    assert np.array_equal(np.diff(batch.labels) % 256, np.ones((1, 19_999)))


def test_every_bert_sample_counts_at_least_one_position() -> None:
    corpus = load(TrainOptions.of(model="bert", seq_length=2, micro_batch_size=200))
    assert corpus.micro_batch(0, 0, 0).counted.any(axis=1).all()


def test_the_built_in_text_is_plain_english_of_some_length() -> None:
    text = load(TrainOptions.of()).text.tobytes().decode()
    assert len(text) > 100_000
    assert text.count(" the ") > 1_000


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_a_text_of_exactly_one_sample_will_do(model: str, tmp_path: Path) -> None:
    options = TrainOptions.of(model=model, seq_length=8, data=str(tmp_path / "text"))
    (tmp_path / "text").write_bytes(b"x" * sample_bytes(options))
    assert load(options).micro_batch(0, 0, 0).labels.shape == (1, 8)


def test_a_missing_empty_short_or_unreadable_text_is_refused_in_one_line(tmp_path: Path) -> None:
    empty, short = tmp_path / "empty", tmp_path / "short"
    empty.write_bytes(b"")
    short.write_bytes(b"x" * 128)
    expected = {
        tmp_path / "missing": "No such file or directory: give a readable text file, or builtin",
        tmp_path: "Is a directory: give a readable text file, or builtin",
        empty: "the file is empty: give a text file, or builtin",
        short: "128 bytes, but one sample takes 129: give a longer text or a smaller --seq-length",
    }
    for path, reason in expected.items():
        with pytest.raises(OptionsError) as refusal:
            load(TrainOptions.of(data=str(path)))
        assert str(refusal.value) == f"--data {path}: {reason}"
