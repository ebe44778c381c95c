"""About how long stages take of which nothing like them has run yet: their arithmetic, at the rate of a short product
of matrices of the model's size on this machine."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ladderize.adapt.layers.options import BlockwiseOptions
from ladderize.adapt.methods import LORA
from ladderize.adapt.train.options import RetrainOptions
from ladderize.checkpoint.config import most_positions, parameter_count
from ladderize.commands.adapt import adapt_options
from ladderize.console import human_count
from ladderize.eval.options import EvalOptions, SensitivityOptions
from ladderize.files.regular import split_name
from ladderize.ranks.device import default_device
from ladderize.runtime.bench.options import BenchOptions, ModelChoice
from ladderize.tradeoff.sweep.launch import Words
from ladderize.tradeoff.sweep.margin import Questions
from ladderize.tradeoff.sweep.stages import Stage, asked_by, errors_begin_with

# of the product's rate, that a model reaches. GPUs: as in adapt's forecast. CPUs: seen of an evaluation and a
# sensitivity of 31M parameters on 2 cores that others used too (0.76 and 0.91)
EFFICIENCY = {"cuda": 0.4, "cpu": 0.8}
START_SECONDS = 10.0  # for imports, the model's weights, and the output
PROBE_SECONDS, PROBE_BYTES = 0.2, 1 << 28
QUESTION_TOKENS, ANSWER_TOKENS = 500, 256  # of a question with all its answers; of one that is generated
TEXT_TOKEN_BYTES, ID_TOKEN_BYTES = 4, 8  # of a token
WINDOWS, ALIGN_TOKENS, HELDOUT = 1024, 1 << 17, 64  # that adapt's methods read where the file does not say
ALIGNED_WORK = 4  # of a sensitivity that aligns each changed model, times one that does not


@dataclass(frozen=True)
class Work:
    """flops: multiplications and additions. passes: of a few tokens, which take as long as reading the weights."""

    flops: float
    passes: float = 0.0


@dataclass(frozen=True)
class Estimator:
    """config: of the model. flops, bandwidth: of one device in a second, as measured; bytes are read. size: bytes of
    the weights. questions: of the tasks; None where they were not counted."""

    config: Mapping[str, Any]
    device: str
    flops: float
    bandwidth: float
    size: int
    questions: Sequence[Questions] | None

    @classmethod
    def of(cls, config: Mapping[str, Any], folder: Path, questions: Sequence[Questions] | None) -> "Estimator":
        """Measures, in less than a second once torch is warm. folder: of the model."""
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        device, count = default_device(), parameter_count(config)
        dtype = torch.float32 if size >= 4 * count else torch.bfloat16
        shape = config["hidden_size"], config["intermediate_size"]
        rows = torch.ones(4096 if device == "cuda" else 512, shape[0], dtype=dtype, device=device)
        weights = torch.ones(*shape, dtype=dtype, device=device)
        read = torch.ones(PROBE_BYTES // 4, device=device)
        product = _seconds_of(lambda: rows @ weights, device)
        return cls(
            config=config,
            device=device,
            flops=2 * rows.numel() * shape[1] / product,
            bandwidth=PROBE_BYTES / _seconds_of(read.sum, device),
            size=size,
            questions=questions,
        )

    @property
    def words(self) -> str:
        return (
            "no stage like some of these has run here: their times are guessed from"
            f" {EFFICIENCY[self.device]:.0%} of the rate of a product of the model's matrices,"
            f" {human_count(self.flops)} operations per second on {self.device}"
        )

    def seconds(self, stage: Stage) -> float | None:
        """None where it cannot be told."""
        with errors_begin_with(stage.title):
            work = self._work(stage.commands[0])
        if work is None:
            return None
        starts, devices = len(stage.commands), max(1, stage.launch.gpus) * stage.launch.hosts
        if stage.kind == "bench":
            asked = asked_by(stage.commands[0])
            starts, devices = len(asked.fill(ModelChoice).models), asked.fill(BenchOptions).tp_size
        devices = devices if self.device == "cuda" else 1  # processes share the cores
        seconds = work.flops / (EFFICIENCY[self.device] * self.flops) + work.passes * self.size / self.bandwidth
        return START_SECONDS * starts + seconds / devices

    def _work(self, words: Words) -> Work | None:
        asked, per_token = asked_by(words), 2.0 * parameter_count(self.config)
        match words[0]:
            case "convert":
                return Work(0.0)
            case "sensitivity":
                scored = asked.fill(SensitivityOptions)
                layers = self.config["num_hidden_layers"] / 2  # what lies before a changed layer is computed once
                tokens = scored.samples * (scored.seq_len or self._seq_len)
                return Work(per_token * tokens * layers * (ALIGNED_WORK if scored.align else 1))
            case "adapt":
                return Work(per_token * self._forwards(words))
            case "eval":
                return self._evaluation(asked.fill(EvalOptions), per_token)
            case _:
                timed, models = asked.fill(BenchOptions), asked.fill(ModelChoice).models
                runs = len(models) * (timed.repeat + timed.warmup)
                prompts = sum(timed.batch_sizes) * timed.prompt_len
                return Work(per_token * runs * prompts, runs * len(timed.batch_sizes) * timed.output_len)

    @property
    def _seq_len(self) -> int:
        return min(2048, most_positions(self.config))

    def _forwards(self, words: Words) -> float:
        """Tokens that adapting takes forward through a whole model, or as much work: backward is twice that, without
        gradients of weights once."""
        options = adapt_options(asked_by(words))
        if not isinstance(options, RetrainOptions):
            seq_len = options.seq_len or self._seq_len
            if isinstance(options, BlockwiseOptions):
                return (options.samples or WINDOWS) * seq_len * (1 + 3 * options.distill.epochs)
            return 2.0 * (options.samples * seq_len if options.samples else ALIGN_TOKENS)  # dense, and converted
        training = options.resolve(self.config, 1)
        step = training.batch_size * training.seq_len
        taught = options.distill_from is not None
        trained = (2 if options.method == LORA else 3) + taught + bool(options.gradient_checkpointing)
        validated = (1 + training.about_steps / training.eval_every) * (options.heldout or HELDOUT) * training.seq_len
        return float(training.about_steps * step * trained + validated * (1 + taught))

    def _evaluation(self, options: EvalOptions, per_token: float) -> Work | None:
        tokens = passes = 0.0
        if options.perplexity is not None:
            path, _ = split_name(options.perplexity)
            tokens = path.stat().st_size / (
                ID_TOKEN_BYTES if Path(path).suffix in (".npy", ".npz") else TEXT_TOKEN_BYTES
            )
            if options.windows is not None:
                tokens = min(tokens, options.windows * (options.seq_len or self._seq_len))
        if options.tasks and self.questions is None:
            return None
        for task in (self.questions or ()) if options.tasks else ():
            tokens += task.count * QUESTION_TOKENS
            passes += task.generated * ANSWER_TOKENS / options.batch_size
        return Work(per_token * tokens, passes)


def _seconds_of(compute: Callable[[], Any], device: str) -> float:
    """The shortest of as many runs as ``PROBE_SECONDS`` allow, at least two after one that does not count."""

    def once() -> float:
        begin = time.perf_counter()
        compute()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    once()
    found, end = [once(), once()], time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < end:
        found.append(once())
    return min(found)
