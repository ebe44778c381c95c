"""What ``bench`` is asked to do: which options go with inference and which with training, and the dataclasses of
either."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ladderize.choices import DeviceName, EngineName
from ladderize.commands.options import _runtime_options, names_of, options_from
from ladderize.console import Console
from ladderize.errors import UsageError
from ladderize.runtime.bench.options import BenchOptions, GroupOptions, ModelChoice, parse_baselines, parse_counts
from ladderize.runtime.bench.training.options import TrainingBenchOptions, parse_schedules
from ladderize.serving.vllm.bench.options import VllmBenchOptions

# options that no field of their dataclass is called after
ONLY_INFERENCE = {"compile_", "plot"}
FOR_VLLM = {"engine", "batch_size", "out", "plot", "as_json", "config", "print_config"}
INSTEAD_FOR_VLLM = {
    "backend": "; LADDERIZE_VLLM_BACKEND says what carries its messages",
    "emulate_tp": "; LADDERIZE_VLLM_BACKEND=emulated:... stands for ranks that are not there",
    "link": "; LADDERIZE_VLLM_BACKEND=emulated:... stands for ranks that are not there",
    "device": ", which computes on what it was built for",
    "compile_": ", which compiles by itself",
    "no_check": ", whose tokens are not compared with a reference",
    "train": ", which does not train",
}


def check_way(given: Sequence[str], *, train: bool, engine: EngineName) -> None:
    """Raise UsageError for options that were given and have no effect on inference, on training, or on vLLM."""
    if engine == "vllm":
        _check_vllm_way(given)
        return
    inference, training = names_of(BenchOptions) | ONLY_INFERENCE, names_of(TrainingBenchOptions)
    for name in given:
        option = f"--{name.rstrip('_').replace('_', '-')}"
        if train and name in inference - training:
            instead = {"schedule": "; give --schedules", "prompt_len": "; give --seq-len"}.get(name, "")
            raise UsageError(f"{option} has no effect with --train{instead}")
        if not train and name in training - inference:
            raise UsageError(f"{option} has no effect without --train")


def _check_vllm_way(given: Sequence[str]) -> None:
    known = names_of(VllmBenchOptions) | names_of(ModelChoice) | FOR_VLLM
    for name in given:
        if name not in known:
            instead = INSTEAD_FOR_VLLM.get(name, "")
            raise UsageError(f"--{name.rstrip('_').replace('_', '-')} has no effect with --engine vllm{instead}")


def vllm_bench_options(params: Mapping[str, Any]) -> VllmBenchOptions:
    return options_from(VllmBenchOptions, params, **_sizes(params), baselines=parse_baselines(params["baselines"]))


def bench_options(params: Mapping[str, Any]) -> BenchOptions:
    return options_from(
        BenchOptions,
        params,
        **_sizes(params),
        baselines=parse_baselines(params["baselines"]),
        check=not params["no_check"],
        compile=params["compile_"],
        device=params["device"] or "cpu",  # which GPUs there are, torch says later
    )


def training_bench_options(params: Mapping[str, Any]) -> TrainingBenchOptions:
    schedules = params["schedules"]
    return options_from(
        TrainingBenchOptions,
        params,
        **_sizes(params),
        schedules=TrainingBenchOptions.schedules if schedules is None else parse_schedules(schedules),
        check=not params["no_check"],
        device=params["device"] or "cpu",
    )


def _sizes(params: Mapping[str, Any]) -> dict[str, Any]:
    return {} if params["batch_size"] is None else {"batch_sizes": parse_counts(params["batch_size"])}


def start_bench(module: str, options: GroupOptions, console: Console, device: DeviceName | None) -> DeviceName:
    """Import torch and ``module``, and check where to compute; returns the device."""
    with console.stage("loading torch"):
        importlib.import_module(module)
        return _runtime_options(device, options.backend, options.threads, options.ranks)
