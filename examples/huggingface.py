"""Models of Hugging Face's, cut as they are: torchrun --nproc-per-node 4 examples/huggingface.py gpt2|bert|t5 P.json"""

import os
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from evenpipe.partition.dawnpiper.copies import Workload
from evenpipe.partition.profiling import profile
from evenpipe.partition.search.finding import find_plan
from evenpipe.partition.timing import Measured
from evenpipe.partition.trace import trace
from evenpipe.stage_code import write_stages
from evenpipe.torch.planned import PlannedPipeline

SIZE = {"vocab_size": 256, "use_cache": False, "attn_implementation": "eager"}
BERT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=4, n_head=4, **SIZE)),
    "bert": lambda: BertForMaskedLM(BertConfig(**BERT, **SIZE)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5, **SIZE)),
}

parser = ArgumentParser(prog="huggingface.py", description=__doc__)
parser.add_argument("model", choices=MODELS)
parser.add_argument("plan", type=Path, help="where the plan goes, and the code of its stages beside it")
parser.error = lambda said: parser.exit(2, f"huggingface.py: {said} (see --help)\n")  # in one line
given = parser.parse_args()
if "RANK" not in os.environ:
    parser.error("a stage is a process: start it by torchrun --nproc-per-node N")
dist.init_process_group("gloo")
torch.manual_seed(0)
name, path = given.model, given.plan
model = MODELS[name]().train()
tokens = torch.randint(256, (8 * 2, 32))  # eight micro-batches of two samples
if dist.get_rank() == 0:  # once; another run of the same model needs the files alone
    graph = trace(model, {"input_ids": tokens[:2], "labels": tokens[:2]})
    nodes = profile(graph, Measured(torch.device("cpu")), name)
    plan = find_plan(nodes, Workload("1f1b", micro_batches=8), stages=dist.get_world_size(), limit_bytes=40 << 30)
    write_stages(graph, nodes, plan, path)  # and the plan, with digests of their code
dist.barrier()
pipeline = PlannedPipeline(path, model, measure=True)
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
for iteration in range(5):
    optimizer.zero_grad()
    loss = pipeline.step({"input_ids": tokens, "labels": tokens})
    optimizer.step()
    if loss is not None:  # where the model ends
        print(f"iteration {iteration}: loss {loss.item():.6f}")
for line in pipeline.truth(optimizer):  # what every stage was to take, and took
    print(line)
state = pipeline.full_state_dict()
if state is not None:  # the first stage has the uncut model's
    model.load_state_dict(state)
