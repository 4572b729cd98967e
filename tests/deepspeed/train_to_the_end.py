"""Trains under 2bw with BPipe, and ends without a word, while one rank has something else to do."""

import time

import torch
import train_tiny  # the launcher puts this folder on the path

if __name__ == "__main__":
    torch.set_num_threads(1)
    train_tiny.deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    train_tiny.deepspeed.init_distributed(dist_backend="gloo")
    case = train_tiny.Case(4, {"evenpipe": {"schedule": "2bw", "bpipe": True}, "zero_optimization": {"stage": 1}})
    engine, data = train_tiny.engine_of(case)
    for _ in range(case.steps):
        engine.train_batch(data)
    if train_tiny.dist.get_rank() == 1:
        time.sleep(3)
