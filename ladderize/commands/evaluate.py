"""Evaluate models, and show their results and how they differ."""

from ladderize.commands.shared import loading
from ladderize.console import Console
from ladderize.eval.options import EvalOptions, check_task_names


def evaluate(options: EvalOptions, console: Console) -> None:
    """Evaluate models with lm-eval tasks and by perplexity, all in the same way, and compare them with the first."""
    check_task_names(options)  # before anything is imported
    with loading(options, console):
        from ladderize.eval.run import evaluate as evaluate_models
        from ladderize.eval.table import prediction_words, result_rows, show_comparison

        if options.engine == "vllm":
            from ladderize.vllm.environment import check_vllm
            from ladderize.vllm.eval_model import open_vllm

            check_vllm()
    opened_by = open_vllm if options.engine == "vllm" else None
    results = evaluate_models(options, open_model=opened_by, console=console)
    console.document(results.to_dict())
    console.table(result_rows(results), right=["value", "stderr"])
    for entry in results.models:
        predictions = entry.model.predictions
        if options.reference is not None and predictions is not None:
            console.result("")
            console.prose(f"{entry.model.model} against {predictions.reference}. {prediction_words(predictions)}")
    for comparison in results.comparisons:
        console.result("")
        show_comparison(comparison, console)
    if options.out is not None:
        console.note(f"wrote {options.out}")
