"""`pretrain_gpt.py` of the checkout it is started in, where synchronising the "device" waits for all that is under way.

CPU mode has nothing to synchronise. Here `torch.cuda.synchronize`, which Megatron's timers call around every forward
and backward, waits for the messages, evictions and exchanges of this rank, as on a GPU: for both ends of each. Without
such timers it is called before every step of a stage. With POSTED_AHEAD in the environment, receives are posted k + 1
actions ahead, whatever the other stages do.
"""

import os
import runpy
import sys
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import megatron.core  # noqa: F401  CPU mode has put its own in place by then
import torch

from evenpipe.runtime import connections
from evenpipe.runtime.channel import Channel
from evenpipe.runtime.exchange import Exchange
from evenpipe.runtime.flow import Flow
from evenpipe.schedule import Step

AHEAD = "POSTED_AHEAD" in os.environ
HANGS_AFTER = timedelta(seconds=8 if AHEAD else 120)
under_way: list[Any] = []
exchanges: list[Any] = []
calls = [0]
queues: list[str] = []
_send, _receive, _start_exchange, _take = Channel.send, Channel.receive, Exchange.start, Flow.take
_queues_of = connections.queues_of


def send(channel: Channel, *arguments: Any) -> Any:
    under_way.append(_send(channel, *arguments))
    return under_way[-1]


def receive(channel: Channel, *arguments: Any) -> Any:
    under_way.append(_receive(channel, *arguments))
    return under_way[-1]


def start_exchange(exchange: Exchange, row: Any) -> None:
    _start_exchange(exchange, row)
    exchanges.append(exchange._gathering[0])


def synchronize(device: object = None) -> None:
    calls[0] += 1
    for transfer in under_way:
        waiting = Thread(target=transfer.finish, daemon=True)
        waiting.start()
        waiting.join(HANGS_AFTER.total_seconds())
        if waiting.is_alive():
            print(f"STANDS STILL: {len(under_way)} messages under way never come to their end", flush=True)
            os._exit(1)
    for work in exchanges:
        work.wait(HANGS_AFTER)
    under_way.clear()
    exchanges.clear()


def take(flow: Flow, step: Step) -> None:
    synchronize()
    _take(flow, step)


def queues_of(*arguments: Any) -> Any:
    queues.append(_queues_of(*arguments))
    return queues[-1]


if AHEAD:
    sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
    from synchronised_cases import PostedAhead

    from evenpipe.megatron.schedule import PipelineSchedule

    _program = PipelineSchedule.program

    def program(schedule: PipelineSchedule, *sizes: int) -> PostedAhead:
        found = _program(schedule, *sizes)
        return PostedAhead(found.schedule, found.pairs)

    PipelineSchedule.program = program  # type: ignore[method-assign]
if "--timing-log-level" not in sys.argv:
    Flow.take = take
Channel.send, Channel.receive = send, receive
Exchange.start = start_exchange
torch.cuda.synchronize = synchronize
connections.queues_of = queues_of
sys.argv[0] = "pretrain_gpt.py"
runpy.run_path("pretrain_gpt.py", run_name="__main__")
print(f"SYNCHRONISED {calls[0]} {' '.join(queues)}", flush=True)
