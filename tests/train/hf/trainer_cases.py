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


class Accuracy:
    """The share of labels that are predicted; with `compute_result` of batch after batch."""

    def __init__(self) -> None:
        self.right = self.counted = 0
        self.shapes: list[list[int]] = []

    def __call__(self, found: Any, compute_result: bool = True) -> dict[str, Any]:
        predicted, labels = (torch.as_tensor(one) for one in (found.predictions, found.label_ids))
        self.shapes.append([*predicted.shape, *labels.shape])
        counts = labels[:, 1:] != -100
        self.right += int((predicted[:, :-1][counts] == labels[:, 1:][counts]).sum())
        self.counted += int(counts.sum())
        return {"accuracy": torch.tensor(self.right / self.counted)} if compute_result else {}


def likeliest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert logits.shape[:2] == labels.shape
    return logits.argmax(-1)


def computed(make: Any) -> dict[str, Any]:
    """Metrics of an incomplete evaluation, collected as a whole and batch by batch, by the trainer that is made."""
    found: dict[str, Any] = {}
    for name, more in {"whole": {"eval_accumulation_steps": 1}, "by batch": {"batch_eval_metrics": True}}.items():
        accuracy = Accuracy()
        trainer = make(compute_metrics=accuracy, preprocess_logits_for_metrics=likeliest, **more)
        found[name] = {key: one for key, one in trainer.evaluate(samples(5)[:13]).items() if "accuracy" in key}
        found[f"{name}, shapes"] = accuracy.shapes
        if hasattr(trainer, "close"):
            trainer.close()
    return found


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
    metrics = {"compute_metrics", "preprocess_logits_for_metrics"}

    def evaluating(**more: Any) -> Trainer:
        given = {name: more.pop(name) for name in metrics}
        args = arguments(folder, per_device_eval_batch_size=8, **more)
        return Trainer(MixtralForCausalLM.from_pretrained(folder / "trained"), args, data_collator=longest, **given)

    document = {
        "log": rows[:-1],
        "metrics": computed(evaluating),
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
    wrong = {
        "no metrics": refusal(failing(folder).evaluate, samples(5)[:8]),
        "no labels": refusal(failing(folder, label_names=["labels", "answers"]).evaluate, samples(5)[:8]),
        "nothing": refusal(failing(folder).evaluate),
        "nothing to train": refusal(failing(folder).train),
        "too few": refusal(PipelineTrainer(folder / "model", arguments(folder), samples(4)[:7]).train),
        "epoch": refusal(
            PipelineTrainer(folder / "model", arguments(folder), samples(4), None, longest, None, [Early()]).train
        ),
    }

    def evaluating(**more: Any) -> PipelineTrainer:
        given = {name: more.pop(name) for name in ("compute_metrics", "preprocess_logits_for_metrics")}
        return PipelineTrainer(folder / "trained", arguments(folder, **more), data_collator=longest, **given)

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
        "wrong": wrong,
        "half": half(folder),
        "loop": looped(folder),
        "metrics": computed(evaluating),
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


def looped(folder: Path) -> dict[str, Any]:
    """Trains in a loop of one's own, by `pipeline` and uncut; then saves, loads and generates."""
    from evenpipe.torch.hf import pipeline, save_pretrained, weightless_model

    batch = longest(samples(4)[:8])
    args, found = arguments(folder), weightless_model(folder / "model")
    wrong = refusal(pipeline, found, args, {name: one[:7] for name, one in batch.items()})
    piped = pipeline(found, args, batch, bpipe=True)
    uncut = MixtralForCausalLM.from_pretrained(folder / "model").train()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (piped, uncut)]
    losses: list[list[float]] = [[], []]
    for _ in range(3):
        loss = piped.step(batch)
        losses[0] += [] if loss is None else [loss.item()]
        parts = [uncut(**{name: one[at : at + 2] for name, one in batch.items()}).loss / 4 for at in (0, 2, 4, 6)]
        sum(parts).backward()
        losses[1].append(sum(part.item() for part in parts))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    save_pretrained(piped, found.model, folder / "looped")
    piped.close()
    prompt = {"input_ids": batch["input_ids"][:1, :4], "max_new_tokens": 4, "do_sample": False}
    models = [MixtralForCausalLM.from_pretrained(folder / "looped"), uncut.eval()]
    texts = [model.generate(**prompt).tolist() for model in models]
    return {"losses": losses, "texts": texts, "wrong": wrong, "last": piped.is_last}


def half(folder: Path) -> dict[str, Any]:
    """Trains in fp16 in a pipeline, and by a loop with torch's scaler in one process: the first step overflows."""
    from torch.optim.lr_scheduler import LinearLR

    from evenpipe.torch.hf import PipelineTrainer

    args = arguments(folder, fp16=True, num_train_epochs=3, warmup_steps=0, weight_decay=0.0)
    trainer = PipelineTrainer(folder / "model", args, samples(4), data_collator=longest)
    trainer._pipeline(next(trainer._training_batches(2, 0)))
    assert trainer._scaler is not None
    trainer._scaler.update(2.0**20)

    def unread() -> float:
        raise AssertionError("the host waits for its device to read the scale")

    trainer._scaler.get_scale = unread  # type: ignore[method-assign]
    trainer.train()
    del trainer._scaler.get_scale
    log = [[row[name] for name in ("loss", "learning_rate")] for row in trainer.log_history]
    model = MixtralForCausalLM.from_pretrained(folder / "model").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=6)
    scaler, rows, skipped = torch.amp.GradScaler("cpu", init_scale=2.0**20), samples(4), []
    losses = []
    for step in range(6):
        each = [longest(rows[at : at + 2]) for at in range(step % 2 * 8, step % 2 * 8 + 8, 2)]
        count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in each)
        optimizer.zero_grad()
        found = 0.0
        for one in each:
            with torch.autocast("cpu", torch.float16):
                loss = model(**one, num_items_in_batch=torch.tensor(count)).loss
            found += loss.item()
            scaler.scale(loss).backward()
        losses.append([found, optimizer.param_groups[0]["lr"]])
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < before)
        if not skipped[-1]:
            scheduler.step()
    scales = [trainer._scaler.get_scale(), scaler.get_scale()]
    trainer.close()
    return {"log": log, "own": losses, "skipped": skipped, "scales": scales}


def failing(folder: Path, **more: Any) -> Any:
    """Return a trainer whose metrics cannot be computed."""
    from evenpipe.torch.hf import PipelineTrainer

    def metrics(found: Any) -> dict[str, float]:
        return {"nothing": found.predictions[100000]}

    return PipelineTrainer(folder / "model", arguments(folder, **more), data_collator=longest, compute_metrics=metrics)


class Early(TrainerCallback):
    """Ends an epoch in its middle."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_epoch_stop = True


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
    make_plan, before = trainer._cut._plans.make, 0

    def make_and_watch(*given: Any) -> Any:
        nonlocal before
        found = make_plan(*given)
        before = private_kib()
        watching.start()
        return found

    watching = threading.Thread(target=watch)
    trainer._cut._plans.make = make_and_watch  # type: ignore[method-assign]
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
