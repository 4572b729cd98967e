"""Train a few cases under every engine on whatever megatron-core is imported; print what came of them as JSON."""

import json

from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions

BASE = {"stages": 4, "hidden": 32, "heads": 4, "seq_length": 32, "iterations": 2}
SETTINGS = {
    "full recomputation": {"layers": 4, "recompute": "full"},
    "bert with dropout": {"layers": 4, "model": "bert", "dropout": 0.1},
    "interleaved": {"layers": 8, "schedule": "interleaved", "chunks": 2},
}
ENGINES = {"megatron": {"engine": "megatron"}, "evenpipe": {}, "bpipe": {"bpipe": True}}


def main() -> None:
    import megatron.core

    names = [(setting, engine) for setting in SETTINGS for engine in ENGINES]
    results = run_cases([TrainOptions.of(**BASE, **SETTINGS[setting], **ENGINES[engine]) for setting, engine in names])
    found: dict[str, dict[str, list[str]]] = {setting: {} for setting in SETTINGS}
    for (setting, engine), result in zip(names, results, strict=True):
        found[setting][engine] = [*(loss.hex() for loss in result.losses), result.weights_sha256]
    print(json.dumps({"version": megatron.core.__version__, "results": found}))


if __name__ == "__main__":
    main()
