"""Does emulation tell the truth? The real slow link's own measured all-reduce time as --link, and the speed-ups side by
side.

    python benchmarks/emulation.py benchmarks/results/slow_link.json [--out FILE]

Also the second claim of the emulation: with --emulate-tp 8 --link 200,1, how much of what can be hidden ladder hides.
"""

import argparse
import json
from pathlib import Path

from ladderize.console import Console
from ladderize.files.documents import read_document
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.inference import bench
from ladderize.runtime.bench.options import BenchOptions

SHAPES = Path(__file__).parent / "shapes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    measured = BenchDocument.from_dict(read_document(args.measured, "benchmark"), args.measured)
    sizes = {int(key.split()[2]): value for key, value in measured.alone_ms.items() if key.startswith("all_reduce")}
    (small, small_ms), (large, large_ms) = min(sizes.items()), max(sizes.items())
    beta = (large - small) / ((large_ms - small_ms) * 1e-3) / 1e9
    alpha = small_ms * 1e3 - small / beta / 1e3
    emulated_options = BenchOptions(
        random_weights=str(SHAPES / "slow_link.json"),
        dtype="float32",
        emulate_tp=2,
        link=f"{max(alpha, 0):.1f},{beta:.6f}",
        prompt_len=measured.options.prompt_len,
        output_len=measured.options.output_len,
        replicate_vocab=True,
        repeat=9,
        threads=1,
    )
    emulated = bench(emulated_options, console=Console())
    print(
        f"link fitted to the measured all-reduces: {alpha:.0f} us + bytes / {beta:.4f} GB/s; prefill of"
        f" {emulated_options.prompt_len} tokens"
    )
    rows = []
    for real, made in zip(measured.rows, emulated.rows, strict=True):
        ratio = made.speedup["prefill"] / real.speedup["prefill"]
        rows.append(
            {
                "layout": real.model,
                "measured": real.speedup["prefill"],
                "emulated": made.speedup["prefill"],
                "ratio": ratio,
            }
        )
        told = [f"{row.ms['prefill']:6.1f} ms {row.speedup['prefill']:.3f}x" for row in (real, made)]
        print(f"{real.model:12} measured {told[0]}   emulated {told[1]}   ratio {ratio:.3f}")
    shape, layout = str(SHAPES / "200m.json"), "dense,ladder,spd+ladder"
    options = BenchOptions(random_weights=shape, layout=layout, emulate_tp=8, link="200,1", repeat=15, threads=1)
    hiding = bench(options, console=Console())
    for row in hiding.rows:
        for phase in ("prefill", "decode"):
            found = row.communication[phase]
            if row.overlaps(phase):
                hid = f"{found.alone_ms - found.exposed_ms:.2f} ms of {found.alone_ms:.2f}"
                print(f"{row.model:12} --emulate-tp 8 --link 200,1, {phase}: hid {hid}")
    if args.out:
        record = {"schema_version": 1, "fitted": rows, "emulated": emulated.to_dict(), "hiding": hiding.to_dict()}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
