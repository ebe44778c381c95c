"""The pace of a training: the rows and number of its steps, and the learning rate, with defaults for a model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ladderize.adapt.options import LORA, AdaptOptions
from ladderize.checkpoint.config import most_positions
from ladderize.data.windows import row_of_ids
from ladderize.errors import UserError
from ladderize.runtime.schedule import Schedule

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
MICRO_BATCH_TOKENS = 8192
# the share of the time for validation; with fewer tokens in each one there are fewer validations instead
VALIDATION_SHARE, ENOUGH_SCORED = 0.1, 4096


@dataclass(frozen=True)
class Pace:
    """batch_size: rows of a step, over all processes. micro_batch_size: rows that a process computes at once."""

    options: AdaptOptions
    seq_len: int
    batch_size: int
    micro_batch_size: int
    lr: float
    warmup_steps: int

    @classmethod
    def of(cls, options: AdaptOptions, config: Mapping[str, Any], ranks: int, accumulation: int = 1) -> "Pace":
        """Return the pace of training a model. ranks: that read different data: all processes / ``tp_size``."""
        positions = most_positions(config)
        seq_len = options.seq_len or min(row_of_ids(options.data) or 2048, positions)
        if seq_len > positions:
            raise UserError(f"--seq-len {seq_len} is more than the {positions} positions that the model supports")
        per_step = PER_STEP
        if options.max_tokens:
            per_step = max(LEAST_PER_STEP, min(MOST_PER_STEP, options.max_tokens // 2000))
        multiple = ranks * accumulation
        batch_size = options.batch_size or -(-max(1, per_step // seq_len) // multiple) * multiple
        rows, rest = divmod(batch_size, ranks)
        if rest:
            raise UserError(
                f"--batch-size {batch_size} (rows of a step, over all processes) must be divisible by the {ranks}"
                " processes that read different data"
            )
        most = rows // accumulation if accumulation > 1 else min(rows, MICRO_BATCH_TOKENS // seq_len)
        micro = options.micro_batch_size or next(count for count in range(max(1, most), 0, -1) if rows % count == 0)
        if rows % micro:
            raise UserError(
                f"--micro-batch-size {micro} does not divide the {rows} rows of a step that are each process's"
            )
        if accumulation > 1 and rows // micro != accumulation:
            raise UserError(
                f"accelerate's {accumulation} steps of gradient accumulation and --batch-size {batch_size} do not leave"
                f" --micro-batch-size {micro} rows at once; leave one of them out"
            )
        Schedule(options.schedule).check(micro, seq_len, rows_name="--micro-batch-size", tokens_name="--seq-len")
        lr = (LORA_LR if options.method == LORA else FULL_LR) * WIDTH / config["hidden_size"]
        pace = cls(options, seq_len, batch_size, micro, options.lr or lr, warmup_steps=0)
        warmup = min(MOST_WARMUP, int(pace.steps * SHARE_OF_WARMUP))
        return replace(pace, warmup_steps=warmup if options.warmup_steps is None else options.warmup_steps)

    def after_alignment(self, left: float) -> "Pace":
        """Return the pace on aligned weights, with a lower peak and a longer rise where the options leave them
        open. A divergence grows with the square of the distance to go, and Adam's rate is the length of its
        steps. left: the held-out divergence from the dense model, in nats per token."""
        lr, warmup = self.options.lr, self.options.warmup_steps
        if lr is None:
            lr = self.lr * min(1.0, max(LEAST_PEAK, math.sqrt(left / WHOLE_PEAK_FROM)))
        if warmup is None:
            warmup = max(self.warmup_steps, min(ALIGNED_WARMUP, int(self.steps * ALIGNED_SHARE)))
        return replace(self, lr=lr, warmup_steps=warmup)

    @property
    def steps(self) -> int:
        """The number of steps; with ``max_tokens`` at least, since rows have padding."""
        tokens = self.options.max_tokens or 1
        return self.options.max_steps or math.ceil(tokens / (self.batch_size * self.seq_len))

    @property
    def in_words(self) -> str:
        about = "about " if self.options.max_tokens else ""
        rows = f"{self.batch_size} rows of {self.seq_len} tokens, {self.micro_batch_size} at once"
        return f"{about}{self.steps:,} steps of {rows}"

    def share(self, step: int, tokens: int) -> float:
        """Return the share of the training that is done, 0 to 1, after ``step`` steps that read ``tokens`` tokens."""
        if self.options.max_steps:
            return min(1.0, step / self.options.max_steps)
        return min(1.0, tokens / (self.options.max_tokens or 1))

    def rate(self, step: int, share: float) -> float:
        """Return the learning rate of step ``step`` (from 0), before which this share of the budget was spent: a budget
        of tokens has no known number of steps, by which transformers' schedules go."""
        decay = {"cosine": 0.5 * (1 + math.cos(math.pi * share)), "linear": 1 - share, "constant": 1.0}
        return self.lr * min(1.0, (step + 1) / (self.warmup_steps + 1)) * decay[self.options.lr_schedule]

    def validations(self, rows: int) -> tuple[int, int]:
        """Return how many of the held-out ``rows`` are scored, and how often. What was not asked for takes at most a
        tenth of the time, if a row is scored as slowly as it is trained on."""
        options = self.options
        all_asked = options.heldout is not None or bool(options.eval_data)
        before = 1.5 if options.distill_from else 1.0  # validations before the first step: the dense model's, too
        affordable = VALIDATION_SHARE * self.steps * self.batch_size
        times = self.steps // (options.eval_every or max(1, min(500, self.steps // 10)))
        if not options.eval_every:
            fewest = rows if all_asked else min(rows, ENOUGH_SCORED // self.seq_len)
            times = max(1, min(times, int(affordable / max(1, fewest) - before)))
        if all_asked:
            return rows, times
        return min(rows, max(1, int(affordable / (times + before)))), times
