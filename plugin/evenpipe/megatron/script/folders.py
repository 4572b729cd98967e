"""Where Megatron puts the folders of its checkpoints, and finds them again."""

from __future__ import annotations

import os
from argparse import Namespace

__all__ = ["folder_of", "folders_loaded_from"]


def folder_of(args: Namespace, non_persistent: bool) -> str:
    """Where Megatron puts the folders of its checkpoints."""
    if not non_persistent:
        return str(args.save)
    return str(args.non_persistent_global_ckpt_dir or os.path.join(args.save, "non_persistent"))


def folders_loaded_from(args: Namespace) -> list[str]:
    """Where Megatron has looked for what it loaded."""
    return [
        folder
        for folder in (args.load, os.path.join(args.load, "non_persistent"), args.non_persistent_global_ckpt_dir)
        if folder
    ]
