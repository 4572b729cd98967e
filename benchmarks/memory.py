"""What each stage holds at most, with and without BPipe: saved activations of a real GPT, predicted and measured.

Measured: per stage, the peak of saved activations over an iteration of 1F1B, own plus accepted, those being transferred
counted on both stages: exact bytes of the storages that autograd saved, each counted once, parameters left out. The
prediction is the simulator's, from the schedule and from what one micro-batch saves. On: a small megatron-core GPT at
four and at eight stages, trained for two iterations (peaks of the first and later ones are the same).
"""

from __future__ import annotations

from typing import Any, Final

from harness import Benchmark, progress_bar
from rich.table import Table

from evenpipe.train.launch import run_cases
from evenpipe.train.options import TrainOptions
from evenpipe.train.predict import predict

MIB: Final = 2**20
MODEL: Final = {"hidden": 128, "heads": 4, "seq_length": 128, "micro_batch_size": 4, "iterations": 2}
PIPELINES: Final = {4: 8, 8: 16}  # stages: micro-batches; one layer a stage


def entry(plain: TrainOptions, level: TrainOptions, results: list[Any]) -> dict[str, Any]:
    """One pipeline of the document, in bytes."""
    document: dict[str, Any] = {"stages": plain.stages, "micro_batches": plain.micro_batches}
    for name, options, result in zip(("1f1b", "bpipe"), (plain, level), results, strict=True):
        document[f"{name}_peak_live"] = [stage.peak_live for stage in result.stages]
        document[f"{name}_peak_bytes"] = [stage.peak_saved_bytes for stage in result.stages]
        document[f"{name}_predicted_bytes"] = [stage.peak_bytes for stage in predict(options.program, result).stages]
    # The last stage also holds what the output layer saves.
    document["ratio"] = max(document["bpipe_peak_bytes"][:-1]) / max(document["1f1b_peak_bytes"])
    document["same_weights"] = results[0].weights_sha256 == results[1].weights_sha256
    return document


def table(results: list[dict[str, Any]]) -> Table:
    """The same for people."""
    shown = Table("stages", "stage", "1F1B MiB", "predicted", "BPipe MiB", "predicted", "live", "with BPipe")
    for result in results:
        names = ("1f1b_peak_bytes", "1f1b_predicted_bytes", "bpipe_peak_bytes", "bpipe_predicted_bytes")
        for stage in range(result["stages"]):
            sizes = (f"{result[name][stage] / MIB:.2f}" for name in names)
            live = (str(result[f"{name}_peak_live"][stage]) for name in ("1f1b", "bpipe"))
            shown.add_row(str(result["stages"]), str(stage), *sizes, *live)
        shown.add_section()
    return shown


def main() -> None:
    benchmark = Benchmark("memory", __doc__ or "", repeats=1)
    benchmark.parser.parse_args()
    cases = [
        TrainOptions.of(**MODEL, stages=stages, layers=stages, micro_batches=micro_batches, bpipe=bpipe)
        for stages, micro_batches in PIPELINES.items()
        for bpipe in (False, True)
    ]
    with progress_bar("iterations", sum(case.iterations for case in cases)) as tick:
        results = run_cases(cases, lambda iteration: tick())
    entries = [entry(cases[i], cases[i + 1], results[i : i + 2]) for i in range(0, len(cases), 2)]
    benchmark.report({**MODEL}, entries, table(entries))


if __name__ == "__main__":
    main()
