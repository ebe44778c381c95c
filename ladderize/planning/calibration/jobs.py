"""The least that tells a device's and a link's figures apart: which models are timed, at which batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ladderize.checkpoint.llama import check_config
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.planning.calibration.options import CalibrateOptions
from ladderize.runtime.bench.options import BenchOptions, named_layout
from ladderize.runtime.shapes import read_shape
from ladderize.runtime.spec import ModelSpec, shape_spec

# hidden, intermediate, layers, query heads, KV heads: two widths, so that what a kernel costs and what its bytes cost
# differ; weights of hundreds of megabytes, which no core's own cache holds
CPU_SHAPES = ((1024, 2816, 12, 16, 8), (2048, 5632, 4, 16, 8))
GPU_SHAPES = ((4096, 14336, 8, 32, 8), (8192, 28672, 4, 64, 8))
VOCABULARY = 8192
PREFILL_TOKENS = {"cpu": 256, "cuda": 8192}
MOST_PROMPT_TOKENS = 1024
LAYOUTS = ("dense", "ladder")  # the second tells how much a message in flight slows the compute beside it


@dataclass(frozen=True)
class CalibrationJob:
    """One shape at one batch size, in ``LAYOUTS``; with one rank, where all are alike, dense alone."""

    specs: list[ModelSpec]
    options: BenchOptions
    batch: int


def calibration_jobs(options: CalibrateOptions, ranks: int) -> list[CalibrationJob]:
    """What a group of ``ranks`` times. Raises UserError or LayoutError for shapes that cannot be run on it."""
    jobs = []
    for config in _configs(options):
        specs = [
            shape_spec(
                config,
                named_layout(name, config["num_hidden_layers"], ranks),
                name=name,
                tp_size=ranks,
                dtype=options.dtype,
            )
            for name in (LAYOUTS if ranks > 1 else LAYOUTS[:1])
        ]
        for batch in options.batch_sizes:
            prompt = _prompt_len(options, batch)
            if prompt + options.output_len > specs[0].positions:
                raise UserError(
                    f"--shape: prompts of {prompt} tokens and {options.output_len} new ones are over the"
                    f" {specs[0].positions} positions of {config['hidden_size']} hidden; give fewer --prefill-tokens"
                )
            jobs.append(CalibrationJob(specs, _bench_options(options, ranks, batch, prompt), batch))
    return jobs


def prefill_tokens(options: CalibrateOptions) -> int:
    """Of all rows of a batch together."""
    return options.prefill_tokens or PREFILL_TOKENS[options.device]


def _prompt_len(options: CalibrateOptions, batch: int) -> int:
    return max(1, min(MOST_PROMPT_TOKENS, prefill_tokens(options) // batch))


def _bench_options(options: CalibrateOptions, ranks: int, batch: int, prompt: int) -> BenchOptions:
    return BenchOptions(
        tp_size=ranks,
        batch_sizes=(batch,),
        backend=options.backend if ranks > 1 else "auto",
        warmup=options.warmup,
        repeat=options.repeat,
        device=options.device,
        threads=options.threads,
        seed=options.seed,
        prompt_len=prompt,
        output_len=options.output_len,
    )


def _configs(options: CalibrateOptions) -> list[dict[str, Any]]:
    if not options.shapes:
        return [_made(*sizes) for sizes in (GPU_SHAPES if options.device == "cuda" else CPU_SHAPES)]
    configs = []
    for name in options.shapes:
        config = dict(read_shape(name, "--shape"))
        check_config(config)
        configs.append(plain_config(config))
    return configs


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without its layout."""
    dropped = Layout.dense(1).to_config().keys()
    return {**{key: value for key, value in config.items() if key not in dropped}, "model_type": "llama"}


def _made(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    }
