"""Bad input of every command: one line that names the command and the value, in the words of the command line."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from evenpipe.cli.main import main

FILES = {
    "empty.json": b"{}",
    "broken.json": b"[1,2",
    "bin.json": b"\xff\xfe\x00",
    "run.json": b'{"format": "evenpipe.run/1"}',
    "plan.json": b'{"format": "evenpipe.plan/1", "plans": "x"}',
    "costs.json": b'{"format": "evenpipe.costs/1"}',
    "S.txt": b"hello",
    "m.yaml": b"models: 3",
    "m2.yaml": b"models: {a: {layers: x}}",
    "c.yaml": b"clusters: {a: {device: nope}}",
    "f.py": b"def f(): return 1",
    "broken.py": b"def f(:",
    "ds.json": b'{"train_batch_size": 8}',
    "hf.json": b'{"model_type": "zzz"}',
    "llama.json": b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": -1}',
    "deep.json": b"[" * 100000,
    "tab.yaml": b"models:\n\t- x",
    "tag.yaml": b"models: !!python/object/apply:os.system ['ls']",
    "twice.txt": b"F0 F0 B0\nF0 B0 B0\n",
    "list.json": b"[1, 2]",
    "other.json": b'{"optimizer": {}}',
    "a-bridge.json": b"""{"model": {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 5, "seq_length": 64,
        "vocab_size": 99}, "train": {"micro_batch_size": 1, "global_batch_size": 8}}""",
    "odd.json": b"""{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5, "num_hidden_layers": 2,
        "vocab_size": 9, "intermediate_size": 99, "max_position_embeddings": 64}""",
    "rank.json": b'{"train_batch_size": 8, "evenpipe": 3}',
}
#: What each command takes.
GOOD = {
    "schedule": "schedule --schedule 1f1b --stages 4 --micro-batches 8",
    "simulate": "simulate --schedule 1f1b --stages 4 --micro-batches 8",
    "searched": "schedule --schedule searched --stages 2 --micro-batches 2",
    "candidates": "candidates --stages 2 --global-batch-size 8 --memory-gib 1",
    "estimate": "estimate --model gpt3-13b --cluster 1x8-a100-80gb --global-batch-size 32",
    "plan": "plan --model gpt3-13b --cluster 1x8-a100-80gb --global-batch-size 32",
    "recipe": "recipe gpt --model gpt3-13b --cluster 1x8-a100-80gb --framework megatron --launcher torchrun --out out",
    "partition": "partition --model gpt2-large --small --stages 2",
    "train": "train --stages 2 --layers 2",
    "estimate-hf": "estimate --cluster 1x8-a100-80gb --global-batch-size 32 --hf",
    "fit-gpt": "fit -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 64 --vocab-size 99 --pipeline-model-parallel-size 4",
}
#: What is added, and what the line says of it.
BAD = """
schedule --schedule file:S.txt | --schedule file:S.txt: line 1: 'hello' is no action
schedule --schedule file:. | --schedule file:.: Is a directory
schedule --schedule file:bin.json | is no text: name a file that `evenpipe schedule --out` wrote
schedule --seed -1 | '-1': give a whole number below
schedule --seed 1 | --seed: is of --schedule searched
schedule --format torch-csv | --format torch-csv: is of --out
schedule --format torch | --format torch: unknown, did you mean torch-csv?
schedule --bpipe=yes | --bpipe: takes no value: leave 'yes' out
schedule --schedule '' | --schedule : unknown schedule, choose one of 1f1b
schedule --out . | --out: .: is a folder
schedule --chunks 1.5 | --chunks: '1.5' is no whole number
searched | for which times? Give --costs COSTS.json
searched --costs empty.json | empty.json: format: is missing
searched --costs bin.json | bin.json: is no text
searched --costs nowhere.json | nowhere.json: No such file or directory
searched --seconds 0 | --seconds: 0 is no time
simulate --front | --schedule: --front is of all schedules
simulate --synchronised timer | --synchronised timer: unknown, did you mean timers?
simulate --weight-gradient-ms 1 | --weight-gradient-ms: 1f1b does not split backwards: leave it out
simulate --schedule zb-h1 --weight-gradient-ms 5 | --weight-gradient-ms: give one a stage
simulate --forward-ms , | --forward-ms: '' is no number
simulate --costs costs.json | costs.json: placement: is missing
costs nowhere.json | nowhere.json: No such file or directory
costs broken.json | broken.json: is no trace evenpipe.trace/1
costs bin.json | bin.json: is no trace evenpipe.trace/1
costs . --saved-bytes 1.5 | --saved-bytes: '1.5': give whole numbers of bytes
candidates --layers x | --layers x: must be a whole number
candidates --stages 1 | --stages 1: one stage is no pipeline
candidates --memory-gib lots | --memory-gib: 'lots' is no number
candidates --precision fp8 | --precision fp8: must be 'fp32', 'bf16' or 'fp16'
candidates --device tpu | --device tpu: unknown
estimate --model m.yaml | --model m.yaml: has no models
estimate --model m2.yaml | --model m2.yaml: a.layers: must be a whole number
estimate --cluster c.yaml | nope: unknown among devices
estimate --cluster 8-a100-80gb | --cluster 8-a100-80gb: unknown among clusters, did you mean a100-80gb?
estimate --stages 7 | its 8 GPUs do not divide into replicas of 7
estimate --layout a,b | --layout: 'a,b' is no list of numbers
estimate --schedule kfkb --group-size 0 | --group-size: '0' is no whole number
estimate --micro-batch-size 5 | --global-batch-size 32: is no multiple of 40
estimate --expert-parallel 4 | --expert-parallel 4: gpt3-13b has no experts
estimate --message-ms -1 | --message-ms: -1 is no duration
plan --top 0 | --top: '0' is no whole number of at least 1
plan --schedule 1f1b,,gpipe | --schedule: '1f1b,,gpipe': give names
plan --schedule 1f1b gpipe | gpipe: unexpected argument
plan --stages 9 | --stages 9: 8 GPUs do not divide
recipe | --global-batch-size: how many samples
recipe --set x | --set x: give key=value
recipe --set dat=1 | --set dat: there is no such setting, did you mean data?
recipe --plan plan.json | --plan plan.json: no plan that `evenpipe plan --out` wrote: model: is missing
recipe --plan bin.json | --plan bin.json: cannot be read: no text
recipe --launcher pbs | --launcher pbs: unknown
recipe --check nowhere | cannot be read: No such file or directory
partition --stages 0 | --stages 0: must be at least 1
partition --stages 100000 | 100000 stages need 99999 cuts
partition --precision bf61 | --precision bf61: unknown, did you mean bf16?
partition --attention fast | --attention fast: unknown, choose one of eager, sdpa
partition --device gameboy | --device gameboy: unknown among devices
partition --device cpu | --memory-gib: how much may a stage hold?
partition --memory-gib 1e-7 | no partition fits: give at least
partition --mode sync --schedule 1f1b | --schedule: not allowed with argument --mode
partition --profile broken.json | --profile broken.json: no evenpipe.profile/1: the file: is no JSON
partition --half-layers | --half-layers: is for --megatron
train --layers 3 | --layers 3: not divisible by --stages 2
train --iterations 1.5 | --iterations 1.5: must be a whole number
train --group-size big | --group-size big: must be a whole number or 'auto'
train --data nowhere.txt | --data nowhere.txt: No such file or directory
train --load nowhere | --load nowhere: no checkpoint there
train --save empty.json | --save empty.json: cannot be made
train --partition empty.json | --partition empty.json: no evenpipe.partition/1: search_ms: is missing
train --engine warp | --engine warp: must be 'evenpipe'
demo --quiet=1 | --quiet: takes no value: leave '1' out
demo --picture demo.svg | --picture: demo.svg: pictures are PNG
report nowhere.json --html x.html | nowhere.json: No such file or directory
report broken.json --html x.html | broken.json: is no JSON document
report empty.json --html x.html | it has no format
report run.json --html x.html | run.json: timeline: is missing: write it anew
report costs.json --html x.html | has no page
run . | .: Is a directory: name the script to run
run --cluster x f.py | --cluster: is for --estimate
run --estimate --cluster nope f.py | --cluster nope: unknown among clusters
run --cpu --deepspeed f.py | --deepspeed: not allowed with argument --cpu
patches --check nowhere | --check nowhere: there is no such folder
patches --check . | --check .: has neither
patches --check . --markdown | leave out --check
doctor --model nope | --model nope: unknown among models
doctor --stages 0 | --stages: '0' is no whole number
doctor --limit-s 0 | --limit-s: '0' is no whole number
doctor --checkpoint-gib -1 | --checkpoint-gib: -1
doctor --checkpoint-gib x | --checkpoint-gib: 'x' is no number
schedule --schedule 1F1B | --schedule 1F1B: unknown schedule, did you mean 1f1b?
schedule --schedule zb_h1 | --schedule zb_h1: unknown schedule, did you mean zb-h1?
schedule --stages 1e3 | --stages: '1e3' is no whole number
schedule --stages | --stages: expected one argument
schedule --schedule interleaved --chunks 2 --group-size 3 | --group-size 3: interleaved needs groups of at least as many
schedule --schedule interleaved --chunks 2 --micro-batches 9 --group-size 6 | --micro-batches 9: interleaved needs
schedule --schedule v-half --chunks 3 | --chunks 3: v-half has 2 model chunks a stage
schedule --out /proc/x.txt | --out: /proc/x.txt: nothing can be written to the folder /proc
simulate --forward-ms 1e400 | --forward-ms: 1e400 is no duration
simulate --swap-mib -2 | --swap-mib: -2 is no size
simulate --swap-mib 1 --host-gbps 0 | --host-gbps: 0 is no bandwidth
simulate --picture - --trace - | --picture -: --trace is written to standard output too
costs | costs: error: missing T.json
candidates --hidden 100 --heads 3 | --hidden 100: not divisible by --heads 3
candidates --global-batch-size 0 | --global-batch-size: '0' is no whole number of at least 1
estimate --tensor-parallel 3 | its 8 GPUs do not divide into replicas of 3
estimate --context-parallel 16 | has 8 GPUs, 8 too few
estimate --recompute everything | --recompute everything: unknown, choose one of none
estimate --bpipe --stages 1 | --bpipe: one stage has no partner
estimate --schedule interleaved --chunks 7 --stages 4 | 40 layers do not divide by 28 parts
estimate --precision fp9 | --precision fp9: unknown, did you mean fp8?
estimate --model GPT3-13B | --model GPT3-13B: unknown among models, did you mean gpt3-13b?
estimate --lora-rank 0 | --lora-rank: 0 is no rank: give a whole number of at least 1
estimate --activation-offload-fraction x | --activation-offload-fraction: x is no fraction: give a number from 0 to 1
estimate --delta-offload-bytes-across-pp-ranks x | --delta-offload-bytes-across-pp-ranks: 'x' is no whole number
plan --precision bf61 | --precision: 'bf61': unknown, did you mean bf16?
plan --framework deepspede | --framework deepspede: unknown among frameworks, did you mean deepspeed?
plan --optimizer-offload-fraction 2 | --optimizer-offload-fraction: 2 is no fraction
plan --tensor-parallel 5 | --tensor-parallel 5: none of what divides heads
recipe --framework deepspeed --tensor-parallel 2 --global-batch-size 8 | --framework deepspeed: its layers are whole
recipe --global-batch-size 32 --set time=1 | --set time: is of Slurm, and torchrun would not read it
recipe --set master_port=99999999 | --set master_port='99999999': must be less than or equal to 65535
recipe --check . | recipe.json: cannot be read: No such file or directory: name the folder
partition --schedule zigzag | --schedule zigzag: unknown schedule, choose one of 1f1b
partition --stage-gbps 0 | --stage-gbps: 0 is no bandwidth
train --dropout 1.5 | --dropout 1.5: must be less than 1
train --save-interval 5 | --save-interval 5: no folder to save to: give --save DIR
train --lr nan | --lr nan: must be a finite number
train --optimizer sgdd | --optimizer sgdd: must be 'adam', 'sgd' or 'muon'
run broken.py | broken.py:1: is no Python (
run --estimate broken.py | broken.py:1: is no Python (
run bin.json | bin.json: is no Python (
doctor --checkpoint-gib 5 | --checkpoint-gib: where are they to go? Give --checkpoint-dir DIR
schedule --schedule file:twice.txt | --schedule file:twice.txt: schedule table, stage 0, step 1: F0 finds
schedule --out '' | --out: names no file: give one
schedule --no-bpipe | --no-bpipe: unknown option, did you mean --bpipe?
schedule --schedule searched --costs deep.json | deep.json: the file: is no JSON
estimate --model tab.yaml | --model tab.yaml: line 2: is no YAML (found character
estimate --model tag.yaml | --model tag.yaml: line 1: is no YAML (could not determine a constructor
estimate --model hf.json | --model hf.json: a JSON file is none of models: give a config.json by --hf
estimate --precision mxfp8 --fp8-recipe delayed | --fp8-recipe delayed: contradicts --precision mxfp8
estimate --precision nvfp4 --fp8-format hybrid | --fp8-format hybrid: contradicts --precision nvfp4
estimate --precision nvfp4 | products in nvfp4: a100-80gb has no fp4: compute in bf16
plan --precision tensorwise,mxfp8 --fp4-format e2m1 | --fp4-format e2m1: contradicts --precision tensorwise,mxfp8
recipe --set = | --set =: give key=value
report deep.json --html x.html | deep.json: is no JSON document
fit deep.json | deep.json: is nested too deeply
fit rank.json --model gpt3-13b --stages 2 --cluster 1x8-h100 | rank.json: evenpipe: must be an object
fit tag.yaml | tag.yaml:1: is neither YAML nor JSON
fit -- torchrun pretrain_gpt.py --micro-batch-size 1 | --num-layers: not given
fit | no script: give the line that starts the run
fit -- torchrun pretrain_gpt.py --num-layers four | --num-layers: 'four' is no whole number
fit -- torchrun pretrain_gpt.py --num-layers | --num-layers: expected one argument
fit -- deepspeed train.py | train.py: --deepspeed_config: not given
fit ds.json --model gpt3-13b | ds.json: does not say what the stages of PipelineModule are: give --stages
fit list.json --model gpt3-13b | list.json: is no object: name a configuration of DeepSpeed's, or one that
fit other.json --model gpt3-13b | other.json: is no configuration of DeepSpeed's: add one of gradient_accumulation
fit -- deepspeed train.py --deepspeed_config list.json | list.json: is no object: name
fit -- deepspeed train.py --deepspeed_config other.json | other.json: is no configuration of DeepSpeed's
fit -- torchrun --nproc-per-node eight pretrain_gpt.py | --nproc-per-node eight: is no number that torchrun takes
fit -- torchrun --nproc_per_node=0 pretrain_gpt.py | --nproc-per-node 0: is no number that torchrun takes: give a whole
fit -- torchrun --nnodes two --nproc-per-node 8 pretrain_gpt.py | --nnodes two: is no number that torchrun takes
fit-gpt --micro-batch-size -1 | --micro-batch-size -1: must be at least 1
fit-gpt --num-attention-heads 5 | pretrain_gpt.py: --hidden-size 64 does not divide by --num-attention-heads 5: correct
fit-gpt --num-attention-heads 5 | correct one, or add --kv-channels
fit-gpt --group-query-attention --num-query-groups 3 | --num-attention-heads 4: not divisible by --num-query-groups 3
fit-gpt --num-layers 0 | the flags: --num-layers: must be greater than or equal to 1
fit a-bridge.json | error: a-bridge.json: hidden_size=64 does not divide by num_attention_heads=5
estimate-hf odd.json | hidden_size=64 does not divide by num_attention_heads=5: correct one, or add head_dim
fit ds.json --modle gpt3-13b | --modle: unknown option, did you mean --model?
fit --take stok -- torchrun pretrain_gpt.py | --take stok: unknown, did you mean stock?
"""
#: Models that partition is given in other ways than by --model.
MODELS = """
partition --stages 2 | a model: name one of --model, --module, --hf, --megatron or --profile
partition --stages 2 --module nowhere.py:f | --module nowhere.py:f: there is no file nowhere.py
partition --stages 2 --module f.py:f | --module f.py:f: it should return (model, inputs), and returned int
partition --stages 2 --hf hf.json | --hf hf.json: it has no 'architectures'
partition --stages 2 --module f.py:g | --module f.py:g: the file has no g: name one of its functions
partition --stages 2 --hf llama.json | LlamaForCausalLM cannot be built:
partition --model gpt9 --stages 2 | --model gpt9: unknown, choose one of bert-large
partition --megatron | --megatron: which flags? Give those of the run after --
"""
#: Words of pydantic, argparse and Python.
INTERNAL = re.compile(r"Traceback|Input should|Field required|invalid \w+ value|Invalid JSON|NoneType|pydantic")


def lines(text: str, good: dict[str, str]) -> list[tuple[list[str], str]]:
    found = []
    for line in text.strip().splitlines():
        words, _, said = line.partition(" | ")
        command, *added = shlex.split(words)
        found.append(([*good.get(command, command).split(), *added], said))
    return found


CASES = [*lines(BAD, GOOD), *lines(MODELS, {})]


@pytest.mark.parametrize("command", sorted({argv[0] for argv, _ in CASES}))
def test_bad_input_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    for argv, said in CASES:
        if argv[0] != command:
            continue
        with pytest.raises(SystemExit) as caught:
            pytest.fail(f"{argv} ended with {main(argv)}")
        shown = capsys.readouterr()
        assert (caught.value.code, shown.out, shown.err.count("\n")) == (2, "", 1), argv
        assert shown.err.startswith(f"evenpipe {command}: error: "), argv
        assert said in shown.err
        assert not INTERNAL.search(shown.err)
        assert set(os.listdir()) == set(FILES), argv
