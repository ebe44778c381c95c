"""What alignment on texts of some kinds does to texts of other kinds: KL to the dense model on each kind.

    python benchmarks/aligned_kinds.py OUT.json

The bundled model, aligned on 256 windows of 128 tokens (float32, one seed), with and without random tokens, and with
texts of its own. Prints a table (docs/adapt.md has figures of it), with what was not aligned on in brackets.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ladderize.adapt.layers import align
from ladderize.adapt.layers.layer_files import Contender, heldout_measures
from ladderize.adapt.layers.options import AlignOptions
from ladderize.adapt.layers.rewrite import adapt_layers
from ladderize.blocks import Blocks, read_windows
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.demo.command import MODEL, write_documents
from ladderize.demo.corpus import GENRE_WEIGHTS
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks

KINDS = ("stories", "arithmetic", "agreement", "copying")
LAYOUTS = {"ladder 4:8": "4:8", "ladder all": "all"}
ALL_BUT_ARITHMETIC = ("stories", "agreement", "copying")
DATA = {"all kinds": KINDS, "all but arithmetic": ALL_BUT_ARITHMETIC, "agreement": ("agreement",)}
OWN = "agreement, and 600 texts of the model's own"
SEQ_LEN, SAMPLES, JUDGED = 128, 256, 100
ALONE = Ranks(0, 1, torch.device("cpu"))


def write_kinds(path: Path, kinds: Sequence[str], count: int, *, test: bool) -> Path:
    return write_documents(path, count, test=test, seed=7, weights={kind: GENRE_WEIGHTS[kind] for kind in kinds})


def divergences(model: Path, heldout: Mapping[str, Path]) -> dict[str, float]:
    """KL(dense || model) of each kind of text, in nats per token."""
    dense, own = (Blocks(open_checkpoint(str(path)), torch.float32, torch.device("cpu")) for path in (MODEL, model))
    plain = Layout.dense(dense.num_layers)
    found = {}
    for kind, file in heldout.items():
        ids = read_windows(dense.checkpoint, str(file), seq_len=SEQ_LEN, seed=0)[:JUDGED]
        models: Any = {
            "dense": Contender(dense, plain, dense.weights),
            "model": Contender(own, own.layout, own.weights),
        }
        found[kind] = heldout_measures(models, torch.from_numpy(ids), ALONE)[1]["model"]
    return found


def main(out: Path) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        heldout = {kind: write_kinds(folder / f"{kind}.jsonl", [kind], 2000, test=True) for kind in KINDS}
        data = {name: write_kinds(folder / f"{name}.jsonl", kinds, 12_000, test=False) for name, kinds in DATA.items()}
        own = folder / "own.jsonl"
        subprocess.run(["ladderize", "generate", MODEL, "--from-bos", "--num-samples", "600", "--out", own], check=True)
        data[OWN] = folder / "both.jsonl"
        alone = data["agreement"].read_text().splitlines()[:600]
        texts = [json.dumps({"text": json.loads(line)["text"]}) for line in own.read_text().splitlines()]
        data[OWN].write_text("\n".join([*alone, *texts]) + "\n")
        for layout, ladder in LAYOUTS.items():
            model = folder / layout
            convert_checkpoint(MODEL, model, Recipe(ladder=ladder), verify=False)
            rows.append({"layout": layout, "data": "as converted", "random": None, **divergences(model, heldout)})
            for name, file in data.items():
                for share in (0.0, 0.25) if name != OWN else (0.25,):
                    align.RANDOM_SHARE = share
                    options = AlignOptions(str(file), samples=SAMPLES, seq_len=SEQ_LEN, dtype="float32", write="last")
                    aligned = folder / f"{layout}-{name}-{share}"
                    adapt_layers(model, aligned, MODEL, options, verify=False)
                    rows.append({"layout": layout, "data": name, "random": share, **divergences(aligned, heldout)})
                    show(rows[-1])
    out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    print("\n| layout, aligned on | random tokens | " + " | ".join(KINDS) + " |\n" + "|---" * (len(KINDS) + 2) + "|")
    for row in rows:
        show(row)


def show(row: Mapping[str, Any]) -> None:
    seen = DATA.get(row["data"], KINDS)
    cells = [f"{row[kind]:.3f}" if kind in seen else f"({row[kind]:.3f})" for kind in KINDS]
    random = {None: "", 0.0: "none", 0.25: "a quarter"}[row["random"]]
    name = f"{row['layout']}, as converted" if row["random"] is None else row["data"]
    print(f"| {name} | {random} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
