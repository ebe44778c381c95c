"""The step from documents to models: all results under one model path belong to one model."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ladderize.errors import UserError
from ladderize.eval.answers import read_models
from ladderize.eval.compare import compare_models
from ladderize.eval.options import MARGIN
from ladderize.eval.results import EvalResults, EvaluatedModel
from ladderize.eval.table import mean_accuracy, short_names
from ladderize.report.documents import FoundDocuments
from ladderize.report.models import ReportModel, Setting, Timing, WithInterval, model_key
from ladderize.runtime.bench.document import LEAST_ROUNDS, BenchDocument, BenchRow

FROM_POINT = ("adapted", "tokens", "failure", "not_promoted")  # a sweep's facts about a model
Models = dict[str, ReportModel]  # by the model's path; of other rows by the document and the row's name


@dataclass
class ReportContent:
    """All that a report shows.

    every: models and baselines, the reference first.
    settings: measured ones first, then by ranks (most first) and batch size.
    remarks: sentences on the origin of the numbers that a reader must know.
    """

    margin: float
    every: list[ReportModel]
    settings: list[Setting]
    found: FoundDocuments
    remarks: list[str]

    @property
    def models(self) -> list[ReportModel]:
        """The models that have an accuracy: no baselines, and none with random weights."""
        return [one for one in self.every if one.is_model]

    @property
    def reference(self) -> ReportModel | None:
        """The model that the others are compared with."""
        return self.models[0] if self.models else None

    @property
    def real_settings(self) -> list[Setting]:
        """The settings with times of models."""
        return [setting for setting in self.settings if any(one.timing(setting) for one in self.models)]


def join_documents(found: FoundDocuments, margin: float | None = None) -> ReportContent:
    """Return the joined content of the documents. Raises UserError for documents that do not belong together.

    margin: in points; None: the sweep's (the least of several sweeps'), or 1.
    """
    margin = margin or min((sweep.margin for _, sweep in found.sweeps), default=MARGIN)
    models: Models = {}
    folders = short_names([str(path.parent) for path, _ in found.sweeps])
    for folder, (path, sweep) in zip(folders, found.sweeps, strict=True):
        for point in sweep.points:  # of another sweep, too: paths hold a hash of all that decides a model
            key = f"{path}: {point.name}" if point.model is None else model_key(point.model)
            known = {name: getattr(point, name) for name in FROM_POINT}
            models.setdefault(key, ReportModel(point.name, point.model or point.name, point, sweep=folder, **known))
    places = _add_results(models, found.results)
    remarks = _add_times(models, found.benches, is_evaluated=bool(places))
    _name([one for one in models.values() if one.is_model])
    remarks += _compare(models, found.results, places, margin)
    every = sorted(models.values(), key=lambda one: not one.is_model)
    settings = sorted({timing.setting for one in every for timing in one.timings}, key=_preference)
    return ReportContent(margin, every, settings, found, remarks)


def _preference(setting: Setting) -> tuple[object, ...]:
    return bool(setting.note), setting.kind == "emulated", -setting.tp_size, setting.source, setting.batch_size


def _name(models: list[ReportModel]) -> None:
    """Name the models that a sweep has not named, by the last parts of their paths. No name comes twice."""
    unnamed = [one for one in models if not one.name]
    for one, name in zip(unnamed, short_names([one.model for one in unnamed]), strict=True):
        one.name = name
    counts = Counter(one.name for one in models)
    for one in models:
        one.name = one.name if counts[one.name] == 1 else f"{one.name} ({one.sweep or one.model})"


def _check_layout(one: ReportModel, row: EvaluatedModel | BenchRow, path: Path) -> None:
    """Raise UserError where a document has a model in another layout than the documents before it."""
    if (one.row.attention_sync, one.row.mlp_sync) != (row.attention_sync, row.mlp_sync):
        raise UserError(
            f"{path} has {one.model} in another layout than the other documents ({one.row.layout}): it was converted"
            " again in between; evaluate and time it again"
        )


# ---- accuracy: every model against the reference, in pairs ----


def _add_results(models: Models, found: Sequence[tuple[Path, EvalResults]]) -> dict[str, tuple[Path, str]]:
    """Add the evaluations. Return the place of each model's samples by key: a results.json, and the model's name in it.

    Raises UserError for a model that is evaluated twice, or that has another layout elsewhere.
    """
    places: dict[str, tuple[Path, str]] = {}
    for path, results in found:
        for number, entry in enumerate(results.models):
            row, key = entry.model, model_key(entry.model.model)
            if key in places:
                is_reference = number == 0 and len(results.models) > 1  # of several evaluations: the first one counts
                # sweeps name the folder of a stage by all that decides it
                is_same_stage = path.parent.name == places[key][0].parent.name and path.parent.name.startswith("eval-")
                if is_reference or is_same_stage:
                    continue
                raise UserError(f"{path} and {places[key][0]} both evaluate {row.model}; name one of the two")
            places[key] = (path, row.model)
            one = models.setdefault(key, ReportModel("", row.model, row))
            _check_layout(one, row, path)
            one.accuracy, one.tasks = mean_accuracy(entry), entry.parts().leaves
            if row.perplexity is not None:
                one.perplexity = row.perplexity.perplexity
    return places


def _compare(
    models: Models, found: Sequence[tuple[Path, EvalResults]], places: dict[str, tuple[Path, str]], margin: float
) -> list[str]:
    """Give every evaluated model its comparison with the reference; return remarks, each once.

    Models that were evaluated together are compared in results.json. Models that were evaluated apart, as in a sweep,
    or are asked for another margin, are compared here.
    """
    dense = next(iter(models), "")
    if dense not in places:
        return []
    stored = {
        model_key(one.other): one
        for _, results in found
        for one in results.comparisons
        if model_key(one.reference) == dense and one.margin == margin
    }
    answered = cache(lambda key: next(read_models(*places[key])))
    remarks: dict[str, None] = {}
    for key in places:
        if key != dense:
            compared = stored.get(key) or compare_models(answered(dense), answered(key), margin)
            one, reference = models[key], models[dense]
            one.comparison = compared
            if (overall := compared.overall) is not None:
                one.accuracy = overall.value  # over the tasks of the difference
                reference.difference = WithInterval(0.0)
                share = WithInterval(overall.difference, overall.low, overall.high)
                one.difference = share.mapped(lambda value: 100 * value)
            if (measured := compared.predictions) is not None:
                one.divergence = WithInterval(measured.mean_kl, measured.low, measured.high)
            if (text := compared.perplexity) is not None:
                one.perplexity = text.value
                one.perplexity_change = WithInterval(text.difference, text.low, text.high)
                reference.perplexity_change = WithInterval(0.0)
            remarks |= {f"{one.name}: {words}": None for words in (*compared.left_out, *compared.remarks)}
    return list(remarks)


# ---- times: speed depends on the layout alone, so models that were not timed share those of their layout ----


def _add_times(models: Models, benches: Sequence[tuple[Path, BenchDocument]], *, is_evaluated: bool) -> list[str]:
    """Add the measured times; return the reasons why models were not timed.

    is_evaluated: True if accuracies are known: speed-ups must then be over the same model.
    """
    remarks = []
    for source, (path, document) in enumerate(benches):
        for name, why in document.failed.items():
            remarks.append(f"{path.name}: {why}, so it was not timed")
            if (failed := models.get(model_key(name))) is not None:
                failed.failure = failed.failure or remarks[-1]
        for row in document.rows:
            _add_timing(models, row, document, source, path)
        first = document.rows[0] if document.rows else None
        if is_evaluated and first is not None and not first.is_random:
            reference = next(iter(models.values()))
            if not any(timing.is_first for timing in reference.timings if timing.setting.source == source):
                raise UserError(
                    f"{path} has speed-ups over {first.model}, but the accuracies are compared with {reference.model};"
                    " name the same model first in eval and in bench"
                )
        _share_times(models, source, document)
    return remarks


def _add_timing(models: Models, row: BenchRow, document: BenchDocument, source: int, path: Path) -> None:
    first, options, link = document.rows[0], document.options, document.link
    setting = Setting(
        kind="measured" if document.link is None else "emulated",
        tp_size=row.tp_size,
        medium=link.name if link is not None else document.backend.partition(":")[0],
        batch_size=row.batch_size,
        prompt_len=options.prompt_len,
        output_len=options.output_len,
        device=f"{'vLLM, ' if document.engine is not None else ''}{document.environment.device}",
        source=source,
        note="; random weights" if first.is_random else "",
    )
    new = ReportModel("", row.model, row)
    if not new.is_model:
        new.name = row.model
    one = models.setdefault(model_key(row.model) if new.is_model else f"{path}: {row.model}", new)
    _check_layout(one, row, path)
    if one.timing(setting) is not None:
        raise UserError(f"{path} has two rows of {row.model} at batch size {row.batch_size}")
    is_first = row.model == first.model
    one.timings.append(Timing(setting, row, is_first, options.repeat >= LEAST_ROUNDS and not is_first))


def _share_times(models: Models, source: int, document: BenchDocument) -> None:
    """Give models that a document does not time the times of the first one of their layout that it does."""

    def of_document(one: ReportModel) -> list[Timing]:
        return [timing for timing in one.timings if timing.setting.source == source]

    timed = [one for one in models.values() if one.is_model and of_document(one)]
    for one in models.values():
        is_failed = any(model_key(name) == model_key(one.model) for name in document.failed)
        donor = next((other for other in timed if other.modes == one.modes), None)
        if one.is_model and not is_failed and donor is not None and not of_document(one):
            one.timings += of_document(donor)
            one.timed_as = donor
