"""The step from documents to models: all results under one model path belong to one model."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from os.path import normpath
from pathlib import Path
from typing import Literal

from ladderize.errors import UserError
from ladderize.eval.compare import compare_models, read_models
from ladderize.eval.options import MARGIN
from ladderize.eval.results import ComparisonDocument, EvalResults, EvaluatedModel
from ladderize.eval.table import mean_accuracy, short_names
from ladderize.layout import Layout
from ladderize.report.documents import FoundDocuments
from ladderize.report.models import ReportModel, Setting, Timing, WithInterval
from ladderize.runtime.bench.document import LEAST_ROUNDS, BenchDocument, BenchRow
from ladderize.sweep_document import SweepDocument, SweepPoint

Models = dict[str, ReportModel]  # by the model's path; of other rows by the document and the row's name
Evaluated = dict[str, tuple[Path, str]]  # by the model's path: its results.json, and its name in that


@dataclass
class ReportContent:
    """All that a report shows."""

    margin: float
    every: list[ReportModel]  # ``models``, then baselines and rows of random weights, which have no accuracy
    models: list[ReportModel]  # the reference first
    settings: list[Setting]  # measured ones first, then by ranks (most first) and batch size
    documents: FoundDocuments
    remarks: list[str]  # sentences on the origin of the numbers that a reader must know


def join_documents(documents: FoundDocuments, margin: float | None = None) -> ReportContent:
    """Return the joined content of the documents; the margin is the sweep's (the least of several), or 1, if not
    given."""
    sweeps = documents.of(SweepDocument)
    margin = margin or min((sweep.margin for _, sweep in sweeps), default=MARGIN)
    every: Models = {}
    folders = short_names([str(path.parent) for path, _ in sweeps])
    for folder, (path, sweep) in zip(folders, sweeps, strict=True):
        for point in sweep.points:  # of another sweep, too: paths hold a hash of all that decides a model
            key = f"{path}: {point.name}" if point.model is None else normpath(point.model)
            model = ReportModel(point.name, point.model or point.name, _layout_of(point), sweep=folder)
            model.adapted, model.tokens = point.adapted, point.tokens
            model.failure, model.not_promoted = point.failure, point.not_promoted
            model.conversion = next((stage.output for stage in point.stages if stage.stage == "convert"), "")
            every.setdefault(key, model)
    evaluated = _add_results(every, documents)
    remarks = _add_times(every, documents, is_evaluated=bool(evaluated))
    models = [model for model in every.values() if model.is_model]
    _name_models(models)
    remarks += _compare(every, documents, evaluated, margin)
    settings = sorted(
        {setting for model in every.values() for setting in model.timings},
        key=lambda it: (it.is_random, it.kind == "emulated", -it.tp_size, it.source, it.batch_size),
    )
    others = [model for model in every.values() if not model.is_model]
    return ReportContent(margin, models + others, models, settings, documents, remarks)


def _layout_of(row: SweepPoint | EvaluatedModel | BenchRow) -> Layout:
    return Layout(tuple(row.attention_sync), tuple(row.mlp_sync), row.sync_tp_size)


def _name_models(models: list[ReportModel]) -> None:
    """Name the models that a sweep has not named, by the last parts of their paths. No name comes twice."""
    unnamed = [model for model in models if not model.name]
    for model, name in zip(unnamed, short_names([model.model for model in unnamed]), strict=True):
        model.name = name
    counts = Counter(model.name for model in models)
    for model in models:
        if counts[model.name] > 1:
            model.name = f"{model.name} ({model.sweep or model.model})"


def _check_layout(model: ReportModel, layout: Layout, path: Path) -> None:
    if (model.layout.attention_sync, model.layout.mlp_sync) != (layout.attention_sync, layout.mlp_sync):
        raise UserError(
            f"{path} has {model.model} in another layout than the other documents ({model.layout}): it was converted"
            " again in between; evaluate and time it again"
        )


def _add_results(models: Models, documents: FoundDocuments) -> Evaluated:
    evaluated: Evaluated = {}
    for path, results in documents.of(EvalResults):
        for number, entry in enumerate(results.models):
            row, key = entry.model, normpath(entry.model.model)
            if key in evaluated:
                first = evaluated[key][0]
                is_reference = number == 0 and len(results.models) > 1  # of several evaluations: the first one counts
                is_same_stage = path in documents.stages and documents.stages[path] == documents.stages.get(first)
                if is_reference or is_same_stage:
                    continue
                raise UserError(f"{path} and {first} both evaluate {row.model}; name one of the two")
            evaluated[key] = (path, row.model)
            model = models.setdefault(key, ReportModel("", row.model, _layout_of(row)))
            _check_layout(model, _layout_of(row), path)
            model.accuracy, model.tasks = mean_accuracy(entry), entry.reported.leaves
            if row.perplexity is not None:
                model.perplexity = row.perplexity.perplexity
    return evaluated


def _compare(models: Models, documents: FoundDocuments, evaluated: Evaluated, margin: float) -> list[str]:
    """Give every evaluated model its comparison with the reference, from results.json unless it was evaluated apart, as
    in a sweep, or on another margin; return remarks, each once."""
    dense = next(iter(models), "")
    if dense not in evaluated:
        return []
    stored: dict[str, ComparisonDocument] = {}
    for _, results in documents.of(EvalResults):
        for comparison in results.comparisons:
            if normpath(comparison.reference) == dense and comparison.margin == margin:
                stored[normpath(comparison.other)] = comparison
    answered = cache(lambda key: next(read_models(*evaluated[key])))
    remarks: list[str] = []
    for key in evaluated:
        if key != dense:
            comparison = stored.get(key) or compare_models(answered(dense), answered(key), margin)
            _add_comparison(models[key], models[dense], comparison)
            remarks += [f"{models[key].name}: {text}" for text in (*comparison.left_out, *comparison.remarks)]
    return list(dict.fromkeys(remarks))


def _add_comparison(model: ReportModel, reference: ReportModel, comparison: ComparisonDocument) -> None:
    model.comparison = comparison
    overall, predictions, text = comparison.overall, comparison.predictions, comparison.perplexity
    if overall is not None:
        model.accuracy, model.verdict = overall.value, overall.verdict or ""  # over the tasks of the difference
        model.difference = WithInterval.of(overall).mapped(lambda value: 100 * value)
        reference.difference = WithInterval(0.0)
    if predictions is not None:
        model.divergence = WithInterval(predictions.mean_kl, predictions.low, predictions.high)
    if text is not None:
        model.perplexity, model.perplexity_change = text.value, WithInterval.of(text)
        dense = max(text.value - text.difference, 1.0)  # no perplexity is below 1
        model.perplexity_growth = model.perplexity_change.mapped(lambda more: math.log(max(dense + more, 1.0) / dense))
        reference.perplexity_change = reference.perplexity_growth = WithInterval(0.0)


def _add_times(models: Models, documents: FoundDocuments, *, is_evaluated: bool) -> list[str]:
    """Add the measured times, also to models that were not timed: speed depends on the layout alone. Where accuracies
    are known, speed-ups must be over the same model. Returns the reasons why models were not timed."""
    remarks: list[str] = []
    for source, (path, bench) in enumerate(documents.of(BenchDocument)):
        timed: Models = {}
        for row in bench.rows:
            is_model = row.is_model and not row.is_random
            name, key = ("", normpath(row.model)) if is_model else (row.model, f"{path}: {row.model}")
            new = ReportModel(name, row.model, _layout_of(row), is_model=is_model, is_baseline=not row.is_model)
            model = timed[key] = models.setdefault(key, new)
            _check_layout(model, new.layout, path)
            setting = _setting_of(bench, row, source)
            if setting in model.timings:
                raise UserError(f"{path} has two rows of {row.model} at batch size {row.batch_size}")
            is_first = row.model == bench.rows[0].model
            has_interval = bench.options.repeat >= LEAST_ROUNDS and not is_first
            model.timings[setting] = Timing(row, is_first, has_interval)
        first, reference = next(iter(timed), None), next(iter(models), None)
        if is_evaluated and first != reference and first is not None and not bench.rows[0].is_random:
            raise UserError(
                f"{path} has speed-ups over {bench.rows[0].model}, but the accuracies are compared with"
                f" {models[str(reference)].model}; name the same model first in eval and in bench"
            )
        for name, reason in bench.failed.items():
            remarks.append(f"{path.name}: {reason}, so it was not timed")
            failed = models.get(normpath(name))
            if failed is not None:
                failed.failure = failed.failure or remarks[-1]
        donors = {model.layout: model for model in reversed([*timed.values()]) if model.is_model}
        apart = timed.keys() | {normpath(name) for name in bench.failed}
        for key, model in models.items():
            if model.is_model and key not in apart and model.layout in donors:
                model.timed_as = donors[model.layout]
                times = model.timed_as.timings.items()
                model.timings |= {setting: timing for setting, timing in times if setting.source == source}
    return remarks


def _setting_of(bench: BenchDocument, row: BenchRow, source: int) -> Setting:
    kind: Literal["measured", "emulated"] = "measured" if bench.link is None else "emulated"
    medium = bench.link.name if bench.link is not None else bench.backend.partition(":")[0]
    ranks = f"{row.tp_size} ranks over {medium}" if row.tp_size > 1 else "1 rank"
    device = f"{'vLLM, ' if bench.engine is not None else ''}{bench.environment.device}"
    is_random = bench.rows[0].is_random
    title = (
        f"{kind}: {ranks} ({device}){'; random weights' if is_random else ''}, batch {row.batch_size},"
        f" {bench.options.prompt_len} + {bench.options.output_len} tokens"
    )
    return Setting(kind, row.tp_size, row.batch_size, source, is_random, title)
