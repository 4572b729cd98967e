"""2BW in unmodified scripts: nothing joins the stages, and no way to stop, look at or save a run changes it."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy
import pytest
import torch

from tests.megatron_lm import traced_collectives
from tests.megatron_lm.launch import Run, differences, launch, model_flags, start, torchrun
from tests.megatron_lm.test_experts import EXPERTS
from tests.selected import marked

GPT, BERT = "pretrain_gpt.py", "pretrain_bert.py"
TWO = ("--evenpipe-schedule", "2bw")
PP4 = ("--pipeline-model-parallel-size", "4")
PP2 = ("--pipeline-model-parallel-size", "2")
SHARED_OUT = (*EXPERTS, "--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size", "2")
BIASED = (
    *("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "0.1"),
    *("--moe-router-score-function", "sigmoid"),
)
BY_BATCH = (*BIASED, "--moe-router-load-balancing-type", "global_aux_loss")
MTP = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
PER_TOKEN = "--calculate-per-token-loss"
UNTIED = "--untie-embeddings-and-output-weights"
OVERLAPPED = ("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer", "--overlap-grad-reduce", "--bf16")
CASES = {
    "GPT PP4 m=4, torch_dist": (GPT, (*PP4, "--global-batch-size", "4"), "torch_dist"),
    # Not BERT: its head of two classes is padded, and newer releases save padding in torch_dist as it lies in memory.
    "GPT DP2xPP2 bf16 distributed optimizer, torch_dist": (GPT, OVERLAPPED, "torch_dist"),
    "GPT DP2xPP2 bf16 distributed optimizer, error feedback, torch": (
        GPT,
        (*OVERLAPPED, "--evenpipe-delay-correction", "error-feedback"),
        "torch",
    ),
    "BERT DP2xPP2 bf16 distributed optimizer, torch": (BERT, (*OVERLAPPED, "--overlap-param-gather"), "torch"),
    "GPT PP4 MTP bpipe, torch": (GPT, (*PP4, *MTP, "--bpipe"), "torch"),
    "BERT PP4 bpipe, torch": (BERT, (*PP4, "--bpipe"), "torch"),
    "GPT DP2xPP2 experts over both, torch_dist": (GPT, (*PP2, *SHARED_OUT), "torch_dist"),
    "GPT DP2xPP2 experts over both, distributed optimizer, torch": (
        GPT,
        (*PP2, *SHARED_OUT, *BY_BATCH, "--use-distributed-optimizer", "--overlap-grad-reduce"),
        "torch",
    ),
}

# What differs little from a case that stays, of this file or of `tests/two_bw/test_interruptions.py`.
LONG = ("GPT DP2xPP2 bf16 distributed optimizer, error feedback, torch", "BERT PP4 bpipe, torch")


def flags_for(checkout, script, iterations, bert_data):
    """Without evaluation in between."""
    flags = model_flags(checkout, script, iterations, bert_data)
    return [*flags, "--eval-interval", "1000"]


def step_lines(run: Run) -> list[str]:
    """What EvenPipe said of losses and norms."""
    return re.findall(r"\[evenpipe\] (?:iteration \d+ \| loss of .*|(?:no )?grad norm.*)", run.output)


def sidecars(folder: Path, iteration: int) -> list[Path]:
    return sorted((folder / f"iter_{iteration:07d}" / "evenpipe_2bw").iterdir())


def older_versions(folder: Path, iteration: int) -> dict[str, list[torch.Tensor]]:
    """And, in files of ranks, what the correction of the delay keeps."""
    states = {path.name: torch.load(path)["state"] for path in sidecars(folder, iteration)}
    return {name: state["corrected" if name.startswith("rank_") else "before"] for name, state in states.items()}


def same(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(left, right) for name in one for left, right in zip(one[name], other[name], strict=True)
    )


@pytest.mark.every_release
def test_nothing_waits_for_another_stage(megatron_lm, tmp_path):
    """Of all collectives in a steady iteration; Megatron's 1F1B has the ones that it is known for."""
    waited = {}
    for schedule in ("2bw", "1f1b"):
        environment = {"TRACED": str(megatron_lm / GPT), "TRACES": str(tmp_path / schedule)}
        flags = [*flags_for(megatron_lm, GPT, 6, ()), *PP4, *EXPERTS, *BIASED, "--evenpipe-schedule", schedule]
        launch(megatron_lm, traced_collectives.__file__, 4, flags, environment)
        made = [
            tuple(row)
            for rank in range(4)
            for row in json.loads((tmp_path / f"{schedule}.{rank}").read_text())
            if row[0] in (2, 3, 4)
        ]
        waited[schedule] = {where.partition(":")[2] for _, _, _, waits, where in made if waits}
        assert len(made) > 3
    assert waited["2bw"] == set()
    assert waited["1f1b"] >= {
        "_allreduce_embedding_grad",
        "get_grad_norm_fp32",
        "logical_and_across_model_parallel_group",
        "reduce_max_stat_across_model_parallel_group",
        "highest_of_all",
        "reduce_aux_losses_tracker_across_ranks",
    }
    # Whether any rank wants the iteration run again: older releases ask within another function.
    assert waited["1f1b"] & {"_reduce_any", "should_run_forward_backward"}


