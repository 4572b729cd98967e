"""A pytest plugin for DeepSpeed's own tests: their pipeline engines get the section that EVENPIPE_SECTION holds.

Without that variable they stay stock. How to run them: CONTRIBUTING.md.
"""

import functools
import inspect
import json
import os
from multiprocessing import set_forkserver_preload

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

import evenpipe.deepspeed

evenpipe.deepspeed.install()


def _with_the_section(section):
    """Wraps `deepspeed.initialize`."""
    evenpipes = deepspeed.initialize

    @functools.wraps(evenpipes)
    def initialize(*args, **kwargs):
        call = inspect.signature(evenpipes).bind(*args, **kwargs)
        model = call.arguments.get("model")
        if type(model) is not PipelineModule or model.num_stages < 2:
            return evenpipes(*args, **kwargs)
        call.arguments["config"] = {**call.arguments["config"], "evenpipe": section}
        made = evenpipes(*call.args, **call.kwargs)
        assert type(made[0]).__name__ == "EvenPipeEngine"
        print(f"EvenPipe's engine on rank {made[0].global_rank}: {section}")  # so this module was loaded
        return made

    return initialize


# Their tests run in processes forked from a server, which loads this module first.
set_forkserver_preload([__name__])
# DeepSpeed would compile a shared-memory all-reduce; gloo's does as well.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# Their helper for Cifar10 forks the random state of the device by functions that torch.cpu does not have.
torch.cpu.get_rng_state = lambda device: torch.get_rng_state()
torch.cpu.set_rng_state = lambda state, device: torch.set_rng_state(state)
if "EVENPIPE_SECTION" in os.environ:
    deepspeed.initialize = _with_the_section(json.loads(os.environ["EVENPIPE_SECTION"]))
