"""Layers of a script are made with delayed weight gradients where Transformer Engine is new enough for them."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core import utils

from evenpipe.megatron_lm.delayed import _delaying, too_old_engine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(version: str | None) -> None:
        number = version and tuple(map(int, version.split(".")))
        monkeypatch.setattr(utils, "get_te_version", lambda: version)
        monkeypatch.setattr(utils, "is_te_min_version", lambda least: number >= tuple(map(int, least.split("."))))

    return install


def made(args: Namespace) -> tuple[Any, Any]:
    """The settings that layers and data parallelism are made by; Megatron's check sees none."""
    seen = []

    def original(given: Namespace) -> SimpleNamespace:
        seen.append(given.delay_wgrad_compute)
        return SimpleNamespace(delay_wgrad_compute=given.delay_wgrad_compute)

    config = _delaying(original, args)
    assert seen == [False]
    return config.delay_wgrad_compute, args.delay_wgrad_compute


def test_layers_of_transformer_engine_are_made_to_delay(engine: Any) -> None:
    engine("2.8.0")
    args = Namespace(transformer_impl="transformer_engine")
    assert made(args) == (True, True)
    assert made(args) == (True, True)  # a second model of the script
    assert too_old_engine(args) is None
    assert made(Namespace(transformer_impl="local")) == (False, False)


def test_an_older_one_is_told_of_and_computes_whole_backwards(engine: Any) -> None:
    engine("2.7.0")
    args = Namespace(transformer_impl="transformer_engine")
    assert made(args) == (False, False)
    said = too_old_engine(args)
    assert said is not None
    assert said.startswith("Transformer Engine 2.7.0 computes weight gradients in the first half")
    assert too_old_engine(Namespace(transformer_impl="local")) is None
