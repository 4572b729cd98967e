"""`pretrain_gpt.py` of the checkout it is started in, with a loader whose samples have lengths of their own."""

import runpy
import sys
from typing import Any

import megatron.core  # noqa: F401  CPU mode has put its own in place by then
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training import arguments

lengths = set[int]()
_config, _sample = arguments.core_transformer_config_from_args, GPTDataset.__getitem__


def config(*given: Any, **named: Any) -> Any:
    """Megatron has no flag for it: whoever has such a loader says so."""
    made = _config(*given, **named)
    made.variable_seq_lengths = True
    return made


def sample(dataset: GPTDataset, number: int | None) -> Any:
    found = _sample(dataset, number)
    length = found["tokens"].numel() - 8 * ((number or 0) % 5)
    lengths.add(length)
    masks = {"attention_mask": found.pop("attention_mask")[..., :length, :length]} if "attention_mask" in found else {}
    return {name: each[:length] for name, each in found.items()} | masks


arguments.core_transformer_config_from_args = config
GPTDataset.__getitem__ = sample
sys.argv[0] = "pretrain_gpt.py"
runpy.run_path("pretrain_gpt.py", run_name="__main__")
print(f"LENGTHS {len(lengths)}", flush=True)
