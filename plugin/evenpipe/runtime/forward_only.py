"""A batch's forwards along the links of a pipeline, without backwards: for an evaluation."""

from __future__ import annotations

from collections import deque
from typing import cast

from torch import Tensor

from evenpipe.runtime.channel import Transfer
from evenpipe.runtime.resources import Resources
from evenpipe.runtime.stage import Stage, VaryingStage
from evenpipe.schedule import FORWARD, Link, Place, Places, Unit

__all__ = ["forward_only"]


def forward_only(resources: Resources, places: Places, count: int, stage: Stage) -> None:
    """Forward `count` micro-batches in groups of one less than there are stages: a group in one part, then the next.

    All stages go by this one order of group, part and micro-batch, so that messages arrive in the order of their
    sending. One stage then has nothing to send, so that none waits for another in a circle, not even where a host waits
    for all that it enqueues (CUDA_LAUNCH_BLOCKING=1). Outputs are kept until the stage that takes them has them.
    """
    channels, layouts, stages = resources.connections.channels, resources.layouts, places.stages
    group = max(1, stages - 1)
    mine = [(number, place) for number, place in enumerate(places.order) if place.stage == resources.stage_index]
    under_way: deque[Transfer] = deque()
    here: dict[Unit, list[Tensor]] = {}  # what the next part on this stage takes
    for start in range(0, count, group):
        for number, place in mine:
            for micro_batch in range(start, min(start + group, count)):
                unit, inputs = Unit(micro_batch, place.chunk), None
                if number:
                    inputs = here.pop(unit, None)
                if number and inputs is None:
                    link = _link(places.order[number - 1], place)
                    if link in layouts:
                        inputs = cast(VaryingStage, stage).buffers_like(unit, layouts[link].receive())
                    else:
                        inputs = stage.receive_buffers(FORWARD, unit)
                    channels[link].receive(inputs).wait()
                results = stage.forward(unit, inputs)
                if number + 1 == len(places.order):
                    continue
                after = places.order[number + 1]
                if after.stage == place.stage:
                    here[Unit(micro_batch, after.chunk)] = results
                    continue
                link = _link(place, after)
                if link in layouts:
                    layouts[link].send(cast(VaryingStage, stage).description(unit, results))
                under_way.append(channels[link].send(results))
                if len(under_way) > 2 * stages:
                    under_way.popleft().wait()
    for transfer in under_way:
        transfer.wait()


def _link(source: Place, target: Place) -> Link:
    return Link("forward", source.stage, target.stage)
