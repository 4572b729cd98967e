"""An estimate is of programs for the hardware queues that the recipe exports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenpipe.descriptions import cluster, model
from evenpipe.planner.estimate import Estimator
from evenpipe.planner.run import Run
from evenpipe.recipes import Recipe, Settings
from evenpipe.recipes.files import files_of
from evenpipe.schedule import Programs, Queues
from tests.recipes.tiny import recipe_of

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
#: BPipe Appendix B, Table 6: with t = 8 the partners of 96B are on different nodes.
APPENDIX_B = Run(global_batch=128, tensor=8, stages=4, micro_batch=2, recompute="selective", bpipe=True)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Queues]:
    """For which queues programs are built."""
    seen: list[Queues] = []

    def noting(spec: str, bpipe: bool, queues: Queues = "many") -> Programs:
        seen.append(queues)
        return Programs(spec, bpipe, queues)

    monkeypatch.setattr("evenpipe.planner.estimate.Programs", noting)
    return seen


def test_with_one_queue_the_case_of_bpipe_s_appendix_takes_longer(built: list[Queues]) -> None:
    """A load starts when compute before it has ended, so that transfers of 1.4 forwards show."""
    of, nodes = model("gpt3-96b"), cluster("4x8-a100-80gb")
    recipe = Recipe.of(of, nodes, APPENDIX_B, "megatron", "torchrun", Settings.of(()), of.framework)
    assert f"export {NAME}=1\n" in files_of(recipe)["train.sh"]
    assert recipe.run.queues == "one"
    one = recipe.estimate
    assert set(built) == {"one"}
    many = recipe.estimator(replace(recipe.run, one_queue=False))
    assert built[-1] == "many"
    assert 1.03 < one.iteration_ms / many.iteration_ms < 1.10
    assert Estimator(of, nodes)(APPENDIX_B).run.queues == "one", "Megatron-LM 3.0 demands it too"


@pytest.mark.parametrize(
    ("framework", "tensor", "value"), [("megatron", 2, "1"), ("megatron", 1, "32"), ("deepspeed", 1, "32")]
)
def test_what_is_exported_is_what_programs_are_built_for(
    framework: str, tensor: int, value: str, built: list[Queues]
) -> None:
    recipe = recipe_of(framework, tensor=tensor, stages=4 // tensor, bpipe=tensor == 1)  # type: ignore[arg-type]
    assert f"export {NAME}={value}\n" in files_of(recipe)["train.sh"]
    assert recipe.estimate.iteration_ms > 0
    assert set(built) == {"one" if value == "1" else "many"}
