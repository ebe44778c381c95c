"""The options of ``ladderize adapt``. Imports neither torch nor numpy, so that the command line starts at once."""
# ruff: noqa: RUF009 - the calls make fields

import re
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, Literal

from ladderize import choices
from ladderize.adapt.lora import LORA_TARGETS
from ladderize.choices import MAX_SEED, Option, argument, check_options, flag, option, split_names
from ladderize.data.files import HUB, check_sources, hub_dataset
from ladderize.errors import UsageError
from ladderize.runtime.schedule import ScheduleName

Method = Literal["full", "lora", "blocks", "align"]
FULL: Final = "full"
LORA: Final = "lora"
BLOCKS: Final = "blocks"
ALIGN: Final = "align"

CONVERTED: Final = "converted"  # of --train
Write = Literal["best", "last"]  # the weights that become the output
METRICS = "metrics.jsonl"  # of retraining: a line for each step and each validation
MAX_LR = 1e3
SAMPLES = Option("Windows to align on, or to train blocks on.", min=1, shown="131,072 tokens; blocks: up to 1024")
TRAINING_SEED = Option("Seed of which data are used, and their order.", min=0, max=MAX_SEED)
TrainingDtype = Literal["auto", "float32", "bfloat16"]  # float16 has too small a range
COMPUTE_DTYPE = Option("float32, bfloat16, or auto: float32 if the model is stored in it, else bfloat16.", "DTYPE")


def check_lr(lr: float | None) -> None:
    """Raise UsageError for a learning rate that cannot be trained with."""
    if lr is not None and not 0 < lr <= MAX_LR:
        raise UsageError(f"--lr must be above 0 and at most {MAX_LR:g}, not {lr:g}")


LORA_RANK = 16
MOST_TOKENS = 10**18  # more than any data have
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
RateSchedule = Literal["cosine", "linear", "constant"]

LORA_FIELDS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
TRAINING_FIELDS = (
    *("distill_weight", "teacher_cache", "align", "tp_size", "schedule", "gradient_checkpointing", "micro_batch_size"),
    *("max_tokens", "max_steps", "batch_size", "lr_schedule", "warmup_steps", "weight_decay", "max_grad_norm"),
    *("eval_data", "eval_every", "log_with", "dry_run"),
)
# the options that have no effect with a method
IDLE: dict[Method, tuple[str, ...]] = {
    FULL: LORA_FIELDS,
    LORA: (),
    BLOCKS: (*TRAINING_FIELDS, *LORA_FIELDS),
    ALIGN: (*TRAINING_FIELDS, *LORA_FIELDS, "lr"),
}


@dataclass(frozen=True)
class Objective:
    """The loss: (1 - w) * cross-entropy + w * KL(teacher || student), w: distill_weight. On held-out rows it decides
    which weights are best."""

    distill_weight: float = 0.0

    @classmethod
    def of(cls, teacher: str | None, weight: float | None) -> "Objective":
        """Return the loss: with a teacher its predictions alone, unless ``weight`` says otherwise."""
        return cls(float(teacher is not None) if weight is None else weight)

    @property
    def label(self) -> str:
        w = self.distill_weight
        if w in (0, 1):
            return "KL" if w else "cross-entropy"
        return f"{w:g} KL + {1 - w:g} cross-entropy"

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


_data, _method = partial(option, panel=choices.DATA), partial(option, panel=choices.METHOD)
_optimisation, _validation = partial(option, panel=choices.OPTIMISATION), partial(option, panel=choices.VALIDATION)
_memory, _output = partial(option, panel=choices.MEMORY), partial(option, panel=choices.OUTPUT)


