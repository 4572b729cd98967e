"""Trains as train_experts does, on eight ranks: two stages of four replicas, of which two have the same experts."""

from __future__ import annotations

import sys
from pathlib import Path

import train_tiny
from train_experts import train

train_tiny.RANKS = 8

if __name__ == "__main__":
    train_tiny.run(train, Path(sys.argv[1]), Path(sys.argv[2]))
