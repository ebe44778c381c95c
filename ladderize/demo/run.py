"""``ladderize demo``: convert the bundled model to four layouts, win two's accuracy back, evaluate all, and time them
on the runtime."""

import json
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.adapt.blockwise.distill import DistillOptions
from ladderize.adapt.blockwise.run import BlockwiseOptions
from ladderize.adapt.data.sources import parse_specs
from ladderize.adapt.retrain.losses import Objective
from ladderize.adapt.retrain.options import RetrainOptions
from ladderize.adapt.retrain.outcome import summary as summary_of_training
from ladderize.adapt.retrain.run import retrain
from ladderize.adapt.retrain.schedule import Budget
from ladderize.console import Console, UserError, table
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.demo.corpus import documents
from ladderize.eval.harness import EvalOptions, comparison, evaluate_models
from ladderize.files.documents import write_json
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.options import BenchOptions, ModelChoice
from ladderize.runtime.bench.plan import plan_bench
from ladderize.runtime.bench.report import bench_summary
from ladderize.runtime.bench.run import run_bench
from ladderize.workflows.spd import SpdOptions, block_rows, perplexity_rows, run_spd

HERE = Path(__file__).parent
MODEL, TASKS = HERE / "model", HERE / "tasks"
RECIPES = {
    "ladder-upper": Recipe(ladder="4:"),
    "ladder-all": Recipe(ladder="all"),
    "spd-all": Recipe(spd="all", sync_tp_size=4),
    "spd-ladder-all": Recipe(ladder="all", spd="all", sync_tp_size=4),
}
QUICK = ("ladder-all", "spd-all")


@dataclass(frozen=True)
class BenchGroup:
    """Ranks of a benchmark: real ones, or emulated ones over a published link."""

    tp_size: int = 1
    emulate_tp: int | None = None
    link: str | None = None

    @property
    def command_line(self) -> str:
        return (
            f"--tp-size {self.tp_size}" if self.link is None else f"--emulate-tp {self.emulate_tp} --link {self.link}"
        )


# What a group of 4 on PCIe would gain, and the runtime at work on 2 processes of this machine, whose shared memory
# leaves little to gain
BENCHES = {"bench-emulated-tp4": BenchGroup(emulate_tp=4, link="nccl_pcie"), "bench-tp2": BenchGroup(tp_size=2)}
HELDOUT_DOCUMENTS = 200
ADAPTED, DISTILLED = "ladder-all-adapted", "spd-all-adapted"
RETRAINED = "ladder-all"  # what ADAPTED is made of
TRAINING = {"samples": 1024, "epochs": 2, "max_tokens": 400_000}
QUICK_TRAINING = {"samples": 64, "epochs": 1, "max_tokens": 10_000}
SEQ_LEN, LR = 128, 1e-3


def run_demo(out: Path | None, *, quick: bool, console: Console) -> dict[str, Any]:
    """Convert, evaluate and print; returns the results document. ``out``: a folder to keep everything in."""
    with ExitStack() as stack:
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ladderize-demo-")))
        else:
            folder = out
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UserError(f"--out {folder} is not an empty folder; choose another")
            folder.mkdir(parents=True, exist_ok=True)
        models = [str(shutil.copytree(MODEL, folder / "dense"))]
        for name, recipe in RECIPES.items():
            if quick and name not in QUICK:
                continue
            console.status(f"$ ladderize convert {models[0]} {folder / name} {command_line(recipe)}")
            report = convert_checkpoint(models[0], folder / name, recipe, verify=not quick, console=console)
            console.result(f"{name:19} {report['layout']}")
            models.append(str(folder / name))
        training = QUICK_TRAINING if quick else TRAINING
        data = write_documents(
            folder / "train.jsonl", 6 * training["samples"] + 400, test=False, seed=11
        )  # about 20 tokens each
        adapted = [
            _distil(models[0], folder, str(data), training, quick, console),
            _retrain(models[0], folder, str(data), training, quick, console),
        ]
        heldout = write_documents(folder / "heldout.jsonl", HELDOUT_DOCUMENTS, test=True, seed=1)
        options = EvalOptions(
            tasks=tuple(sorted(f"demo_{path.stem}" for path in TASKS.glob("*.yaml"))),
            include_path=str(TASKS),
            include_default_tasks=False,
            limit=20 if quick else None,
            batch_size=64,
            dtype="float32",
            perplexity=str(heldout),
            seq_len=SEQ_LEN,
        )
        evaluated = [*models, *adapted]
        console.status(
            f"$ ladderize eval {' '.join(evaluated)} --tasks {','.join(options.tasks)} --include-path {TASKS}"
            f" --perplexity {heldout} ..."
        )
        document = evaluate_models(
            evaluated, options, console=console, save=lambda document: write_json(folder / "results.json", document)
        )
        console.result("")
        console.result(table(comparison(document), right=["value", "stderr", "difference"]))
        console.result(
            f"\n{DISTILLED} is spd-all with its heads grouped and its blocks distilled (`ladderize spd`), {ADAPTED} is"
            f" {RETRAINED} after a short retraining on text and the dense model's predictions (`ladderize adapt`). In"
            " the others no layer was retrained."
        )
        benches = {
            name: _bench(models, folder / f"{name}.json", group, quick, console) for name, group in BENCHES.items()
        }
        return {**document, "benches": {name: bench.to_dict() for name, bench in benches.items()}}


