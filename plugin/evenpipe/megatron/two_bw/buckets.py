"""Mark reductions of Megatron's gradient buckets as under way, where Megatron itself does not."""

from __future__ import annotations

from typing import Any

__all__ = ["say_what_is_under_way"]


def say_what_is_under_way(bucket: Any) -> None:
    """Have a group of buckets have a handle while it is reduced, as it has none with several optimizer instances.

    Their reduction is on a stream of its own, which `finish_grad_sync` waits for. It would be started twice.
    """
    start, finish = bucket.start_grad_sync, bucket.finish_grad_sync

    def started(*args: Any, **kwargs: Any) -> None:
        if bucket.grad_reduce_handle is None:
            start(*args, **kwargs)
            bucket.grad_reduce_handle = bucket.communication_stream

    def finished(*args: Any, **kwargs: Any) -> None:
        finish(*args, **kwargs)
        bucket.grad_reduce_handle = None

    bucket.start_grad_sync, bucket.finish_grad_sync = started, finished