@pytest.mark.parametrize(
    "model",
    [(), pytest.param(MTP, marks=pytest.mark.long), (*MTP, UNTIED), (*MTP, PER_TOKEN)],
    ids=["tied", "MTP, tied", "MTP, untied", "MTP, loss per token"],
)
def test_the_first_two_batches_run_on_the_first_weights(megatron_lm, model, tmp_path):
    """So the first update is stock's, bit for bit, and the second batch has the loss that it has without any.

    Multi-token prediction has a copy of the embedding, whose gradients are one with the first stage's. A batch has 512
    tokens, by which all are divided without rounding.
    """
    flags = [*flags_for(megatron_lm, GPT, 2, ()), *PP4, *model, "--ckpt-format", "torch", "--save-interval", "1"]
    stock = launch(megatron_lm, GPT, 4, [*flags, "--save", str(tmp_path / "stock"), "--exit-interval", "1"])
    ours = launch(megatron_lm, GPT, 4, [*flags, *TWO, "--save", str(tmp_path / "2bw")])
    first = "iter_0000001"
    found = differences(tmp_path / "stock" / first, tmp_path / "2bw" / first)
    assert found
    assert all(name.startswith("evenpipe_2bw/") for name in found), found
    frozen = launch(megatron_lm, GPT, 4, [*flags, "--lr", "0", "--weight-decay", "0", "--save", str(tmp_path / "0")])
    loss = [re.search(r"lm loss: \S+", line)[0] for line in frozen.lines]
    assert [re.search(r"lm loss: \S+", line)[0] for line in ours.lines] == loss
    further = numbers("mtp_1 loss: ", ours)
    assert len(further) == (2 if model else 0)
    assert further == numbers("mtp_1 loss: ", frozen)
    norms = [float(re.search(r"grad norm: (\S+)", line)[1]) for line in frozen.lines]
    assert [float(norm) for norm in re.findall(r"grad norm ([\d.]+) of iteration", ours.output)] == norms
    assert stock.lines[0].partition("grad norm")[0] == ours.lines[0].partition("number")[0]


DIVIDED = {
    "over replicas": (),
    "over replicas, distributed optimizer": ("--use-distributed-optimizer", "--overlap-grad-reduce"),
    # Two tensor-parallel ranks, each of which has whole experts.
    "over tensor-parallel ranks": (
        *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1"),
        "--use-distributed-optimizer",
    ),
}


@pytest.mark.parametrize("how", marked(DIVIDED, ["over replicas"]))
def test_the_first_losses_and_norms_of_experts_that_are_shared_out_are_megatron_s(megatron_lm, how):
    """The first two batches run on the first weights."""
    flags = [*flags_for(megatron_lm, GPT, 2, ()), *PP2, *SHARED_OUT, *DIVIDED[how]]
    ours = launch(megatron_lm, GPT, 4, [*flags, *TWO])
    frozen = launch(megatron_lm, GPT, 4, [*flags, "--lr", "0", "--weight-decay", "0"])
    assert numbers("lm loss: ", ours) == numbers("lm loss: ", frozen)
    assert numbers("grad norm ", ours) == numbers("grad norm: ", frozen)
    assert len(numbers("grad norm ", ours)) == 2


