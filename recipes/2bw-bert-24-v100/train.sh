#!/usr/bin/env bash
# bert-24 on 4x8-v100-16gb: DeepSpeed with EvenPipe, started by DeepSpeed's launcher.
# launch.sh has every process run it.
# README.md says what this run is predicted to need, how fast it will be, and what would change that.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

# --- Yours: paths ---------------------------------------------------------------------------------
# Prefix of the .bin with the tokens, one after the other (data.py).
DATA=/data/tokens_text_document
# On a file system that all nodes see; a run goes on from here.
CHECKPOINTS=/data/checkpoints/bert-24

# --- Environment ----------------------------------------------------------------------------------
# Compute, each link and each group have a stream. With CUDA's 8 queues some would wait for others.
export CUDA_DEVICE_MAX_CONNECTIONS=32
# Micro-batches come and go in several sizes: segments that can grow leave fewer gaps.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# CPU threads of a process: with one for each core, a node has eight times too many.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# InfiniBand waits 17 s (4.1 µs × 2^22) for a busy switch before it gives a message up.
export NCCL_IB_TIMEOUT=22

# --- The run --------------------------------------------------------------------------------------
# The model.
MODEL=(
    --layers 24 --hidden 1024 --ffn 4096
    --heads 16
    --sequence 128 --vocabulary 30592
    --masked
)
# The pipeline: its batch, schedule and layers are in ds_config.json.
PIPELINE=(
    --stages 4 --recompute
)
# Yours: how it is trained; the optimizer is in ds_config.json.
TRAINING=(
    --iterations 500000 --seed 1234
)
# What is read and written.
FILES=(
    --data="$DATA"
    --checkpoints="$CHECKPOINTS" --save-interval 1000
    --deepspeed_config ds_config.json
)

exec python -u -m evenpipe run --deepspeed train.py \
    "${MODEL[@]}" "${PIPELINE[@]}" "${TRAINING[@]}" "${FILES[@]}"
