"""Results of ``ladderize eval`` that tests make up."""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


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
