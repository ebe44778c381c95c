"""What a retraining leaves: a checkpoint or an adapter, with a record of how it came about."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from ladderize.adapt.lora.write import write_adapter
from ladderize.adapt.methods import LORA
from ladderize.adapt.retrain.models import EMBEDDING, HEAD
from ladderize.adapt.retrain.state import METRICS, load_trained
from ladderize.adapt.retrain.trainer import Trainer, score
from ladderize.blocks import open_checkpoint, stored_dtype
from ladderize.console import Console, UserError, human_seconds, to_json
from ladderize.convert.checkpoint import fingerprint
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.convert.tensor_file import locate_tensors
from ladderize.layout import format_ranges

if TYPE_CHECKING:
    from ladderize.adapt.retrain.task import Task


def write_outcome(
    trainer: Trainer,
    task: "Task",
    out: str,
    identity: Mapping[str, Any],
    *,
    console: Console,
    overwrite: bool,
    verify: bool,
    revision: str | None,
) -> dict[str, Any]:
    """Choose the state, score it as it will be stored, and write it; returns the document (on the main process). All
    ranks call it."""
    progress, work = trainer.progress, trainer.folder
    if progress.best_step == 0:
        console.note("the held-out perplexity never got better than before the training; the last step is written")
    chosen = (task.options.write == "best" and progress.best_step) or progress.step
    heldout = score_stored(trainer, task, chosen)
    if not trainer.engine.ranks.is_main:
        return {}
    losses = read_metrics(work.metrics, "loss")
    if heldout:
        heldout = {"before": read_metrics(work.metrics, "heldout_perplexity")[0], **heldout}
    document = {
        "model": task.model,
        "out": out,
        "method": task.options.method,
        "layout": str(task.layout),
        **task.layout.to_config(),
        "layers": list(task.layers),
        "distill_from": task.options.distill_from,
        "data": [spec.text for spec in task.options.data],
        "steps": progress.step,
        "tokens": progress.tokens,
        "scored_tokens": progress.scored,
        "written_step": chosen,
        "training_seconds": progress.seconds,
        "loss": {"first": losses[0], "last": losses[-1]},
        "heldout_perplexity": heldout or None,
        "data_counts": trainer.stream.counts,
        "options": {**task.options.record(task.training), **task.options.settings(task.training)},
        "dtype": identity["dtype"],
        "fingerprints": {"model": identity["model"], "teacher": identity["teacher"]},
    }
    metrics = {METRICS: work.metrics.read_text()}
    if fingerprint(open_checkpoint(task.model, revision)) != identity["model"]:
        raise UserError(
            f"{task.model} has changed since the training began, and {work.folder} holds what was trained of it; put it"
            " back"
        )
    if task.options.method == LORA:
        return write_adapter(
            Path(out),
            task.lora,
            load_file(work.weights(chosen)),
            base=task.checkpoint,
            base_name=task.model,
            revision=revision,
            document=document,
            extra_files=metrics,
            overwrite=overwrite,
        )
    recorded = (
        "method",
        "distill_from",
        "data",
        "steps",
        "tokens",
        "scored_tokens",
        "loss",
        "heldout_perplexity",
        "options",
    )
    replaced = locate_tensors(work.weights(chosen))
    if HEAD in task.checkpoint.tensors and task.tied and EMBEDDING in replaced:
        replaced[HEAD] = replace(replaced[EMBEDDING], name=HEAD)  # this file has it twice
    convert_checkpoint(
        task.model,
        out,
        Recipe(),
        revision=revision,
        overwrite=overwrite,
        verify=verify,
        console=console,
        replace=replaced,
        record={"adaptation": {key: document[key] for key in recorded}},
        extra_files={"adaptation.json": to_json(document) + "\n", **metrics},
        note=card_note(document),
    )
    return document


def score_stored(trainer: Trainer, task: "Task", step: int) -> dict[str, Any]:
    """Perplexity of the held-out rows with the weights of ``step``, rounded as the file will hold them."""
    load_trained(trainer.folder.state_path(step), trainer.parameters)
    if task.options.method != LORA:  # an adapter is stored in fp32
        stored = getattr(torch, stored_dtype(task.checkpoint))
        with torch.no_grad():
            for parameter in trainer.parameters.values():
                parameter.copy_(parameter.to(stored))
    if not trainer.heldout:
        return {}
    scores = score(trainer.engine, trainer.heldout, trainer.options.micro_batch_size)
    return {"after": scores.perplexity, "tokens": scores.tokens}


def read_metrics(path: Path, key: str) -> list[float]:
    """The values of one metric, in order."""
    found = []
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line.get(key) is not None:
            found.append(line[key])
    return found


def card_note(document: Mapping[str, Any]) -> str:
    """How the weights came about, for the model card."""
    weight, heldout = document["options"]["objective"]["distill_weight"], document["heldout_perplexity"]
    teacher = f" and the predictions of `{document['distill_from']}` (weight {weight:g})" if weight else ""
    reached = (
        f", held-out perplexity {heldout['before']:.4f} before and {heldout['after']:.4f} after" if heldout else ""
    )
    return (
        f"**Retraining.** Layers {format_ranges(document['layers'])} were retrained (`{document['method']}`) on"
        f" {' and '.join(f'`{name}`' for name in document['data'])}{teacher}: {document['steps']:,} steps,"
        f" {document['tokens']:,} tokens, loss {document['loss']['first']:.4f} to"
        f" {document['loss']['last']:.4f}{reached}. `adaptation.json` and `metrics.jsonl` say more."
    )


def retraining_summary(document: Mapping[str, Any]) -> str:
    """What was reached, for people."""
    heldout, loss = document["heldout_perplexity"], document["loss"]
    lines = [
        f"{document['steps']:,} steps, {document['tokens']:,} tokens in {human_seconds(document['training_seconds'])};"
        f" loss {loss['first']:.4f} to {loss['last']:.4f}"
    ]
    if heldout:
        lines.append(
            f"held-out perplexity {heldout['before']:.4f} before, {heldout['after']:.4f} after (step"
            f" {document['written_step']}, as stored)"
        )
    return "\n".join(lines)
