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
from pathlib import Path

import numpy as np
import torch
from ladderize.adapt.retrain.options import Budget, RetrainOptions
from ladderize.adapt.retrain.run import Trackers, make_trainer, open_data
from ladderize.adapt.retrain.state import TrainingFolder
from ladderize.adapt.retrain.task import open_task
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import ladderize
from ladderize.adapt.data.packing import IGNORED_TARGET, collate
from ladderize.adapt.data_specs import parse_specs
from ladderize.console import Console
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import environment
from ladderize.runtime.bench.messages import synchronize

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
    np.save(folder / "full.npy", np.random.default_rng(0).integers(3, args.vocab, (4096, args.seq_len)))
    with (folder / "chat.jsonl").open("w") as file:
        for _ in range(20000):
            ids, mask = [1], [0]
            for turn in range(2 * rng.randint(1, 3)):
                length = min(400, 3 + round(rng.lognormvariate(2.5, 0.9)))
                ids += [rng.randrange(3, args.vocab) for _ in range(length)]
                mask += [turn % 2] * length
            file.write(json.dumps({"input_ids": ids[: args.seq_len], "loss_mask": mask[: args.seq_len]}) + "\n")


class Ours:
    """`ladderize adapt`, step by step."""

    def __init__(
        self, model: Path, data: Path, work: Path, args: argparse.Namespace, *, rows: int, packing: bool = True
    ) -> None:
        ranks = Ranks(0, 1, torch.device(args.device))
        options = RetrainOptions(
            data=parse_specs([str(data)]),
            train="all",
            heldout=1,
            seq_len=args.seq_len,
            packing=packing,
            budget=Budget(steps=10**6),
            batch_size=rows,
            micro_batch_size=rows,
            lr=LR,
            lr_schedule="constant",
            warmup_steps=0,
            dtype=args.dtype,
            device=args.device,
        )
        task = open_task(str(model), options, ranks, None)
        self.stream, heldout = open_data(task.checkpoint, options, task.training)
        self.trainer = make_trainer(
            task, ranks, self.stream, heldout, TrainingFolder(work, {}), Console(), Trackers((), work, {}, ranks)
        )

    def steps(self, count: int) -> tuple[int, float, float]:
        """Tokens, seconds, and the last loss."""
        before, begin = self.trainer.progress.tokens, time.perf_counter()
        for _ in range(count):
            loss = self.trainer.step(0.0, lambda: False)["loss"]
        synchronize(self.trainer.engine.ranks.device)
        return self.trainer.progress.tokens - before, time.perf_counter() - begin, loss


class Clock(TrainerCallback):
    """From the first step's begin to the last one's end, what lies between (fetching the next batch) included, as in
    ours."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.begin, self.end, self.losses = device, None, 0.0, []

    def on_step_begin(self, *_, **__):
        if self.begin is None:
            synchronize(self.device)
            self.begin = time.perf_counter()

    def on_step_end(self, *_, **__):
        synchronize(self.device)
        self.end = time.perf_counter()

    def on_log(self, *_, logs=None, **__):
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


class Theirs:
    """transformers' Trainer with its own loop; every round is a `train()` of a few steps that goes on with the
    model."""

    def __init__(self, model: Path, examples, work: Path, args: argparse.Namespace, *, rows: int) -> None:
        self.model = ladderize.load(model, dtype="float32").to(args.device).train()
        self.examples, self.rows, self.work, self.args, self.taken = examples, rows, work, args, 0

    def steps(self, count: int) -> tuple[int, float, float]:
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
        return sum(len(example["input_ids"]) for example in examples), clock.end - clock.begin, clock.losses[-1]


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


def read_examples(stream, count: int):
    """The stream's rows, one example each, as transformers wants them."""
    rows = stream.take(count)
    found = []
    for row in rows:
        labels = np.full(len(row), IGNORED_TARGET)
        labels[1:] = row.targets[:-1]
        found.append({"input_ids": row.ids.tolist(), "labels": labels.tolist()})
    return found


