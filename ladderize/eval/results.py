"""The documents of ``ladderize eval`` and ``compare``, described in docs/files.md. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from ladderize.errors import UserError
from ladderize.files.records import Record, read_value


@dataclass(frozen=True)
class Perplexity(Record):
    """The perplexity of a text. The last three fields are only there after ``ladderize eval``."""

    LEFT_OUT: ClassVar = ("ids_sha256", "window_nll", "window_tokens")

    perplexity: float
    stderr: float | None  # from the spread between windows; a single one has none
    nll_per_token: float
    tokens: int
    windows: int
    seq_len: int
    ids_sha256: str | None = None  # of the windows' ids, which another tokenizer changes
    window_nll: list[float] | None = None  # the summed negative log-likelihood of each window in nats
    window_tokens: list[int] | None = None  # those scored


def perplexity_from_nlls(nlls: np.ndarray, windows: list[np.ndarray]) -> Perplexity:
    """Return the perplexity over windows, of which every token but the first is scored, by their summed negative
    log-likelihoods in nats. Windows are taken to be independent; tokens of one window are not."""
    counts = np.array([len(window) - 1 for window in windows])
    mean = float(nlls.sum() / counts.sum())
    if not math.isfinite(mean):
        raise UserError("the perplexity is NaN or infinite; check the model's weights, or compute in float32")
    stderr = None
    if len(windows) > 1:
        variance = len(windows) / (len(windows) - 1) * ((nlls - mean * counts) ** 2).sum()
        stderr = math.exp(mean) * math.sqrt(variance) / float(counts.sum())
    return Perplexity(math.exp(mean), stderr, mean, int(counts.sum()), len(windows), max(map(len, windows)))


@dataclass(frozen=True)
class Predictions(Record):
    """The distance of a model's predictions from the reference's, over the scored tokens of the perplexity's windows:
    KL(reference || model) in nats per token, over the whole vocabulary."""

    reference: str
    mean_kl: float
    low: float | None  # the ends of the mean's interval over windows; a single one has none
    high: float | None
    p99_kl: float
    same_top_share: float
    tokens: int


@dataclass(frozen=True)
class MeanComparison(Record):
    """The means of one metric of both models, on the same samples."""

    samples: int
    reference_value: float
    value: float
    difference: float
    low: float | None  # the ends of the difference's interval; None where the samples give none
    high: float | None
    verdict: str | None  # shown, not shown or worse; None where a margin in points has no meaning


@dataclass(frozen=True)
class TaskComparison(MeanComparison):
    """One metric of one task; only metrics of 0 and 1 have flips."""

    task: str
    metric: str
    filter: str
    main: bool  # the metric that stands for its task
    higher_is_better: bool | None
    mcnemar_p: float | None = None
    right_to_wrong: list[int] | None = None
    wrong_to_right: list[int] | None = None


@dataclass(frozen=True)
class PooledComparison(MeanComparison):
    """The mean over tasks of their main metrics. A group of lm-eval counts as one task."""

    tasks: list[str]


@dataclass(frozen=True)
class PerplexityComparison(Record):
    """The perplexities of both models on the same windows; a single one gives no interval."""

    windows: int
    tokens: int
    reference_value: float
    value: float
    difference: float
    stderr: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ComparisonDocument(Record):
    """One model against another."""

    reference: str
    other: str
    margin: float
    tasks: list[TaskComparison]
    overall: PooledComparison | None  # None where nothing could be pooled
    perplexity: PerplexityComparison | None
    predictions: Predictions | None
    left_out: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Comparisons(Record):
    """Each later model against the first: the document that ``ladderize compare`` writes."""

    comparisons: list[ComparisonDocument]


@dataclass(frozen=True)
class EvaluatedModel(Record):
    """An evaluated model, with its measurements on a text; predictions: None for the reference itself."""

    LEFT_OUT: ClassVar = ("perplexity", "predictions")

    model: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    parameters: int
    dtype: str
    device: str
    torch_version: str
    transformers_version: str
    perplexity: Perplexity | None = None
    predictions: Predictions | None = None
    backend: Literal["hf", "vllm"] = "hf"
    tp_size: int = 1


@dataclass(frozen=True)
class HarnessResult(Record):
    """The facts that are read of lm-eval's result, by task."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    higher_is_better: dict[str, dict[str, Any]] = field(default_factory=dict)
    group_subtasks: dict[str, list[str]] = field(default_factory=dict)

    @property
    def leaves(self) -> list[str]:
        """The tasks that have samples: groups have none."""
        return [task for task in self.results if not self.group_subtasks.get(task)]


@dataclass(frozen=True)
class ModelResult(Record):
    """One model's entry of results.json: lm-eval's own schema, to which ``model`` and ``samples`` are added."""

    model: EvaluatedModel
    harness: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, str] = field(default_factory=dict)  # by task, the file beside results.json, as lm-eval logs

    @property
    def reported(self) -> HarnessResult:
        """Return the facts that are read of lm-eval's result. Raises UserError where it is malformed."""
        return HarnessResult.from_dict(self.harness, self.model.model)

    def with_task(self, result: Mapping[str, Any], samples: Mapping[str, str]) -> "ModelResult":
        """Return the entry with one task's result of lm-eval added, and the files of its samples."""
        # objects are by task, but for the config, which is the same for all
        objects = {key: value for key, value in result.items() if isinstance(value, dict)}
        joined = {key: {**self.harness.get(key, {}), **value} for key, value in objects.items()}
        return replace(self, harness={**result, **self.harness, **joined}, samples={**self.samples, **samples})

    def to_dict(self) -> dict[str, Any]:
        return {"ladderize": self.model.to_dict(), "samples": dict(self.samples), **self.harness}

    @classmethod
    def from_dict(cls, value: object, where: str | Path) -> "ModelResult":
        harness = read_value(dict[str, Any], value, str(where))
        model = EvaluatedModel.from_dict(harness.pop("ladderize", None), f"{where}: ladderize")
        samples = read_value(dict[str, str], harness.pop("samples", {}), f"{where}: samples")
        return cls(model, harness, samples)


@dataclass(frozen=True)
class EvalResults(Record):
    """The document results.json."""

    options: Mapping[str, Any]  # those that decide what is measured
    models: list[ModelResult]
    # each later model against the first; none for a single model, or if the run was cut off
    comparisons: list[ComparisonDocument] = field(default_factory=list)
