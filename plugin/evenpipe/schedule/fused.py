"""Which backwards a stage can compute together with the forward before them, so that each hides the other's messages.

Megatron's combined step does so with what experts send each other (``combined_1f1b.py``), DualPipe's with all messages
of a layer.
"""

from __future__ import annotations

import numpy as np

from evenpipe.schedule.actions import BACKWARD, FORWARD
from evenpipe.schedule.order import Order

__all__ = ["fusable"]


def fusable(order: Order, stage: int) -> frozenset[int]:
    """Return the numbers of a stage's backwards that may begin with the forward right before them, of another unit.

    The two wait for both inputs at the forward's place in the order, and the forward's result is sent when both are
    over. So what the backward takes comes before that place, and it awaits no transfer: then still all that is awaited
    comes before what awaits it (:mod:`evenpipe.schedule.order`).
    """
    wiring, table = order.wiring, order.wiring.schedule.table
    rows = table.of(stage)
    late, early = np.arange(rows.start + 1, rows.stop), np.arange(rows.start, rows.stop - 1)
    another = (table.micro_batch[late] != table.micro_batch[early]) | (table.chunk[late] != table.chunk[early])
    pairs = (table.kind[late] == ord(BACKWARD)) & (table.kind[early] == ord(FORWARD)) & another
    ready = order.messages[late] < order.places[early]  # -1: from this stage, earlier, or from nowhere
    awaits_none = (wiring.after[late] < 0) & (wiring.gone[late] == wiring.gone[early])
    return frozenset(late[pairs & ready & awaits_none].tolist())
