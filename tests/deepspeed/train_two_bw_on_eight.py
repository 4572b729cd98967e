"""Trains as train_two_bw does, on eight ranks: two stages of two model-parallel ranks, twice."""

from __future__ import annotations

import sys
from pathlib import Path

import train_tiny
from train_two_bw import train

train_tiny.RANKS = 8

if __name__ == "__main__":
    train_tiny.run(train, Path(sys.argv[1]), Path(sys.argv[2]))
