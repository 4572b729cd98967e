"""What a spawned child (a checkpoint writer, say) imports in place of the script: the same drop-in, then the script.

`evenpipe run` names this module as the specification of `__main__`, and multiprocessing hands `sys.argv` on.
"""

import runpy
import sys

import evenpipe.megatron  # noqa: F401

globals().update(runpy.run_path(sys.argv[0], run_name="__mp_main__"))
