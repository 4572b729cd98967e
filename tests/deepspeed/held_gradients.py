"""Trains as train_tiny does, under 2bw, on eight ranks: what waits on each for its step when a batch has ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import train_tiny
from train_tiny import Case, engine_of, run

train_tiny.RANKS = 8


def train(given: dict[str, Any]) -> dict[str, Any]:
    engine, data = engine_of(Case(**given))
    for _ in range(2):
        engine.train_batch(data_iter=data)
    optimizer, gradients = engine.optimizer, engine.two_bw.gradients
    kept = [*getattr(gradients, "_shards", ())]
    kept += [gradient for _, gradient in gradients._own.kept] if hasattr(gradients, "_own") else []
    tied = getattr(gradients, "_tied", {}).values()
    kept += [one.whole for one in tied]
    kept += [one for pieces in getattr(optimizer, "averaged_gradients", {}).values() for one in pieces]
    theirs = {one.untyped_storage().data_ptr() for one in getattr(optimizer, "fp32_groups_gradients_flat", ())}
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
    found = {
        "stage": engine.stage_id,
        "gradients": type(gradients).__name__,
        "parameters": sum(one.numel() for one in engine.module.parameters()),
        "tied": sum(one.whole.nbytes for one in tied if one.whole is not one.own),
        "held": sum(nbytes for address, nbytes in storages.items() if address not in theirs),
        "said": engine.two_bw.gradients.held_bytes,
    }
    engine.destroy()
    return found


if __name__ == "__main__":
    run(train, Path(sys.argv[1]), Path(sys.argv[2]))
