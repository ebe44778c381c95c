"""The content of results.json, which ``ladderize eval`` writes. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ladderize.errors import UserError
from ladderize.eval.comparison import ComparisonDocument, Predictions
from ladderize.eval.options import EvalBackend, EvalOptions
from ladderize.files.records import Record, read_value

OWN_KEY, SAMPLES_KEY = "ladderize", "samples"  # our parts of a model's entry


@dataclass(frozen=True)
class Perplexity(Record):
    """The perplexity of a text.

    stderr: the standard error of the perplexity, from the spread between windows; None for a single window.
    ids_sha256: of the windows' ids, which another tokenizer changes.
    window_nll, window_tokens: the summed negative log-likelihood of each window in nats, and its scored tokens, for a
    comparison in pairs.

    The last three are only there after ``ladderize eval``.
    """

    LEFT_OUT: ClassVar = ("ids_sha256", "window_nll", "window_tokens")

    perplexity: float
    stderr: float | None
    nll_per_token: float
    tokens: int
    windows: int
    seq_len: int
    ids_sha256: str | None = None
    window_nll: list[float] | None = None
    window_tokens: list[int] | None = None


def perplexity_from_nlls(nlls: np.ndarray, windows: list[np.ndarray]) -> Perplexity:
    """Return the perplexity over windows, of which every token but the first is scored, and its standard error.

    Windows are taken to be independent; tokens of one window are not.

    nlls: the summed negative log-likelihood of each window in nats.
    Raises UserError where it is NaN or infinite.
    """
    counts = np.array([len(window) - 1 for window in windows])
    mean = nlls.sum() / counts.sum()
    if not math.isfinite(mean):
        raise UserError("the perplexity is NaN or infinite; check the model's weights, or compute in float32")
    stderr = None
    if len(windows) > 1:
        spread = nlls - mean * counts
        stderr = math.exp(mean) * math.sqrt(len(windows) / (len(windows) - 1) * (spread**2).sum()) / float(counts.sum())
    return Perplexity(
        perplexity=math.exp(mean),
        stderr=stderr,
        nll_per_token=float(mean),
        tokens=int(counts.sum()),
        windows=len(windows),
        seq_len=max(map(len, windows)),
    )


@dataclass(frozen=True)
class EvaluatedModel(Record):
    """The description of an evaluated model, with its measurements on a text.

    predictions: against the reference's; None for the reference itself.
    """

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
    backend: EvalBackend = "hf"
    tp_size: int = 1


@dataclass(frozen=True)
class HarnessResult(Record):
    """The parts of lm-eval's result that are read here, by task."""

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
    """One model's entry: lm-eval's own schema, to which ``model`` and ``samples`` are added under keys of their own.

    harness: lm-eval's result.
    samples: task -> the .jsonl file of its samples in lm-eval's layout, relative to the folder of results.json.
    """

    model: EvaluatedModel
    harness: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, str] = field(default_factory=dict)

    @property
    def tasks(self) -> Mapping[str, Mapping[str, Any]]:
        """The metrics of lm-eval: task -> ``metric,filter`` and ``metric_stderr,filter`` -> value."""
        return self.parts().results

    def parts(self) -> HarnessResult:
        """Return what is read of lm-eval's result. Raises UserError where it is malformed."""
        return HarnessResult.from_dict(self.harness, self.model.model)

    def with_task(self, result: Mapping[str, Any], samples: Mapping[str, str]) -> "ModelResult":
        """Return the entry with one task's result of lm-eval added, and the files of its samples."""
        joined = dict(self.harness)
        for key, value in result.items():
            if isinstance(value, dict):  # by task, but for the config, which is the same for all
                joined[key] = {**joined.get(key, {}), **value}
            else:
                joined.setdefault(key, value)
        return replace(self, harness=joined, samples={**self.samples, **samples})

    def to_dict(self) -> dict[str, Any]:
        return {OWN_KEY: self.model.to_dict(), SAMPLES_KEY: dict(self.samples), **self.harness}

    @classmethod
    def from_dict(cls, value: object, where: str | Path) -> "ModelResult":
        harness = read_value(dict[str, Any], value, str(where))
        model = EvaluatedModel.from_dict(harness.pop(OWN_KEY, None), f"{where}: {OWN_KEY}")
        return cls(model, harness, read_value(dict[str, str], harness.pop(SAMPLES_KEY, {}), f"{where}: {SAMPLES_KEY}"))


@dataclass(frozen=True)
class EvalResults(Record):
    """The document results.json.

    options: shared by all models.
    comparisons: each later model against the first; none for a single model, or if the run was cut off.
    """

    options: EvalOptions
    models: list[ModelResult]
    comparisons: list[ComparisonDocument] = field(default_factory=list)
