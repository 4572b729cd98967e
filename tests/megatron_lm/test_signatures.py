"""What is recorded of megatron.training is what the checkout has."""

import pytest

from evenpipe.megatron.supported import RELEASES
from evenpipe.megatron.symbols import TRAINING
from evenpipe.upstream.source import found_in, literal_in


@pytest.mark.every_release
def test_every_recorded_signature_is_the_checkouts(megatron_lm):
    release = [literal_in(megatron_lm, f"megatron.core.package_info:{part}") for part in ("MAJOR", "MINOR")]
    series = ".".join(map(str, release))
    assert series in RELEASES
    there = {symbol: versions[series] for symbol, versions in TRAINING.items() if series in versions}
    assert {symbol: found_in(megatron_lm, symbol, expected, {}) for symbol, expected in there.items()} == there
