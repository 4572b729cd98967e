"""Runs beside each other: which can be, which fit, and which of many is the fastest, by bounds before estimates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

from evenpipe.descriptions import Cluster, Framework, Model
from evenpipe.planner.estimate import Estimator
from evenpipe.planner.iteration import message_bytes_of
from evenpipe.planner.kernels import FITTED
from evenpipe.planner.possible import check
from evenpipe.planner.run import EstimateError, Run
from evenpipe.planner.search.balanced_layout import Layout
from evenpipe.planner.search.bounds import least_bytes, least_end_ms, least_ms, unlike
from evenpipe.planner.search.candidates import Way, ways
from evenpipe.planner.search.profiles import Divided
from evenpipe.planner.search.search import EQUAL, Planned
from evenpipe.planner.stage_bytes import stage_states
from evenpipe.planner.stage_nodes import Placed, StageNodes
from evenpipe.schedule import ScheduleError

__all__ = ["Weighing"]


class Weighing:
    """Estimates of runs of one model on one cluster, each made once.

    ``allowed``: whether the framework starts such a run. divided: the costs of their blocks.
    """

    def __init__(self, model: Model, cluster: Cluster, of: Framework, allowed: Callable[[Run], bool]) -> None:
        self.model, self.cluster, self.framework = model, cluster, of
        self.have = cluster.device.memory_gib * 2**30
        self._allowed = allowed
        self._estimate = Estimator(model, cluster, of)
        self._nodes = StageNodes(cluster)
        self.divided = Divided(model, self._nodes)
        self.planned = cache(self._planned)
        self._bounds = cache(self._bounds_of)

    def _planned(self, run: Run) -> Planned | None:
        """Return the run with its estimate; None for one that cannot be."""
        if not self._allowed(run):
            return None
        try:
            return Planned(run, self._estimate(run))
        except EstimateError:
            return None

    def fitting(self, run: Run) -> Planned | None:
        """Return the run with its estimate; None for one that cannot be, or does not fit."""
        found = self.planned(run)
        return found if found is not None and found.estimate.fits else None

    def balanced(self, run: Run) -> Run:
        """Return the run with as many layers in each part, or else those that make its stages equally fast."""
        if self.model.layers % (run.stages * run.chunks) == 0:
            return replace(run, layout=None, further_part=None)
        return self.levelled(run)

    def levelled(self, run: Run) -> Run:
        """Return the run with the layers in each part that make its stages equally fast."""
        way = self._way(run)
        if way is None:
            return run
        layout = self.divided.of(_plain(run)).balanced(
            tuple(way.where.stages), None if self._nodes.alike else tuple(self._nodes.of_stages(run))
        )
        return replace(run, layout=layout.layers, further_part=layout.further)

    def near_fastest(self, runs: Iterable[Run]) -> list[Planned]:
        """Return the runs that fit and take no longer than the fastest of them, but for equal times, fastest first."""
        each = sorted(((*self._bounds(run), number, run) for number, run in enumerate(dict.fromkeys(runs))))
        found: list[Planned] = []
        least = float("inf")
        for ms, nbytes, _, run in each:
            if ms > EQUAL * least:
                break
            if nbytes <= self.have and (planned := self.fitting(run)) is not None:
                found.append(planned)
                least = min(least, planned.estimate.iteration_ms)
        found.sort(key=lambda one: one.estimate.iteration_ms)
        return [one for one in found if one.estimate.iteration_ms <= EQUAL * least]

    def _bounds_of(self, run: Run) -> tuple[float, int]:
        """Return the milliseconds and bytes that the run takes at least; infinite for one that cannot be."""
        try:
            check(run, self.model, self.cluster)
            way = self._way(run)
        except (EstimateError, ScheduleError):
            return float("inf"), 0
        if way is None or not self._allowed(run):
            return float("inf"), 0
        if run.recomputed_layers is not None:
            return 0.0, 0  # bounds are of blocks that are all alike
        profile = self.divided.of(_plain(run))
        placed = Placed(run, self._nodes, FITTED)
        layout = None if run.layout is None else Layout(run.layout, run.further_part)
        parts = profile.parts(run.stages, run.chunks, layout, [placed.groups[stage] for stage in way.where.stages])
        split, stream = "split" in way.spec.needs, "stream" in way.spec.needs
        message = message_bytes_of(self.model, run)
        away = bool(run.offload_modules or run.optimizer_offload)  # less is kept than these bounds count
        nbytes = 0
        for stage in () if away else unlike(parts, way.where):
            groups = placed.groups[stage]
            own, device = [parts[n].chunk for n in way.where.at[stage]], self._nodes.device(groups)
            held = stage_states(own, run, way.spec.weight_versions, device.transposing)
            least = least_bytes(own, held, way.live[stage], split, run, message, device)
            nbytes = max(nbytes, least + self._nodes.lacking(groups))
        if nbytes > self.have:
            return 0.0, nbytes
        over = placed.fastest_hand_over(self.model, run, way.where.stages)
        ms = least_ms(parts, way.where, run, over, split, stream, way.edges)
        return ms + least_end_ms(parts, way.where, run, placed), nbytes

    @staticmethod
    def _way(run: Run) -> Way | None:
        every = ways(run, (run.spec.name,), run.bpipe)
        wanted = run.bpipe, run.group_size
        return next((one for one in every if (one.bpipe, one.size.group_size) == wanted or run.stages == 1), None)


def _plain(run: Run) -> Run:
    """Return a run whose blocks are the same."""
    return replace(run, schedule="1f1b", bpipe=False, group_size=1, further_part=None)
