"""Documents as eval and bench write them, with numbers that a test chooses: input of the report's tests."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ladderize.console import to_json
from ladderize.eval.results import (
    ComparisonDocument,
    EvalResults,
    EvaluatedModel,
    ModelResult,
    PerplexityComparison,
    PooledComparison,
    Predictions,
    TaskComparison,
)
from ladderize.layout import Layout
from ladderize.runtime.bench.document import MODEL_ROW, BenchDocument, BenchRow, Environment, PhaseCommunication
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.collectives.links import Link
from ladderize.sweep_document import SweepDocument, SweepPoint

TASKS = ("arc", "hellaswag")
DENSE_ACCURACY = 0.61


def layouts(layers: int = 4) -> dict[str, Layout]:
    everything = range(layers)
    return {
        "dense": Layout.dense(layers),
        "ladder": Layout.from_layers(layers, ladder=everything),
        "spd": Layout.from_layers(layers, spd=everything, sync_tp_size=2),
        "both": Layout.from_layers(layers, ladder=everything, spd=everything, sync_tp_size=2),
    }


def write_document(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(to_json(content))


def model_path(name: str) -> str:
    return f"models/{name}"


def comparison(reference: str, other: str, points: float, spread: float, margin: float) -> dict[str, Any]:
    """points: the difference; spread: half the width of its interval, in points."""
    low, high = (points - spread) / 100, (points + spread) / 100
    verdict = "shown" if 100 * low > -margin else "worse" if 100 * high < -margin else "not shown"
    ends = {"difference": points / 100, "low": low, "high": high, "verdict": verdict}
    value = DENSE_ACCURACY + points / 100
    common: dict[str, Any] = {"reference_value": DENSE_ACCURACY, "value": value, **ends}
    tasks = [
        TaskComparison(
            task=task, metric="acc", filter="none", main=True, higher_is_better=True, samples=500, mcnemar_p=0.2,
            right_to_wrong=list(range(12)), wrong_to_right=list(range(12, 21)), **common,
        )
        for task in TASKS
    ]  # fmt: skip
    overall = PooledComparison(tasks=list(TASKS), samples=1000, **common)
    perplexity = PerplexityComparison(
        windows=64, tokens=6400, reference_value=4.0, value=4.0 - points / 20, difference=-points / 20, stderr=0.01,
        low=-points / 20 - 0.02, high=-points / 20 + 0.02,
    )  # fmt: skip
    predictions = Predictions(reference, 0.01, 0.009, 0.011, 0.2, 0.97, 6400)
    return ComparisonDocument(reference, other, margin, tasks, overall, perplexity, predictions).to_dict()


def eval_document(
    models: Mapping[str, Layout], points: Mapping[str, float], *, spread: float = 0.5, margin: float = 1.0
) -> dict[str, Any]:
    """results.json. points: of each model but the first, its difference to that."""
    entries = []
    for name, layout in models.items():
        scores = {"acc,none": DENSE_ACCURACY + points.get(name, 0.0) / 100, "acc_stderr,none": 0.02}
        results = {task: {"alias": task, **scores} for task in TASKS}
        harness = {"results": results, "group_subtasks": {}, "lm_eval_version": "0.4.13"}
        entries.append(ModelResult(_evaluated(model_path(name), layout), harness))
    first, *others = models
    compared = [comparison(model_path(first), model_path(name), points[name], spread, margin) for name in others]
    return {**EvalResults({"tasks": list(TASKS), "limit": 500}, entries).to_dict(), "comparisons": compared}


def _evaluated(model: str, layout: Layout) -> EvaluatedModel:
    return EvaluatedModel(
        model=model, layout=str(layout), **layout.to_config(), parameters=1_000_000, dtype="float32", device="cpu",
        torch_version="2.13.0", transformers_version="5.23.0",
    )  # fmt: skip


def bench_document(
    models: Mapping[str, Layout],
    speedups: Mapping[str, float],
    *,
    emulated: bool = False,
    batches: Any = (1,),
) -> dict[str, Any]:
    """bench.json. speedups: of each model but the first."""
    options = BenchOptions(**{"emulate_tp" if emulated else "tp_size": 2}, batch_sizes=tuple(batches), device="cpu")
    rows = [_row(name, layout, speedups.get(name, 1.0), size) for size in batches for name, layout in models.items()]
    return BenchDocument(
        complete=True, options=options, link=Link("nccl_pcie", 20.0, 10.0) if emulated else None,
        backend="none" if emulated else "shm: all ranks are on this host",
        environment=Environment("cpu", "a processor", 2, 1, "3.11.7", "2.13.0", "5.23.0", "Linux 6", 1, {}),
        checks={}, alone_ms={}, rows=rows, failed={},
    ).to_dict()  # fmt: skip


def _row(name: str, layout: Layout, speedup: float, batch: int) -> BenchRow:
    model, interval = model_path(name), [speedup - 0.02, speedup + 0.02]
    prefill, decode = 40.0 / speedup, 5.0 / speedup
    part = PhaseCommunication(
        all_reduces=16, bytes=4096, no_communication_ms=0.7 * decode, alone_ms=1.5, exposed_ms=0.3 * decode,
        exposed_interval_ms=[0.2, 2.0],
    )  # fmt: skip
    return BenchRow(
        model=model, kind=MODEL_ROW, schedule="sequential", layout=str(layout), **layout.to_config(),
        weights=f"/tmp/{model}", dtype="float32", tp_size=2, batch_size=batch,
        ms={"prefill": prefill, "decode": decode, "end_to_end": prefill + 32 * decode},
        tokens_per_s=1e3 * batch / decode, speedup=dict.fromkeys(("prefill", "decode", "end_to_end"), speedup),
        speedup_interval=dict.fromkeys(("prefill", "decode", "end_to_end"), interval),
        samples_ms={"prefill": [prefill] * 7, "decode": [decode] * 7},
        communication={"prefill": part, "decode": part},
        no_communication_samples_ms={"prefill": [1.0], "decode": [1.0]},
    )  # fmt: skip


def write_metrics(folder: Path, values: Sequence[float], *, dense: float | None = 3.4) -> None:
    """metrics.jsonl of a retraining, validated at every step of 500 tokens. dense: None for one without a teacher."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step, value in enumerate(values):
        lines += [{"step": step, "loss": 1.0 / step, "tokens": 500 * step}] if step else []
        lines.append({"step": step, "heldout_perplexity": value})
        if dense is not None:
            lines[-1]["heldout_divergence"] = math.log(value / dense)
    if dense is not None:
        lines[0]["dense_heldout_perplexity"] = dense
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_sweep(folder: Path, right: Mapping[str, Sequence[bool]]) -> None:
    """A sweep's folder. right: of the dense model and of points named LAYOUT, LAYOUT-TOKENS (of full) or
    LAYOUT-TOKENS-METHOD+METHOD, which answers were right. Each model is evaluated by itself, with its samples; layouts
    are timed, not points.
    """
    models = layouts()
    points, timed = [], {}
    for name, answers in right.items():
        layout, _, adapted = _parts(name)
        place = f"stages/eval-{name}"
        (folder / place).mkdir(parents=True)
        written = Written(folder / place, "results").task("arc", {"acc": [float(answer) for answer in answers]})
        written.model |= vars(_evaluated(model_path(name), models[layout]))
        written.write()
        if "full" in adapted:
            write_metrics(folder / f"stages/adapt-{name}", [9.0, 5.0, 4.0])
        timed[layout] = models[layout]
        points.append(_point(name, models[layout], f"{place}/results.json"))
    write_document(folder / "bench.json", bench_document(timed, {"ladder": 1.25, "spd": 1.4}, batches=(1, 4)))
    same = {"command": "ladderize sweep sweep.yaml", "complete": True, "stages": [], "benches": ["bench.json"]}
    document = SweepDocument(model="models/dense", margin=2.0, points=points, **same)
    write_document(folder / "sweep.json", document.to_dict())


