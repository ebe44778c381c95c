"""``eval``."""

from pathlib import Path
from typing import Annotated

import typer

from ladderize.commands.options import AsJson, Revision, check_dtype, options_from
from ladderize.console import Console, UsageError
from ladderize.eval.options import EvalOptions


def evaluate(
    ctx: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Checkpoint folders or hub ids; the first is the one to compare with."),
    ],
    tasks: Annotated[str, typer.Option(metavar="A,B", help="lm-eval tasks or groups, comma-separated.")] = "",
    include_path: Annotated[
        str | None, typer.Option(metavar="DIR", help="A folder with lm-eval tasks of your own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Samples per task, for a quick look.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples in the prompt.  [default: the task's own]")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Put prompts through the model's chat template.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward pass.")] = EvalOptions.batch_size,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = EvalOptions.dtype,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.  [default: cuda if there is one]")] = None,
    revision: Revision = None,
    seed: Annotated[int, typer.Option(min=0, help="For sampling and few-shot examples.")] = EvalOptions.seed,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run a checkpoint's own Python code; not needed for ladderized ones."),
    ] = False,
    perplexity: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Text (.txt, .jsonl) or token ids (.npy, .npz, file.npz:array) to score."),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(min=2, help="Window of --perplexity.  [default: rows of ids, else 2048 or the model's limit]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write results as JSON, anew after every task.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate models alike with lm-eval's tasks and by perplexity; print one table."""
    check_dtype(dtype)
    if seq_len is not None and perplexity is None:
        raise UsageError("--seq-len has no effect without --perplexity")
    names = tuple(dict.fromkeys(task.strip() for task in tasks.split(",") if task.strip()))
    if not names and perplexity is None:
        raise UsageError("nothing to evaluate: name --tasks, or a file for --perplexity")
    for value, option in (
        (include_path, "--include-path"),
        (limit, "--limit"),
        (num_fewshot, "--num-fewshot"),
        (apply_chat_template, "--apply-chat-template"),
    ):
        if value not in (None, False) and not names:
            raise UsageError(f"{option} has no effect without --tasks")
    from ladderize.files.documents import check_writable, write_json

    if out is not None:
        check_writable(out)
    from ladderize.eval.comparison import comparison_rows
    from ladderize.eval.harness import evaluate_models

    console = Console(as_json)
    options = options_from(EvalOptions, ctx.params, tasks=names)
    save = (lambda content: write_json(out, content)) if out is not None else (lambda content: None)
    results = evaluate_models(models, options, console=console, save=save)
    console.document(results.to_dict())
    console.table(comparison_rows(results), right=["value", "stderr", "difference"])
    if out is not None:
        console.note(f"wrote {out}")
