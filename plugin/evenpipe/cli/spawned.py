"""What a spawned child (a checkpoint writer, say) imports in place of the script: EvenPipe for Megatron, then that.

`evenpipe run` names this module as the specification of `__main__`, and the script in EVENPIPE_SCRIPT, which children
inherit: `sys.argv[0]` is this file's while it is imported.
"""

import os
import runpy

# Nobody else imports this module: a child is as good as asking.
if script := os.environ.get("EVENPIPE_SCRIPT"):
    import evenpipe.megatron

    evenpipe.megatron.install()
    globals().update(runpy.run_path(script, run_name="__mp_main__"))
