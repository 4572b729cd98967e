"""Why transfers are not cut into pieces where all of a device's work passes one queue: the smallest case.

An evictor's backward of 2 and forward of 1, again and again, beside one eviction and one load of 1.5 forwards. The load
takes the room that the eviction leaves, and is needed by the next backward (BPipe, Appendix B). An action is many
kernels, as on a device: what is enqueued behind it is reached with its last one.
"""

from itertools import product

import pytest

from evenpipe.schedule import Action, Link, Message
from evenpipe.simulate import Costs, Wire
from evenpipe.simulate.device import Call, Device, Environment

TRANSFER = 1.5
KERNELS = 4  # of a forward
EVICT, LOAD = Link("evict", 0, 1), Link("load", 1, 0)
ONE, MANY = Environment(one_queue=True), Environment()
#: Of what an evictor's host enqueues in a period: a kernel, or a piece that leaves or comes.
KERNEL, LEAVES, COMES = "kernel", "leaves", "comes"
Item = tuple[str, int]


def period(row: list[Item], pieces: int, environment: Environment) -> float:
    """How much longer a period more makes it, in forwards."""
    wire = Wire(transmit_ms=TRANSFER / pieces)
    costs = Costs((1 / KERNELS,) * 2, (2.0,) * 2, {"evict": wire, "load": wire})

    def makespan(periods: int) -> float:
        evictor: list[Call] = []
        acceptor: list[Call] = []
        for number in range(periods):
            first = number * pieces
            if number:
                evictor += [Call("wait", Message(LOAD, first - 1 - one, 0)) for one in range(pieces)]
            for kind, one in row:
                leaving, coming = (Message(link, first + one, 0) for link in (EVICT, LOAD))
                if kind == KERNEL:
                    evictor.append(Call("compute", Action("F", len(evictor), 0)))
                elif kind == LEAVES:
                    evictor.append(Call("send", leaving))
                    acceptor.append(Call("receive", leaving))
                else:
                    evictor.append(Call("receive", coming, (leaving,)))
                    acceptor.append(Call("send", coming))
        device = Device([evictor, acceptor], costs, environment=environment)
        assert not device.stuck
        return device.makespan_ms

    return (makespan(8) - makespan(4)) / 4


def placed(pieces: int, evicted: int, loaded: int, within: int = 2 * KERNELS) -> list[Item]:
    """So many pieces each way before the backward, and the others behind it, or behind so many of its kernels."""
    out, back = ([(kind, one) for one in range(pieces)] for kind in (LEAVES, COMES))
    kernels = [(KERNEL, 0)] * 3 * KERNELS
    return [*out[:evicted], *back[:loaded], *kernels[:within], *out[evicted:], *back[loaded:], *kernels[within:]]


def between_actions(pieces: int, environment: Environment) -> float:
    """The shortest period, wherever pieces are enqueued between actions."""
    choices = [(out, back) for out, back in product(range(pieces + 1), repeat=2) if back <= out]
    return min(period(placed(pieces, *choice), pieces, environment) for choice in choices)


def test_whole_transfers_cost_what_a_load_takes_longer_than_a_forward() -> None:
    """It starts behind the backward: before it, it would have the backward wait for the eviction."""
    assert between_actions(1, ONE) == pytest.approx(2 + TRANSFER)
    assert between_actions(1, MANY) == pytest.approx(3)


@pytest.mark.parametrize("pieces", [2, 3])
def test_pieces_cost_more_with_one_queue_wherever_they_are_between_actions(pieces: int) -> None:
    """A piece starts when the piece before it is through, and holds up all that is enqueued behind it until then."""
    assert between_actions(pieces, MANY) == pytest.approx(3)
    assert between_actions(pieces, ONE) > between_actions(1, ONE)


def test_a_whole_load_within_the_backward_would_cost_nothing() -> None:
    """Enqueued behind three quarters of its kernels, when the eviction is through: a hook in autograd could."""
    assert period(placed(1, 1, 0, within=3 * KERNELS // 2), 1, ONE) == pytest.approx(3)