def same_loss(ours: Ours, theirs: Theirs) -> float:
    """Relative difference of the loss of the same examples under the two models as they are; and neither trains on
    them."""
    place = ours.stream.place()
    rows = ours.stream.take(4)
    ours.stream.go_to(place)
    with torch.no_grad():
        sums = ours.trainer.engine.losses(ours.trainer.engine.to_device(collate(rows)))
        own = float(sums[0]) / sum(int((row.targets != IGNORED_TARGET).sum()) for row in rows)
        total, count = 0.0, 0
        for row in rows:
            ids = torch.from_numpy(row.ids)[None].to(theirs.model.device)
            positions = torch.from_numpy(row.positions)[None].to(theirs.model.device)
            labels = np.full(len(row), IGNORED_TARGET)
            labels[1:] = row.targets[:-1]
            scored = int((labels != IGNORED_TARGET).sum())
            with torch.autocast(theirs.args.device, torch.bfloat16, enabled=theirs.args.dtype == "bfloat16"):
                loss = theirs.model(
                    ids, position_ids=positions, use_cache=False, labels=torch.from_numpy(labels)[None].to(ids.device)
                ).loss
            total, count = total + float(loss) * scored, count + scored
    return abs(own - total / count) / abs(own)


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
    device, results = torch.device(args.device), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, args)
        make_data(folder, args)
        for layout in args.layouts.split(","):
            model, many = folder / layout, args.rows * 6
            variants = {
                ("full", "ladderize"): Ours(model, folder / "full.npy", folder / f"{layout}-1", args, rows=args.rows),
                ("chat", "ladderize"): Ours(model, folder / "chat.jsonl", folder / f"{layout}-2", args, rows=args.rows),
                ("chat", "unpacked"): Ours(
                    model, folder / "chat.jsonl", folder / f"{layout}-3", args, rows=many, packing=False
                ),
            }
            full, chat = variants["full", "ladderize"], variants["chat", "unpacked"]
            variants["full", "Trainer"] = Theirs(model, read_examples(full.stream, 256), folder, args, rows=args.rows)
            variants["chat", "Trainer"] = Theirs(model, read_examples(chat.stream, 1024), folder, args, rows=many)
            differences = {
                "full": same_loss(full, variants["full", "Trainer"]),
                "chat": same_loss(variants["chat", "ladderize"], variants["chat", "Trainer"]),
            }
            if max(differences.values()) > (1e-4 if args.dtype == "float32" else 0.02):
                sys.exit(f"{layout}: the losses differ by {differences}; not the same work is timed")
            samples = {f"{kind}/{who}": [] for kind, who in variants}
            for round_ in range(args.rounds + 2):
                for (kind, who), variant in variants.items():
                    tokens, seconds, _ = variant.steps(STEPS)
                    if round_ >= 2:  # two rounds of warm-up are not counted
                        samples[f"{kind}/{who}"].append(tokens / seconds)
            for variant in variants.values():
                if isinstance(variant, Ours):
                    variant.stream.close()
                    padding = variant.stream.counts.padding_share
            medians = {key: statistics.median(values) for key, values in samples.items()}
            ratios = {
                "full: ladderize / Trainer": medians["full/ladderize"] / medians["full/Trainer"],
                "chat: packed / unpacked": medians["chat/ladderize"] / medians["chat/unpacked"],
                "chat: packed / Trainer": medians["chat/ladderize"] / medians["chat/Trainer"],
            }
            results[layout] = {
                "tokens_per_s": samples, "medians": medians, "ratios": ratios, "relative_loss_difference": differences,
                "unpacked_padding_share_of_seq_len": padding,
            }  # fmt: skip
            for key, value in medians.items():
                print(f"{layout:8} {key:20} {value:10,.0f} tokens/s")
            for key, value in ratios.items():
                print(f"{layout:8} {key:28} {value:6.2f}x", flush=True)
    if args.out:
        record = {
            "schema_version": 1, "environment": environment(Ranks(0, 1, device)).to_dict(),
            "options": {k: str(v) for k, v in vars(args).items()}, "steps_per_round": STEPS, "results": results,
        }  # fmt: skip
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
