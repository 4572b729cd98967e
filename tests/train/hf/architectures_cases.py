"""Trains tiny models by `PipelineTrainer` on two ranks, and whole in one of them: `FOLDER NAME,..`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from evenpipe.stage_code import drawing
from tests.partition.code.test_architectures import ALWAYS, LONG, SIZE, inputs_of

PARTS, STEPS = 2, 2


def samples_of(name: str) -> list[dict[str, Any]]:
    """As many as a training takes."""
    torch.manual_seed(1)
    batches = [inputs_of(name) for _ in range(PARTS * STEPS)]
    return [
        {key: one[row] if isinstance(one, torch.Tensor) else one for key, one in batch.items()}
        for batch in batches
        for row in range(SIZE)
    ]


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: torch.stack([row[key] for row in rows]) if isinstance(one, torch.Tensor) else one
        for key, one in rows[0].items()
    }


def trained(folder: Path, name: str) -> dict[str, Any]:
    from evenpipe.torch.hf import PipelineTrainer

    rows = samples_of(name)
    args = transformers.TrainingArguments(
        output_dir=str(folder / "trained"),
        use_cpu=True,
        per_device_train_batch_size=SIZE,
        gradient_accumulation_steps=PARTS,
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        train_sampling_strategy="sequential",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        architecture, fields = (ALWAYS | LONG)[name]
        getattr(transformers, architecture)(transformers.CONFIG_MAPPING[name](**fields)).save_pretrained(folder)
    dist.barrier()
    trainer = PipelineTrainer(folder, args, rows, rows, collate)
    trainer.train()
    losses = [row["loss"] for row in trainer.log_history]
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    held = {id(one): one for one in trainer.model.state_dict(keep_vars=True).values()}.values()
    share = sum(one.nbytes for one in held if not one.is_meta) / sum(one.nbytes for one in held)
    trainer.close()
    return {"losses": losses, "evaluated": loss, "share": share}


def whole(folder: Path, name: str) -> dict[str, Any]:
    """The losses of the same training in one process, and what `from_pretrained` loads of the pipeline's."""
    kind, rows = getattr(transformers, (ALWAYS | LONG)[name][0]), samples_of(name)
    batches = [collate(rows[at : at + SIZE]) for at in range(0, len(rows), SIZE)]
    model = kind.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number in range(step * PARTS, step * PARTS + PARTS):
            with drawing(42, number):  # `TrainingArguments.seed`
                loss = model(**batches[number]).loss / PARTS
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    loaded, wrong = kind.from_pretrained(folder / "trained", output_loading_info=True)
    with torch.no_grad():
        of_own, of_loaded = (
            sum(one(**batch).loss.item() for batch in batches) / len(batches) for one in (model.eval(), loaded.eval())
        )
    found = {"losses": losses, "evaluated": of_own, "loaded": of_loaded, "wrong": _named(wrong)}
    if loaded.can_generate() and set(batches[0]) == {"input_ids", "attention_mask", "labels"}:
        tokens = batches[0]["input_ids"]
        found["generated"] = loaded.generate(tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape[0]
    return found


def _named(wrong: Mapping[str, Any]) -> dict[str, list[str]]:
    return {name: sorted(map(str, found)) for name, found in wrong.items() if found}


def main(folder: Path, names: list[str]) -> None:
    dist.init_process_group("gloo")
    document = {}
    for name in names:
        document[name] = {"pipeline": trained(folder / name, name)}
        if dist.get_rank() == 0:
            document[name]["whole"] = whole(folder / name, name)
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(document))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2].split(","))
