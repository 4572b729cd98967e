"""An independent interpreter of devices: hosts, hardware queues and streams take their turns in random order."""

from collections import deque
from random import Random

from evenpipe.schedule import Message

__all__ = ["ends"]


def ends(calls, environment, chance: Random) -> bool:
    """Whether all stages come to their end, by rules of its own; times do not matter for that."""
    stages = range(len(calls))
    at, given, done = [0] * len(calls), [0] * len(calls), [0] * len(calls)
    queues = [{} for _ in stages]  # per stage: of each hardware queue, what is in it
    busy = [{} for _ in stages]  # per stage: what each stream moves
    enqueued = [[] for _ in stages]
    members = {}
    for stage, row in enumerate(calls):
        for kind, what, _ in row:
            if kind in ("send", "receive", "gather"):
                members.setdefault(what, set()).add(stage)
    started, complete = {what: set() for what in members}, set()

    def idle(stage):
        return done[stage] == given[stage] and all(what in complete for what in enqueued[stage])

    def host(stage):
        if at[stage] == len(calls[stage]):
            return False
        kind, what, follows = calls[stage][at[stage]]
        if environment.synchronises(calls[stage], at[stage]) and not idle(stage):
            return False
        if kind == "update":
            if what not in complete:
                return False
        elif kind in ("send", "receive", "gather"):
            stream = what.link if isinstance(what, Message) else "gather"
            if environment.shared and isinstance(what, Message):
                stream = frozenset((what.link.source, what.link.target))
            queue = queues[stage].setdefault("one" if environment.one_queue else stream, deque())
            queue.append((stream, "behind", given[stage]))
            queue.extend((stream, "await", one) for one in follows)
            queue.append((stream, "move", what))
            enqueued[stage].append(what)
        else:
            given[stage] += 1
            queue = queues[stage].setdefault("one" if environment.one_queue else "compute", deque())
            queue.append(("compute", "await" if kind == "wait" else "kernel", what))
        at[stage] += 1
        return True

    def device(stage, name):
        queue = queues[stage][name]
        if not queue:
            return False
        stream, kind, what = queue[0]
        if busy[stage].get(stream) is not None and busy[stage][stream] not in complete:
            return False
        if (kind == "behind" and done[stage] < what) or (kind == "await" and what not in complete):
            return False
        queue.popleft()
        done[stage] += stream == "compute"
        if kind == "move":
            busy[stage][stream] = what
            started[what].add(stage)
            if started[what] == members[what]:
                complete.add(what)
        return True

    moved = True
    while moved:
        turns = [(host, (stage,)) for stage in stages]
        turns += [(device, (stage, name)) for stage in stages for name in queues[stage]]
        chance.shuffle(turns)
        moved = sum([turn(*arguments) for turn, arguments in turns]) > 0
    return all(at[s] == len(calls[s]) and idle(s) and not any(queues[s].values()) for s in stages)
