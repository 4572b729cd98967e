"""A stage that dies ends the whole job at once, with its own error."""

import os
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.megatron_lm.launch import EXPERTS, gpt_flags, start, torchrun

HIDING = "--overlap-moe-expert-parallel-comm"
HIDES = (
    *("--evenpipe-schedule", "interleaved", "--num-layers-per-virtual-pipeline-stage", "2", "--bf16", *EXPERTS),
    *("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"),
)

FLAGS = [*gpt_flags(50), "--pipeline-model-parallel-size", "4", "--bpipe"]
RUN = ("-m", "evenpipe", "run", "--cpu")
RAISES = """
    import evenpipe.megatron
    evenpipe.megatron.install()
    import functools
    import os
    import megatron.core.pipeline_parallel.schedules as schedules

    original, calls = schedules.forward_step, []

    @functools.wraps(original)
    def forward_step(*args, **kwargs):
        calls.append(1)
        if os.environ["RANK"] == "2" and len(calls) == 13:
            print("FAILS NOW", flush=True)
            {how}
        return original(*args, **kwargs)

    schedules.forward_step = forward_step
    exec(compile(open({script!r}).read(), {script!r}, "exec"))
"""


DIFFERS = """
    import os
    import sys

    import evenpipe.megatron

    if os.environ["RANK"] == "1":
        del sys.argv[-len({left_out!r}) :]
    evenpipe.megatron.install()
    exec(compile(open({script!r}).read(), {script!r}, "exec"))
"""


@pytest.mark.parametrize(
    ("how", "command"),
    [
        pytest.param("raise RuntimeError('stage two is broken')", RUN, id="raises, run"),
        pytest.param("raise RuntimeError('stage two is broken')", (), id="raises, import", marks=pytest.mark.long),
        pytest.param("os.kill(os.getpid(), 9)", RUN, id="killed, run"),  # nothing of Python sees it
    ],
)
def test_a_stage_that_dies_ends_the_job_within_15_seconds(megatron_lm, how, command, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(textwrap.dedent(RAISES).format(how=how, script=str(megatron_lm / "pretrain_gpt.py")))
    started_at = time.monotonic()
    job = start([*torchrun(4), *command, str(script), *FLAGS], megatron_lm, {"EVENPIPE_CPU": "1"})
    try:
        failed_at, lines = None, []
        for line in job.stdout:
            lines.append(line)
            if "FAILS NOW" in line:
                failed_at = time.monotonic()
        status = job.wait(timeout=800)
        ended_at = time.monotonic()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    output = "".join(lines)
    assert failed_at is not None, output[-4000:]
    # On a busy machine all takes longer, as the start has.
    assert ended_at - failed_at < max(15, failed_at - started_at)
    assert status != 0
    if "raise" in how:
        assert "RuntimeError: stage two is broken" in output
    assert not _left_behind(job.pid), output[-2000:]


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        pytest.param(["--evenpipe-schedule", "kfkb"], "was started without EvenPipe's flags", marks=pytest.mark.long),
        (["--group-size", "2", "--bf16"], "was started differently from rank 0"),
        ([HIDING], "was started differently from rank 0"),
    ],
)
def test_a_rank_that_was_started_differently_is_named_before_anybody_waits_for_it(
    megatron_lm, left_out, said, tmp_path
):
    script = tmp_path / "odd.py"
    script.write_text(textwrap.dedent(DIFFERS).format(left_out=left_out, script=str(megatron_lm / "pretrain_gpt.py")))
    schedule = ["--evenpipe-schedule", "kfkb"] if "--group-size" in left_out else []
    processes, more = (4, HIDES) if left_out == [HIDING] else (2, ())
    flags = [*gpt_flags(2), "--pipeline-model-parallel-size", "2", *schedule, *more, *left_out]
    job = start([*torchrun(processes), str(script), *flags], megatron_lm, {"EVENPIPE_CPU": "1"})
    try:
        output, _ = job.communicate(timeout=300)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    line = next((line for line in output.splitlines() if line.startswith("evenpipe: error: ")), output[-6000:])
    assert line.startswith(f"evenpipe: error: rank 1 ({socket.gethostname()}) {said}"), line
    if "--bf16" in left_out:
        assert "--group-size 1 instead of 2" in line
        assert "--bf16 False instead of True" in line
    if HIDING in left_out:
        assert f"{HIDING} False instead of True" in line
    assert job.returncode != 0


def _left_behind(group: int) -> list[int]:
    """Processes of the group that are still there."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _group_of(path) == group]


def _group_of(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[2])
    except OSError:
        return -1


@pytest.mark.parametrize(
    ("processes", "flags", "said"),
    [
        (1, ["--pipeline-model-parallel-size", "2"], "1 processes are no multiple of tensor × context × pipeline"),
        (3, ["--pipeline-model-parallel-size", "3"], "8 layers are no multiple of 3 stages: change --num-layers"),
        (1, ["--micro-batch-size", "0"], "change the flag that it names"),
    ],
)
def test_what_megatron_refuses_of_the_flags_is_one_line(megatron_lm, processes, flags, said):
    """A newcomer's first mistakes: no traceback, and what to do."""
    command = [sys.executable, *RUN, "pretrain_gpt.py", *gpt_flags(2), "--bpipe", *flags]
    job = start(command, megatron_lm, {"WORLD_SIZE": str(processes)})
    output, _ = job.communicate(timeout=300)
    (line,) = (line for line in output.splitlines() if line.startswith("evenpipe: error: "))
    assert said in line
    assert "arguments.py:" in line
    assert "Traceback" not in output
    assert job.returncode == 2
