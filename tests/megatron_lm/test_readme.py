"""The README's commands for Megatron-LM, and a page's whole line: each trains, or is estimated, on the CPU."""

import sys

import pytest

from tests.megatron_lm.launch import gpt_flags, launch, start
from tests.readme import commands, commands_of

COMMANDS = commands_of("megatron")
SMALL = (*gpt_flags(4), "--pipeline-model-parallel-size", "2")


def flags(words):
    """Those behind the script; `auto` is given the memory that it cannot ask a CPU for."""
    given = words[words.index("<your flags>") + 1 :]
    return [*SMALL, *given, *(["--memory-gib", "1"] if "auto" in given else [])]


@pytest.mark.parametrize("words", [words for words in COMMANDS if "torchrun" in words], ids=lambda words: words[-1])
def test_a_run(megatron_lm, words):
    deep = ("--pipeline-model-parallel-size", "4") if "--bpipe" in words else ()
    run = launch(megatron_lm, "pretrain_gpt.py", 4 if deep else 2, [*flags(words), *deep])
    assert len([line for line in run.lines if line.startswith("iteration")]) == 4
    assert "[evenpipe] iteration 4 |" in run.output


@pytest.mark.parametrize("words", [words for words in COMMANDS if "--estimate" in words], ids=lambda words: words[-1])
def test_a_dry_run(megatron_lm, words):
    script = words.index("pretrain_gpt.py") + 1
    layers = ("--pipeline-model-parallel-size", "4")
    job = start([sys.executable, "-m", *words[:script], *flags(words), *layers], megatron_lm)
    output, _ = job.communicate(timeout=800)
    assert job.returncode == 0, output[-3000:]
    assert "1f1b with BPipe" in " ".join(output.split())


def test_the_line_to_try_without_a_gpu(megatron_lm):
    """Nothing is left to a reader to add; without `--bpipe` losses are the same, as the page says."""
    [words] = [words for words in commands("docs/megatron.md") if "--mock-data" in words]
    given = words[words.index("pretrain_gpt.py") + 1 :]
    processes = int(words[words.index("--nproc-per-node") + 1])
    run = launch(megatron_lm, "pretrain_gpt.py", processes, given)
    stock = launch(megatron_lm, "pretrain_gpt.py", processes, [word for word in given if word != "--bpipe"])
    assert len(run.lines) == 4
    assert run.lines == stock.lines
    assert max(run.peak_live) <= 3  # stock: 4
