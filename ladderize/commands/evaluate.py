"""``eval``."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import AS_JSON, argument, check_options, option
from ladderize.commands.builder import MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command
from ladderize.commands.shared import loading
from ladderize.console import Console
from ladderize.eval.options import EvalOptions


@dataclass(frozen=True)
class EvalArguments:
    models: tuple[str, ...] = argument("MODEL...", "Checkpoints: folders or hub ids. The first is the reference.")
    out: Path | None = option("Write results as JSON, after every task.", metavar="FILE")
    keep_predictions: Path | None = option(
        "Keep the first model's predictions on --perplexity, for --reference of later runs.", metavar="DIR"
    )
    reference: Path | None = option(
        "Compare predictions with those that --keep-predictions kept.", metavar="DIR", shown="the first model's"
    )
    resume: bool = option(
        "Keep the tasks that --out has from a run with these options. Whether the models are the same is not checked.",
        False,
        needs="out",
    )
    as_json: bool = option(AS_JSON, False)


@command(
    EvalOptions,
    EvalArguments,
    panels={
        MEASUREMENT: "tasks perplexity include_path limit num_fewshot apply_chat_template"
        " seq_len windows seed backend reference",
        MEMORY: "tp_size batch_size max_length dtype device",
        MODELS: "revision",
        OUTPUT: "out keep_predictions resume json",
    },
)
def evaluate(given: GivenOptions) -> None:
    """Evaluate models with lm-eval tasks and by perplexity, all in the same way, and compare them with the first."""
    arguments, options = given.fill(EvalArguments), given.fill(EvalOptions)
    options.check(arguments.models)  # before anything is imported
    check_options(arguments)
    console = Console(arguments.as_json)
    with loading(given, console):
        from ladderize.eval.run import evaluate as evaluate_models
        from ladderize.eval.table import prediction_words, result_rows, show_comparison
        from ladderize.vllm.environment import check_vllm
        from ladderize.vllm.eval_model import open_vllm

        if options.backend == "vllm":
            check_vllm()
    results = evaluate_models(
        arguments.models,
        options,
        out=arguments.out,
        keep_predictions=arguments.keep_predictions,
        reference=arguments.reference,
        resume=arguments.resume,
        engine=open_vllm if options.backend == "vllm" else None,
        console=console,
    )
    console.document(results.to_dict())
    console.table(result_rows(results), right=["value", "stderr"])
    for one in results.models if arguments.reference is not None else ():
        if (predictions := one.model.predictions) is not None:
            console.result("")
            console.prose(f"{one.model.model} against {predictions.reference}. {prediction_words(predictions)}")
    for comparison in results.comparisons:
        console.result("")
        show_comparison(comparison, console)
    if arguments.out is not None:
        console.note(f"wrote {arguments.out}")
