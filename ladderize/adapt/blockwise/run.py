"""``ladderize adapt --method blocks``: distil a converted checkpoint's blocks one by one, and write the checkpoint
anew."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ladderize import data
from ladderize.adapt.blockwise.distill import (
    TOKENS_PER_STEP,
    DistillOptions,
    Student,
    Windows,
    distill,
    estimate,
    trainable_layers,
)
from ladderize.adapt.blockwise.folder import BlockFolder
from ladderize.blocks import Blocks, open_checkpoint, read_windows, stored_dtype, window_nlls
from ladderize.console import Console, UserError, human_bytes, human_seconds, to_json
from ladderize.convert.checkpoint import Checkpoint, dense_function, fingerprint
from ladderize.convert.llama import expected_tensors
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.eval.perplexity import perplexity_from_nlls
from ladderize.files import output
from ladderize.files.work import work_folder
from ladderize.layout import Layout, format_ranges, parse_ranges
from ladderize.ranks.group import join_ranks
from ladderize.ranks.training import check_launch_of_blocks, compute_dtype

# Without --samples: so many windows at most, since a block sees each several times.
SAMPLES, HELDOUT = 1024, 64


@dataclass(frozen=True)
class BlockwiseOptions:
    """See ``ladderize adapt --help``. samples, heldout: windows to train on and others to measure on; None: what the
    data give, up to ``SAMPLES`` and ``HELDOUT``. layers: ranges; None: every layer that computes something else than
    the teacher's."""

    data: str
    samples: int | None = None
    heldout: int | None = None
    seq_len: int | None = None
    layers: str | None = None
    distill: DistillOptions = field(default_factory=DistillOptions)
    dtype: str = "auto"
    device: str = "cpu"
    work_dir: Path | None = None


