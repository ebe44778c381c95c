"""distillation.json: what became of each block."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ladderize import data
from ladderize.adapt.blockwise.options import BlockwiseOptions
from ladderize.adapt.blockwise.windows import Windows


def training_record(windows: Windows, options: BlockwiseOptions, dtype: torch.dtype) -> dict[str, Any]:
    """What training depends on besides the models: for ladderize.yaml, and for a killed run to know itself."""
    return {
        "data": {
            "file": options.data,
            "sha256": data.file_sha256(options.data),
            "samples": len(windows.train),
            "heldout": len(windows.heldout),
            "seq_len": windows.train.shape[1],
        },
        "options": options.distill.record(),
        "dtype": str(dtype).removeprefix("torch."),
    }


def distillation_rows(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A table of blocks for people."""
    return [
        {
            "block": str(report["block"]),
            "loss before": f"{report['loss_before']:.3e}",
            "after": f"{report['loss_after']:.3e}",
            "lost before": f"{report['share_lost_before']:.2%}",
            "lost after": f"{report['share_lost_after']:.2%}",
            "steps": str(report["steps"]) + (" (stopped early)" if report["stopped_early"] else ""),
        }
        for report in reports
    ]


def perplexity_rows(perplexities: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Held-out perplexities beside the first, the dense model's, for people."""
    dense = next(iter(perplexities.values()))["perplexity"]
    return [
        {
            "held out": name,
            "perplexity": f"{value['perplexity']:.4f}",
            "stderr": "" if value["stderr"] is None else f"{value['stderr']:.4f}",
            "difference": "" if number == 0 else f"{value['perplexity'] - dense:+.4f}",
        }
        for number, (name, value) in enumerate(perplexities.items())
    ]
