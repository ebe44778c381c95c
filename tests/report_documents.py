"""Documents as eval and bench write them, with numbers that a test chooses: input of the report's tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladderize.console import to_json
from ladderize.eval.options import EvalOptions
from ladderize.eval.paired.document import (
    ALL,
    ComparisonDocument,
    PerplexityComparison,
    PooledComparison,
    PredictionComparison,
    TaskComparison,
    Verdict,
)
from ladderize.eval.results import EvalResults, EvaluatedModel, ModelResult
from ladderize.layout import Layout
from ladderize.runtime.bench.document import MODEL_ROW, BenchDocument, BenchRow, PhaseCommunication
from ladderize.runtime.bench.environment import Environment
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.collectives.links import Link

TASKS = ("arc", "hellaswag")
BENCH_OPTIONS = BenchOptions(tp_size=2, device="cpu")
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
    verdict: Verdict = "shown" if 100 * low > -margin else "worse" if 100 * high < -margin else "not shown"
    ends = {"difference": points / 100, "low": low, "high": high, "verdict": verdict, "samples_needed": 4000}
    value = DENSE_ACCURACY + points / 100
    common: dict[str, Any] = {"clusters": 500, "reference_value": DENSE_ACCURACY, "value": value, **ends}
    tasks = [
        TaskComparison(
            task=task,
            metric="acc",
            filter="none",
            main=True,
            higher_is_better=True,
            samples=500,
            mcnemar_p=0.2,
            right_to_wrong=12,
            wrong_to_right=9,
            right_to_wrong_docs=[1],
            wrong_to_right_docs=[2],
            **common,
        )
        for task in TASKS
    ]
    pooled = PooledComparison(name=ALL, weights="tasks", tasks=list(TASKS), samples=1000, **common)
    perplexity = PerplexityComparison(
        windows=64,
        tokens=6400,
        reference_value=4.0,
        value=4.0 - points / 20,
        difference=-points / 20,
        stderr=0.01,
        low=-points / 20 - 0.02,
        high=-points / 20 + 0.02,
        ratio=1.0,
        ratio_low=0.9,
        ratio_high=1.1,
    )
    predictions = PredictionComparison(64, 6400, 0.01, 0.009, 0.011, 0.2, 0.97)
    document = ComparisonDocument(
        reference, other, margin, 0.95, 1000, 0, None, tasks, [pooled], perplexity, predictions
    )
    return document.to_dict()


def eval_document(
    models: Mapping[str, Layout], points: Mapping[str, float], *, spread: float = 0.5, margin: float = 1.0
) -> dict[str, Any]:
    """results.json. points: of each model but the first, its difference to that."""
    names = list(models)
    entries = []
    for name, layout in models.items():
        value = DENSE_ACCURACY + points.get(name, 0.0) / 100
        harness = {
            "results": {task: {"alias": task, "acc,none": value, "acc_stderr,none": 0.02} for task in TASKS},
            "group_subtasks": {},
            "lm_eval_version": "0.4.13",
        }
        entries.append(ModelResult(_evaluated(model_path(name), layout), harness))
    results = EvalResults(EvalOptions(tasks=TASKS, limit=500), entries)
    first = model_path(names[0])
    compared = [comparison(first, model_path(name), points[name], spread, margin) for name in names[1:]]
    return {**results.to_dict(), "comparisons": compared}


def _evaluated(model: str, layout: Layout) -> EvaluatedModel:
    return EvaluatedModel(
        model=model,
        layout=str(layout),
        attention_sync=list(layout.attention_sync),
        mlp_sync=list(layout.mlp_sync),
        sync_tp_size=layout.sync_tp_size,
        parameters=1_000_000,
        dtype="float32",
        device="cpu",
        torch_version="2.13.0",
        transformers_version="5.23.0",
        add_bos_token=True,
    )


def bench_document(
    models: Mapping[str, Layout],
    speedups: Mapping[str, float],
    *,
    spread: float = 0.02,
    emulated: bool = False,
    batches: tuple[int, ...] = (1,),
    tp_size: int = 2,
) -> dict[str, Any]:
    """bench.json. speedups: of each model but the first; spread: half the width of their intervals."""
    ranks = {"emulate_tp": tp_size} if emulated else {"tp_size": tp_size}
    options = BenchOptions(**ranks, batch_sizes=batches, device="cpu")
    rows = [
        _row(model_path(name), layout, speedups.get(name, 1.0), spread, batch, tp_size, emulated)
        for batch in batches
        for name, layout in models.items()
    ]
    document = BenchDocument(
        complete=True,
        emulated=emulated,
        options=options,
        link=Link("nccl_pcie", 20.0, 10.0) if emulated else None,
        message_bytes_outside_link_range=[],
        backend="none" if emulated else "shm: all ranks are on this host",
        environment=Environment("cpu", "a processor", 2, 1, "3.11.7", "2.13.0", "5.23.0", "Linux 6", 1, {}),
        checks={},
        alone_ms={},
        rows=rows,
    )
    return document.to_dict()


def _row(
    model: str, layout: Layout, speedup: float, spread: float, batch: int, tp_size: int, emulated: bool
) -> BenchRow:
    interval = [speedup - spread, speedup + spread]
    prefill, decode = 40.0 / speedup, 5.0 / speedup
    part = PhaseCommunication(16, 4096, 0.7 * decode, 1.5, 0.1, 0.3 * decode, [0.2, 2.0], 0.4, 0.6, 0.5, decode)
    return BenchRow(
        model=model,
        kind=MODEL_ROW,
        layout=str(layout),
        attention_sync=list(layout.attention_sync),
        mlp_sync=list(layout.mlp_sync),
        sync_tp_size=layout.sync_tp_size,
        weights=f"/tmp/{model}",
        dtype="float32",
        checked=True,
        emulated=emulated,
        tp_size=tp_size,
        batch_size=batch,
        prefill_ms=prefill,
        decode_ms_per_token=decode,
        output_tokens_per_s=1e3 * batch / decode,
        tokens_per_s_per_user=1e3 / decode,
        end_to_end_ms=prefill + 32 * decode,
        speedup_prefill=speedup,
        speedup_decode=speedup,
        speedup_end_to_end=speedup,
        speedup_prefill_interval=interval,
        speedup_decode_interval=interval,
        speedup_end_to_end_interval=interval,
        weight_bytes=1000,
        kv_cache_bytes=100,
        peak_memory_bytes=2000,
        samples_ms={"prefill": [prefill] * 7, "decode": [decode] * 7},
        communication={"prefill": part, "decode": part},
        no_communication_samples_ms={"prefill": [1.0], "decode": [1.0]},
    )