def test_experts_that_are_shared_out_train_as_if_each_replica_had_them_all(megatron_lm, tmp_path):
    """But for the order of a sum over the tokens of two replicas. Megatron draws other weights, so they are loaded."""
    _skip_where_older_numpy_is_wanted(megatron_lm)
    flags = [*flags_for(megatron_lm, GPT, 4, ()), *PP2, *SHARED_OUT]
    all_of_them = ("--expert-model-parallel-size", "1")
    saved = ("--save", str(tmp_path), "--save-interval", "1", "--exit-interval", "1")
    launch(megatron_lm, GPT, 4, [*flags, *all_of_them, *saved])
    flags += [*TWO, "--load", str(tmp_path), "--finetune"]
    ours, together = launch(megatron_lm, GPT, 4, flags), launch(megatron_lm, GPT, 4, [*flags, *all_of_them])
    for figure in ("lm loss: ", "load_balancing_loss: "):
        assert numbers(figure, ours) == pytest.approx(numbers(figure, together), rel=1e-5)
    assert numbers("grad norm ", ours) == pytest.approx(numbers("grad norm ", together), abs=2e-3)
    assert len(numbers("grad norm ", ours)) == 4


def test_what_joins_all_stages_at_an_interval_changes_nothing(megatron_lm):
    """Times, the norm of parameters, energy, stragglers, hashes. With a rate of zero the norm is any schedule's."""
    flags = [*flags_for(megatron_lm, GPT, 4, ()), *PP2, "--log-interval", "2"]
    logs = ("--timing-log-level", "2", "--log-params-norm", "--log-energy")
    logs += (
        "--log-straggler",
        "--disable-straggler-on-startup",
        "--check-weight-hash-across-dp-replicas-interval",
        "3",
    )
    plain, logged = (launch(megatron_lm, GPT, 2, [*flags, *TWO, *more]) for more in ((), logs))
    assert logged.lines == plain.lines
    assert len(plain.lines) == 3, "the first iteration too"
    assert len(re.findall(r"forward-backward \.+: \([\d.]+, [\d.]+\)", logged.output)) == 3
    frozen = [*flags, *logs, "--lr", "0", "--weight-decay", "0"]
    norms = [numbers("params norm: ", launch(megatron_lm, GPT, 2, [*frozen, *more])) for more in ((), TWO)]
    assert norms[0] == norms[1]
    assert len(numbers("params norm: ", logged)) == 3
    assert re.findall(r"Weight hashes match after (\d) iterations", logged.output) == ["0", "3"]
    assert "energy per GPU" in logged.output


def numbers(figure: str, run: Run) -> list[float]:
    """Of each iteration that is said to have that figure."""
    return [float(found) for found in re.findall(rf"{figure}([\d.]+(?:E[+-]\d+)?)", run.output)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=pytest.mark.every_release
            if case == "GPT PP4 m=4, torch_dist"
            else pytest.mark.long
            if case in LONG
            else (),
        )
        for case in CASES
    ],
)
def test_a_resumed_run_is_the_one_that_only_saved(megatron_lm, case, bert_data, tmp_path):
    script, parallel, format_ = CASES[case]
    if not (megatron_lm / script).exists():
        pytest.skip(f"{megatron_lm.name} has no {script}")
    if format_ == "torch_dist" and parallel[: len(PP2)] == PP2:
        _skip_where_older_numpy_is_wanted(megatron_lm)
    stops, ends = 3, 6
    flags = [*flags_for(megatron_lm, script, ends, bert_data), *parallel, *TWO]
    flags += ["--ckpt-format", format_, "--save-interval", str(stops)]

    def train(folder, *more):
        return launch(megatron_lm, script, 4, [*flags, "--save", str(tmp_path / folder), *more])

    whole = train("whole")
    assert len(whole.lines) == ends, whole.output[-4000:]
    stopped = train("stopped", "--exit-interval", str(stops))
    assert stopped.lines == whole.lines[:stops]
    assert "Overwriting old incomplete" not in stopped.output
    if format_ == "torch":
        _as_if_killed_after_the_tracker_moved(tmp_path / "stopped", stops)
    resumed = train("resumed", "--load", str(tmp_path / "stopped"))
    assert "both weight versions are as they were saved" in resumed.output
    # Some releases begin a mean after a resume; EvenPipe's lines name the iterations, so they tell.
    assert len(resumed.lines) == ends - stops
    assert step_lines(resumed)[-1] == step_lines(whole)[-1]
    assert step_lines(resumed)[-1] == f"[evenpipe] grad norm {_last_norm(whole)} of iteration {ends} |"
    last = f"iter_{ends:07d}"
    assert differences(tmp_path / "whole" / last, tmp_path / "resumed" / last) == []
    assert same(older_versions(tmp_path / "whole", ends), older_versions(tmp_path / "resumed", ends))


def _skip_where_older_numpy_is_wanted(checkout: Path) -> None:
    text = (checkout / "megatron" / "core" / "dist_checkpointing" / "exchange_utils.py").read_text()
    if "np.product(" in text and not hasattr(numpy, "product"):
        pytest.skip(f"{checkout.name} saves replicas' shards in torch_dist with NumPy 1 only")


