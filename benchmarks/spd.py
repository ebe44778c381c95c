"""Sync-Point Drop measured: the trained fixtures as tables, and the paper's ablation of who shares a rank as a picture.

    python benchmarks/spd.py table MODEL --data FILE --heldout FILE [--ranks 4,2] [--samples N] [--out FILE]
    python benchmarks/spd.py train FOLDER --data FILE             # a small MHA model, whose heads may go to any rank
    python benchmarks/spd.py ablation MODEL --data FILE --heldout FILE [--ranks 4] [--seeds 3] [--plot STEM]
        [--out FILE]

``table`` runs `ladderize spd` on all blocks and scores the checkpoint on data that nothing was chosen or trained by.
``ablation`` compares zero-shot, distillation alone, and distillation after heads, and heads and neurons, were assigned
to ranks, at 25, 50, 75 and 100 % of blocks. Every block is distilled alone, so each is trained once per assignment and
seed, and each fraction is put together.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch

from ladderize.adapt.layers.assign import assign_layers
from ladderize.adapt.layers.distill import BlockReport, distill
from ladderize.adapt.layers.layer_files import LayerFiles, LayerJob
from ladderize.adapt.layers.options import BlockwiseOptions, SensitivityOptions, SpdOptions
from ladderize.adapt.layers.rewrite import spd
from ladderize.adapt.layers.sensitivity import write_sensitivity
from ladderize.adapt.layers.windows import training_windows
from ladderize.blocks import Blocks, read_windows, window_nlls
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import Console
from ladderize.eval.options import EvalOptions
from ladderize.eval.run import evaluate
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import environment

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
MHA = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def table(args: argparse.Namespace) -> dict:
    """`ladderize spd --spd-fraction 1`, zero-shot to distilled, on held-out data of its own."""
    rows = []
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            options = SpdOptions(
                model=args.model,
                out=f"{folder}/out",
                data=args.data,
                samples=args.samples,
                seq_len=args.seq_len,
                epochs=args.epochs,
                sync_tp_size=ranks,
                spd_fraction=1.0,
                repair="blocks",
            )
            begin = time.perf_counter()
            document = spd(options, console=Console())
            assert document is not None
            layers = len(document.layers)
            seconds = time.perf_counter() - begin
            scores = evaluate(
                EvalOptions(
                    models=(args.model, f"{folder}/out"),
                    perplexity=args.heldout,
                    seq_len=args.seq_len,
                    batch_size=32,
                ),
                console=Console(),
            )
            dense, distilled = (entry.model.perplexity for entry in scores.models)
            assert dense is not None
            assert distilled is not None
            zero = heldout_perplexity(
                args,
                Layout.from_layers(layers, spd=range(layers), sync_tp_size=ranks),
            )
            rows.append(
                {
                    "sync_tp_size": ranks,
                    "dense": dense.perplexity,
                    "zero_shot": zero,
                    "distilled": distilled.perplexity,
                    "stderr": distilled.stderr,
                    "seconds": seconds,
                    "spd": document.to_dict(),
                }
            )
            print(
                f"{ranks} virtual ranks: dense {dense.perplexity:.3f}, zero-shot {zero:.3f}, grouped and distilled "
                f"{distilled.perplexity:.3f} +- {distilled.stderr:.3f} in {seconds:.0f} s",
                flush=True,
            )
    return {"rows": rows}


def heldout_perplexity(args: argparse.Namespace, layout: Layout) -> float:
    checkpoint = open_checkpoint(args.model)
    blocks = Blocks(checkpoint, torch.float32, torch.device("cpu"))
    ids = torch.from_numpy(read_windows(checkpoint, args.heldout, seq_len=args.seq_len, seed=0))
    return perplexity(window_nlls(blocks, lambda i: blocks.layer(i, layout), ids, batch_size=16), ids)


def perplexity(nlls: torch.Tensor, ids: torch.Tensor) -> float:
    return math.exp(float(nlls.sum()) / (len(ids) * (ids.shape[1] - 1)))


def train(args: argparse.Namespace) -> dict:
    """A small MHA model on ids: nothing but a model with heads that may go anywhere."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MHA))
    path, _, key = args.data.partition(":")
    import numpy as np

    rows = torch.from_numpy(np.load(path)[key].astype(np.int64))
    batch, steps = 32, args.steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps, pct_start=0.05)
    for step in range(steps):
        ids = rows[torch.randint(len(rows), (batch,))]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: perplexity {math.exp(float(loss)):.3f}", flush=True)
    model.save_pretrained(args.model)
    return {"steps": steps, "last_loss": float(loss)}


