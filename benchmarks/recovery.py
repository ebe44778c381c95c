"""What alignment and retraining win back, against the tokens that they see: KL to the dense model and perplexity.

    python benchmarks/recovery.py OUT.json [--models demo,stories] [--prose MODEL] [--wide MODEL] [--layouts ...]
        [--recipes ...] [--tokens 16k,60k] [--align-tokens 16384] [--seeds 0,1,2] [--lr-factors 1] [--jobs 2]

Every cell is a run of ``ladderize.adapt_checkpoint`` or ``adapt_layers`` with the options that a user gets by default,
on one thread, and is judged in float32 on texts that nothing was trained on; of the demo model in LAYOUTS with seed 0
and 60k tokens or more the demo's tasks are asked, too. Cells that OUT.json has already are not run again, so that a run
may be cut off, or asked for more. The models ``prose`` and ``wide`` are made by scripts/train_demo_model.py, which says
how. Preload tcmalloc. docs/draw_recovery.py makes the figure and prints tables of it.

Layouts: ladder upper, ladder all, spd all, both; or all layers with a kind, ranks and what is assigned to them by the
training data: "delayed 2", "spd 4 heads", "spd+delayed 8 neurons" (heads and neurons). docs/draw_assignment.py makes
the figure, and prints a table of those.

Recipes: ce (cross-entropy on the text, the Ladder paper's way), kl (the dense model's predictions), blocks
(block-to-block distillation), none. ``align`` in front of one starts it from the aligned weights; the tokens of the
alignment, 16k, are not counted into the budget: they are no steps. Rows of a recipe "hidden" are kl and a third loss,
which is no option any more.
"""

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ladderize.convert.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT.parent / "shared" / "fixtures"
STORIES = FIXTURES / "stories260K"
LAYOUTS = ("ladder upper", "ladder all", "spd all", "both")
RECIPES = ("none", "align", "ce", "kl", "blocks", "align+kl", "align+blocks")
ALIGN_TOKENS = 16_384
JUDGED = 400  # windows
BEST = "best"
TASKS = ("demo_many_agreement", "demo_many_arithmetic", "demo_repeating", "demo_first_word", "demo_last_word")


@dataclass(frozen=True)
class Cell:
    """One figure: a model in a layout after a recipe."""

    model: str
    layout: str
    recipe: str
    tokens: int  # trained on; of a recipe that only aligns: aligned on
    seed: int
    lr_factor: float | None  # of the default learning rate without an alignment; None: the default


@dataclass(frozen=True)
class Bench:
    """A dense model with its data. ``train`` and ``heldout`` are --data."""

    model: Path
    train: str
    heldout: str
    seq_len: int
    batch_size: int
    ranks: int


def best_factor(rows: Sequence[Mapping[str, Any]], model: str, layout: str, recipe: str) -> float:
    """The factor of the lowest KL among the runs with seed 0 and the fewest tokens."""
    runs = [
        (row["tokens"], row["kl"], row["lr_factor"])
        for row in rows
        if (row["model"], row["layout"], row["recipe"], row["seed"]) == (model, layout, recipe, 0) and row["lr_factor"]
    ]
    fewest = min(tokens for tokens, _, _ in runs)
    return min((kl, factor) for tokens, kl, factor in runs if tokens == fewest)[1]


