"""What a stage holds in saved activations: bytes and micro-batches, own and accepted, with their peaks."""

from dataclasses import dataclass

__all__ = ["MemoryCounter", "MemorySnapshot"]


@dataclass(frozen=True)
class MemorySnapshot:
    """One reading of a `MemoryCounter`; all sizes in bytes, all units in micro-batches (times model chunks).

    `peak_bytes` and `peak_units` are peaks of own plus accepted, and `evicted_bytes` is the total given to the partner,
    all since the last `reset_peak`.
    """

    own_bytes: int
    accepted_bytes: int
    own_units: int
    accepted_units: int
    peak_bytes: int
    peak_units: int
    evicted_bytes: int


class MemoryCounter:
    """Exact running totals, fed by `ActivationStore` (own) and `SlotPool` (accepted).

    A peak is a peak of the sum: own and accepted need not have peaked at the same moment.
    """

    __slots__ = (
        "accepted_bytes",
        "accepted_units",
        "evicted_bytes",
        "largest_saved",
        "largest_sent",
        "own_bytes",
        "own_units",
        "peak_bytes",
        "peak_units",
    )

    def __init__(self) -> None:
        self.own_bytes = 0
        self.accepted_bytes = 0
        self.own_units = 0
        self.accepted_units = 0
        self.peak_bytes = 0
        self.peak_units = 0
        self.evicted_bytes = 0
        self.forget_largest()

    def forget_largest(self) -> None:
        """Micro-batches that follow have other sizes than those so far."""
        #: Bytes that one micro-batch saved at most, and of its largest message.
        self.largest_saved = 0
        self.largest_sent = 0

    def note_saved(self, nbytes: int) -> None:
        """A forward has saved so much."""
        self.largest_saved = max(self.largest_saved, nbytes)

    def note_sent(self, nbytes: int) -> None:
        """A message to a neighbour has so many bytes."""
        self.largest_sent = max(self.largest_sent, nbytes)

    def add_own(self, nbytes: int) -> None:
        """Count `nbytes` more of this stage's own saved activations (negative: fewer); see `note_peak`."""
        self.own_bytes += nbytes

    def add_accepted(self, nbytes: int) -> None:
        """Count `nbytes` more held for another stage (negative: fewer)."""
        self.accepted_bytes += nbytes
        self.note_peak()

    def note_peak(self) -> None:
        """What is saved now may be a peak.

        Said when a forward or a load has saved all it saves: what an operation saves and drops again before that (as
        dropout does inside a recomputed region) waits for no backward; it is workspace.
        """
        self.peak_bytes = max(self.peak_bytes, self.own_bytes + self.accepted_bytes)

    def add_own_units(self, units: int) -> None:
        """Count `units` more live micro-batches of this stage (negative: fewer)."""
        self.own_units += units
        self.peak_units = max(self.peak_units, self.own_units + self.accepted_units)

    def add_accepted_units(self, units: int) -> None:
        """Count `units` more live micro-batches of another stage (negative: fewer)."""
        self.accepted_units += units
        self.peak_units = max(self.peak_units, self.own_units + self.accepted_units)

    def add_evicted(self, nbytes: int) -> None:
        """Add `nbytes` to the total that was given to the partner."""
        self.evicted_bytes += nbytes

    def reset_peak(self) -> None:
        """Start a new period: peaks fall to what is live now, the evicted total to zero."""
        self.peak_bytes = self.own_bytes + self.accepted_bytes
        self.peak_units = self.own_units + self.accepted_units
        self.evicted_bytes = 0

    def snapshot(self) -> MemorySnapshot:
        """Return the present totals and peaks as an immutable value."""
        return MemorySnapshot(
            own_bytes=self.own_bytes,
            accepted_bytes=self.accepted_bytes,
            own_units=self.own_units,
            accepted_units=self.accepted_units,
            peak_bytes=self.peak_bytes,
            peak_units=self.peak_units,
            evicted_bytes=self.evicted_bytes,
        )