def ablation(args: argparse.Namespace) -> dict:
    """Perplexity by method, fraction and seed."""
    checkpoint = open_checkpoint(args.model)
    blocks = Blocks(checkpoint, torch.float32, torch.device("cpu"))
    count, ranks = blocks.num_layers, int(args.ranks)
    layers = range(count)
    every = Layout.from_layers(count, spd=layers, sync_tp_size=ranks)
    heldout = torch.from_numpy(read_windows(checkpoint, args.heldout, seq_len=None, seed=0))
    dense = perplexity(
        window_nlls(blocks, lambda i: blocks.layer(i, Layout.dense(count)), heldout, batch_size=16), heldout
    )
    rows: list[dict] = []
    for seed in range(args.seeds):
        options = BlockwiseOptions(data=args.data, samples=args.samples, epochs=args.epochs, seed=seed)
        windows = training_windows(checkpoint, options)
        calibration = windows.train[:128].numpy()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "sensitivity.json"
            asked = SensitivityOptions(args.model, args.data, out, mode="sweep", sync_tp_size=ranks, seed=seed)
            measured = write_sensitivity(asked, drawn=(calibration, ""), console=Console())
        ascending = [cost.layer for cost in sorted(measured.costs, key=lambda cost: cost.sensitivity)]
        chosen = {fraction: ascending[: round(fraction * count)] for fraction in FRACTIONS}
        for assigned in ("none", "heads", "heads,neurons"):
            untrained = {layer: blocks.weights(layer) for layer in layers}
            if assigned != "none":
                made = assign_layers(blocks, every, assigned.split(","), windows, seed=seed)
                untrained = {layer: made.permuted(layer, own, blocks.config) for layer, own in untrained.items()}
            with tempfile.TemporaryDirectory() as folder:
                work, begin = LayerFiles(Path(folder)), time.perf_counter()
                same = blocks, blocks, every, tuple(layers), untrained.__getitem__, blocks.weights
                job = LayerJob(*same, windows, Ranks(0, 1, torch.device("cpu")), work, Console())
                distill(job, options)
                seconds = time.perf_counter() - begin
                trained = {layer: work.weights(layer) for layer in layers}
                reports = [work.report(BlockReport, layer).to_dict() for layer in layers]
            for fraction, dropped in chosen.items():
                layout = Layout.from_layers(count, spd=dropped, sync_tp_size=ranks)
                for distilled, weights in ((False, untrained), (True, trained)):
                    nlls = window_nlls(
                        blocks,
                        lambda i, w=weights, d=dropped, o=layout: blocks.layer(i, o, w[i] if i in d else None),
                        heldout,
                        batch_size=16,
                    )
                    rows.append(
                        {
                            "seed": seed,
                            "assigned": assigned,
                            "distilled": distilled,
                            "fraction": fraction,
                            "dropped": dropped,
                            "perplexity": perplexity(nlls, heldout),
                        }
                    )
            print(
                f"seed {seed}, assigned {assigned}: "
                + ", ".join(
                    f"{row['fraction']:.0%} {'distilled' if row['distilled'] else 'zero-shot'} {row['perplexity']:.3f}"
                    for row in rows
                    if row["seed"] == seed and row["assigned"] == assigned
                )
                + f" ({seconds:.0f} s)",
                flush=True,
            )
            rows[-1]["blocks"] = [{key: value for key, value in report.items() if key != "curve"} for report in reports]
    document = {
        "dense": dense,
        "sync_tp_size": ranks,
        "config": dict(blocks.config),
        "samples": len(windows.train),
        "rows": rows,
    }
    if args.plot:
        draw(document, args.plot)
    return document


LINES = {
    ("none", False): ("zero-shot", "#888888", "o"),
    ("none", True): ("distillation", "#dd8452", "s"),
    ("heads", True): ("heads assigned + distillation", "#4c72b0", "^"),
    ("heads,neurons", True): ("heads and neurons assigned + distillation", "#55a868", "v"),
}


def draw(document: dict, stem: Path) -> None:
    """Perplexity over the part of blocks dropped: mean of the seeds, and their range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, keys in zip(panels, (list(LINES), [key for key in LINES if key[1]]), strict=True):
        for key in keys:
            name, colour, marker = LINES[key]
            values = [
                [
                    row["perplexity"]
                    for row in document["rows"]
                    if (row["assigned"], row["distilled"], row["fraction"]) == (*key, fraction)
                ]
                for fraction in FRACTIONS
            ]
            means = [statistics.mean(part) for part in values]
            spread = [
                [mean - min(part) for mean, part in zip(means, values, strict=True)],
                [max(part) - mean for mean, part in zip(means, values, strict=True)],
            ]
            panel.errorbar(
                [100 * fraction for fraction in FRACTIONS],
                means,
                yerr=spread,
                label=name,
                color=colour,
                marker=marker,
                capsize=3,
                linewidth=1.4,
            )
        panel.axhline(document["dense"], color="black", linewidth=0.8, linestyle="--", label="dense")
        panel.set_xticks([100 * fraction for fraction in FRACTIONS])
        panel.set_xlabel("blocks without attention sync (%)")
        panel.set_ylabel("held-out perplexity")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    panels[1].set_title("the distilled ones, closer", fontsize=9)
    layers, heads = (document["config"][key] for key in ("num_hidden_layers", "num_attention_heads"))
    figure.suptitle(
        f"{layers} layers, {heads} heads (MHA), {document['sync_tp_size']} virtual ranks; mean and range of the seeds",
        fontsize=10,
    )
    for suffix in (".png", ".svg"):
        figure.savefig(stem.with_suffix(suffix), dpi=150)
        print("drew", stem.with_suffix(suffix))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["table", "train", "ablation"])
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--heldout")
    parser.add_argument("--ranks", default="4")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    document = {"table": table, "train": train, "ablation": ablation}[args.what](args)
    if args.out:
        surroundings = environment(Ranks(0, 1, torch.device("cpu"))).to_dict()
        said = {key: str(value) for key, value in vars(args).items() if value is not None}
        args.out.write_text(
            json.dumps(
                {"schema_version": 1, "arguments": said, "environment": surroundings, **document}, indent=1, default=str
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