@dataclass(frozen=True, kw_only=True)
class AdaptOptions:
    """The options of ``ladderize adapt``; see its --help. None: the model decides (``Pace``)."""

    model: str = argument(
        "MODEL", "A converted checkpoint, or with --train a dense one: folder or hub id. It is never changed."
    )
    out: str | None = argument("OUT", "The folder to write. It appears whole or not at all.", None)

    data: tuple[str, ...] = _data(
        "json, jsonl, parquet, txt, npy, npz:array, a folder or glob of one kind, or hub:OWNER/NAME:SPLIT. Give it"
        " several times to read all of several sources, or with weights to mix them.",
        ...,
        metavar="FILE[=WEIGHT]",
    )
    seq_len: int | None = option(choices.SEQ_LEN)
    samples: int | None = _data(SAMPLES)
    seed: int = _data(TRAINING_SEED, 0)

    method: Method = _method(
        "full: train all weights of the chosen layers. lora: train LoRA adapters. blocks: train each block alone on the"
        " dense block's outputs. align: solve the projections anew by least squares, without training; seconds to"
        " minutes, and a good start for the others.",
        FULL,
        metavar="NAME",
    )
    distill_from: str | None = _method(
        "The dense model that MODEL was converted from. Its predictions are the training target.", metavar="DENSE"
    )
    train: str | None = _method(
        "Layers to train: converted, all (with full: embedding and LM head too), or ranges like 16:32,40.",
        metavar="LAYERS",
        shown="converted; align: every layer from the first converted one on",
    )
    distill_weight: float | None = _method(
        "Weight of the KL term (0 to 1). Cross-entropy gets the rest.", min=0.0, max=1.0, shown="1 with --distill-from"
    )
    align: bool = _method(
        "full, lora: align first (as --method align does, on the first --data) and train from there. The"
        " aligned checkpoint stays in OUT-aligned.",
        False,
        needs="distill_from",
    )
    lora_rank: int = _method("lora: rank.", LORA_RANK, min=1)
    lora_alpha: int | None = _method("lora: alpha; scales by alpha / rank.", min=1, shown="twice the rank")
    lora_dropout: float = _method("lora: dropout before A.", 0.0, min=0.0, max=0.99, shown="0")
    lora_targets: tuple[str, ...] = _method(
        "lora: projections that get adapters.",
        LORA_TARGETS,
        metavar="A,B",
        parse=split_names,
        shown="all seven of a layer",
    )

    max_tokens: int | None = _optimisation(
        "How many tokens to train on, such as 20M or 3B; padding is not counted.",
        metavar="COUNT",
        min=1,
        parse=parse_count,
    )
    max_steps: int | None = _optimisation("How many steps to train, instead of --max-tokens.", min=1)
    batch_size: int | None = _optimisation(
        "Rows per optimizer step, over all processes.",
        min=1,
        shown="2048 to 65536 tokens: a 2000th of --max-tokens; blocks: 2048 tokens",
    )
    lr: float | None = _optimisation(
        "Peak learning rate.", shown="full 2e-5, lora 1e-4, blocks 5e-5; times 4096 / hidden size; less after align"
    )
    lr_schedule: RateSchedule = _optimisation(
        "The learning rate after its warm-up: down to 0 as half a cosine or a line, or constant.", "cosine"
    )
    warmup_steps: int | None = _optimisation(
        "Steps of linear warm-up.", min=0, shown="5 % of all, at most 200; after align at least 10, or 20 %"
    )
    weight_decay: float = _optimisation("AdamW's weight decay, of matrices only.", 0.0, min=0.0, shown="0")
    max_grad_norm: float = _optimisation("Clip the gradient's norm to this.", 1.0, shown="1")

    eval_data: tuple[str, ...] = _validation(
        "Data to validate on.", (), metavar="FILE", shown="examples held out of --data"
    )
    heldout: int | None = _validation(
        "Examples to hold out of each --data for validation.",
        min=0,
        shown="a hundredth, up to 256, as a tenth of the time allows; blocks, align: a tenth of the windows",
    )
    eval_every: int | None = _validation(
        "Steps between validations; the state is saved with each.", min=1, shown="a tenth of all; in short runs more"
    )
    write: Write = _validation(
        "Which weights become OUT. best: lowest held-out KL (with --distill-from), cross-entropy, or mixture of both;"
        " nothing is written if training never lowered it."
        " last: the last ones.",
        "best",
    )

    dry_run: bool = _memory(
        "full, lora: show the memory and disk it takes, and stop. No weights are read.", False, decides=False
    )
    micro_batch_size: int | None = _memory(
        "Rows computed at once on one device. It decides the memory, not the result.",
        min=1,
        shown="8192 tokens, or what accelerate's gradient accumulation leaves",
        decides=False,
    )
    gradient_checkpointing: bool = _memory("Recompute activations instead of keeping them.", False, decides=False)
    teacher_cache: str | None = _memory(
        "Keep the dense model's answers (its 64 likeliest next tokens) on --data in this folder, and train with them"
        " instead of with the model in memory. Later runs on the same data find them there.",
        metavar="FOLDER",
        needs="distill_from",
    )
    tp_size: int = _memory(
        "full: processes that share one copy of the model (tensor parallelism). Started here, or by a launcher"
        " that starts N, or a multiple for data parallelism.",
        1,
        min=1,
    )
    schedule: ScheduleName = _memory(
        "When sub-modules run, with --tp-size: sequential, or domino, which cuts a micro-batch in two and runs"
        " one half's all-reduces under the other's compute. The result is the same.",
        "sequential",
    )
    dtype: TrainingDtype = _memory(COMPUTE_DTYPE, "auto")
    device: str | None = option(choices.DEVICE)

    log_with: tuple[str, ...] = _output(
        "Accelerate's trackers beside metrics.jsonl, such as tensorboard, wandb, trackio. They write to OUT-logs.",
        (),
        metavar="A,B",
        parse=split_names,
        decides=False,
    )
    overwrite: bool = option(choices.OVERWRITE, False, help="Replace OUT if it is a checkpoint (lora: an adapter).")
    verify: bool = option(choices.NO_VERIFY, True)

    def __post_init__(self) -> None:
        check_options(self)
        if self.out is None and not self.dry_run:
            raise UsageError("OUT is missing: name the folder to write")
        for field in fields(self):
            if field.name in IDLE[self.method] and getattr(self, field.name) != field.default:
                raise UsageError(f"{flag(field.name)} has no effect with --method {self.method}")
        check_lr(self.lr)
        check_sources(self.data)
        if self.method in (FULL, LORA):
            self._check_training()
        elif self.distill_from is None or len(self.data) > 1 or self.data[0].startswith(HUB):
            raise UsageError(
                f"--method {self.method} needs --distill-from DENSE, the checkpoint that MODEL was converted from, and"
                " one --data file"
            )

    def _check_training(self) -> None:
        if (self.max_steps is None) == (self.max_tokens is None):
            raise UsageError("say how long to train: --max-tokens, such as 20M, or --max-steps, and not both")
        if self.samples is not None and not self.align:
            raise UsageError("--samples has no effect without --align")
        if set(self.lora_targets) - set(LORA_TARGETS):
            raise UsageError(f"--lora-targets must name some of {', '.join(LORA_TARGETS)}")
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

    @property
    def objective(self) -> Objective:
        return Objective.of(self.distill_from, self.distill_weight)


@dataclass(frozen=True)
class MergeOptions:
    """The options of ``ladderize merge``."""

    adapter: str = argument("ADAPTER", "A LoRA adapter folder. It is never changed.")
    out: str = argument("OUT", "The checkpoint folder to write. It appears whole or not at all.")
    base: str | None = option(
        "The checkpoint that ADAPTER was trained on.",
        metavar="MODEL",
        shown="the one that ADAPTER names",
        panel=choices.MODELS,
    )
    overwrite: bool = option(choices.OVERWRITE, False)
    verify: bool = option(choices.NO_VERIFY, True)