def cells(arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """What was asked for; recipes that train nothing have no budget but their own."""
    found = []
    for model in arguments.models:
        for layout in arguments.layouts:
            for recipe in arguments.recipes:
                if recipe == "none":
                    found.append(Cell(model, layout, recipe, 0, 0, None))
                    continue
                for tokens in arguments.tokens if recipe != "align" else arguments.align_tokens:
                    for seed in arguments.seeds:
                        factors = arguments.lr_factors if recipe != "align" else [None]
                        if factors == [BEST]:
                            factors = [best_factor(rows, model, layout, recipe)]
                        for factor in factors:
                            found.append(Cell(model, layout, recipe, tokens, seed, factor))
    return sorted(dict.fromkeys(found), key=lambda cell: (cell.seed, cell.tokens))


def prepare(name: str, made: Mapping[str, Path | None], folder: Path) -> Bench:
    """Put a model's data into ``folder``, once. ``made``: where the models are that are not in the repository."""
    from ladderize.demo.command import MODEL, write_documents

    model = made.get(name, MODEL)
    if model is None:
        raise SystemExit(f"--models {name} needs --{name} MODEL; scripts/train_demo_model.py makes it")
    if name == "prose":
        texts = FIXTURES / "wikitext-2"
        return Bench(model, str(texts / "test.txt"), str(texts / "valid.txt"), 128, 8, 2)

    if name == "stories":
        ids = f"{STORIES}-samples.npz"
        return Bench(STORIES, f"{ids}:train", f"{ids}:heldout", 256, 4, 4)
    train, heldout = folder / "train.jsonl", folder / "heldout.jsonl"
    if not train.exists():
        write_documents(train, 24_000, test=False, seed=11)
        write_documents(heldout, 400, test=True, seed=1)
    return Bench(model, str(train), str(heldout), 128, 8, 2)


def recipe_of(layout: str, layers: int, ranks: int) -> "Recipe":
    from ladderize.convert.recipe import Recipe

    if layout in LAYOUTS:
        return {
            "ladder upper": Recipe(ladder=f"{layers // 2}:"),
            "ladder all": Recipe(ladder="all"),
            "spd all": Recipe(spd="all", sync_tp_size=ranks),
            "both": Recipe(ladder="all", spd="all", sync_tp_size=ranks),
        }[layout]
    kind, size, *_ = layout.split()
    return Recipe(**dict.fromkeys(kind.split("+"), "all"), sync_tp_size=int(size))


def converted(bench: Bench, layout: str, folder: Path) -> Path:
    """The converted checkpoint, made once."""
    from ladderize.adapt.layers.assign import assign_ranks
    from ladderize.adapt.layers.options import AssignOptions
    from ladderize.checkpoint.opening import open_checkpoint
    from ladderize.convert.pipeline import convert_checkpoint
    from ladderize.convert.plan import Changes

    folder.mkdir(parents=True, exist_ok=True)
    out = folder / layout.replace(" ", "-")
    if not out.exists():
        layers = int(open_checkpoint(str(bench.model)).config["num_hidden_layers"])
        recipe = recipe_of(layout, layers, bench.ranks)
        assign = {"heads": ("heads",), "neurons": ("heads", "neurons")}.get(layout.split()[-1])
        options = AssignOptions(assign, bench.train) if assign else None
        changes = Changes(assignment=assign_ranks(str(bench.model), recipe, options)) if options else None
        convert_checkpoint(bench.model, out, recipe, changes, verify=False)
    return out


def aligned(bench: Bench, source: Path, tokens: int, seed: int, scratch: Path) -> Path:
    """The aligned checkpoint, beside its source: two workers may make it, and the first is kept."""
    from ladderize.adapt.layers.options import AlignOptions
    from ladderize.adapt.layers.rewrite import adapt_layers

    options = AlignOptions(
        bench.train, samples=tokens // bench.seq_len, seq_len=bench.seq_len, seed=seed, dtype="float32", write="last"
    )
    out = source.with_name(f"{source.name}-aligned-{tokens}-{seed}")
    if not out.exists():
        adapt_layers(source, scratch / "aligned", bench.model, options, verify=False)
        with suppress(OSError):
            (scratch / "aligned").rename(out)
    return out


def trained(bench: Bench, source: Path, recipe: str, cell: Cell, out: Path) -> Path:

    from ladderize.adapt.layers.options import PAPERS_LR, PAPERS_WIDTH, BlockwiseOptions
    from ladderize.adapt.layers.rewrite import adapt_layers
    from ladderize.adapt.options import AdaptOptions
    from ladderize.adapt.train.run import adapt_checkpoint
    from ladderize.adapt.train.task import FULL_LR, WIDTH
    from ladderize.checkpoint.opening import open_checkpoint

    hidden = int(open_checkpoint(str(bench.model)).config["hidden_size"])
    if recipe == "blocks":
        # the tokens are seen in two epochs, so that learning rates may fall
        windows = BlockwiseOptions(
            bench.train,
            samples=max(1, cell.tokens // bench.seq_len // 2),
            heldout=16,
            seq_len=bench.seq_len,
            epochs=2,
            lr=(cell.lr_factor or 1) * PAPERS_LR * PAPERS_WIDTH / hidden,
            seed=cell.seed,
            dtype="float32",
            write="last",
        )
        adapt_layers(source, out, bench.model, windows, verify=False)
        return out
    options = AdaptOptions(
        model=str(source),
        out=str(out),
        verify=False,
        data=(str(bench.train),),
        distill_from=None if recipe == "ce" else str(bench.model),
        max_tokens=cell.tokens,
        seq_len=bench.seq_len,
        batch_size=bench.batch_size,
        lr=None if cell.lr_factor is None else cell.lr_factor * FULL_LR * WIDTH / hidden,
        heldout=64,
        eval_every=10**6,
        seed=cell.seed,
        dtype="float32",
        write="last",
    )
    adapt_checkpoint(options)
    return out


def answered(model: Path) -> dict[str, float]:
    """The share of right answers to each of the demo's tasks."""
    from ladderize import EvalOptions, evaluate

    tasks = str(ROOT / "ladderize" / "demo" / "tasks")
    options = EvalOptions(models=(str(model),), tasks=TASKS, include_path=tasks, batch_size=64, dtype="float32")
    (result,) = evaluate(options).models
    scores = {}
    for task, metrics in result.reported.results.items():
        (scores[task],) = (value for key, value in metrics.items() if key.startswith(("acc,", "exact_match,")))
    return scores


def judge(bench: Bench, model: Path) -> dict[str, float]:
    """KL(dense || model) in nats per token and perplexity, in float32."""
    import torch

    from ladderize.adapt.layers.layer_files import Contender, heldout_measures
    from ladderize.blocks import Blocks, read_windows
    from ladderize.checkpoint.opening import open_checkpoint
    from ladderize.layout import Layout
    from ladderize.ranks.group import Ranks

    dense, own = (
        Blocks(open_checkpoint(str(path)), torch.float32, torch.device("cpu")) for path in (bench.model, model)
    )
    ids = read_windows(dense.checkpoint, bench.heldout, seq_len=bench.seq_len, seed=0)[:JUDGED]
    plain = Layout.dense(dense.num_layers)
    perplexity, divergence = heldout_measures(
        {
            "dense": Contender(dense, plain, dense.weights),
            "model": Contender(own, own.layout, own.weights),
        },
        torch.from_numpy(ids),
        Ranks(0, 1, torch.device("cpu")),
    )
    return {
        "kl": divergence["model"],
        "perplexity": perplexity["model"].perplexity,
        "stderr": perplexity["model"].stderr or 0.0,
        "dense_perplexity": perplexity["dense"].perplexity,
    }


def run(cell: Cell, made: Mapping[str, Path | None], folder: Path) -> dict[str, object]:
    """One cell's row."""
    import torch

    from ladderize.errors import LadderizeError

    torch.set_num_threads(1)
    bench = prepare(cell.model, made, folder)
    begin = time.perf_counter()
    scratch = Path(tempfile.mkdtemp(dir=folder))
    try:
        model = converted(bench, cell.layout, folder / cell.model)
        start, _, recipe = cell.recipe.rpartition("+")
        if cell.recipe == "align":
            model = aligned(bench, model, cell.tokens, cell.seed, scratch)
        elif cell.recipe != "none":
            if start == "align":
                model = aligned(bench, model, ALIGN_TOKENS, cell.seed, scratch)
            model = trained(bench, model, recipe, cell, scratch / "trained")
        seconds = time.perf_counter() - begin
        row = {**asdict(cell), **judge(bench, model), "seconds": round(seconds, 1)}
        asked = cell.model == "demo" and cell.layout in LAYOUTS and cell.seed == 0 and cell.lr_factor is None
        return {**row, **answered(model)} if asked and cell.tokens != 16_000 else row
    except LadderizeError as error:
        return {**asdict(cell), "failed": str(error)}
    finally:
        shutil.rmtree(scratch)


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def counts(text: str) -> list[int]:
    return [round(float(part.removesuffix("k")) * (1000 if part.endswith("k") else 1)) for part in names(text)]


def lr_factors(text: str) -> list[float] | list[str]:
    return [BEST] if text == BEST else list(map(float, names(text)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", type=names, default=["demo", "stories"])
    parser.add_argument("--prose", type=Path, help="the model of that name")
    parser.add_argument("--wide", type=Path, help="the model of that name, trained on the demo's texts")
    parser.add_argument("--layouts", type=names, default=list(LAYOUTS))
    parser.add_argument("--recipes", type=names, default=list(RECIPES))
    parser.add_argument("--tokens", type=counts, default=[16_000, 60_000, 200_000])
    parser.add_argument("--align-tokens", type=counts, default=[ALIGN_TOKENS, 8 * ALIGN_TOKENS])
    parser.add_argument("--seeds", type=lambda text: list(map(int, names(text))), default=[0, 1, 2])
    parser.add_argument("--lr-factors", type=lr_factors, default=[None], help=f"or {BEST}, of seed 0")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    made = {"prose": arguments.prose, "wide": arguments.wide}
    document = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"rows": []}
    rows = document["rows"]
    keys = list(Cell.__dataclass_fields__)
    done = {tuple(row[key] for key in keys) for row in rows if "failed" not in row}
    rows = [row for row in rows if "failed" not in row]
    wanted = [cell for cell in cells(arguments, rows) if tuple(asdict(cell).values()) not in done]
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(arguments.jobs) as pool:
        folder = Path(scratch)
        for model in arguments.models:  # before the workers share them
            bench = prepare(model, made, folder)
            for layout in arguments.layouts:
                converted(bench, layout, folder / model)
        futures = [pool.submit(run, cell, made, folder) for cell in wanted]
        for number, future in enumerate(as_completed(futures), 1):
            rows.append(row := future.result())
            print(f"{number}/{len(wanted)}", *(f"{key} {value}" for key, value in row.items()), flush=True)
            document.update(machine=platform.processor() or platform.machine(), torch=version("torch"), rows=rows)
            temporary = arguments.out.with_suffix(".part")
            temporary.write_text(json.dumps(document, indent=1) + "\n")
            temporary.rename(arguments.out)


if __name__ == "__main__":
    main()
