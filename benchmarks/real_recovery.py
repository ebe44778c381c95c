"""Which further idea wins accuracy back on a real model, at about equal CPU time? KL of SmolLM2-135M (docs/results.md).

    python benchmarks/real_recovery.py OUT.json [--layouts ladder,delayed] [--variants ...] [--work real/work/recovery]

Needs what ``make real`` prepares in real/. Each variant begins with the upper half (15:30) converted and is made by
``ladderize adapt``; what no option of it does is patched in here, in the child process that runs it, and is no feature.
All but the first three train on TOKENS from the model aligned on 16,384 tokens, or what they name. CPU seconds are
those of the children of the variant, without the alignment that it begins with. A finished variant is not run again.

- align 16k, align 65k, align 262k: more tokens
- kl: the loss of ``adapt``
- align 65k, kl: the same from the model aligned on 65,536 tokens
- norms, o, down: kl, but only these tensors are trained
- top 64: kl of the teacher's 64 largest logits, the others dropped
- top 64 and rest: the same, with the probability of all others as one more outcome (--teacher-cache)
- on-policy: reverse KL on answers of the converted model itself (half of TOKENS: to write them takes the other half)
- on-policy, forward: the same, by KL of the teacher

Rows of a variant "hidden" were trained on a third loss, too, which is no option any more.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path("real")
TEXTS = {"wikitext-2": "../shared/fixtures/wikitext-2/test.txt", "chat": "real/chat.jsonl"}
LAYOUTS = {
    "ladder": ["--ladder", "15:"],
    "delayed": ["--delayed", "15:", "--sync-tp-size", "3", "--assign", "heads,neurons", "--data", "real/train.jsonl"],
}
WINDOWS = {"align 16k": 32, "align 65k": 128, "align 262k": 512}
TRAININGS = ("kl", "align 65k, kl", "norms, o, down", "top 64", "top 64 and rest", "on-policy", "on-policy, forward")
TOKENS = 64_000
PROMPTS = 240  # of the on-policy variants
TRAINED = ("layernorm.weight", "o_proj.weight", "down_proj.weight")
KEPT_LOGITS = 64


# ---- in the child process ----


def patch(variant: str) -> None:
    """Change what ``adapt`` trains, or its loss."""
    from ladderize.adapt.train import task, training_model

    if variant == "norms, o, down":
        trained = task.trained_tensors
        task.trained_tensors = lambda *some: frozenset(name for name in trained(*some) if name.endswith(TRAINED))
    elif variant == "top 64":
        losses = training_model.Student.forward
        training_model.Student.forward = lambda model, batch, teacher_logits, **more: losses(
            model, batch, largest(teacher_logits), **more
        )
    elif variant == "on-policy":
        training_model.Student.forward = reverse_losses


def largest(logits: Any) -> Any:
    """Return the logits [tokens, vocab] with all but the largest of a token so low that they have no weight."""
    top = logits.topk(KEPT_LOGITS, -1)
    return logits.new_full(logits.shape, -1e4).scatter_(-1, top.indices, top.values)


def reverse_losses(model: Any, batch: Any, teacher_logits: Any, **more: Any) -> Any:
    """Return the sums of cross-entropy and KL(student || teacher): [2]."""
    import torch

    own, target = model.scored_logits(batch).float().log_softmax(-1), teacher_logits.float().log_softmax(-1)
    entropy = -own.gather(1, batch.scored_targets[:, None]).sum()
    return torch.stack((entropy, ((own - target) * own.exp()).sum()))


def child(variant: str, command: list[str]) -> None:
    """Run a command of ladderize, patched."""
    if variant:
        patch(variant)
    from ladderize.cli import main

    sys.argv[1:] = command
    main()


# ---- in the parent ----


def ladderize(log: Path, variant: str, *command: object) -> None:
    """Run a command in a child process; its output goes to ``log``."""
    with log.open("a") as out:
        arguments = [sys.executable, __file__, "--child", variant, *map(str, command)]
        subprocess.run(arguments, check=True, stdout=out, stderr=subprocess.STDOUT)


def start_of(variant: str) -> str:
    """Return the variant that a training begins with."""
    return "align 65k" if variant.startswith("align 65k,") else "align 16k"


def make(layout: str, variant: str, work: Path) -> Path:
    """Write the model of a variant, unless it is there, and return its folder."""
    start, out = work / layout, work / f"{layout} {variant}".replace(", ", "-").replace(" ", "-")
    log, dense = work / "log.txt", ROOT / "smollm2"
    if out.exists():
        return out
    if not start.exists():
        ladderize(log, "", "convert", dense, start, *LAYOUTS[layout], "--no-verify")
    common = ["--distill-from", dense, "--seq-len", 512, "--no-verify"]
    if variant in WINDOWS:
        samples = ["--samples", WINDOWS[variant]]
        ladderize(log, "", "adapt", start, out, "--method", "align", *common, *samples, "--data", ROOT / "train.jsonl")
        return out
    aligned, data, tokens = make(layout, start_of(variant), work), ROOT / "train.jsonl", TOKENS
    if variant.startswith("on-policy"):
        data, tokens = work / f"{layout}-own.jsonl", TOKENS // 2
        if not data.exists():
            prompts = work / "prompts.jsonl"
            prompts.write_text("\n".join((ROOT / "prompts.jsonl").read_text().splitlines()[:PROMPTS]) + "\n")
            how = ["--max-new-tokens", 256, "--temperature", 1]
            ladderize(log, "", "generate", aligned, "--prompt-file", prompts, *how, "--out", data)
    how = ["--batch-size", 8, "--micro-batch-size", 4, "--heldout", 8, "--eval-every", 1000, "--write", "last"]
    loss: list[object] = ["--max-tokens", tokens]
    if variant == "top 64 and rest":
        loss += ["--teacher-cache", work / "answers"]
    ladderize(log, variant, "adapt", aligned, out, "--data", data, *how, *loss, *common)
    return out


def judge(model: Path, work: Path) -> dict[str, Any]:
    """Return perplexity and KL on each text."""
    found = {}
    for text, file in TEXTS.items():
        out = work / f"eval-{text}.json"
        out.unlink(missing_ok=True)
        scored = ["--perplexity", file, "--seq-len", 512, "--windows", 32, "--out", out]
        ladderize(work / "log.txt", "", "eval", ROOT / "smollm2", model, *scored)
        entry = json.loads(out.read_text())["models"][1]["ladderize"]
        perplexity, predictions = entry["perplexity"], entry["predictions"]
        found[text] = {key: predictions[key] for key in ("mean_kl", "low", "high", "same_top_share")}
        found[text] |= {key: perplexity[key] for key in ("perplexity", "window_nll")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layouts", default="ladder,delayed")
    everything = [*WINDOWS, *TRAININGS]
    parser.add_argument("--variants", default=";".join(everything), help="with semicolons between")
    parser.add_argument("--work", type=Path, default=ROOT / "work" / "recovery")
    arguments = parser.parse_args()
    variants, layouts = arguments.variants.split(";"), arguments.layouts.split(",")
    if unknown := {*variants} - {*everything} | {*layouts} - {*LAYOUTS}:
        parser.error(f"{unknown.pop()!r} is not one of {'; '.join([*everything, *LAYOUTS])}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    for variant in variants:
        for layout in layouts:
            if any((row["layout"], row["variant"]) == (layout, variant) for row in rows):
                continue
            if variant not in WINDOWS:
                make(layout, start_of(variant), arguments.work)
            begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
            model = make(layout, variant, arguments.work)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            row = {"layout": layout, "variant": variant, "cpu_s": cpu, "wall_s": time.monotonic() - begin}
            rows.append(row | {"texts": judge(model, arguments.work)})
            partial = arguments.out.with_suffix(".part")
            partial.write_text(json.dumps(rows, indent=1) + "\n")
            os.replace(partial, arguments.out)
            told = {text: f"KL {found['mean_kl']:.3f}" for text, found in rows[-1]["texts"].items()}
            print(f"{layout}, {variant}: {cpu:.0f} s of CPU, {told}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
    else:
        main()