def write_documents(path: Path, count: int, *, test: bool, seed: int) -> Path:
    """Texts of the demo's corpus, a line of JSON each."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(count, test=test, seed=seed)))
    return path


def _distil(dense: str, folder: Path, data: str, training: dict[str, int], quick: bool, console: Console) -> str:
    """`ladderize spd`: all blocks dropped, their heads grouped, and distilled."""
    out, samples = str(folder / DISTILLED), training["samples"]
    options = SpdOptions(
        sync_tp_size=4,
        spd_fraction=1.0,
        distill_all=True,
        training=BlockwiseOptions(
            data=data, samples=samples, heldout=16, seq_len=SEQ_LEN, distill=DistillOptions(epochs=training["epochs"])
        ),
    )
    console.status(
        f"$ ladderize spd {dense} {out} --sync-tp-size 4 --spd-fraction 1 --distill-all --data {data} --samples"
        f" {samples} ..."
    )
    document = run_spd(dense, out, options, console=console, verify=not quick)
    console.result(f"{DISTILLED:19} {document['layout']}\n")
    console.result(table(block_rows(document), right=["block", "S"]) + "\n")
    console.result(table(perplexity_rows(document["perplexity"]), right=["perplexity", "stderr", "difference"]))
    return out


def _retrain(dense: str, folder: Path, data: str, training: dict[str, int], quick: bool, console: Console) -> str:
    """`ladderize adapt`: all weights of the all-ladder model, on the dense model's predictions."""
    model, out, tokens = str(folder / RETRAINED), str(folder / ADAPTED), training["max_tokens"]
    options = RetrainOptions(
        data=tuple(parse_specs([data])),
        distill_from=dense,
        objective=Objective(distill_weight=1.0),
        budget=Budget(tokens=tokens),
        seq_len=SEQ_LEN,
        batch_size=8,
        lr=LR,
    )
    said = f"--distill-from {dense} --data {data} --max-tokens {tokens} --seq-len {SEQ_LEN} --batch-size 8 --lr {LR}"
    console.status(f"$ ladderize adapt {model} {out} {said}")
    document = retrain(model, out, options, console=console, verify=not quick)
    console.result(f"\n{ADAPTED:19} {document['layout']}\n{summary_of_training(document)}")
    return out


def _bench(models: list[str], out: Path, group: BenchGroup, quick: bool, console: Console) -> BenchDocument:
    options = BenchOptions(
        tp_size=group.tp_size,
        emulate_tp=group.emulate_tp,
        prompt_len=64,
        repeat=1 if quick else BenchOptions.repeat,
        warmup=1 if quick else BenchOptions.warmup,
    )
    said = f"--prompt-len {options.prompt_len} {group.command_line}{' --repeat 1 --warmup 1' * quick}"
    console.status(f"$ ladderize bench {' '.join(models)} {said} --out {out}")
    document = run_bench(plan_bench(ModelChoice(tuple(models)), options, group.link), console)
    write_json(out, document.to_dict())
    console.result("\n" + bench_summary(document))
    return document


def command_line(recipe: Recipe) -> str:
    return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in recipe.to_dict().items())
