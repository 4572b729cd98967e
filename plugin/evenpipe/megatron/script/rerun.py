"""What a spawned child (a checkpoint writer, say) imports in place of the script: the same drop-in, then the script.

`evenpipe run` names this module as the specification of `__main__`, and the script in EVENPIPE_SCRIPT, which children
inherit: `sys.argv[0]` is this file's while it is imported.
"""

import os
import runpy

import evenpipe.megatron  # noqa: F401

globals().update(runpy.run_path(os.environ["EVENPIPE_SCRIPT"], run_name="__mp_main__"))
