"""`evenpipe recipe --from-flags`: a line that starts a run today, with EvenPipe in it, and nothing else changed."""

from __future__ import annotations

import shlex

import pytest

from evenpipe.cli.main import main

LARGE = shlex.split(
    "--num-layers 80 --hidden-size 9984 --num-attention-heads 104 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 2 --global-batch-size 128 --fp16 --tensor-model-parallel-size 4 --sequence-parallel "
    "--pipeline-model-parallel-size 8 --use-distributed-optimizer --recompute-granularity selective --train-iters 3 "
    "--lr 1e-4 --vocab-size 51200 --attention-backend unfused"
)
HOSTILE = "it's $(touch owned)`\n"


def converted(capsys, *line, on="4x8-a100-80gb"):
    main(["recipe", *(("--cluster", on) if on else ()), "--from-flags", *line])
    return capsys.readouterr().out


def command_of(printed):
    """The last paragraph, as a shell reads it."""
    return shlex.split(printed.split("\n\n")[-1])


def test_a_run_that_does_not_fit_is_levelled_and_all_other_words_stay(capsys):
    start = ["CUDA_DEVICE_MAX_CONNECTIONS=1", "torchrun", "--nnodes", "4", "--nproc-per-node", "8"]
    printed = converted(capsys, *start, "pretrain_gpt.py", *LARGE, "--rotary-base", "7", "--data-path", "/a b")
    assert "81.4 GiB at most: does not fit" in printed
    assert command_of(printed) == [
        *(*start, "-m", "evenpipe", "run", "pretrain_gpt.py", *LARGE, "--rotary-base", "7", "--data-path", "/a b"),
        "--bpipe",
    ]
    added = [line[1:].strip() for line in printed.splitlines() if line.startswith("+") and line[1] != "+"]
    assert added == [f"{shlex.join(start)} -m evenpipe run pretrain_gpt.py", "--bpipe"]


def test_groups_are_taken_where_messages_are_slow(capsys):
    flags = shlex.split(
        "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
        "--micro-batch-size 1 --global-batch-size 64 --bf16 --pipeline-model-parallel-size 4 --vocab-size 51200"
    )
    printed = converted(capsys, "torchrun", "pretrain_gpt.py", *flags, on="4x1-a100-80gb-25gbit")
    assert "--evenpipe-schedule kfkb --group-size" in printed.replace("\n+    ", " ")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("srun python -u pretrain_gpt.py", "srun python -u -m evenpipe run pretrain_gpt.py"),
        (
            "python -m torch.distributed.run a/pretrain_gpt.py",
            "python -m torch.distributed.run -m evenpipe run a/pretrain_gpt.py",
        ),
        (
            "deepspeed --num_gpus 8 pretrain_gpt.py",
            "deepspeed --no_local_rank --num_gpus 8 --module evenpipe run pretrain_gpt.py",
        ),
    ],
)
def test_every_launcher_starts_it(line, wanted, capsys):
    assert command_of(converted(capsys, *line.split(), *LARGE))[: len(wanted.split())] == wanted.split()


def test_a_script_of_deepspeed_gets_the_section(capsys):
    printed = converted(capsys, "torchrun", "train.py", "--deepspeed_config", "ds.json", on=None)
    assert command_of(printed) == shlex.split(
        "torchrun -m evenpipe run --deepspeed train.py --deepspeed_config ds.json"
    )
    assert '"evenpipe": { "schedule": "1f1b"' in printed


def test_hostile_words_come_out_as_they_went_in(capsys):
    printed = converted(capsys, f"A={HOSTILE}", "torchrun", "pretrain_gpt.py", *LARGE, "--data-path", HOSTILE)
    words = shlex.split(printed[printed.rindex("\n\nA=") :])
    assert words[0] == f"A={HOSTILE}"
    assert words[words.index("--data-path") + 1] == HOSTILE


def test_without_a_cluster_there_are_as_many_gpus_as_a_replica_needs(capsys):
    assert "(on 4x8-a100-80gb)" in converted(capsys, "torchrun", "pretrain_gpt.py", *LARGE, on=None)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun -m evenpipe run pretrain_gpt.py", "EvenPipe is in this line already"),
        ("torchrun --nproc-per-node 8", "names no script"),
        ("", "names no script"),
        ("pretrain_gpt.py --num-layers 8", "names no script behind a launcher"),
        ("torchrun pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 4", "--vocab-size"),
        (f"torchrun pretrain_gpt.py {shlex.join(LARGE)} --bpipe", "EvenPipe's flags are in this line already"),
        (f"torchrun pretrain_gpt.py {shlex.join(LARGE)} --micro-batch-size 16", "no schedule makes this run fit"),
        (f"torchrun pretrain_gpt.py {shlex.join(LARGE)} --pipeline-model-parallel-size 1", "one stage is no pipeline"),
    ],
)
def test_what_cannot_be_is_one_line(line, said, capsys):
    with pytest.raises(SystemExit) as end:
        converted(capsys, *shlex.split(line))
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert said in told
