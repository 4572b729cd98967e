"""The tuner's state is on disk before Megatron's checkpoint counts, and is used under its own settings only."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from evenpipe.megatron_lm.measured import TUNED, training_for
from evenpipe.settings.config import EvenPipeConfig

BESIDE, INSIDE = ".evenpipe_tuner/0000007.json", "iter_0000007/evenpipe_tuner.json"
LIMIT = 1 << 30
SIZES = {"virtual_pipeline_model_parallel_size": None}
STATE = {
    "iteration": 7,
    "limit_bytes": LIMIT,
    "tuner": {"current": [2, 4, 2], "times": {"4": [[1.5, 2.5], [3.0, 0.1]]}},
}


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda found, src: None)


def megatrons(folder, iteration=7, **others):
    values = {"load": str(folder), "iteration": iteration, "non_persistent_global_ckpt_dir": None, "rank": 0}
    return Namespace(
        **values
        | {"micro_batch_size": 2, "bpipe": False, "recompute_modules": ["core_attn"], "calculate_per_token_loss": False}
        | others
    )


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_it_is_there_before_megatron_saves_and_inside_afterwards(one_rank, tmp_path, capsys):
    during = []
    assert (
        TUNED.save(megatrons(tmp_path), 7, str(tmp_path), STATE, lambda: during.append(files(tmp_path)) or "saved")
        == "saved"
    )
    assert during == [[BESIDE]]
    assert files(tmp_path) == [INSIDE]
    assert TUNED.resumed(megatrons(tmp_path), LIMIT) == STATE
    assert capsys.readouterr().out == (
        " [evenpipe] --group-size auto: checkpoint of iteration 7: goes on tuning as it was saved\n"
    )


def test_a_file_that_a_script_saved_is_gone_on_with(one_rank, tmp_path, capsys):
    """As the first release that tunes wrote it, in Megatron-LM 0.16.1."""
    file = Path(__file__).parents[2] / "tuner" / "states" / "script.json"
    content = json.loads(file.read_text())
    settings = {name: value for name, value in content["settings"].items() if name != "one_size"}
    (tmp_path / INSIDE).parent.mkdir()
    shutil.copy(file, tmp_path / INSIDE)
    args = megatrons(tmp_path, **settings)
    assert TUNED.resumed(args, content["state"]["limit_bytes"]) == content["state"]
    assert "goes on tuning as it was saved" in capsys.readouterr().out
    assert TUNED.resumed(args, content["state"]["limit_bytes"] - 1) is None
    TUNED.save(args, 8, str(tmp_path), content["state"], lambda: None)
    assert json.loads((tmp_path / "iter_0000008" / "evenpipe_tuner.json").read_text()) == content


def test_a_job_killed_before_it_was_moved_finds_it(one_rank, tmp_path):
    def killed():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TUNED.save(megatrons(tmp_path), 7, str(tmp_path), STATE, killed)
    assert files(tmp_path) == [BESIDE]
    assert TUNED.resumed(megatrons(tmp_path), LIMIT) == STATE


@pytest.mark.parametrize(
    ("others", "limit"),
    [
        ({"micro_batch_size": 4}, LIMIT),
        ({"bpipe": True}, LIMIT),
        ({"recompute_modules": None}, LIMIT),
        ({"tp_comm_overlap": True}, LIMIT),
        ({}, LIMIT - 1),
    ],
)
def test_other_settings_tune_anew(one_rank, tmp_path, capsys, others, limit):
    TUNED.save(megatrons(tmp_path), 7, str(tmp_path), STATE, lambda: None)
    assert TUNED.resumed(megatrons(tmp_path, **others), limit) is None
    assert capsys.readouterr().out.endswith("has no tuner's state of these settings: tunes anew\n")


@pytest.mark.parametrize(
    "others",
    [{"attention_backend": AttnBackend.unfused}, {"exp_avg_dtype": torch.bfloat16}, {"optimizer_cpu_offload": True}],
)
def test_a_plan_under_a_cap_is_of_one_attention_and_one_kind_of_optimizer(one_rank, tmp_path, capsys, others):
    capped = training_for(
        EvenPipeConfig.of(schedule="1f1b", swap="auto", memory_gib=1.0), megatrons(tmp_path, **SIZES), None, print
    )._saved
    usual = {**SIZES, "attention_backend": AttnBackend.auto, "exp_avg_dtype": torch.float32}
    capped.save(megatrons(tmp_path, **usual), 7, str(tmp_path), STATE, lambda: None)
    assert capped.resumed(megatrons(tmp_path, **usual), LIMIT) == STATE
    assert capped.resumed(megatrons(tmp_path, **usual | others), LIMIT) is None
    assert capsys.readouterr().out.endswith("has no plan for these settings: measures again\n")


def test_another_iteration_or_none_has_no_state(one_rank, tmp_path, capsys):
    TUNED.save(megatrons(tmp_path), 7, str(tmp_path), STATE, lambda: None)
    assert TUNED.resumed(megatrons(tmp_path, 8), LIMIT) is None
    assert "iteration 8: has no tuner's state" in capsys.readouterr().out
    assert TUNED.resumed(megatrons(tmp_path, 0), LIMIT) is None
    assert TUNED.resumed(Namespace(load=None), LIMIT) is None
    assert capsys.readouterr().out == ""  # nothing was loaded


@pytest.mark.parametrize("state", [None, {}, "half"], ids=["no state", "no limit", "not whole"])
def test_a_file_that_is_not_whole_tunes_anew(one_rank, tmp_path, capsys, state):
    TUNED.save(megatrons(tmp_path), 7, str(tmp_path), STATE, lambda: None)
    text = json.dumps(json.loads((tmp_path / INSIDE).read_text()) | {"state": state})
    (tmp_path / INSIDE).write_text(text if state != "half" else text[:30])
    assert TUNED.resumed(megatrons(tmp_path), LIMIT) is None
    assert "tunes anew" in capsys.readouterr().out


def test_a_file_of_something_else_tunes_anew(one_rank, tmp_path):
    TUNED.save(megatrons(tmp_path), 7, str(tmp_path), STATE, lambda: None)
    (tmp_path / INSIDE).write_text("[]")
    assert TUNED.resumed(megatrons(tmp_path), LIMIT) is None


def test_a_folder_that_cannot_be_written_costs_only_the_tuning(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert TUNED.save(megatrons(tmp_path), 7, str(tmp_path / "file"), STATE, lambda: "saved") == "saved"
    assert "a resumed run will tune anew" in capsys.readouterr().out
