"""What a recipe writes for DeepSpeed is read by DeepSpeed's configuration class and EvenPipe's section."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from evenpipe.deepspeed.section import section_of
from evenpipe.recipes.deepspeed import boundaries_of
from evenpipe.recipes.files import files_of, write_files
from tests.recipes.tiny import bert, gpt, recipe_of

RUNS = {
    "bpipe": {},
    "kfkb": {"schedule": "kfkb", "group_size": 2},
    "2bw": {"schedule": "2bw"},
    "gpipe": {"schedule": "gpipe", "bpipe": False},
    "fp16": {"precision": "fp16"},
    "uneven": {"layout": (1, 3, 2, 2)},
}
READ = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
for path in sys.argv[1:]:
    read = DeepSpeedConfig(json.load(open(path)))
    batch = read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps
    print(*batch, read.zero_config.stage)
"""


def test_deepspeed_and_the_section_read_every_configuration(tmp_path):
    paths = []
    for name, changed in RUNS.items():
        recipe = recipe_of("deepspeed", **({"precision": "bf16"} | changed))
        write_files(tmp_path / name, files_of(recipe))
        paths.append(tmp_path / name / "ds_config.json")
        section = section_of(json.loads(paths[-1].read_text()))
        assert section is not None
        found = section.spec.name, section.bpipe, section.group_size
        assert found == (recipe.run.spec.name, recipe.run.bpipe, recipe.run.group_size)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", READ, *paths], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-len(RUNS) :] == ["8 1 8 1"] * len(RUNS)


@pytest.mark.parametrize("kind", [gpt, bert])
def test_stages_have_the_layers_that_were_planned(kind):
    run = recipe_of("deepspeed", of=kind(), layout=(1, 3, 2, 2)).run
    assert boundaries_of(kind(), run) == [0, 3, 6, 8, 12], "words and positions come first, norm and logits last"


def test_the_emitted_scripts_are_clean(tmp_path):
    write_files(tmp_path / "recipe", files_of(recipe_of("deepspeed")))
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,W,F,I,B,UP", "--line-length", "120", "."],
        cwd=tmp_path / "recipe",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
