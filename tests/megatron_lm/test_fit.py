"""`evenpipe fit`: Megatron-LM's own parser takes each changed line, and one trains to the bits of the run before."""

from __future__ import annotations

import json
import shlex

import pytest

from evenpipe.cli.main import main
from tests.megatron_lm.launch import gpt_flags, launch

DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 128255 --train-iters 3 --lr 1e-4 --bf16"
DENSE = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 2 --global-batch-size 64 --pipeline-model-parallel-size 4 "
    "--num-layers-per-virtual-pipeline-stage 4"
)
EXPERTS = (
    "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --seq-length 4096 "
    "--max-position-embeddings 4096 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    "--micro-batch-size 2 --global-batch-size 256 --pipeline-model-parallel-size 2 "
    "--pipeline-model-parallel-layout Et*13|t*14L "
    "--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-layer-freq ([0]*1+[1]*26) "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4 "
    "--use-distributed-optimizer "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128"
)


def answers(capsys, where, line, *words):
    assert main(["fit", "--cluster", where, "--json", *words, "--", "torchrun", "pretrain_gpt.py", *line]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("line", "gib"),
    [pytest.param(DENSE, "64", marks=pytest.mark.long, id="dense"), pytest.param(EXPERTS, "60", id="experts")],
)
def test_megatron_s_own_parser_takes_every_answer_and_its_estimate_is_that(megatron_lm, line, gib, capsys):
    found = answers(capsys, "1x8-h100", [*line.split(), *DATA.split()], "--memory-gib", gib)
    assert len(found["answers"]) >= 2
    for one in found["answers"]:
        at = one["command"].index("pretrain_gpt.py")
        environment = dict(word.split("=", 1) for word in one["command"][:at] if "=" in word)
        script = str(megatron_lm / "pretrain_gpt.py")
        options = ["--estimate", "--cluster", "1x8-h100", "--json"]
        run = launch(megatron_lm, script, 1, one["command"][at + 1 :], environment, options=options)
        again = json.loads(run.output)
        assert again["iteration_ms"] == pytest.approx(one["iteration_ms"], rel=1e-4), one
        assert max(stage["bytes"]["total"] for stage in again["stages"]) / 2**30 == pytest.approx(
            one["memory_gib"], rel=1e-3
        ), one


def test_changed_lines_train_to_the_bits_of_the_run_as_it_was(megatron_lm, capsys, tmp_path):
    """Recomputation, where memory is less than the run takes by 0.1 MiB; EvenPipe's schedule, where it fits."""
    flags = [*gpt_flags(3), "--pipeline-model-parallel-size", "4", "--transformer-impl", "local"]
    keep = ("--keep", "t,p,c,e,b,v,optimizer,overlap,allocator,gradients,moments,placement")
    now = answers(capsys, "1x4-h100", flags, *keep)["now"]
    less = max(stage["bytes"]["total"] for stage in now["stages"]) / 2**30 - 1e-4
    stock = launch(megatron_lm, "pretrain_gpt.py", 4, flags)
    assert len(stock.lines) == 3, stock.output[-3000:]
    for wanted, memory in {"recompute": ("--memory-gib", f"{less:.5f}"), "evenpipe": ()}.items():
        out = tmp_path / f"{wanted}.sh"
        line = ["torchrun", "pretrain_gpt.py", *flags]
        assert main(["fit", "--cluster", "1x4-h100", *keep, *memory, "--write", str(out), "--", *line]) == 0
        assert "same bits" in capsys.readouterr().out
        words = shlex.split(out.read_text().replace("\\\n", " "), comments=True)
        assert wanted in " ".join(words)
        run = launch(megatron_lm, "pretrain_gpt.py", 4, words[words.index("pretrain_gpt.py") + 1 :])
        assert run.lines == stock.lines, wanted
