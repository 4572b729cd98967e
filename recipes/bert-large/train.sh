#!/usr/bin/env bash
# bert-large on 2x8-a100-80gb-100gbit: Megatron-LM 0.16 with EvenPipe, started by torchrun.
# On each of the 2 nodes, N from 0 to 1:  MASTER_ADDR=<node 0> NODE_RANK=<N> bash train.sh
# README.md says what this run is predicted to need, how fast it will be, and what would change that.
set -euo pipefail

# --- Yours: paths ---------------------------------------------------------------------------------
# A checkout of Megatron-LM 0.16, on every node.
MEGATRON_LM=/opt/Megatron-LM
# Prefix of the .bin and .idx that tools/preprocess_data.py of Megatron-LM writes.
DATA=/data/tokens_text_document
# The vocabulary, a word a line.
TOKENIZER=/data/vocab.txt
# On a file system that all nodes see; a run goes on from here.
CHECKPOINTS=/data/checkpoints/bert-large

# --- Yours: nodes ---------------------------------------------------------------------------------
NODES=2
GPUS_PER_NODE=8
# Which of them this is.
NODE_RANK=${NODE_RANK:?"which node is this, from 0 to 1?"}
# Where they meet.
MASTER_ADDR=${MASTER_ADDR:?"name or address of node 0, as the others know it"}
# Free on node 0, and the same on all.
MASTER_PORT=${MASTER_PORT:-29500}

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
    --num-layers 24 --hidden-size 1024 --ffn-hidden-size 4096
    --num-attention-heads 16
    --seq-length 512 --max-position-embeddings 512
)
# How the model and the batch are divided.
PARALLEL=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 2
    --pipeline-model-parallel-layout 'Et*14|t*10L'
    --micro-batch-size 8 --global-batch-size 1024
    --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
)
# The schedule of the pipeline.
EVENPIPE=(
    --evenpipe-schedule kfkb --group-size 3
)
# What is saved for the backward, and in which precision.
MEMORY=(
    --bf16
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
    --tokenizer-type BertWordPieceLowerCase --vocab-file="$TOKENIZER" --legacy-tokenizer
    --save="$CHECKPOINTS" --load="$CHECKPOINTS"
    --save-interval 1000
)

exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    -m evenpipe run "$MEGATRON_LM/pretrain_bert.py" \
    "${MODEL[@]}" "${PARALLEL[@]}" "${EVENPIPE[@]}" "${MEMORY[@]}" "${TRAINING[@]}" "${FILES[@]}"
