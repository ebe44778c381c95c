"""``ladderize demo``: convert the bundled model to four layouts, win two's accuracy back, evaluate all, and time them
on the runtime."""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.adapt.blockwise.documents import perplexity_rows
from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions
from ladderize.adapt.data.sources import parse_specs
from ladderize.adapt.retrain.losses import Objective
from ladderize.adapt.retrain.options import RetrainOptions
from ladderize.adapt.retrain.run import adapt_checkpoint
from ladderize.adapt.retrain.schedule import Budget
from ladderize.console import Console
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.demo.corpus import documents
from ladderize.errors import UserError
from ladderize.eval.evaluation.run import evaluate
from ladderize.eval.evaluation.table import comparison_rows
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvalResults
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.options import BenchOptions, ModelChoice
from ladderize.runtime.bench.run import bench
from ladderize.workflows.spd import SpdOptions, spd
from ladderize.workflows.spd_document import spd_rows

HERE = Path(__file__).parent
MODEL, TASKS = HERE / "model", HERE / "tasks"
RECIPES = {
    "ladder-upper": Recipe(ladder="4:"),
    "ladder-all": Recipe(ladder="all"),
    "spd-all": Recipe(spd="all", sync_tp_size=4),
    "spd-ladder-all": Recipe(ladder="all", spd="all", sync_tp_size=4),
}
QUICK_RECIPES = ("ladder-all", "spd-all")
# What a group of 4 on PCIe would gain, and the runtime at work on 2 processes of this machine, whose shared memory
# leaves little to gain: options and link
BENCHES: dict[str, tuple[BenchOptions, str | None]] = {
    "bench-emulated-tp4": (BenchOptions(prompt_len=64, emulate_tp=4), "nccl_pcie"),
    "bench-tp2": (BenchOptions(prompt_len=64, tp_size=2), None),
}
HELDOUT_DOCUMENTS = 200
RETRAINED, DISTILLED = "ladder-all-adapted", "spd-all-adapted"
RETRAINED_FROM = "ladder-all"
SEQ_LEN, LR = 128, 1e-3


@dataclass(frozen=True)
class DemoSize:
    """How much is done of each step. samples, epochs: of distillation; max_tokens: of retraining. limit: samples of
    each task. warmup, repeat: rounds of the benchmarks."""

    recipes: tuple[str, ...]
    verify: bool
    samples: int
    epochs: int
    max_tokens: int
    limit: int | None
    warmup: int = BenchOptions.warmup
    repeat: int = BenchOptions.repeat

    @classmethod
    def of(cls, quick: bool) -> "DemoSize":
        if quick:
            return cls(QUICK_RECIPES, False, 64, 1, 10_000, limit=20, warmup=1, repeat=1)
        return cls(tuple(RECIPES), True, 1024, 2, 400_000, limit=None)


def run_demo(out: Path | None, *, quick: bool, console: Console) -> dict[str, Any]:
    """Convert, evaluate and print; returns the content of results.json with ``benches``. ``out``: a folder to keep
    everything in."""
    size = DemoSize.of(quick)
    with ExitStack() as stack:
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ladderize-demo-")))
        else:
            folder = empty_folder(out)
        models = _convert(folder, size, console)
        # about 20 tokens each
        data = write_documents(folder / "train.jsonl", 6 * size.samples + 400, test=False, seed=11)
        adapted = [
            _distil(models[0], folder, str(data), size, console),
            _retrain(models[0], folder, str(data), size, console),
        ]
        results = _evaluate([*models, *adapted], folder, size, console)
        benches = {
            name: _bench(models, folder / f"{name}.json", options, link, size, console)
            for name, (options, link) in BENCHES.items()
        }
        return {**results.to_dict(), "benches": {name: document.to_dict() for name, document in benches.items()}}


def empty_folder(path: Path) -> Path:
    """``path``, made if it is not there; raises UserError if anything is in it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"--out {path} is not an empty folder; choose another")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_documents(path: Path, count: int, *, test: bool, seed: int) -> Path:
    """Texts of the demo's corpus, a line of JSON each."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(count, test=test, seed=seed)))
    return path


def command_line(recipe: Recipe) -> str:
    return _options_said(recipe.to_dict())


def _options_said(values: Mapping[str, object]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())


