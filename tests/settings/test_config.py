"""The settings that every front end shares."""

import pytest

from evenpipe.settings.config import ConfigError, EvenPipeConfig


def test_nothing_asked_for_is_a_run_without_evenpipe():
    assert not EvenPipeConfig().active
    assert EvenPipeConfig.of(bpipe=True).active
    assert EvenPipeConfig.of(schedule="1f1b").active


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("schedule", "1f2b", "1f2b: unknown schedule, did you mean 1f1b?"),
        (
            "schedule",
            "zigzag",
            "zigzag: unknown schedule, choose one of 1f1b, gpipe, 2bw, interleaved, kfkb, zb-h1, zb-h2, "
            "interleaved-zb, paci, dualpipev, v-half, v-min, zbv, searched, auto",
        ),
        ("bpipe", "perhaps", "perhaps: must be true or false"),
        ("group_size", "0", "0: must be greater than or equal to 1 or 'auto'"),
        ("group_size", "all", "all: must be a whole number or 'auto'"),
        ("memory_gib", "inf", "inf: must be a finite number"),
        ("trace_iteration", "0", "0: must be greater than or equal to 1"),
    ],
)
def test_a_wrong_value_is_one_line_that_starts_with_it(setting, value, said):
    with pytest.raises(ConfigError) as error:
        EvenPipeConfig.of(**{setting: value})
    assert error.value.setting == setting
    assert str(error.value) == said
