"""``ladderize adapt --method blocks``: distil a converted checkpoint's blocks one by one, and write the checkpoint
anew."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ladderize.adapt.blockwise.block_trainer import StudentBlocks
from ladderize.adapt.blockwise.distill import distill, estimate
from ladderize.adapt.blockwise.documents import BlockwiseRun, Distillation, TrainingRecord
from ladderize.adapt.blockwise.folder import BlockFolder
from ladderize.adapt.blockwise.options import TOKENS_PER_STEP, BlockwiseOptions
from ladderize.adapt.blockwise.windows import Windows, training_windows
from ladderize.adapt.improvement import check_improved
from ladderize.adapt.methods import BLOCKS
from ladderize.adapt.pair import check_pair
from ladderize.blocks import Blocks, open_checkpoint, stored_dtype, window_nlls
from ladderize.checkpoint.fingerprint import fingerprint
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import SILENT, Console, human_bytes, human_seconds, to_json
from ladderize.convert.changes import Changes
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.eval.perplexity import perplexity_from_nlls
from ladderize.eval.results import Perplexity
from ladderize.files import output
from ladderize.files.finished import FINISHED, RUN, EarlierRun, run_digest
from ladderize.files.regular import resolved
from ladderize.files.work import work_folder
from ladderize.layout import Layout, format_ranges, parse_ranges
from ladderize.ranks.group import join_ranks
from ladderize.ranks.training import check_launch_of_blocks, compute_dtype

DOCUMENT = "distillation.json"


def heldout_perplexities(
    blocks: Blocks, variants: Mapping[str, Callable[[int], torch.nn.Module]], ids: torch.Tensor
) -> dict[str, Perplexity]:
    """Perplexity of held-out windows under variants of a model, each given by its layers; one layer in memory at a
    time."""
    batch_size = max(1, 2 * TOKENS_PER_STEP // ids.shape[1])
    results = {}
    for name, layer_at in variants.items():
        begin = time.perf_counter()
        nlls = window_nlls(blocks, layer_at, ids, batch_size=batch_size).numpy()
        results[name] = perplexity_from_nlls(nlls, list(ids.numpy()), time.perf_counter() - begin)
    return results


def announce_distillation(
    teacher: Blocks, student: StudentBlocks, windows: Windows, options: BlockwiseOptions, console: Console
) -> None:
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
    model: str | Path,
    out: str | Path,
    teacher_name: str | Path,
    options: BlockwiseOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    revision: str | None = None,
    console: Console = SILENT,
) -> Distillation | None:
    """Distil ``model``'s blocks against the dense ``teacher_name`` and write the result to ``out``; returns the
    document of distillation.json, on other ranks than 0 None.

    Several processes (accelerate launch, torchrun) share the blocks out; rank 0 writes. A killed run goes on where it
    was.
    """
    model, out, teacher_name = str(model), str(out), str(teacher_name)
    check_launch_of_blocks()
    options.source.files()  # that they are there
    ranks = join_ranks(options.device)
    student_checkpoint, teacher_checkpoint = open_checkpoint(model, revision), open_checkpoint(teacher_name)
    layout = check_pair(student_checkpoint, teacher_checkpoint, model, teacher_name)
    layers = layers_to_distill(layout, options.layers)
    folder = work_folder(out, options.work_dir, student_checkpoint.folder, teacher_checkpoint.folder)
    earlier = EarlierRun(resolved(out), DOCUMENT, folder, overwrite=overwrite)
    maybe_done = ranks.broadcast(earlier.may_have_finished())  # then OUT may be full
    if not maybe_done:
        check_targets(out, student_checkpoint, teacher_checkpoint, overwrite=overwrite)
    with console.stage("reading the data"):
        windows = training_windows(teacher_checkpoint, options)
    dtype = compute_dtype(options.dtype, stored_dtype(teacher_checkpoint))
    teacher, own = (Blocks(checkpoint, dtype, ranks.device) for checkpoint in (teacher_checkpoint, student_checkpoint))
    stored = Blocks(student_checkpoint, getattr(torch, stored_dtype(student_checkpoint)), ranks.device)
    student = StudentBlocks(layout, layers, stored.weights)
    identity = BlockwiseRun(BLOCKS, fingerprint(student_checkpoint), fingerprint(teacher_checkpoint))
    record = TrainingRecord.of(windows, options, dtype)
    digest = run_digest({**identity.to_dict(), **record.to_dict(), "layers": list(layers)})
    if maybe_done:
        if ranks.broadcast(earlier.finished(digest)):
            if not ranks.is_main:
                return None
            return Distillation.from_dict(earlier.tidy(BlockFolder, identity.to_dict(), console), DOCUMENT)
        check_targets(out, student_checkpoint, teacher_checkpoint, overwrite=overwrite)
    with ranks.main_first():
        work = BlockFolder(folder, identity.to_dict(), main=ranks.is_main)
    with work:
        if teacher.ends_differ(own):
            console.note(
                f"{model} has a different embedding, final norm or LM head than {teacher_name}: its blocks will read"
                " what"
                " they do not expect"
            )
        announce_distillation(teacher, student, windows, options, console)
        distill(
            teacher,
            student,
            windows,
            options.distill,
            work,
            ranks,
            console,
            about=record.to_dict(),
        )
        ranks.barrier()
        if not ranks.is_main:
            return None
        with console.stage("measuring held-out perplexities"):
            perplexities = before_and_after(teacher, own, layout, layers, work, windows.heldout)
        if options.write == "best":
            before, after = (perplexities[name].perplexity for name in ("before", "distilled"))
            check_improved(before, after, work=folder)
        document = Distillation(
            model=model,
            teacher=teacher_name,
            out=out,
            layout=str(layout),
            **layout.to_config(),
            fingerprints=identity,
            **vars(record),
            blocks=[work.report(layer) for layer in layers],
            heldout_perplexity=perplexities,
        )
        work.write_about(**{FINISHED: digest})  # a run that is killed from here on may find OUT complete
        convert_checkpoint(
            model,
            out,
            Recipe(),
            revision=revision,
            overwrite=overwrite,
            verify=verify,
            changes=Changes(
                replace=work.tensors(layers),
                record={
                    "distillation": {
                        "teacher": teacher_name,
                        "fingerprints": identity.to_dict(),
                        "layers": format_ranges(layers),
                        **record.to_dict(),
                    }
                },
                extra_files={DOCUMENT: to_json({**document.to_dict(), RUN: digest}) + "\n"},
                note=document.card_note(),
            ),
            console=console,
        )
        work.remove()
    return document


def before_and_after(
    teacher: Blocks, own: Blocks, layout: Layout, layers: tuple[int, ...], work: BlockFolder, heldout: torch.Tensor
) -> dict[str, Perplexity]:
    """Held-out perplexity of the dense model, of the converted one, and of that with its distilled blocks."""
    dense = Layout.dense(layout.num_layers)
    variants = {
        "before": lambda layer: own.layer(layer, layout),
        "distilled": lambda layer: own.layer(layer, layout, loaded(work, layer, own) if layer in layers else None),
    }
    return {
        **heldout_perplexities(teacher, {"dense": lambda layer: teacher.layer(layer, dense)}, heldout),
        **heldout_perplexities(own, variants, heldout),
    }


def check_targets(out: str, *sources: Checkpoint, overwrite: bool) -> None:
    """Raise UserError unless ``out`` may be written, and is none of its sources."""
    for checkpoint in sources:
        output.check_target(Path(out), checkpoint.folder, overwrite=overwrite)


def loaded(work: BlockFolder, layer: int, blocks: Blocks) -> dict[str, torch.Tensor]:
    """A trained block's weights, to compute with."""
    return {name: tensor.to(blocks.device, blocks.dtype) for name, tensor in work.weights(layer).items()}


def layers_to_distill(layout: Layout, ranges: str | None) -> tuple[int, ...]:
    """The layers to train; raises UserError for one that computes what the dense model's does."""
    able = layout.converted_layers
    chosen = parse_ranges(ranges, layout.num_layers, option="--train") if ranges is not None else able
    if rest := sorted(set(chosen) - set(able)):
        raise UserError(
            f"--train: {format_ranges(rest)} are the same as in the dense model; only {format_ranges(able)} differ"
            " from it"
        )
    return tuple(chosen)
