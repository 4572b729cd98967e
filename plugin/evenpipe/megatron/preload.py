"""What the fork server imports once, so that every training process starts with it: torch and megatron-core."""

import warnings

with warnings.catch_warnings():
    # megatron-core warns of every optional package that is missing; none is needed here.
    warnings.simplefilter("ignore")
    import evenpipe.megatron.process  # noqa: F401
