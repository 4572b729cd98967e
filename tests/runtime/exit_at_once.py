"""Ends right after a collective of very many tensors, which gloo's thread has just begun to drop."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
kept = [torch.ones(1) for _ in range(30_000)]
sys.setswitchinterval(100.0)  # seconds that the thread waits before it asks for the GIL
dist.all_reduce_coalesced(kept)
