"""The patch registry: every upstream symbol that EvenPipe replaces or relies on, verified before use."""

from evenpipe.upstream.expectation import ANY, Distribution, Expectation, verify
from evenpipe.upstream.patches import APPLIED, FITS, Patch, PatchSet, PatchState, around
from evenpipe.upstream.symbols import BUILTIN, PRESENT, UpstreamError, signature_of

__all__ = [
    "ANY",
    "APPLIED",
    "BUILTIN",
    "FITS",
    "PRESENT",
    "Distribution",
    "Expectation",
    "Patch",
    "PatchSet",
    "PatchState",
    "UpstreamError",
    "around",
    "signature_of",
    "verify",
]
