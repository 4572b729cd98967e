"""The older weight version is on disk before Megatron's checkpoint counts, and is used with its own weights only."""

import resource
from argparse import Namespace
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from evenpipe.megatron_lm.hooks import folder_of
from evenpipe.megatron_lm.two_bw.checkpoint import has_two_versions, resume, save
from evenpipe.two_bw.side_file import SideFileError

BESIDE, INSIDE = ".evenpipe_2bw/0000007_stage_02_shard_01.pt", "iter_0000007/evenpipe_2bw/stage_02_shard_01.pt"


class Buffers:
    """What is saved of 2BW, and given back."""

    name = "2bw"
    correction = None
    versions = SimpleNamespace(latest=0, tensors=lambda version: [None, None], in_place=False)

    def __init__(self, before):
        self.before = before

    def state_dict(self, places):
        return {"before": [self.before]}

    def load_state_dict(self, state):
        self.before = None if state is None else state["before"][0]


@pytest.fixture
def ranks(monkeypatch, alone):
    """Stage 2, shard 1, the first replica."""
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda with_context_parallel: 0)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)


def model(*, dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Linear(3, 2, dtype=dtype)]


def loading(folder, iteration=7):
    return Namespace(load=str(folder), iteration=iteration, non_persistent_global_ckpt_dir=None, rank=0)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_there_before_megatron_saves_and_inside_afterwards(ranks, tmp_path, dtype):
    during = []
    before = torch.arange(5.0)
    save(7, model(dtype=dtype), Buffers(before), str(tmp_path), lambda: during.append(files(tmp_path)))
    assert during == [[BESIDE]]
    assert files(tmp_path) == [INSIDE]
    fresh = Buffers(None)
    assert resume(loading(tmp_path), model(dtype=dtype), fresh, True, accepts_one_version=False)
    assert torch.equal(fresh.before, before)


def test_a_job_killed_before_it_was_moved_finds_it(ranks, tmp_path):
    def killed():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(7, model(), Buffers(torch.ones(2)), str(tmp_path), killed)
    assert files(tmp_path) == [BESIDE]
    assert resume(loading(tmp_path), model(), Buffers(None), True, accepts_one_version=False)


def test_other_weights_or_another_iteration_do_not_get_it(ranks, tmp_path, capsys):
    save(7, model(), Buffers(torch.ones(2)), str(tmp_path), lambda: None)
    other = Buffers("as made")
    with pytest.raises(SideFileError, match="goes with other weights"):
        resume(loading(tmp_path), model(seed=1), other, True, accepts_one_version=False)
    assert other.before == "as made"
    assert not resume(loading(tmp_path), model(seed=1), other, True, accepts_one_version=True)
    assert other.before is None
    assert "both weight versions are the loaded one" in capsys.readouterr().out
    assert not resume(loading(tmp_path, 8), model(), Buffers(None), False, accepts_one_version=False)
    assert "it was saved without 2bw" in capsys.readouterr().out
    nothing = loading(tmp_path, 0)
    assert not resume(nothing, model(), Buffers(None), None, accepts_one_version=False)


@pytest.mark.parametrize(
    ("saved_by", "known"),
    [
        ({}, False),
        ({"evenpipe_schedule": None}, False),
        ({"evenpipe_schedule": "kfkb"}, False),
        ({"evenpipe_schedule": "paci"}, False),
        ({"evenpipe_schedule": "2bw"}, True),
        ({"evenpipe_schedule": "file:/gone.txt"}, None),
        ({"evenpipe_schedule": "of-another-package"}, None),
    ],
)
def test_where_the_schedule_is_unknown_the_files_that_lie_there_tell(ranks, tmp_path, capsys, saved_by, known):
    assert has_two_versions(Namespace(**saved_by)) is known
    if known is None:
        assert not resume(loading(tmp_path), model(), Buffers("as made"), known, accepts_one_version=False)
        assert "it was saved without 2bw" in capsys.readouterr().out
        save(7, model(), Buffers(torch.ones(2)), str(tmp_path), lambda: None)
        assert resume(loading(tmp_path), model(), Buffers(None), known, accepts_one_version=False)
        with pytest.raises(SideFileError, match="goes with other weights"):
            resume(loading(tmp_path), model(seed=1), Buffers(None), known, accepts_one_version=False)


def test_a_full_disk_is_one_line_and_leaves_what_was_there(ranks, tmp_path):
    save(7, model(), Buffers(torch.ones(2)), str(tmp_path), lambda: None)
    saved = []
    with _files_of_at_most(1 << 16), pytest.raises(RuntimeError) as error:
        save(8, model(), Buffers(torch.ones(1 << 20)), str(tmp_path), lambda: saved.append(8))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("the checkpoint of iteration 8 could not be saved: ")
    assert saved == []
    assert files(tmp_path) == [INSIDE]


@contextmanager
def _files_of_at_most(size):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_folders_are_megatrons():
    args = Namespace(save="/s", non_persistent_global_ckpt_dir=None)
    assert folder_of(args, False) == "/s"
    assert folder_of(args, True) == "/s/non_persistent"
    args.non_persistent_global_ckpt_dir = "/n"
    assert folder_of(args, True) == "/n"
