"""What a stage does around one of its actions."""

from __future__ import annotations

from typing import NamedTuple

from evenpipe.schedule.actions import Action
from evenpipe.schedule.topology import Gathering, Message

__all__ = ["Step"]


class Step(NamedTuple):
    """One action with the communication around it, in this order: post, complete, transfer, compute or update, send.

    ``post``: receives of what compute needs here or later, each at its place in the one order of the whole pipeline
    (:mod:`evenpipe.schedule.order`), and gatherings. ``complete``: messages, received or sent by this stage, that must
    be complete before the action. ``transfer``: what an action starts to move to or from its partner or its host, once
    what it ``follows`` is complete: departures that make room for it, which nothing else waits for.
    ``then_post``: the same as ``post``, for what comes after the action and before ``send``.
    ``send``: what compute gives a neighbour when it ends; local, where the next part of the model is on this stage.
    ``takes``: what compute got from a neighbour: one of ``complete``, or local.
    """

    post: tuple[Message | Gathering, ...]
    complete: tuple[Message, ...]
    action: Action
    transfer: Message | None = None
    then_post: tuple[Message | Gathering, ...] = ()
    send: Message | None = None
    takes: Message | None = None
    follows: tuple[Message, ...] = ()
