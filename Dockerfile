# EvenPipe in NVIDIA's PyTorch container, with Megatron-LM. Untested: it has not been built, since that takes a machine
# with Docker, tens of GB and a network. `tests/test_agents.py` checks its words alone.
#
#   docker build -t evenpipe .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 evenpipe \
#       torchrun --nproc-per-node 8 -m evenpipe run pretrain_gpt.py <your flags> --bpipe
#
# Any tag whose torch is 2.10 or newer will do; those have Transformer Engine and NCCL.
ARG PYTORCH=25.12-py3
FROM nvcr.io/nvidia/pytorch:${PYTORCH}

ARG MEGATRON_LM=core_v0.16.1
RUN git clone --depth 1 --branch "${MEGATRON_LM}" https://github.com/NVIDIA/Megatron-LM /opt/Megatron-LM
ENV PYTHONPATH=/opt/Megatron-LM

# Without dependencies: the container's torch, a pre-release by its version, stays. What it may lack is small.
COPY . /opt/evenpipe
# Versions are not pinned: what the container has already satisfies these, and stays.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-deps /opt/evenpipe \
    && pip install --no-cache-dir 'pydantic>=2' pyyaml jinja2 rich matplotlib 'bokeh>=3.8,<4' \
    && evenpipe patches --check /opt/Megatron-LM

WORKDIR /opt/Megatron-LM
CMD ["evenpipe", "doctor"]
