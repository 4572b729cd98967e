"""The process in which a model is profiled: options in on standard input, stages out on standard output, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator

__all__ = ["main"]


def main() -> None:
    """Profile what is asked for. Whatever goes wrong ends the process with a traceback, its last line the error's."""
    asked = json.load(sys.stdin)
    os.environ.update(CUDA_VISIBLE_DEVICES="", CUDA_DEVICE_MAX_CONNECTIONS="1")
    with contextlib.redirect_stdout(sys.stderr), _traceback_as_it_is():
        from evenpipe.megatron.profile.stages import profile, without_memory
        from evenpipe.train.options import TrainOptions

        without_memory(asked["device"])
        # Checked by whoever asks.
        found = [profile(TrainOptions.model_construct(**options)) for options in asked["cases"]]
    print(json.dumps(found))


@contextlib.contextmanager
def _traceback_as_it_is() -> Iterator[None]:
    """torch.distributed would put the rank before each of its lines."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
