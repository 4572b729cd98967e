"""A V (`v-half`) goes on with a stock checkpoint to the bits of a stock run, and stock with one of a V."""

import shutil

import pytest

from evenpipe.cli.main import main
from tests.megatron_lm.launch import EXPERTS, LAYOUTS, differences, launch, model_flags

TRAINED = 3
TWO_OF_TWO = ("--num-layers-per-virtual-pipeline-stage", "2")
UNTIED = "--untie-embeddings-and-output-weights"
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SHARDED = "DP2xPP2 distributed optimizer"
CASES = {
    "tied": ("PP4xVPP2", ()),
    "sequence parallel": ("TP2xPP2", (*TWO_OF_TWO, "--bf16")),
    "both overlaps": (SHARDED, (*TWO_OF_TWO, "--bf16")),
    "searched": ("PP4xVPP2", (UNTIED,)),
    "zbv, both overlaps, untied": (SHARDED, (*TWO_OF_TWO, "--bf16", UNTIED)),
    "experts": (
        SHARDED,
        (
            *TWO_OF_TWO,
            "--bf16",
            "--expert-model-parallel-size",
            "2",
            "--moe-token-dispatcher-type",
            "alltoall",
            *EXPERTS,
        ),
    ),
    "experts, messages hidden": (
        SHARDED,
        (
            *TWO_OF_TWO,
            *("--bf16", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", *EXPERTS),
            *("--overlap-moe-expert-parallel-comm", UNTIED),
        ),
    ),
    "multi-token prediction": (
        "PP2",
        (*TWO_OF_TWO, "--bf16", "--mtp-num-layers", "1", "--position-embedding-type", "rope", UNTIED),
    ),
    "uneven layout, full recomputation": ("PP2", ("--pipeline-model-parallel-layout", "E|ttt|tttt|tL", *FULL)),
    "per token, fp16, attention recomputed": (
        "PP2",
        (
            *TWO_OF_TWO,
            "--fp16",
            "--initial-loss-scale",
            "1024",
            "--calculate-per-token-loss",
            "--recompute-granularity",
            "selective",
        ),
    ),
}
UNEVEN = ("TP2xPP2", ("--pipeline-model-parallel-layout", "Et|ttt|tt|ttL", "--bf16", UNTIED))
HIDDEN = "experts, messages hidden"
MARKS = {"sequence parallel": [pytest.mark.every_release], HIDDEN: []}
MARKED = [pytest.param(case, marks=MARKS.get(case, [pytest.mark.long])) for case in CASES]


def searched_table(folder, trace, stages, micro_batches):
    """A schedule for the times of a trace, with no more than 5 units on a stage, as the commands write it."""
    costs, table = folder / "costs.json", folder / "S.txt"
    assert main(["costs", str(trace), "--memory-bytes", "5", "--out", str(costs)]) == 0
    sizes = ["--stages", str(stages), "--micro-batches", str(micro_batches), "--seconds", "0.5"]
    assert main(["schedule", "--schedule", "searched", "--costs", str(costs), *sizes, "--out", str(table)]) == 0
    return table


def logged(run):
    """Return Megatron's log lines without the number of all iterations."""
    return [line.partition(" | ")[2] for line in run.lines]


class Job:
    """Runs of one case in folders of their own, which go on with each other's checkpoints."""

    def __init__(self, megatron_lm, case, folder):
        layout, self._more = case
        self._processes, self._parallel = LAYOUTS[layout]
        self._megatron_lm, self._folder = megatron_lm, folder
        self._same = ["--clip-grad", "0", "--override-opt_param-scheduler"]
        if layout == SHARDED:  # otherwise it is read where parameters are on the same stages only
            self._same += ["--dist-ckpt-optim-fully-reshardable"]

    def run(self, name, iterations, *flags, after=None, check=True):
        """Train until there are so many iterations, of which those of the run `after` are loaded."""
        folder = self._folder / name
        if after is not None:
            shutil.copytree(self._folder / after, folder)
        kept = ["--save", str(folder), "--save-interval", str(iterations)]
        kept += ["--load", str(folder)] if after is not None else []
        flags = [
            *model_flags(self._megatron_lm, "pretrain_gpt.py", iterations, []),
            *self._parallel,
            *self._more,
            *flags,
        ]
        return launch(self._megatron_lm, "pretrain_gpt.py", self._processes, [*flags, *self._same, *kept], check=check)

    def differences(self, one, other, iterations):
        last = f"iter_{iterations:07d}"
        return differences(self._folder / one / last, self._folder / other / last)


@pytest.mark.parametrize("case", MARKED)
def test_a_v_goes_on_with_a_stock_checkpoint_to_the_same_bits(megatron_lm, case, tmp_path):
    job = Job(megatron_lm, CASES[case], tmp_path)
    job.run("start", 1)
    stock = job.run("stock", 1 + TRAINED, after="start")
    schedule = "dualpipev" if case == HIDDEN else "zbv" if case.startswith("zbv") else "v-half"
    if case == "searched":
        trace = tmp_path / "T.json"
        job.run("traced", 2, "--evenpipe-schedule", "zbv", "--evenpipe-trace", str(trace))
        schedule = f"file:{searched_table(tmp_path, trace, 4, 8)}"
    ours = job.run("vee", 1 + TRAINED, "--evenpipe-schedule", schedule, after="start")
    assert len(stock.lines) == TRAINED
    assert ours.lines == stock.lines
    assert len(stock.validation) >= 2
    assert ours.validation == stock.validation
    assert job.differences("stock", "vee", 1 + TRAINED) == []
    stages = len(ours.peak_live)
    if case == "searched":
        assert max(ours.peak_live) == 5
    else:
        assert (
            ours.peak_live
            == {
                "zbv": [2 * stages] * stages,
                "v-half": [2 * (stages // 2 + 1)] * stages,
                "dualpipev": [5, 5],
            }[schedule]
        )


def test_an_order_is_searched_while_it_trains_and_gone_on_with(megatron_lm, tmp_path):
    """Two iterations are measured. The third follows the order that was found, and so does a later run."""
    job = Job(megatron_lm, UNEVEN, tmp_path)
    searched = ("--evenpipe-schedule", "searched", "--memory-gib", "0.0236")
    job.run("start", 1)
    stock = logged(job.run("stock", 1 + TRAINED + 1, after="start"))
    ours = job.run("searched", 1 + TRAINED, *searched, after="start")
    assert len(logged(ours)) == TRAINED
    assert logged(ours) == stock[:TRAINED]
    assert ours.output.count("searched: 8 micro-batches: an order found in") == 1
    on = job.run("on", 1 + TRAINED + 1, *searched, after="searched")
    assert logged(on) == stock[TRAINED:]
    assert on.peak_live == ours.peak_live
    assert "checkpoint of iteration 4: trains by the order that was saved" in on.output
    assert "an order found" not in on.output
    assert job.differences("stock", "on", 1 + TRAINED + 1) == []


def test_memory_that_holds_no_order_ends_the_job(megatron_lm, tmp_path):
    job = Job(megatron_lm, CASES["tied"], tmp_path)
    ended = job.run("ended", 3, "--evenpipe-schedule", "searched", "--memory-gib", "0.001", check=False)
    assert ended.returncode != 0
    assert "evenpipe: error: --memory-gib 0.001: no schedule fits: stage " in ended.output


@pytest.mark.long
def test_stock_goes_on_with_a_checkpoint_of_a_v(megatron_lm, tmp_path):
    job = Job(megatron_lm, CASES["tied"], tmp_path)
    job.run("vee", 1, "--evenpipe-schedule", "v-half")
    stock = job.run("stock", 2, after="vee")
    ours = job.run("on", 2, "--evenpipe-schedule", "v-half", after="vee")
    assert len(stock.lines) == 1
    assert ours.lines == stock.lines
    assert job.differences("stock", "on", 2) == []


REFUSED = {
    "chunks": (
        ["--num-layers-per-virtual-pipeline-stage", "1"],
        "has 2 model chunks a stage, but --num-layers-per-virtual-pipeline-stage, "
        "--num-virtual-stages-per-pipeline-rank or the layout gives it 4",
    ),
    "a file a rank": (
        [*TWO_OF_TWO, "--save", "FOLDER", "--save-interval", "1", "--ckpt-format", "torch"],
        "--ckpt-format torch counts layers from the start of their chunk",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_v_cannot_have_is_told_before_it_trains(megatron_lm, case, tmp_path):
    flags, told = REFUSED[case]
    flags = [str(tmp_path) if flag == "FOLDER" else flag for flag in flags]
    processes, parallel = LAYOUTS["PP2"]
    given = [*model_flags(megatron_lm, "pretrain_gpt.py", 1, []), *parallel, *flags, "--evenpipe-schedule", "v-half"]
    run = launch(megatron_lm, "pretrain_gpt.py", processes, given, check=False)
    assert run.returncode == 2
    assert f"evenpipe: error: --evenpipe-schedule v-half: {told}" in run.output


@pytest.mark.long
def test_a_checkpoint_that_does_not_say_where_its_layers_belong_is_not_read(megatron_lm, tmp_path):
    processes, parallel = LAYOUTS["PP2"]
    flags = [*model_flags(megatron_lm, "pretrain_gpt.py", 1, []), *parallel, *TWO_OF_TWO]
    kept = ["--save", str(tmp_path), "--save-interval", "1", "--ckpt-format", "torch"]
    launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, *kept])
    loaded = ["--load", str(tmp_path), "--evenpipe-schedule", "v-half"]
    run = launch(megatron_lm, "pretrain_gpt.py", processes, [*flags, *loaded], check=False)
    assert run.returncode == 2
    assert "is of --ckpt-format torch, which counts layers from the start of their chunk" in run.output
