"""Each later model of a run against the first, in pairs of answers to the same questions."""

from dataclasses import replace
from typing import Any

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.eval.evaluation.output import Output
from ladderize.eval.evaluation.samples import read_samples
from ladderize.eval.paired.compare import compare_results
from ladderize.eval.paired.document import CompareOptions, ComparisonDocument
from ladderize.eval.paired.entry import ComparedModel, make_entry
from ladderize.eval.results import ModelResult


def compare_models(output: Output, console: Console) -> list[dict[str, Any]]:
    """The comparisons that results.json holds; what cannot be compared is said and left out, since results that were
    hard to get must not be lost for it."""
    models = output.finished
    if len(models) < 2:
        return []
    with console.stage(f"comparing with {models[0].model.model}"):
        reference = _entry(models[0], output)
        found = [_compare(reference, _entry(other, output), console) for other in models[1:]]
    return [document.to_dict() for document in found if document is not None]


def _entry(result: ModelResult, output: Output) -> ComparedModel:
    name = result.model.model
    return replace(make_entry(result, read_samples(output.parent, result), name), options=output.options)


def _compare(reference: ComparedModel, other: ComparedModel, console: Console) -> ComparisonDocument | None:
    options = CompareOptions()
    try:
        return compare_results(reference, other, options)
    except UserError as error:
        console.warn(f"{other.name} was not compared with {reference.name}: {error}")
    if not (reference.answers and other.answers):
        return None
    try:  # the text alone may be it: another tokenizer has other windows
        return compare_results(_without_text(reference), _without_text(other), options)
    except UserError:  # the same again
        return None


def _without_text(entry: ComparedModel) -> ComparedModel:
    assert entry.model is not None
    return replace(entry, model=replace(entry.model, perplexity=None, predictions=None))
