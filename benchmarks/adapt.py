"""Tokens per second of `ladderize adapt` against transformers' Trainer, on the same model, data and precision,
interleaved in one run.

    python benchmarks/adapt.py [--hidden 256] [--layers 4] [--rounds 7] [--device cuda] [--dtype bfloat16] [--out FILE]

Two kinds of data. `full`: rows of `--seq-len` token ids, so that nobody pads; what differs is the loop. `chat`: short
conversations, loss on the assistant's turns: the Trainer pads to the longest of a batch, ladderize packs (and, for
comparison, does not). A round times a few optimizer steps of each variant; tokens are real ones, padding is not
counted. Packed rows hold several examples: there the tokens per step are made alike. Before anything is timed, the loss
of the same rows is compared: the same work is measured.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from gpu_adapt import open_loop
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import ladderize
from ladderize.adapt.options import AdaptOptions
from ladderize.adapt.train.loop import Loop, micro_batches
from ladderize.adapt.training_data import IGNORED_TARGET, collate, open_data
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import environment
from ladderize.runtime.bench.rounds import synchronize
from ladderize.runtime.training.batch import Batch

LAYOUTS = {"ladder": Recipe(ladder="all"), "spd": Recipe(spd="all", sync_tp_size=4)}
STEPS, LR = 4, 1e-4


def make_model(folder: Path, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        max_position_embeddings=args.seq_len,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "dense")
    for name, recipe in LAYOUTS.items():
        convert_checkpoint(str(folder / "dense"), folder / name, recipe, verify=False)


def make_data(folder: Path, args: argparse.Namespace) -> None:
    """Random ids; a conversation is 2 to 6 turns whose lengths are spread as those of real ones are: many short ones, a
    few long."""
    rng = random.Random(0)
    np.save(folder / "full.npy", np.random.default_rng(0).integers(3, args.vocab, (1024, args.seq_len)))
    with (folder / "chat.jsonl").open("w") as file:
        for _ in range(5000):
            ids, mask = [1], [0]
            for turn in range(2 * rng.randint(1, 3)):
                length = min(400, args.seq_len - 8, 3 + round(rng.lognormvariate(2.5, 0.9)))
                ids += [rng.randrange(3, args.vocab) for _ in range(length)]
                mask += [turn % 2] * length
            file.write(json.dumps({"input_ids": ids[: args.seq_len], "loss_mask": mask[: args.seq_len]}) + "\n")


def read_rows(file: Path, args: argparse.Namespace):
    """Return the rows that `ladderize adapt` would train on."""
    rows, *_ = open_data([str(file)], None, seq_len=args.seq_len, vocab_size=args.vocab, seed=0, heldout=1)
    return rows


def unpacked(rows) -> list[dict]:
    """Return the examples of packed rows, each in a row of its own."""
    found = []
    for row in rows:
        begin = 0
        for length in row["lengths"]:
            part = slice(begin, begin + length)
            found.append({**{name: row[name][part] for name in ("input_ids", "targets")}, "lengths": [length]})
            begin += length
    return found


class Ours:
    """`ladderize adapt`, step by step."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.batches = loop, micro_batches(loop.rows, loop.pace, loop.model, 0)

    @staticmethod
    def options(model: Path, args: argparse.Namespace, rows: int) -> AdaptOptions:
        return AdaptOptions(
            model=str(model),
            out=str(model.with_name("out")),
            data=("rows.npy",),
            train="all",
            seq_len=args.seq_len,
            max_steps=10**6,
            batch_size=rows,
            micro_batch_size=rows,
            lr=LR,
            warmup_steps=0,
            dtype=args.dtype,
            device=args.device,
        )

    def steps(self, count: int) -> tuple[int, float]:
        """Return tokens and seconds."""
        before, begin = self.loop.progress.tokens, time.perf_counter()
        for _ in range(count):
            self.loop.step(self.batches, 0.0)
        synchronize(self.loop.accelerator.device)
        return self.loop.progress.tokens - before, time.perf_counter() - begin


