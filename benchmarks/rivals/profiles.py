"""The profiles that all methods see: fp32, sequence length 512, by the roofline of the paper's A100 of 40 GB."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Final

from evenpipe.descriptions import device
from evenpipe.partition.dawnpiper.capuchin import Optimize
from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.dawnpiper.problem import Problem
from evenpipe.partition.models import build
from evenpipe.partition.profile import Profile
from evenpipe.partition.profiling import Profiles
from evenpipe.partition.timing import Roofline
from evenpipe.partition.trace import Graph, trace, weightless

__all__ = ["DEVICE", "EVERY", "LIMIT_BYTES", "MODELS", "problem_of", "profiles_of"]

DEVICE: Final = device("a100-40gb")
LIMIT_BYTES: Final = 40 * 10**9
#: Those of the paper's tables, in their order, and one more.
MODELS: Final = {"BERT": "bert-large", "GPT-2": "gpt2-large", "T5": "t5-v1.1-large", "AmoebaNet": "amoebanet-d"}
EVERY: Final = {**MODELS, "T5-large": "t5-large"}


@cache
def profiles_of(title: str) -> Callable[[int], Profile]:
    """The profiles of a model of `EVERY`, by micro-batch size."""

    def graph_of(micro_batch_size: int) -> Graph:
        with weightless():
            example = build(EVERY[title], micro_batch_size)
        return trace(example.model, example.inputs)

    return lru_cache(maxsize=64)(Profiles(graph_of, Roofline(DEVICE), title).at)


def problem_of(profile: Profile, mode: str, stages: int, optimize: Optimize = "none") -> Problem:
    """The problem that all methods solve, in a mode of the paper."""
    return Problem.of(profile, Workload.of_mode(mode, stages), stages, LIMIT_BYTES, optimize, DEVICE.host_gbps)