def _last_norm(run: Run) -> str:
    return re.findall(r"grad norm ([\d.]+) of iteration", run.output)[-1]


def _as_if_killed_after_the_tracker_moved(folder: Path, iteration: int) -> None:
    """Where the second versions are until Megatron has done its part."""
    for path in sidecars(folder, iteration):
        path.rename(folder / ".evenpipe_2bw" / f"{iteration:07d}_{path.name}")


def test_evaluation_changes_nothing(megatron_lm, tmp_path):
    flags = [*flags_for(megatron_lm, GPT, 5, ()), *PP4, *EXPERTS, *BY_BATCH, *TWO]
    flags += ["--ckpt-format", "torch", "--save-interval", "5"]
    quiet = launch(megatron_lm, GPT, 4, [*flags, "--save", str(tmp_path / "quiet")])
    asked = launch(megatron_lm, GPT, 4, [*flags, "--save", str(tmp_path / "asked"), "--eval-interval", "2"])
    assert len(asked.validation) > len(quiet.validation)
    assert asked.lines == quiet.lines
    last = "iter_0000005"
    assert differences(tmp_path / "quiet" / last, tmp_path / "asked" / last) == []


def test_checkpoints_go_to_and_come_from_runs_without_2bw(megatron_lm, tmp_path):
    """A run without 2bw takes the newest weights; one with it ends where the older ones are missing, unless told."""
    flags = [*flags_for(megatron_lm, GPT, 3, ()), *PP4, "--ckpt-format", "torch_dist", "--save-interval", "2"]
    launch(megatron_lm, GPT, 4, [*flags, *TWO, "--save", str(tmp_path / "2bw"), "--exit-interval", "2"])
    to_stock = launch(megatron_lm, GPT, 4, [*flags, "--load", str(tmp_path / "2bw")])
    assert len(to_stock.lines) == 1
    shutil.rmtree(tmp_path / "2bw" / "iter_0000002" / "evenpipe_2bw")
    flags += [*TWO, "--load", str(tmp_path / "2bw")]
    refused = launch(megatron_lm, GPT, 4, flags, check=False)
    assert refused.returncode != 0
    assert "was saved with 2bw, but there is no file" in refused.output
    from_stock = launch(megatron_lm, GPT, 4, [*flags, "--evenpipe-one-version"])
    assert "both weight versions are the loaded one, as there is no file" in from_stock.output
    assert from_stock.lines[0].partition(" | number")[0] == to_stock.lines[0].partition(" | grad norm")[0]
    assert _last_norm(from_stock) == re.search(r"grad norm: (\S+)", to_stock.lines[0])[1]


def test_a_signal_stops_all_ranks_at_the_same_iteration(megatron_lm, tmp_path):
    """One rank gets it; all save, exit, and go on later as if nothing had been."""
    flags = [*flags_for(megatron_lm, GPT, 400, ()), "--pipeline-model-parallel-size", "2", *TWO]
    flags += ["--ckpt-format", "torch", "--exit-signal-handler"]
    command = [*torchrun(2), "-m", "evenpipe", "run", "--cpu", GPT, *flags]
    job = start([*command, "--save", str(tmp_path / "stopped"), "--save-interval", "1000"], megatron_lm)
    try:
        lines = []
        for line in job.stdout:
            lines.append(line)
            if "loss of iteration 4 " in line:
                os.kill(_worker(job.pid), signal.SIGTERM)
        status = job.wait(timeout=800)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    output = "".join(lines)
    assert status == 0, output[-4000:]
    assert "exiting program after receiving SIGTERM" in output
    saved = int((tmp_path / "stopped" / "latest_checkpointed_iteration.txt").read_text())
    assert 4 < saved < 400

    def train(folder, *more):
        more = ("--exit-interval", str(saved + 2), *more)
        return launch(megatron_lm, GPT, 2, [*flags, "--save", str(tmp_path / folder), *more])

    train("whole", "--save-interval", str(saved))
    train("resumed", "--save-interval", "1000", "--load", str(tmp_path / "stopped"))
    last = f"iter_{saved + 2:07d}"
    assert differences(tmp_path / "whole" / last, tmp_path / "resumed" / last) == []


def _worker(agent: int) -> int:
    """A process of the job that is not its agent."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == agent:
            return int(stat.parent.name)
    raise AssertionError("the job has no processes")
