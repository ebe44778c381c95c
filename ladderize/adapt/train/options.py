"""The options of a retraining, and the defaults that depend on the model: loss, budget, learning rate."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ladderize.adapt.layers.options import SAMPLES
from ladderize.adapt.lora import LORA_TARGETS
from ladderize.adapt.methods import (
    COMPUTE_DTYPE,
    CONVERTED,
    FULL,
    LORA,
    TRAINING_SEED,
    Method,
    TrainingDtype,
    Write,
    check_lr,
)
from ladderize.checkpoint.config import most_positions
from ladderize.choices import DEVICE, SEQ_LEN, check_options, flag, option, split_names
from ladderize.data.files import check_sources, data_files, hub_dataset, split_weight
from ladderize.errors import UsageError, UserError
from ladderize.files.records import Record
from ladderize.ranks.device import default_device
from ladderize.runtime.schedule import Schedule, ScheduleName

# Peak learning rates at width 4096; a step of Adam moves a sum over twice the width twice as far.
WIDTH, FULL_LR, LORA_LR = 4096, 2e-5, 1e-4
# After alignment: the fewest steps of warm-up, the largest share of all steps that these may be, the least peak, and
# the divergence in nats per token from which on the whole peak suits. Sooner and higher rates undo the alignment, and a
# longer warm-up is training lost (60k tokens, ladder on all layers of the bundled model: KL 0.173 without, 0.103 with
# a fifth of the steps).
ALIGNED_WARMUP, ALIGNED_SHARE, LEAST_PEAK, WHOLE_PEAK_FROM = 10, 0.2, 0.2, 0.6
SHARE_OF_WARMUP, MOST_WARMUP = 0.05, 200  # of the steps, and steps
# Tokens of a step: a two-thousandth of the budget within these bounds, since a short training gains more from steps
# than from large ones.
LEAST_PER_STEP, MOST_PER_STEP = 2048, 65536
PER_STEP = 16384  # where --max-steps are given
LORA_RANK = 16
MICRO_BATCH_TOKENS = 8192
MOST_TOKENS = 10**18  # more than any data have
# A run that resumes must have these in common with the one before. Others may change, as after the loss exploded.
LORA_FIELDS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
FIXED = ("method", "train", "samples", "heldout", "seq_len", "batch_size", "weight_decay", "seed", "distill_weight")
# the share of the time for validation; with fewer tokens in each one there are fewer validations instead
VALIDATION_SHARE, ENOUGH_SCORED = 0.1, 4096
RateSchedule = Literal["cosine", "linear", "constant"]
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Objective:
    """The loss: (1 - w) * cross-entropy + w * KL(teacher || student), w: distill_weight. On held-out rows it decides
    which weights are best."""

    distill_weight: float = 0.0

    @property
    def label(self) -> str:
        """The loss in words."""
        w = self.distill_weight
        return "cross-entropy" if not w else "KL" if w == 1 else f"{w:g} KL + {1 - w:g} cross-entropy"

    def total(self, cross_entropy: Any, divergence: Any) -> Any:
        """Return the loss from two means, which are numbers or tensors."""
        w = self.distill_weight
        return (1 - w) * cross_entropy + w * divergence if w else cross_entropy


def parse_count(text: str) -> int:
    """Return the number in ``3B``, ``20M``, ``500k`` or a plain number; raises UsageError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMbBtT]?)", text.strip())
    value = float(match[1]) * COUNTS[match[2].upper()] if match else 0.0
    if not 1 <= round(min(value, MOST_TOKENS)) < MOST_TOKENS:
        shown = text if len(text) <= 40 else text[:40] + "..."
        raise UsageError(f"--max-tokens: {shown!r} is not a number of tokens below 10^18; write for example 20M or 3B")
    return round(value)


