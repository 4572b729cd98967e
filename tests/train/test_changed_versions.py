"""A run that goes on from a checkpoint says what of 2BW it does not take up."""

import pytest

from evenpipe.train.engine import changed_versions


@pytest.mark.parametrize(
    ("saved", "kept", "correction", "said"),
    [
        (None, False, "none", None),
        ({"before": []}, True, "none", None),
        ({"before": None}, False, "none", None),  # paci
        ({"before": None}, True, "none", "has one version of the weights: both versions of this run start from it"),
        ({"before": [], "correction": "nesterov"}, True, "nesterov", None),
        (
            {"before": [], "correction": "nesterov"},
            True,
            "none",
            "has the delay correction nesterov: this run's, none, begins anew",
        ),
        ({"before": []}, True, "nesterov", "has the delay correction none: this run's, nesterov, begins anew"),
        (
            {"before": [], "correction": "nesterov"},
            False,
            "none",
            "has two versions of the weights: this run goes on from the newer",
        ),
        (None, True, "nesterov", "has one version of the weights: both versions of this run start from it"),
    ],
)
def test_what_a_checkpoint_lacks_is_said(saved, kept, correction, said):
    found = changed_versions(saved, kept, correction)
    assert found is None if said is None else said in found
