"""One name and one colour for each kind of action, in the terminal and in pictures."""

from __future__ import annotations

from collections.abc import Mapping

from evenpipe.schedule import ACCEPT, BACKWARD, EVICT, FORWARD, LOAD, RETURN, UPDATE, Kind

__all__ = ["COLOURS", "NAMES"]

NAMES: Mapping[Kind, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    EVICT: "evict",
    LOAD: "load",
    ACCEPT: "accept",
    RETURN: "return",
    UPDATE: "update",
}

# Compute in light colours that carry dark text; what leaves a stage in warm ones, what arrives in cool ones.
COLOURS: Mapping[Kind, str] = {
    FORWARD: "#a9c9ea",
    BACKWARD: "#b9dbb2",
    EVICT: "#d9772b",
    LOAD: "#3b6fb6",
    ACCEPT: "#7b5ea7",
    RETURN: "#d1495b",
    UPDATE: "#3f7d58",
}