@dataclass(frozen=True)
class RetrainOptions(Record):
    """The options of ``ladderize adapt``; see its --help. None: ``resolve`` chooses the default for the model.

    align: align with ``distill_from`` before training; the aligned checkpoint stays beside OUT.
    Raises UsageError for a value out of its range.
    """

    data: tuple[str, ...] = option(
        "json, jsonl, parquet, txt, npy, npz:array, a folder or glob of one kind, or hub:OWNER/NAME:SPLIT. Give it"
        " several times to read all of several sources, or with weights to mix them.",
        ...,
        metavar="FILE[=WEIGHT]",
    )
    method: Method = option(
        "full: train all weights of the chosen layers. lora: train LoRA adapters. blocks: train each block alone on the"
        " dense block's outputs. align: solve the projections anew by least squares, without training; seconds to"
        " minutes, and a good start for the others.",
        FULL,
        metavar="NAME",
    )
    train: str = option(
        "Layers to train: converted, all (with full: embedding and LM head too), or ranges like 16:32,40.",
        CONVERTED,
        metavar="LAYERS",
        shown="converted; align: every layer from the first converted one on",
    )
    distill_from: str | None = option(
        "The dense model that MODEL was converted from. Its predictions are the training target.", metavar="DENSE"
    )
    distill_weight: float | None = option(
        "Weight of the KL term (0 to 1). Cross-entropy gets the rest.",
        min=0.0,
        max=1.0,
        shown="1 with --distill-from",
    )
    teacher_cache: str | None = option(
        "Keep the dense model's answers (its 64 likeliest next tokens) on --data in this folder, and train with them"
        " instead of with the model in memory. Later runs on the same data find them there.",
        metavar="FOLDER",
        needs="distill_from",
    )
    lora_rank: int | None = option("lora: rank.", min=1, shown=str(LORA_RANK))
    lora_alpha: int | None = option("lora: alpha; scales by alpha / rank.", min=1, shown="twice the rank")
    lora_dropout: float = option("lora: dropout before A.", 0.0, min=0.0, max=0.99, shown="0")
    lora_targets: tuple[str, ...] = option(
        "lora: projections that get adapters.", (), metavar="A,B", parse=split_names, shown="all seven of a layer"
    )
    eval_data: tuple[str, ...] = option("Data to validate on.", (), metavar="FILE", shown="examples held out of --data")
    heldout: int | None = option(
        "Examples to hold out of each --data for validation.",
        min=0,
        shown="a hundredth, up to 256, as a tenth of the time allows; blocks, align: a tenth of the windows",
    )
    samples: int | None = option(SAMPLES, needs="align")
    seq_len: int | None = option(SEQ_LEN)
    max_tokens: int | None = option(
        "How many tokens to train on, such as 20M or 3B; padding is not counted.",
        metavar="COUNT",
        min=1,
        parse=parse_count,
    )
    max_steps: int | None = option("How many steps to train, instead of --max-tokens.", min=1)
    batch_size: int | None = option(
        "Rows per optimizer step, over all processes.",
        min=1,
        shown="2048 to 65536 tokens: a 2000th of --max-tokens; blocks: 2048 tokens",
    )
    micro_batch_size: int | None = option(
        "Rows computed at once on one device. It decides the memory, not the result.",
        min=1,
        shown="8192 tokens, or what accelerate's gradient accumulation leaves",
    )
    lr: float | None = option(
        "Peak learning rate.",
        shown="full 2e-5, lora 1e-4, blocks 5e-5; times 4096 / hidden size; less after align",
    )
    lr_schedule: RateSchedule = option(
        "The learning rate after its warm-up: down to 0 as half a cosine or a line, or constant.", "cosine"
    )
    warmup_steps: int | None = option(
        "Steps of linear warm-up.", min=0, shown="5 % of all, at most 200; after align at least 10, or 20 %"
    )
    weight_decay: float = option("AdamW's weight decay, of matrices only.", 0.0, min=0.0, shown="0")
    max_grad_norm: float = option("Clip the gradient's norm to this.", 1.0, shown="1")
    gradient_checkpointing: bool = option("Recompute activations instead of keeping them.", False)
    align: bool = option(
        "full, lora: align first (as --method align does, on the first --data) and train from there. The"
        " aligned checkpoint stays in OUT-aligned.",
        False,
        needs="distill_from",
    )
    tp_size: int = option(
        "full: processes that share one copy of the model (tensor parallelism). Started here, or by a launcher"
        " that starts N, or a multiple for data parallelism.",
        1,
        min=1,
    )
    schedule: ScheduleName = option(
        "When sub-modules run, with --tp-size: sequential, or domino, which cuts a micro-batch in two and runs"
        " one half's all-reduces under the other's compute. The result is the same.",
        "sequential",
    )
    eval_every: int | None = option(
        "Steps between validations; the state is saved with each.", min=1, shown="a tenth of all; in short runs more"
    )
    write: Write = option(
        "Which weights become OUT. best: lowest held-out KL (with --distill-from), cross-entropy, or mixture of both;"
        " nothing is written if training never lowered it."
        " last: the last ones.",
        "best",
    )
    seed: int = option(TRAINING_SEED, 0)
    dtype: TrainingDtype = option(COMPUTE_DTYPE, "auto")
    device: str = option(DEVICE, default_device)
    log_with: tuple[str, ...] = option(
        "Accelerate's trackers beside metrics.jsonl, such as tensorboard, wandb, trackio. They write to OUT-logs.",
        (),
        metavar="A,B",
        parse=split_names,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def objective(self) -> Objective:
        """The loss: with a teacher its predictions alone, unless ``distill_weight`` says otherwise."""
        weight = float(self.distill_from is not None) if self.distill_weight is None else self.distill_weight
        return Objective(weight)

    def check_usage(self) -> None:
        """Raise UsageError for impossible values, and for options that do not go together."""
        if (self.max_steps is None) == (self.max_tokens is None):
            raise UsageError("say how long to train: --max-tokens, such as 20M, or --max-steps, and not both")
        if self.method not in (FULL, LORA):
            raise UsageError(f"--method {self.method} has options of its own")
        if self.method != LORA and (idle := [name for name in LORA_FIELDS if getattr(self, name)]):
            raise UsageError(f"{flag(idle[0])} has no effect with --method {self.method}")
        if set(self.lora_targets) - set(LORA_TARGETS):
            raise UsageError(f"--lora-targets must name some of {', '.join(LORA_TARGETS)}")
        check_sources(self.data)
        check_lr(self.lr)
        if (self.distill_from is not None) != bool(self.objective.distill_weight):
            raise UsageError("--distill-from and a --distill-weight above 0 have no effect without each other")
        if self.teacher_cache is not None and any(map(hub_dataset, self.data)):
            raise UsageError("--teacher-cache needs --data of files; a stream's rows have no numbers")
        if not self.max_grad_norm > 0:
            raise UsageError(f"--max-grad-norm must be above 0, not {self.max_grad_norm:g}")
        if self.heldout is not None and self.eval_data:
            raise UsageError("--heldout has no effect with --eval-data")
        if self.schedule == "domino" and self.tp_size == 1:
            raise UsageError("--schedule domino has no effect without a --tp-size above 1")
        if self.method == LORA and self.tp_size > 1:
            raise UsageError(
                f"--method lora has no --tp-size {self.tp_size}; let accelerate launch share the model out (FSDP2), or"
                " train with --method full"
            )

    def check(self) -> None:
        """Raise UsageError as ``check_usage``, and UserError for missing files."""
        self.check_usage()
        for name, _ in map(split_weight, self.data):
            if hub_dataset(name) is None:
                data_files(name)
        for name in self.eval_data:
            data_files(name, "--eval-data")

    def resolve(
        self, config: Mapping[str, Any], ranks: int, *, accumulation: int = 1, left_by_alignment: float | None = None
    ) -> "TrainOptions":
        """Return all options with the defaults resolved for a model.

        ranks: the ranks that read different data: all processes / ``tp_size``.
        accumulation: Accelerate's steps of gradient accumulation; 1: the launcher was given none.
        left_by_alignment: the held-out divergence from the dense model, in nats per token, where weights were aligned
        last.
        Raises UserError for options that do not go together.
        """
        from ladderize.data.windows import default_seq_len  # it needs numpy, and the command line does not

        positions = most_positions(config)
        seq_len = self.seq_len or default_seq_len(self.data, positions)
        if seq_len > positions:
            raise UserError(f"--seq-len {seq_len} is more than the {positions} positions that the model supports")
        tokens, parts = self.max_tokens, ranks * accumulation
        per_step = max(LEAST_PER_STEP, min(MOST_PER_STEP, tokens // 2000)) if tokens else PER_STEP
        batch_size = self.batch_size or -(-max(1, per_step // seq_len) // parts) * parts
        own, rest = divmod(batch_size, ranks)
        if rest:
            raise UserError(
                f"--batch-size {batch_size} (rows of a step, over all processes) must be divisible by the {ranks}"
                " processes that read different data"
            )
        most = own // accumulation if accumulation > 1 else min(own, MICRO_BATCH_TOKENS // seq_len)
        micro = self.micro_batch_size or next(count for count in range(max(1, most), 0, -1) if own % count == 0)
        if own % micro:
            raise UserError(
                f"--micro-batch-size {micro} does not divide the {own} rows of a step that are each process's"
            )
        if accumulation > 1 and own // micro != accumulation:
            raise UserError(
                f"accelerate's {accumulation} steps of gradient accumulation and --batch-size {batch_size} do not leave"
                f" --micro-batch-size {micro} rows at once; leave one of them out"
            )
        Schedule(self.schedule).check(micro, seq_len, rows_name="--micro-batch-size", tokens_name="--seq-len")
        steps = self.max_steps or math.ceil((tokens or 1) / (batch_size * seq_len))
        peak = (LORA_LR if self.method == LORA else FULL_LR) * WIDTH / config["hidden_size"]
        warmup = min(MOST_WARMUP, int(steps * SHARE_OF_WARMUP))
        if left_by_alignment is not None:
            # a divergence grows with the square of the distance to go, and Adam's rate is the length of its steps
            peak *= min(1.0, max(LEAST_PEAK, math.sqrt(left_by_alignment / WHOLE_PEAK_FROM)))
            warmup = max(warmup, min(ALIGNED_WARMUP, int(steps * ALIGNED_SHARE)))
        resolved = {
            "seq_len": seq_len,
            "batch_size": batch_size,
            "micro_batch_size": micro,
            "lora_rank": self.lora_rank or LORA_RANK,
            "lora_targets": self.lora_targets or LORA_TARGETS,
            "lr": self.lr if self.lr is not None else peak,
            "warmup_steps": self.warmup_steps if self.warmup_steps is not None else warmup,
        }
        return TrainOptions(**{**vars(self), **resolved})


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RetrainOptions):
    """The options of a training, with every default resolved."""

    seq_len: int
    batch_size: int
    micro_batch_size: int
    lora_rank: int
    lora_targets: tuple[str, ...]
    lr: float
    warmup_steps: int

    def rate(self, step: int, share: float) -> float:
        """Return the learning rate of step ``step`` (from 0): linear warm-up, then as ``lr_schedule`` says.

        share: the share of the budget spent before it. A budget of tokens has no known number of steps, by which
        transformers' schedules go.
        """
        decay = {"cosine": 0.5 * (1 + math.cos(math.pi * share)), "linear": 1 - share, "constant": 1.0}
        return self.lr * min(1.0, (step + 1) / (self.warmup_steps + 1)) * decay[self.lr_schedule]

    @property
    def steps(self) -> int:
        """The number of steps; with ``max_tokens`` at least, since rows have padding."""
        return self.max_steps or math.ceil((self.max_tokens or 1) / (self.batch_size * self.seq_len))

    @property
    def in_words(self) -> str:
        """The length of the training and the size of its steps."""
        about = "about " if self.max_tokens else ""
        rows = f"{self.batch_size} rows of {self.seq_len} tokens, {self.micro_batch_size} at once"
        return f"{about}{self.steps:,} steps of {rows}"

    def validations(self, rows: int) -> tuple[int, int]:
        """Return how many of the held-out ``rows`` are scored, and how often after steps.

        What was not asked for takes at most a tenth of the time, if a row is scored as slowly as it is trained on.
        """
        is_asked = self.heldout is not None or bool(self.eval_data)
        before = 1.5 if self.distill_from else 1.0  # validations before the first step: the dense model's, too
        affordable = VALIDATION_SHARE * self.steps * self.batch_size
        times = self.steps // (self.eval_every or max(1, min(500, self.steps // 10)))
        if not self.eval_every:
            fewest = rows if is_asked else min(rows, ENOUGH_SCORED // self.seq_len)
            times = max(1, min(times, int(affordable / max(1, fewest) - before)))
        return (rows if is_asked else min(rows, max(1, int(affordable / (times + before))))), times

    def share(self, step: int, tokens: int) -> float:
        """Return the share of the training that is done, 0 to 1, after ``step`` steps that read ``tokens`` tokens."""
        return min(1.0, step / self.max_steps if self.max_steps else tokens / (self.max_tokens or 1))
