"""``eval``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ladderize.commands.config_file import Config, PrintConfig
from ladderize.commands.options import (
    ADVANCED,
    LOADING,
    MEASUREMENT,
    MEMORY,
    OUTPUT,
    AsJson,
    DtypeOption,
    Revision,
    TpSize,
    options_from,
)
from ladderize.console import Console
from ladderize.eval.options import EvalBackend, EvalOptions

if TYPE_CHECKING:
    from ladderize.eval.backends.base import OpenModel


def evaluate(
    ctx: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Checkpoints: folders or hub ids. The first is the reference."),
    ],
    tasks: Annotated[
        str, typer.Option(metavar="A,B", help="lm-eval tasks or groups.", rich_help_panel=MEASUREMENT)
    ] = "",
    perplexity: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Text (.txt, .jsonl) or token ids (.npy, .npz, file.npz:array) to score.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    include_path: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="A folder with your own lm-eval tasks.", rich_help_panel=MEASUREMENT),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Samples per task, for a quick look.", rich_help_panel=MEASUREMENT),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Few-shot examples.",
            show_default="the task's own number",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template",
            help="Format prompts with the model's chat template.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = False,
    seq_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Tokens per window of --perplexity.",
            show_default="the rows of ids, else 2048 or the model's limit",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Score the first N windows of --perplexity only.",
            show_default="all",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Seed of sampling and of few-shot examples.", rich_help_panel=MEASUREMENT
        ),
    ] = EvalOptions.seed,
    backend: Annotated[
        EvalBackend,
        typer.Option(
            help="What computes: transformers in one process, ladderize's runtime, which bench times, or vLLM.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = EvalOptions.backend,
    tp_size: TpSize = EvalOptions.tp_size,
    batch_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Sequences per forward pass.", rich_help_panel=MEMORY)
    ] = EvalOptions.batch_size,
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="With --backend vllm: tokens of the longest text that it keeps room for. Of longer ones the end is"
            " read.",
            show_default="the model's positions",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    dtype: DtypeOption = EvalOptions.dtype,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where to compute, such as cpu or cuda:0.",
            show_default="cuda if there is one",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    revision: Revision = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run Python code that a checkpoint brings along. Not needed for ladderized ones.",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write results as JSON, after every task.", rich_help_panel=OUTPUT),
    ] = None,
    keep_predictions: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the first model's predictions on --perplexity, for --reference of later runs.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Compare predictions with those that --keep-predictions kept.",
            show_default="the first model's",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    as_json: AsJson = False,
    config: Config = None,
    print_config: PrintConfig = False,
) -> None:
    """Evaluate models with lm-eval tasks and by perplexity, all in the same way, and compare them in one table."""
    names = tuple(dict.fromkeys(task.strip() for task in tasks.split(",") if task.strip()))
    options = options_from(EvalOptions, ctx.params, tasks=names)
    options.check()  # before anything is imported
    console = Console(as_json)
    with console.stage(LOADING):
        from ladderize.eval.evaluation.run import evaluate as evaluate_models
        from ladderize.eval.evaluation.table import comparison_rows, prediction_rows, table_words, verdicts

        engine = _engine(options)
    results = evaluate_models(
        models,
        options,
        out=out,
        keep_predictions=keep_predictions,
        reference=reference,
        engine=engine,
        console=console,
    )
    console.document(results.to_dict())
    rows = comparison_rows(results)
    console.table(rows, right=["value", "stderr", "difference", "interval", "flips"])
    if words := table_words(rows):
        console.result("")
        console.prose(words)
    if sentences := verdicts(results):
        console.result("")
    for sentence in sentences:
        console.prose(sentence)
    if predictions := prediction_rows(results):
        console.result("\nKL divergence from the reference's predictions, in nats per token:\n")
        console.table(predictions, right=[key for key in predictions[0] if key != "model"])
    if out is not None:
        console.note(f"wrote {out}")


def _engine(options: EvalOptions) -> "OpenModel | None":
    """What opens a model in vLLM, where that is to compute. Raises UserError where it is not there."""
    if options.backend != "vllm":
        return None
    from ladderize.serving.vllm.eval_model import check_vllm, open_vllm

    check_vllm()
    return open_vllm
