"""A Mixtral by `PipelineTrainer` on two ranks (`pipeline`), and by transformers' own in one process (`own`).

`make` writes the model first; both write what they logged to FOLDER.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

WIDTH = 64


def samples(first: int) -> list[dict[str, list[int]]]:
    """Sixteen of them, the short ones first; some labels count nothing."""
    drawn = torch.Generator().manual_seed(first)
    rows = []
    for number in range(16):
        tokens = torch.randint(3, WIDTH, (first + 2 * (number // 8 * 6 + number % 4),), generator=drawn).tolist()
        rows.append({"input_ids": tokens, "labels": [-100] * 2 + tokens[2:], "attention_mask": [1] * len(tokens)})
    return rows


def longest(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pads to the longest."""
    to = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {name: torch.tensor([row[name] + [fill[name]] * (to - len(row[name])) for row in rows]) for name in fill}


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(folder / "trained"),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "warmup_steps": 1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(**given | more)


def make(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64}
    config = MixtralConfig(vocab_size=WIDTH, pad_token_id=0, **sizes)
    MixtralForCausalLM(config).save_pretrained(folder / "model")


def own(folder: Path) -> None:
    from transformers import Trainer

    model = MixtralForCausalLM.from_pretrained(folder / "model")
    trainer = Trainer(model, arguments(folder), train_dataset=samples(4), data_collator=longest)
    trainer.train()
    rows = [
        {name: row.get(name) for name in ("loss", "grad_norm", "learning_rate")} for row in trainer.state.log_history
    ]
    trained, other = MixtralForCausalLM.from_pretrained(folder / "trained", output_loading_info=True)
    ours, theirs = trained.state_dict(), model.state_dict()
    losses = [trainer.evaluate(samples(5)[at : at + 8])["eval_loss"] for at in (0, 8)]
    document = {
        "log": rows[:-1],
        "eval": losses,
        "wrong": {name: sorted(map(str, found)) for name, found in other.items() if found},
        "off": max(float((ours[name] - theirs[name]).abs().max()) for name in theirs),
        "moved": max(
            float((MixtralForCausalLM.from_pretrained(folder / "model").state_dict()[name] - one).abs().max())
            for name, one in theirs.items()
        ),
    }
    (folder / "own.json").write_text(json.dumps(document))


def pipeline(folder: Path) -> None:
    from evenpipe.partition.models import ModelError
    from evenpipe.torch.hf import PipelineTrainer

    refused = ""
    try:
        PipelineTrainer(folder / "model", arguments(folder, gradient_checkpointing=True))
    except ModelError as error:
        refused = str(error)
    trainer = PipelineTrainer(folder / "model", arguments(folder), samples(4), data_collator=longest)
    trained = trainer.train()
    log = list(trainer.log_history)
    losses = [trainer.evaluate(samples(5)[at : at + 8])["eval_loss"] for at in (0, 8)]
    incomplete = trainer.evaluate(samples(5)[:3])["eval_loss"]
    trainer.save_model()
    held = {id(one): one for one in trainer.model.state_dict(keep_vars=True).values()}.values()
    document = {
        "log": log,
        "eval": losses,
        "incomplete": incomplete,
        "steps": trained.global_step,
        "plans": len(trainer._pipelines),
        "held": sum(one.nbytes for one in held if not one.is_meta),
        "whole": sum(one.nbytes for one in held),
        "refused": refused,
    }
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(document))
    trainer.close()
    dist.destroy_process_group()


def refusal(call: Any, *given: Any, **named: Any) -> str:
    from evenpipe.partition.models import ModelError

    try:
        call(*given, **named)
    except ModelError as error:
        return str(error)
    return ""


class Recording(TrainerCallback):
    """Notes events; on the second rank alone it ends the training after `last` steps."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.events: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append(f"step {state.global_step}")
        control.should_training_stop = dist.get_rank() == 1 and state.global_step >= self.last

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **more: Any) -> None:
        self.events.append("evaluate")

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append(f"save {state.global_step}")


def replicas(folder: Path) -> None:
    """Two pipelines of two stages: a training, and one that is stopped and goes on."""
    from evenpipe.torch.hf import PipelineTrainer

    found: dict[str, Any] = {}
    saving = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3}

    def made(name: str, *callbacks: Any, **more: Any) -> PipelineTrainer:
        args = arguments(folder, output_dir=str(folder / name), **saving | more)
        data = samples(4), samples(5)
        return PipelineTrainer(folder / "model", args, *data, longest, callbacks=callbacks, stages=2)

    recording = Recording(9)
    trainer = made("whole", recording, eval_strategy="epoch")
    trainer.train()
    found["log"], found["events"] = trainer.log_history, recording.events
    trainer.close()
    found["absent"] = refusal(made("stopped").train, True)
    stopped = made("stopped", Recording(3))
    found["stopped"] = stopped.train().global_step
    stopped.close()
    resumed = made("stopped")
    found["resumed"], found["rest"] = resumed.train(True).global_step, resumed.log_history
    resumed.close()
    found["stages"] = refusal(PipelineTrainer, folder / "model", arguments(folder), samples(4), stages=3)
    found["data"] = refusal(PipelineTrainer, folder / "model", arguments(folder, eval_strategy="epoch"), samples(4))
    (folder / f"replicas-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def make_large(folder: Path) -> None:
    """455 MiB, so that the process's own memory hardly counts."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=8000, max_position_embeddings=64, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "large", max_shard_size="200MB")


def memory(folder: Path) -> None:
    """The most memory that each rank takes while its stage is loaded, over the stage's."""
    from evenpipe.torch.hf import PipelineTrainer

    def private_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, private_kib())

    rows = [{"input_ids": [*range(3, 19)], "labels": [*range(3, 19)]}] * 8
    trainer = PipelineTrainer(folder / "large", arguments(folder), rows)
    make_plan, before = trainer._plans.make, 0

    def make_and_watch(*given: Any) -> Any:
        nonlocal before
        found = make_plan(*given)
        before = private_kib()
        watching.start()
        return found

    watching = threading.Thread(target=watch)
    trainer._plans.make = make_and_watch  # type: ignore[method-assign]
    pipeline, _ = trainer._pipeline(trainer._batch(rows, range(8)))
    done.set()
    watching.join()
    stage = sum(one.nbytes for one in pipeline.parameters()) / 1024
    (folder / f"memory-{dist.get_rank()}.json").write_text(json.dumps((most - before) / stage))
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    modes = {"make": make, "own": own, "pipeline": pipeline, "make large": make_large, "memory": memory}
    modes["replicas"] = replicas
    modes[sys.argv[1]](Path(sys.argv[2]))
