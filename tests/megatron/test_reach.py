"""What people run in public: each recipe takes a feature, or the line that refuses it names the flag in its way."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from reach import FEATURES, arguments_of, recipes, refusal

from evenpipe.megatron_lm.flags import destination
from evenpipe.megatron_lm.start import asked_for
from evenpipe.settings.config import EvenPipeConfig

#: A fifth of public recipes captures whole iterations, or layers in Megatron's order, or hides experts' messages.
LEAST = {
    "--bpipe": 0.85,
    "--evenpipe-schedule 1f1b": 0.85,
    "--evenpipe-schedule dualpipev": 0.7,
    "--evenpipe-schedule v-half": 0.55,
    "--evenpipe-schedule searched": 0.55,
    "--evenpipe auto": 0.7,
}


@pytest.mark.parametrize("feature", FEATURES)
def test_public_recipes_start_or_are_told_which_flag_is_in_the_way(feature: str) -> None:
    lines = [refusal(feature, recipe) for recipe in recipes()]
    assert lines.count(None) / len(lines) >= LEAST[feature]
    for line in filter(None, lines):
        assert "\n" not in line
        assert re.search(r"--(cuda-graph-impl|overlap-moe|fine-grained|external-cuda-graph)", line), line


def test_a_recipe_without_a_choice_starts_as_it_is_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments_of(next(one for one in recipes() if one.get("cuda_graph") == "full_iteration"), False)
    asked = EvenPipeConfig.of(schedule="auto", memory_gib=60.0)
    vars(args).update({destination(name): value for name, value in asked.model_dump().items()})
    config, plan = asked_for(args)
    assert (config.active, plan) == (False, None)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(
        " [evenpipe] auto: trains by Megatron's own schedule: --cuda-graph-impl full_iteration replays"
    )
