"""PipeDream-2BW's planner as published (§4, Algorithm 1): width, depth, micro-batch size and recomputation.

Its cost functions are closed forms over a profiled block (§4.2), or measurements of whole configurations (line 122).
`evenpipe.planner.search` asks the same of the planner's own model, over more dimensions. Lines are those of the paper's
text. What is corrected of it:

- Throughput is w · b / t: that of all w pipelines (line 164 has b / t, with which width never pays).
- w workers are in one server if w ≤ its GPUs (line 178 has <; by line 256 eight replicas are in a server of eight).
- Recomputation keeps d · |A^inp| (line 82; line 204 leaves it out).
- Not all N workers need be used: w · d ≤ N (lines 222 and 224), so g = B / (w · d · b), which is line 246's B / (N · b)
  where all are; and a configuration whose smallest batch is larger than is safe is none (line 208).
- Replicas exchange gradients once a batch, of which a micro-batch's share is 1/m, so that throughput grows with g
  (line 377); lines 152 to 162 have all of it in every micro-batch's time.
- SEARCH looks among what fits (line 208); Algorithm 1 would take its fastest b, and drop (w, d) if that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

__all__ = ["Blocks", "Configuration", "Costs", "Execution", "Measured", "Partitioned", "Profiled", "partition"]

Execution = Literal["no pipeline", "gpipe", "flush", "2bw"]
_RECOMPUTED: Final = 4 / 3  # c^extra: backward takes twice a forward (line 160)


class Configuration(NamedTuple):
    """w pipelines of d stages, micro-batches of b samples, r: recomputed; m of them a batch, of a pipeline."""

    w: int
    d: int
    b: int
    r: bool
    m: int
    execution: Execution = "2bw"


class Costs(Protocol):
    """Cost functions. ``throughput``: samples/s of all pipelines; ``memory``: bytes of a worker.

    Both None where nothing is known of a configuration.
    """

    def throughput(self, of: Configuration) -> float | None: ...

    def memory(self, of: Configuration) -> float | None: ...


class Measured(NamedTuple):
    """The result of one run of a configuration (2 to 3 minutes each, line 122)."""

    samples_per_second: float
    nbytes: float


@dataclass(frozen=True)
class Profiled:
    """The first way to profile: end to end, each configuration by itself."""

    runs: Mapping[Configuration, Measured]

    def throughput(self, of: Configuration) -> float | None:
        return self.runs[of].samples_per_second if of in self.runs else None

    def memory(self, of: Configuration) -> float | None:
        return self.runs[of].nbytes if of in self.runs else None


@dataclass(frozen=True)
class Blocks:
    """The second way: extrapolated from measurements of one of ``count`` equal blocks.

    seconds(b): forward and backward of a block. weight_bytes: |W|. saved(b), inputs(b): |A^total| and |A^inp|, bytes
    of all blocks' activations and of their inputs. message(b): |A^inp. + out.| of one block. server: GPUs of one;
    high, low: bytes/s within it and beyond. pipelines_within: stages of a pipeline, rather than replicas of a stage,
    are placed in one server (line 120; line 112 has it the other way).
    """

    count: int
    seconds: Callable[[int], float]
    weight_bytes: float
    saved: Callable[[int], float]
    inputs: Callable[[int], float]
    message: Callable[[int], float]
    server: int
    high: float
    low: float
    pipelines_within: bool = False

    def throughput(self, of: Configuration) -> float | None:
        """§4.2.1. Stages are alike, so that the slowest is any one of them."""
        w, d, b, r, m, execution = of
        if self.count % d:
            return None
        compute = self.count / d * self.seconds(b) * (_RECOMPUTED if r else 1.0)
        # Line 172: activations and gradients, on both sides of a stage.
        between = 2 * self.message(b) / self._depth(w, d) if d > 1 else 0.0
        # A ring's bytes, and a micro-batch's share of them.
        reduced = 2 * (w - 1) / w * self.weight_bytes / d / self._width(w, d) / m
        t = max(compute, between, reduced)  # lines 156 and 162
        if execution == "no pipeline":  # line 152
            t = d * max(compute + between, reduced)
        if execution in ("gpipe", "flush"):  # a flush a batch: m micro-batches take m + d − 1 (Figure 3)
            t *= (m + d - 1) / m
        return w * b / t

    def memory(self, of: Configuration) -> float | None:
        """§4.2.2, lines 82, 84 and 200."""
        _, d, b, r, m, execution = of
        if self.count % d:
            return None
        weights = (2 if execution == "2bw" else 1) * self.weight_bytes
        live = {"no pipeline": 1, "gpipe": m, "flush": d, "2bw": d}[execution]
        if not r:
            return (weights + live * self.saved(b)) / d
        return (weights + live * self.inputs(b) + self.saved(b) - self.inputs(b)) / d

    def _width(self, w: int, d: int) -> float:
        return self.high if w * (d if self.pipelines_within else 1) <= self.server else self.low

    def _depth(self, w: int, d: int) -> float:
        return self.high if d * (1 if self.pipelines_within else w) <= self.server else self.low


class Partitioned(NamedTuple):
    """The result of Algorithm 1, and g, the degree of gradient accumulation."""

    configuration: Configuration
    samples_per_second: float
    g: int


def partition(
    costs: Costs,
    workers: int,
    memory: float,
    samples: int,
    executions: tuple[Execution, ...] = ("no pipeline", "2bw"),
) -> Partitioned | None:
    """Algorithm 1: the fastest configuration of at most N ``workers`` with ``memory`` bytes each.

    ``samples``: the maximum safe batch, B. Of equal ones the first: the narrowest, then the shallowest. None where
    nothing fits. ``executions`` are those to weigh (lines 124 to 128; GPipe, and 2BW with flushes, too).
    """
    best: Partitioned | None = None
    for w in range(1, workers + 1):
        for d in range(1, workers // w + 1):
            for of, g in _search(w, d, samples, executions):
                needed, t = costs.memory(of), costs.throughput(of)
                if needed is None or t is None or needed > memory:
                    continue
                if best is None or t > best.samples_per_second:
                    best = Partitioned(of, t, g)
    return best


def _search(w: int, d: int, samples: int, executions: tuple[Execution, ...]) -> Iterator[tuple[Configuration, int]]:
    """Every b and r, and g such that the batch w · b · m, with m = d · g, is as large as is safe.

    Without a pipeline there is nothing to fill: m = g, over w replicas.
    """
    for execution in executions:
        of_pipeline = 1 if execution == "no pipeline" else d
        for b in range(1, samples // (w * of_pipeline) + 1):
            g = samples // (w * of_pipeline * b)
            for r in (False, True):
                yield Configuration(w, d, b, r, of_pipeline * g, execution), g