def training_windows(checkpoint: Checkpoint, options: BlockwiseOptions) -> Windows:
    """Full windows for training and others that are held out. Raises UserError where the data give too few."""
    seed = options.distill.seed
    if options.samples is not None and options.heldout is not None:
        drawn = read_windows(
            checkpoint, options.data, seq_len=options.seq_len, samples=options.samples + options.heldout, seed=seed
        )
    else:
        drawn = read_windows(checkpoint, options.data, seq_len=options.seq_len, samples=None, seed=seed)
    heldout = options.heldout or min(HELDOUT, max(1, len(drawn) // 10))
    samples = options.samples or min(SAMPLES, len(drawn) - heldout)
    if samples < 1 or samples + heldout > len(drawn):
        raise UserError(
            f"{options.data} gives {len(drawn)} windows of {drawn.shape[1]} tokens, too few for {max(1, samples)} to"
            f" train on and {heldout} held out; give more data, or lower --samples, --heldout or --seq-len"
        )
    ids = torch.from_numpy(drawn)
    return Windows(ids[:samples], ids[samples : samples + heldout])


def heldout_perplexities(
    blocks: Blocks, variants: Mapping[str, Callable[[int], torch.nn.Module]], ids: torch.Tensor
) -> dict[str, Any]:
    """Perplexity of held-out windows under variants of a model, each given by its layers; one layer in memory at a
    time."""
    batch_size = max(1, 2 * TOKENS_PER_STEP // ids.shape[1])
    results = {}
    for name, layer_at in variants.items():
        begin = time.perf_counter()
        nlls = window_nlls(blocks, layer_at, ids, batch_size=batch_size).numpy()
        results[name] = vars(perplexity_from_nlls(nlls, list(ids.numpy()), time.perf_counter() - begin))
    return results


def announce(teacher: Blocks, student: Student, windows: Windows, options: BlockwiseOptions, console: Console) -> None:
    """Say what the training will take before it starts."""
    seconds, states, training = estimate(teacher, student, windows, options.distill)
    train, heldout = len(windows.train), len(windows.heldout)
    place = "in memory" if states <= options.distill.max_memory else "on disk"
    console.note(
        f"distilling {len(student.layers)} blocks on {train} windows of {windows.train.shape[1]} tokens, {heldout} held"
        f" out: at most about {human_seconds(seconds)} for {options.distill.epochs} epochs on {teacher.device},"
        f" {human_bytes(states)} of states {place}, {human_bytes(training)} for one block in training"
    )


def adapt_blocks(
    model: str,
    out: str,
    teacher_name: str,
    options: BlockwiseOptions,
    *,
    console: Console,
    overwrite: bool = False,
    verify: bool = True,
    revision: str | None = None,
) -> dict[str, Any]:
    """Distil ``model``'s blocks against the dense ``teacher_name`` and write the result to ``out``; returns what was
    done.

    Several processes (accelerate launch, torchrun) share the blocks out; rank 0 writes. A killed run goes on where it
    was.
    """
    check_launch_of_blocks()
    ranks = join_ranks(options.device)
    student_checkpoint, teacher_checkpoint = open_checkpoint(model, revision), open_checkpoint(teacher_name)
    layout = check_pair(student_checkpoint, teacher_checkpoint, model, teacher_name)
    layers = chosen_layers(layout, options.layers)
    for checkpoint in (student_checkpoint, teacher_checkpoint):
        output.check_target(Path(out), checkpoint.folder, overwrite=overwrite)
    folder = work_folder(out, options.work_dir, student_checkpoint.folder, teacher_checkpoint.folder)
    windows = training_windows(teacher_checkpoint, options)
    dtype = compute_dtype(options.dtype, stored_dtype(teacher_checkpoint))
    teacher, own = (Blocks(checkpoint, dtype, ranks.device) for checkpoint in (teacher_checkpoint, student_checkpoint))
    stored = Blocks(student_checkpoint, getattr(torch, stored_dtype(student_checkpoint)), ranks.device)
    student = Student(layout, layers, stored.weights)
    identity = {
        "method": "blocks",
        "model": fingerprint(student_checkpoint),
        "teacher": fingerprint(teacher_checkpoint),
    }
    record = training_record(windows, options, dtype)
    with ranks.main_first():
        work = BlockFolder(folder, identity, main=ranks.is_main)
    with work:
        if teacher.ends_differ(own):
            console.note(
                f"{model} has another embedding, final norm or LM head than {teacher_name}: its blocks will read what"
                " they do not expect"
            )
        announce(teacher, student, windows, options, console)
        distill(
            teacher, student, windows, options.distill, work, console, about=record, rank=ranks.rank, ranks=ranks.size
        )
        ranks.barrier()
        if not ranks.is_main:
            return {}
        dense = Layout.dense(layout.num_layers)
        perplexities = {
            **heldout_perplexities(teacher, {"dense": lambda layer: teacher.layer(layer, dense)}, windows.heldout),
            **heldout_perplexities(
                own,
                {
                    "before": lambda layer: own.layer(layer, layout),
                    "distilled": lambda layer: own.layer(
                        layer, layout, loaded(work, layer, own) if layer in layers else None
                    ),
                },
                windows.heldout,
            ),
        }
        document = {
            "model": model,
            "teacher": teacher_name,
            "out": out,
            "layout": str(layout),
            **layout.to_config(),
            "fingerprints": identity,
            **record,
            "blocks": [work.report(layer) for layer in layers],
            "heldout_perplexity": perplexities,
        }
        convert_checkpoint(
            model,
            out,
            Recipe(),
            revision=revision,
            overwrite=overwrite,
            verify=verify,
            replace=work.tensors(layers),
            console=console,
            record={
                "distillation": {
                    "teacher": teacher_name,
                    "fingerprints": identity,
                    "layers": format_ranges(layers),
                    **record,
                }
            },
            extra_files={"distillation.json": to_json(document) + "\n"},
        )
        work.remove()
    return document


def loaded(work: BlockFolder, layer: int, blocks: Blocks) -> dict[str, torch.Tensor]:
    """A trained block's weights, to compute with."""
    return {name: tensor.to(blocks.device, blocks.dtype) for name, tensor in work.weights(layer).items()}


def check_pair(student: Checkpoint, teacher: Checkpoint, model: str, teacher_name: str) -> Layout:
    """The student's layout. Raises UserError unless the teacher is a dense Llama of the same shape, and the student is
    none."""
    layout, dense = Layout.from_config(student.config), Layout.from_config(teacher.config)
    if layout.is_dense:
        raise UserError(f"{model} is dense; there is nothing to distil. Convert it first")
    if not dense.is_dense:
        raise UserError(
            f"--distill-from {teacher_name} is not dense ({dense}); name the model that {model} was converted from"
        )
    if expected_tensors(student.config) != expected_tensors(teacher.config):
        raise UserError(
            f"--distill-from {teacher_name} has other shapes than {model}; name the model that it was converted from"
        )
    ours, theirs = dense_function(student.config), dense_function(teacher.config)
    if different := [key for key in ours if ours[key] != theirs[key]]:
        raise UserError(
            f"--distill-from {teacher_name} computes otherwise than {model} ({', '.join(different)}); name the model"
            " that it was converted from"
        )
    return layout


def chosen_layers(layout: Layout, ranges: str | None) -> tuple[int, ...]:
    """The layers to train; raises UserError for one that computes what the dense model's does."""
    able = trainable_layers(layout)
    chosen = parse_ranges(ranges, layout.num_layers, option="--train") if ranges is not None else able
    if rest := sorted(set(chosen) - set(able)):
        raise UserError(
            f"--train: {format_ranges(rest)} compute what the dense layers compute; only {format_ranges(able)} do not"
        )
    return tuple(chosen)


def training_record(windows: Windows, options: BlockwiseOptions, dtype: torch.dtype) -> dict[str, Any]:
    """What training depends on besides the models: for ladderize.yaml, and for a killed run to know itself."""
    return {
        "data": {
            "file": options.data,
            "sha256": data.file_sha256(options.data),
            "samples": len(windows.train),
            "heldout": len(windows.heldout),
            "seq_len": windows.train.shape[1],
        },
        "options": options.distill.record(),
        "dtype": str(dtype).removeprefix("torch."),
    }


def block_rows(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A table of blocks for people."""
    return [
        {
            "block": str(report["block"]),
            "loss before": f"{report['loss_before']:.3e}",
            "after": f"{report['loss_after']:.3e}",
            "lost before": f"{report['share_lost_before']:.2%}",
            "lost after": f"{report['share_lost_after']:.2%}",
            "steps": str(report["steps"]) + (" (stopped early)" if report["stopped_early"] else ""),
        }
        for report in reports
    ]


def perplexity_rows(perplexities: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Held-out perplexities beside the first, the dense model's, for people."""
    dense = next(iter(perplexities.values()))["perplexity"]
    return [
        {
            "held out": name,
            "perplexity": f"{value['perplexity']:.4f}",
            "stderr": "" if value["stderr"] is None else f"{value['stderr']:.4f}",
            "difference": "" if number == 0 else f"{value['perplexity'] - dense:+.4f}",
        }
        for number, (name, value) in enumerate(perplexities.items())
    ]