class Clock(TrainerCallback):
    """From the first step's begin to the last one's end, what lies between (fetching the next batch) included, as in
    ours."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.begin, self.end = device, None, 0.0

    def on_step_begin(self, *_, **__):
        if self.begin is None:
            synchronize(self.device)
            self.begin = time.perf_counter()

    def on_step_end(self, *_, **__):
        synchronize(self.device)
        self.end = time.perf_counter()


class Theirs:
    """transformers' Trainer with its own loop; every round is a `train()` of a few steps that goes on with the
    model."""

    def __init__(self, model: Path, examples, work: Path, args: argparse.Namespace, *, rows: int) -> None:
        self.model = ladderize.load(model, dtype="float32").to(args.device).train()
        self.examples, self.rows, self.work, self.args, self.taken = examples, rows, work, args, 0

    def steps(self, count: int) -> tuple[int, float]:
        examples = [self.examples[(self.taken + i) % len(self.examples)] for i in range(count * self.rows)]
        self.taken += len(examples)
        settings = TrainingArguments(
            output_dir=str(self.work),
            max_steps=count,
            per_device_train_batch_size=self.rows,
            learning_rate=LR,
            weight_decay=0.0,
            lr_scheduler_type="constant",
            bf16=self.args.dtype == "bfloat16",
            use_cpu=self.args.device == "cpu",
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            adam_beta2=0.95,
            optim="adamw_torch_fused",
            dataloader_num_workers=0,
            train_sampling_strategy="sequential",
        )
        clock = Clock(torch.device(self.args.device))
        trainer = Trainer(model=self.model, args=settings, train_dataset=examples, data_collator=pad, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return sum(len(example["input_ids"]) for example in examples), clock.end - clock.begin


def pad(examples):
    longest = max(len(example["input_ids"]) for example in examples)
    batch = {"input_ids": [], "labels": [], "attention_mask": []}
    for example in examples:
        more = longest - len(example["input_ids"])
        batch["input_ids"].append([*example["input_ids"], *[0] * more])
        batch["labels"].append([*example["labels"], *[IGNORED_TARGET] * more])
        batch["attention_mask"].append([1] * len(example["input_ids"]) + [0] * more)
    if all(all(row) for row in batch["attention_mask"]):
        del batch["attention_mask"]  # nothing is padded
    return {name: torch.tensor(value) for name, value in batch.items()}


def examples_of(rows, count: int):
    """Rows of one example each, as transformers wants them."""
    return [
        {"input_ids": row["input_ids"], "labels": [IGNORED_TARGET, *row["targets"][:-1]]}
        for row in rows.select(range(min(count, len(rows))))
    ]


def same_loss(ours: Ours, theirs: Theirs, rows) -> float:
    """Relative difference of the loss of the same examples under the two models as they are; nothing is trained.
    rows: of one example each."""
    model, device = ours.loop.model, ours.loop.accelerator.device
    with torch.no_grad():
        batch = Batch.of(collate(list(rows.select(range(4)))), device)
        own = float(model.losses(batch)[0]) / len(batch.scored)
        total, count = 0.0, 0
        for example in examples_of(rows, 4):
            ids, labels = (torch.tensor([example[name]], device=device) for name in ("input_ids", "labels"))
            scored = int((labels != IGNORED_TARGET).sum())
            with torch.autocast(device.type, torch.bfloat16, enabled=theirs.args.dtype == "bfloat16"):
                loss = theirs.model(ids, labels=labels, use_cache=False).loss
            total, count = total + float(loss) * scored, count + scored
    return abs(own - total / count) / abs(own)


def measure(layout: str, folder: Path, args: argparse.Namespace) -> dict:
    """Return the samples of all variants on one layout, interleaved, and their ratios."""
    many = args.rows * 6
    full, chat = (read_rows(folder / name, args) for name in ("full.npy", "chat.jsonl"))
    alone = unpacked(chat)
    given = {("full", "ladderize"): (full, args.rows), ("chat", "ladderize"): (chat, args.rows)}
    given["chat", "unpacked"] = (alone, many)
    with ExitStack() as stack:
        variants = {}
        for key, (rows, count) in given.items():
            work = folder / f"{layout}-{'-'.join(key)}"
            opened = open_loop(Ours.options(folder / layout, args, count), rows, work)
            variants[key] = Ours(stack.enter_context(opened)[1])
        for kind, rows, count in (("full", full, args.rows), ("chat", alone, many)):
            variants[kind, "Trainer"] = Theirs(folder / layout, examples_of(rows, 1024), folder, args, rows=count)
        pairs = (("full", full), ("chat", alone))
        differences = {
            kind: same_loss(variants[kind, "ladderize"], variants[kind, "Trainer"], rows) for kind, rows in pairs
        }
        if max(differences.values()) > (1e-4 if args.dtype == "float32" else 0.02):
            sys.exit(f"{layout}: the losses differ by {differences}; not the same work is timed")
        samples = {"/".join(key): [] for key in variants}
        for round_ in range(args.rounds + 2):
            for key, variant in variants.items():
                tokens, seconds = variant.steps(STEPS)
                if round_ >= 2:  # two rounds of warm-up are not counted
                    samples["/".join(key)].append(tokens / seconds)
    medians = {key: statistics.median(values) for key, values in samples.items()}
    ratios = {
        "full: ladderize / Trainer": medians["full/ladderize"] / medians["full/Trainer"],
        "chat: packed / unpacked": medians["chat/ladderize"] / medians["chat/unpacked"],
        "chat: packed / Trainer": medians["chat/ladderize"] / medians["chat/Trainer"],
    }
    for key, value in medians.items():
        print(f"{layout:8} {key:20} {value:10,.0f} tokens/s")
    for key, value in ratios.items():
        print(f"{layout:8} {key:28} {value:6.2f}x", flush=True)
    return {
        "tokens_per_s": samples,
        "medians": medians,
        "ratios": ratios,
        "relative_loss_difference": differences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layouts", default="ladder,spd")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, args)
        make_data(folder, args)
        results = {layout: measure(layout, folder, args) for layout in args.layouts.split(",")}
    if args.out:
        record = {
            "schema_version": 1,
            "environment": environment(Ranks(0, 1, torch.device(args.device))).to_dict(),
            "options": {key: str(value) for key, value in vars(args).items()},
            "steps_per_round": STEPS,
            "results": results,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
