"""Checkpoints that were written before their side file was `evenpipe.delayed/1` are gone on with.

What lies in `before` was made by the release before, on the commit 797a5a5, by

    run_cases([TrainOptions.of(**TRAINED, iterations=5, save="trainer", save_interval=3)])

and, for "megatron", by its `script.two_buffered.checkpoint.save`, given the state of 2BW ("extra") and the parameters
of the second of these processes: a Megatron-LM job on two stages would have saved them so. "deepspeed" is of a case of
`tests/deepspeed/train_two_buffered.py` ("before"), where the test is.
"""

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from evenpipe.delayed import side_file
from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions

BEFORE = Path(__file__).with_name("before")
TRAINED = {
    "stages": 2,
    "layers": 2,
    "hidden": 8,
    "heads": 2,
    "seq_length": 8,
    "micro_batches": 2,
    "schedule": "2bw",
    "precision": "fp16",
    "initial_loss_scale": 2.0**19,
    "clip_grad": 0.1,
}


class Steps:
    """Keeps the state that it is given."""

    def load_state_dict(self, state):
        self.state = state


@pytest.fixture
def saved():
    """What the second process of the trainer saved."""
    return torch.load(BEFORE / "trainer" / "iter_0000003" / "rank_00001.pt")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No other rank lacks anything."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)


def test_the_trainer_goes_on_with_both_versions(capfd):
    (run,) = run_cases([TrainOptions.of(**TRAINED, iterations=5, load=str(BEFORE / "trainer" / "iter_0000003"))])
    assert run.losses == pytest.approx([5.543261289596558, 5.530630111694336], rel=1e-4)
    assert run.grad_norms == pytest.approx([1.962274262758795, 1.755938004483191], rel=1e-2)
    assert run.skipped_iterations == ()
    assert "weights" not in capfd.readouterr().err


def test_a_side_file_of_megatron_s_is_used_with_its_own_weights_only(saved, monkeypatch):
    from megatron.core import parallel_state

    from evenpipe.megatron.script.two_buffered.checkpoint import resume

    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    args = Namespace(load=str(BEFORE / "megatron"), iteration=3, non_persistent_global_ckpt_dir=None, rank=1)
    weights = list(saved["parameters"][0].values())
    steps = Steps()
    assert resume(args, [torch.nn.ParameterList(weights)], steps)
    assert steps.state["told_last"] == saved["extra"]["told_last"] == [True, 1.3795257188251888, None]
    pairs = zip(steps.state["before"], saved["extra"]["before"], strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    weights[-1] = weights[-1] + 1
    assert not resume(args, [torch.nn.ParameterList(weights)], steps)
    assert steps.state is None


def test_a_side_file_of_deepspeed_s_is_used_with_its_own_weights_only(tmp_path):
    checkpoint = BEFORE / "deepspeed" / "global_step4"
    weights = list(torch.load(checkpoint / "layer_02-model_states.pt").values())
    path = tmp_path / "side.pt"
    shutil.copy(checkpoint / "evenpipe_2bw_stage_01.pt", path)
    steps = Steps()
    assert side_file.resume(steps, [tmp_path / "none", path], weights, torch.device("cpu"))
    assert [one.shape for one in steps.state["before"]] == [one.shape for one in weights]
    assert steps.state["unlearnt"] == [False]
    assert not side_file.resume(steps, [path], [*weights, torch.ones(1)], torch.device("cpu"))
    assert steps.state is None
