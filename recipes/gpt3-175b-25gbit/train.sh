#!/usr/bin/env bash
# gpt3-175b on 16x8-a100-80gb-25gbit: Megatron-LM 0.16 with EvenPipe, started by Slurm.
# launch.sbatch runs it once on each node.
# README.md says what this run is predicted to need, how fast it will be, and what would change that.
set -euo pipefail

# --- Yours: paths ---------------------------------------------------------------------------------
# A checkout of Megatron-LM 0.16, on every node.
MEGATRON_LM=/opt/Megatron-LM
# Prefix of the .bin and .idx that tools/preprocess_data.py of Megatron-LM writes.
DATA=/data/tokens_text_document
# Folder of the Hugging Face tokenizer.
TOKENIZER=/data/tokenizer
# On a file system that all nodes see; a run goes on from here.
CHECKPOINTS=/data/checkpoints/gpt3-175b

# --- Yours: nodes ---------------------------------------------------------------------------------
NODES=16
GPUS_PER_NODE=8
# Set by Slurm, and the others by launch.sbatch.
NODE_RANK=${SLURM_NODEID:?"is set by srun: start launch.sbatch"}
MASTER_ADDR=${MASTER_ADDR:?"is set by launch.sbatch"}
MASTER_PORT=${MASTER_PORT:?"is set by launch.sbatch"}

# --- Environment ----------------------------------------------------------------------------------
# One queue for kernels: a collective of tensor parallelism starts before the matrix product that hides
# it. Megatron asks for it on all GPUs before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# Micro-batches come and go in several sizes: segments that can grow leave fewer gaps.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# CPU threads of a process: with one for each core, a node has eight times too many.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# InfiniBand waits 17 s (4.1 µs × 2^22) for a busy switch before it gives a message up.
export NCCL_IB_TIMEOUT=22

# --- The run --------------------------------------------------------------------------------------
# The model.
MODEL=(
    --num-layers 96 --hidden-size 12288 --ffn-hidden-size 49152
    --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048
)
# How the model and the batch are divided.
PARALLEL=(
    --tensor-model-parallel-size 4 --sequence-parallel
    --pipeline-model-parallel-size 16
    --micro-batch-size 1 --global-batch-size 512
    --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
)
# The schedule of the pipeline.
EVENPIPE=(
    --evenpipe-schedule kfkb --group-size 2
)
# What is saved for the backward, and in which precision.
MEMORY=(
    --bf16
    --recompute-modules layernorm
    --recompute-granularity selective
)
# Yours: how it is trained.
TRAINING=(
    --train-iters 500000 --seed 1234
    --lr 0.00015 --min-lr 1.5e-05 --lr-decay-style cosine
    --lr-decay-iters 500000 --override-opt_param-scheduler
    --lr-warmup-iters 2000
    --weight-decay 0.1 --clip-grad 1
    --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.02
    --log-interval 10 --log-throughput
    --eval-interval 1000 --eval-iters 10
)
# What is read and written.
FILES=(
    --data-path="$DATA" --split '99,1,0'
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model="$TOKENIZER"
    --save="$CHECKPOINTS" --load="$CHECKPOINTS"
    --save-interval 1000
)

exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    -m evenpipe run "$MEGATRON_LM/pretrain_gpt.py" \
    "${MODEL[@]}" "${PARALLEL[@]}" "${EVENPIPE[@]}" "${MEMORY[@]}" "${TRAINING[@]}" "${FILES[@]}"