def _convert(folder: Path, size: DemoSize, console: Console) -> list[str]:
    """`ladderize convert`: the dense model, and one for each recipe."""
    dense = str(shutil.copytree(MODEL, folder / "dense"))
    models = [dense]
    for name in size.recipes:
        recipe = RECIPES[name]
        console.note(f"$ ladderize convert {dense} {folder / name} {command_line(recipe)}")
        report = convert_checkpoint(dense, folder / name, recipe, verify=size.verify, console=console)
        console.result(f"{name:19} {report.layout}")
        models.append(str(folder / name))
    return models


def _distil(dense: str, folder: Path, data: str, size: DemoSize, console: Console) -> str:
    """`ladderize spd`: all blocks dropped, their heads grouped, and distilled."""
    out = str(folder / DISTILLED)
    options = SpdOptions(
        sync_tp_size=4,
        spd_fraction=1.0,
        training=BlockwiseOptions(
            data=data, samples=size.samples, heldout=16, seq_len=SEQ_LEN, distill=DistillOptions(epochs=size.epochs)
        ),
    )
    console.note(
        f"$ ladderize spd {dense} {out} --sync-tp-size 4 --spd-fraction 1 --data {data} --samples {size.samples} ..."
    )
    document = spd(dense, out, options, console=console, verify=size.verify)
    assert document is not None  # which it is on other ranks than 0
    console.result(f"{DISTILLED:19} {document.layout}\n")
    console.table(spd_rows(document), right=["block", "S"])
    console.result("")
    console.table(perplexity_rows(document.perplexity), right=["perplexity", "stderr", "difference"])
    return out


def _retrain(dense: str, folder: Path, data: str, size: DemoSize, console: Console) -> str:
    """`ladderize adapt`: all weights of the all-ladder model, on the dense model's predictions."""
    model, out, tokens = str(folder / RETRAINED_FROM), str(folder / RETRAINED), size.max_tokens
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
    console.note(f"$ ladderize adapt {model} {out} {said}")
    adaptation = adapt_checkpoint(model, out, options, console=console, verify=size.verify)
    assert adaptation is not None  # which it is on other ranks than 0
    console.result(f"\n{RETRAINED:19} {adaptation.layout}\n{adaptation.summary()}")
    return out


def _evaluate(models: list[str], folder: Path, size: DemoSize, console: Console) -> EvalResults:
    """`ladderize eval`: the demo's tasks, and the perplexity of documents that nothing was trained on."""
    heldout = write_documents(folder / "heldout.jsonl", HELDOUT_DOCUMENTS, test=True, seed=1)
    options = EvalOptions(
        tasks=tuple(sorted(f"demo_{path.stem}" for path in TASKS.glob("*.yaml"))),
        include_path=str(TASKS),
        include_default_tasks=False,
        limit=size.limit,
        batch_size=64,
        dtype="float32",
        perplexity=str(heldout),
        seq_len=SEQ_LEN,
    )
    console.note(
        f"$ ladderize eval {' '.join(models)} --tasks {','.join(options.tasks)} --include-path {TASKS}"
        f" --perplexity {heldout} ..."
    )
    results = evaluate(models, options, out=folder / "results.json", console=console)
    console.result("")
    console.table(comparison_rows(results), right=["value", "stderr", "difference"])
    console.result(
        f"\n{DISTILLED} is spd-all with its heads grouped and its blocks distilled (`ladderize spd`), {RETRAINED} is"
        f" {RETRAINED_FROM} after a short retraining on text and the dense model's predictions (`ladderize adapt`). In"
        " the others no layer was retrained."
    )
    return results


def _bench(
    models: list[str], out: Path, options: BenchOptions, link: str | None, size: DemoSize, console: Console
) -> BenchDocument:
    """`ladderize bench`, its JSON written to ``out``."""
    options = dataclasses.replace(options, warmup=size.warmup, repeat=size.repeat)
    said = {name: value for name, value in vars(options).items() if value != getattr(BenchOptions(), name)}
    said |= {"link": link} if link is not None else {}
    console.note(f"$ ladderize bench {' '.join(models)} {_options_said(said)} --out {out}")
    console.result("")
    # with --json the demo prints one document, which holds this one
    own = dataclasses.replace(console, quiet=True) if console.as_json else console
    return bench(ModelChoice(tuple(models)), options, link, console=own, out=out)
