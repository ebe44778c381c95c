"""results.json: what ``ladderize eval`` writes. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ladderize.eval.options import EvalOptions
from ladderize.files.records import Record

# the parts of lm-eval's result that hold one entry for each task
PER_TASK = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")
OWN_KEY = "ladderize"  # of our part of a model's entry


@dataclass(frozen=True)
class Perplexity(Record):
    """``stderr`` is the standard error of the perplexity, from the spread between windows; None for a single window."""

    perplexity: float
    stderr: float | None
    nll_per_token: float
    tokens: int
    windows: int
    seq_len: int
    tokens_per_s: float


@dataclass(frozen=True)
class EvaluatedModel(Record):
    """What was evaluated, and how. add_bos_token: whether the texts of tasks begin with BOS; None: no text was
    read, or no model so far had a tokenizer."""

    LEFT_OUT: ClassVar = ("perplexity",)

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
    add_bos_token: bool | None
    perplexity: Perplexity | None = None


@dataclass(frozen=True)
class ModelResult:
    """One model's entry: ``harness`` is lm-eval's own schema as it is, to which ``model`` is added under a key."""

    model: EvaluatedModel
    harness: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tasks(self) -> Mapping[str, Mapping[str, Any]]:
        """lm-eval's metrics: task -> ``metric,filter`` and ``metric_stderr,filter`` -> value."""
        found: Mapping[str, Mapping[str, Any]] = self.harness.get("results", {})
        return found

    def with_task(self, result: Mapping[str, Any]) -> "ModelResult":
        """With one task's result of lm-eval added."""
        joined = dict(self.harness)
        for key, value in result.items():
            if key in PER_TASK and isinstance(value, dict):
                joined[key] = {**joined.get(key, {}), **value}
            else:
                joined.setdefault(key, value)
        return replace(self, harness=joined)

    def to_dict(self) -> dict[str, Any]:
        return {OWN_KEY: self.model.to_dict(), **self.harness}


@dataclass(frozen=True)
class EvalResults:
    """options: what was the same for all models."""

    options: EvalOptions
    models: list[ModelResult]

    def to_dict(self) -> dict[str, Any]:
        """The content of results.json; ``from_dict`` reads it back."""
        return {"options": self.options.to_dict(), "models": [model.to_dict() for model in self.models]}

    @classmethod
    def from_dict(cls, value: object, where: str | Path) -> "EvalResults":
        """Raises UserError, which begins with ``where``, for a malformed document."""
        content = _ResultsContent.from_dict(value, where)
        models = []
        for number, entry in enumerate(content.models):
            own = _OwnPart.from_dict(entry, f"{where}: models[{number}]")
            models.append(ModelResult(own.ladderize, {key: part for key, part in entry.items() if key != OWN_KEY}))
        return cls(content.options, models)


@dataclass(frozen=True)
class _OwnPart(Record):
    ladderize: EvaluatedModel


@dataclass(frozen=True)
class _ResultsContent(Record):
    options: EvalOptions
    models: list[dict[str, Any]]
