"""`PipelineTrainer` beside transformers' own `Trainer`: the same losses, norms and weights, in a pipeline of two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from evenpipe.torch.hf.batches import samples_of
from tests import forked
from tests.job_server import HUGGING_FACE, run_script

pytest.importorskip("accelerate")
CASES = Path(__file__).with_name("trainer_cases.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    for run in (
        run_script(HUGGING_FACE, CASES, "make", folder),
        forked.run(2, HUGGING_FACE, CASES, "pipeline", folder),
        run_script(HUGGING_FACE, CASES, "own", folder),
    ):
        assert run.returncode == 0, run.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def own(folder: Path) -> Any:
    return json.loads((folder / "own.json").read_text())


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Any]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_losses_norms_and_rates_are_trainers(own: Any, ranks: list[Any]) -> None:
    """Over batches of several lengths, in which some labels count nothing."""
    assert len(own["log"]) == 4
    for rank in ranks:
        assert rank["steps"] == 4
        for mine, theirs in zip(rank["log"], own["log"], strict=True):
            assert {name: mine[name] for name in theirs} == pytest.approx(theirs, rel=1e-4)


def test_each_length_has_a_plan_and_the_stages_weights_are_there_once(ranks: list[Any]) -> None:
    """All ranks' parameters are the model's, and none has more than its stage."""
    assert [rank["plans"] for rank in ranks] == [2, 2]
    assert sum(rank["held"] for rank in ranks) == ranks[0]["whole"]
    assert all(rank["held"] < 0.7 * rank["whole"] for rank in ranks)


def test_evaluation_is_the_mean_over_labels(own: Any, ranks: list[Any]) -> None:
    assert ranks[0]["eval"] == pytest.approx(own["eval"], rel=1e-4)
    assert ranks[0]["incomplete"] == ranks[1]["incomplete"] != ranks[0]["eval"][0]


def test_a_loop_of_one_s_own_has_the_uncut_model_s_losses_and_generates_its_text(ranks: list[Any]) -> None:
    for rank in ranks:
        piped, uncut = rank["loop"]["losses"]
        assert piped == (pytest.approx(uncut, rel=1e-5) if rank["loop"]["last"] else [])
        assert uncut[-1] < uncut[0]
        assert rank["loop"]["texts"][0] == rank["loop"]["texts"][1]
        assert "batch['input_ids']: 7 samples are no multiple of gradient_accumulation_steps=4" in rank["loop"]["wrong"]


def test_fp16_is_that_of_a_loop_with_torchs_scaler(ranks: list[Any]) -> None:
    """The first steps overflow and are skipped; the learning rate waits for them."""
    for rank in ranks:
        half = rank["half"]
        assert half["scales"][0] == half["scales"][1]
        assert half["skipped"][0]
        assert not half["skipped"][-1]
        for row, theirs in zip(half["log"], half["own"], strict=True):
            assert row == pytest.approx(theirs, rel=1e-4)


def test_metrics_are_trainers_on_all_ranks(own: Any, ranks: list[Any]) -> None:
    """Of an evaluation whose last batch is incomplete; predictions have the lengths that the collator made."""
    for name in ("whole", "by batch"):
        assert 0 < own["metrics"][name]["eval_accuracy"] < 1
        assert [rank["metrics"][name] for rank in ranks] == [own["metrics"][name]] * 2
        assert ranks[1]["metrics"][f"{name}, shapes"] == own["metrics"][f"{name}, shapes"]
        assert ranks[0]["metrics"][f"{name}, shapes"] == []


def test_what_cannot_be_evaluated_or_trained_is_one_line_on_all_ranks(ranks: list[Any]) -> None:
    for rank in ranks:
        wrong = rank["wrong"]
        assert wrong["no metrics"].startswith("compute_metrics: IndexError: index 100000 is out of bounds")
        assert wrong["no labels"] == "compute_metrics: eval_dataset has no answers: give them, or name label_names="
        assert wrong["nothing"] == "evaluate: on which data? Give eval_dataset= with a sample at least"
        assert wrong["nothing to train"] == "train: on which data? Give train_dataset="
        assert wrong["too few"].startswith("train_dataset: 7 samples are no batch of 8: give more, or a smaller ")
        assert wrong["epoch"].startswith("should_epoch_stop: an epoch does not end early here: set should_training_")


def test_what_each_rank_saved_of_its_stage_is_what_from_pretrained_loads(folder: Path, own: Any) -> None:
    assert own["wrong"] == {}
    assert own["moved"] > 1e-3
    assert own["off"] < 1e-4
    names = sorted(path.name for path in (folder / "trained").glob("*.safetensors*"))
    assert names == [*(f"model-0000{n}-of-00002.safetensors" for n in (1, 2)), "model.safetensors.index.json"]


@pytest.fixture(scope="module")
def replicas(folder: Path) -> list[Any]:
    run = forked.run(4, HUGGING_FACE, CASES, "replicas", folder)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads((folder / f"replicas-{rank}.json").read_text()) for rank in range(4)]


def test_two_replicas_of_two_stages_train_as_one_process_does(own: Any, replicas: list[Any]) -> None:
    """With half as many micro-batches each: the same losses, norms and rates, over all labels of both."""
    for rank in replicas:
        mine = [row for row in rank["log"] if "loss" in row]
        for row, theirs in zip(mine, own["log"], strict=True):
            assert {name: row[name] for name in theirs} == pytest.approx(theirs, rel=1e-4)


def test_callbacks_see_and_steer_the_training_on_all_ranks(replicas: list[Any]) -> None:
    """Evaluations and checkpoints come as the arguments say; a stop that one rank asks for is one for all."""
    events = ["step 1", "step 2", "evaluate", "step 3", "save 3", "step 4", "save 4", "evaluate"]
    assert [rank["events"] for rank in replicas] == [events] * 4
    assert [rank["stopped"] for rank in replicas] == [3] * 4


def test_a_checkpoint_goes_on_to_the_bit(folder: Path, replicas: list[Any]) -> None:
    """In the middle of an epoch: losses, and the weights at the end, are those of a run that was not stopped."""
    for rank in replicas:
        assert rank["resumed"] == 4
        assert rank["rest"] == [row for row in rank["log"] if "loss" in row]
    names = sorted(path.name for path in (folder / "stopped").iterdir())
    assert names == ["checkpoint-3", "checkpoint-4"]
    for path in (folder / "whole" / "checkpoint-4").glob("*.safetensors"):
        assert path.read_bytes() == (folder / "stopped" / "checkpoint-4" / path.name).read_bytes()


def test_what_replicas_and_checkpoints_need_is_said_in_one_line(replicas: list[Any]) -> None:
    for rank in replicas:
        assert rank["stages"] == "stages: 4 processes cannot be shared out to pipelines of 3 stages"
        assert rank["data"] == "eval_strategy=epoch: on which data? Give eval_dataset="
        assert rank["absent"].startswith("resume_from_checkpoint=True: ")
        assert rank["absent"].endswith("has no checkpoint: leave it out to begin anew")


@pytest.mark.long
def test_a_rank_takes_its_stages_memory_while_that_is_loaded(tmp_path: Path) -> None:
    """At most 1.05 of it: neither the whole model nor a second copy of the stage."""
    for command in (
        [sys.executable, str(CASES), "make large", str(tmp_path)],
        forked.command(2, "transformers.models.llama.modeling_llama,torch._dynamo", CASES, "memory", str(tmp_path)),
    ):
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert run.returncode == 0, run.stderr[-4000:]
    shares = [json.loads((tmp_path / f"memory-{rank}.json").read_text()) for rank in range(2)]
    print(f"memory while loading, over the stage's: {shares}")
    assert all(0.9 < share <= 1.05 for share in shares), shares


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lr_scheduler_type", "reduce_lr_on_plateau"), ("auto_find_batch_size", True), ("eval_on_start", True)),
        *(("ignore_data_skip", True), ("save_only_model", True), ("push_to_hub", True), ("full_determinism", True)),
    ],
)
def test_a_setting_that_would_be_passed_over_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    from transformers import TrainingArguments

    from evenpipe.partition.models import ModelError
    from evenpipe.torch.hf.unsupported import refuse_unsupported

    given = {"eval_strategy": "steps", "eval_steps": 1} if name == "eval_on_start" else {}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **given)
    refuse_unsupported(args, own_optimizer=False)
    setattr(args, name, value)
    with pytest.raises(ModelError, match=f"^{name}={value}: the pipeline does not do that: .+"):
        refuse_unsupported(args, own_optimizer=False)


@pytest.mark.parametrize("removes", [True, False])
def test_collators_get_columns_that_no_forward_takes_where_these_stay(removes: bool) -> None:
    model = nn.Linear(2, 2)
    kept = ["labels"] if removes else None
    [sample] = samples_of([{"input": 1, "labels": 2, "image": 3}], model, [0], kept)
    assert set(sample) == {"input", "labels"} | (set() if removes else {"image"})


def test_settings_that_would_be_passed_over_are_refused(ranks: list[Any]) -> None:
    assert ranks[0]["refused"].startswith("gradient_checkpointing=True: the pipeline does not do that: give optimize=")