def _parts(name: str) -> tuple[str, str, str]:
    layout, tokens, adapted = (*name.split("-"), "", "")[:3]
    return layout, tokens, (adapted.replace("+", " + ") or "full") if tokens else "none"


def _point(name: str, layout: Layout, results: str) -> SweepPoint:
    kind, tokens, adapted = _parts(name)
    return SweepPoint(
        name=name, layout=str(layout), **layout.to_config(), adapted=adapted, tokens=int(tokens) if tokens else None,
        model=model_path(name), results=results, adaptation=f"stages/adapt-{name}" if "full" in adapted else None,
        stages=[], timed=model_path(kind),
    )  # fmt: skip


class Written:
    """An evaluation as ``ladderize eval`` stores it, of which every part can be changed before it is written."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path, self.name = folder / f"{name}.json", name
        self.samples: dict[str, list[dict[str, Any]]] = {}
        parts = ("results", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")
        self.harness: dict[str, Any] = {part: {} for part in parts}
        self.model: dict[str, Any] = {
            "model": f"models/{name}", "layout": "dense", "attention_sync": ["blocking"], "mlp_sync": ["blocking"],
            "sync_tp_size": None, "parameters": 1, "dtype": "float32", "device": "cpu", "torch_version": "2",
            "transformers_version": "5",
        }  # fmt: skip
        self.options: dict[str, Any] = {"tasks": []}

    def task(
        self, name: str, values: Mapping[str, Any], *, higher: bool = True, filters: tuple[str, ...] = ("none",)
    ) -> "Written":
        """values: metric -> of each sample."""
        self.options["tasks"].append(name)
        count = len(next(iter(values.values())))
        self.samples[name] = [
            {
                "doc_id": number, "doc": {"question": f"q{number}"}, "target": "x", "arguments": {}, "resps": [],
                "filtered_resps": [], "filter": kind, "metrics": list(values), "doc_hash": f"d{name}{number}",
                "prompt_hash": f"p{name}{number}", "target_hash": f"t{number}",
                **{metric: given[number] for metric, given in values.items()},
            }
            for kind in filters
            for number in range(count)
        ]  # fmt: skip
        reported = {f"{metric},{kind}": float(np.mean(given)) for kind in filters for metric, given in values.items()}
        self.harness["results"][name] = {"alias": name, **reported}
        metrics = [{"metric": metric, "aggregation": "mean"} for metric in values]
        self.harness["configs"][name] = {"metric_list": metrics}
        self.harness["versions"][name], self.harness["n-shot"][name] = 1.0, 0
        self.harness["higher_is_better"][name] = dict.fromkeys(values, higher)
        return self

    def perplexity(self, nll: np.ndarray, tokens: np.ndarray) -> "Written":
        mean = float(nll.sum() / tokens.sum())
        self.model["perplexity"] = {
            "perplexity": math.exp(mean), "stderr": None, "nll_per_token": mean, "tokens": int(tokens.sum()),
            "windows": len(nll), "seq_len": 128, "ids_sha256": "cd",
            "window_nll": nll.tolist(), "window_tokens": tokens.tolist(),
        }  # fmt: skip
        return self

    def write(self) -> Path:
        folder = self.path.with_suffix(".samples")
        folder.mkdir(exist_ok=True)
        named = {}
        for task, logged in self.samples.items():
            random.shuffle(logged)  # processes of lm-eval finish in any order
            (folder / f"{task}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in logged))
            named[task] = f"{folder.name}/{task}.jsonl"
        entry = {"ladderize": self.model, "samples": named, **self.harness}
        content = {"schema_version": 1, "ladderize_version": "0", "options": self.options, "models": [entry]}
        self.path.write_text(json.dumps(content))
        return self.path
