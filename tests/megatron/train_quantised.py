"""Stages that train in FP8, on layers like Transformer Engine's.

Arguments: a folder (rank-<rank>.json out), the number of stages, and cases as a JSON list: a recipe, options of the
trainer, and whether the run is interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "two_bw"))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from interrupted_megatron import evaluate
from quantised_layers import FP8GlobalState, FP8GlobalStateManager, Linear, installed, quantise

from evenpipe.megatron.train_engine import learner
from evenpipe.megatron.train_engine.engine import MegatronEngine, opened, prepare
from evenpipe.train import data
from evenpipe.train.engine import Case, FailureContext, Recorder
from evenpipe.train.options import TrainOptions

CPU = torch.device("cpu")
RESUMED_AFTER = (1, 3)


def layers(engine: MegatronEngine) -> list[Linear]:
    return [one for chunk in engine.learner.replica.chunks for one in chunk.modules() if isinstance(one, Linear)]


def train(options: TrainOptions, path: Path | None, evaluates: bool) -> dict[str, Any]:
    """Losses and weights; with a `path`, after saves and resumes, and evaluations if it `evaluates`."""
    losses: list[list[float]] = []
    state: Any = None
    while len(losses) < options.iterations:
        failure = FailureContext(dist.get_rank())
        case = Case(options, data.load(options), CPU, failure, Recorder(failure), lambda text: None)
        FP8GlobalStateManager.quantization_state = FP8GlobalState()
        with opened(case) as engine:
            if state is not None:
                engine.restore(state["engine"])
                for layer, known in zip(layers(engine), state["layers"], strict=True):
                    layer.set_extra_state(known)
            engine.begin(len(losses))
            while len(losses) < options.iterations:
                losses.append(engine.train(len(losses)))
                if path is not None:
                    if evaluates:
                        evaluate(options, engine)
                    engine.drain()
                    known = [layer.get_extra_state() for layer in layers(engine)]
                    torch.save({"engine": engine.state(), "layers": known}, path)
                    if len(losses) - 1 in RESUMED_AFTER:
                        state = torch.load(path)
                        break
            engine.drain()
            [weights] = engine.weights().values()
    return {"losses": losses, "weights": weights}


def run(rank: int, folder: str, stages: int, cases: list[tuple[str, dict[str, Any], bool]]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(stages), CUDA_VISIBLE_DEVICES="", CUDA_DEVICE_MAX_CONNECTIONS="1")
    prepare(CPU)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", stages), rank=rank, world_size=stages)
    make, found = learner._module, []
    for recipe, given, interrupted in cases:

        def quantised(*args: Any, recipe: str = recipe) -> torch.nn.Module:
            module = make(*args)
            quantise(module, recipe, FP8GlobalStateManager.quantization_state)
            return module

        learner._module = quantised
        path = Path(folder, f"rank-{rank}.pt") if interrupted else None
        with installed():
            # By delayed scaling, values of an evaluation join the history, with 2BW and without.
            found.append(train(TrainOptions.of(**given), path, evaluates=recipe != "delayed"))
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    stages = int(sys.argv[2])
    mp.start_processes(run, (sys.argv[1], stages, json.loads(sys.argv[3])), nprocs=stages, start_method="fork")
