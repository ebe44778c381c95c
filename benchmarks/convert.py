"""How fast is `ladderize convert`, beside `cp` and beside transformers' from_pretrained + save_pretrained?

    python benchmarks/convert.py                     # a 2 GB checkpoint in two shards, made in a temporary folder
    python benchmarks/convert.py --gigabytes 0.2     # a quick look

Every variant runs `--repeat` times, interleaved, in a process of its own, so that drift of the machine hits all alike
and peak memory is one variant's. Each ends with its bytes on the disk (fsync). The page cache is warm for all: the
source is read once before the first run. Prints a table; raw samples go to --out.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VARIANTS = ("link", "link, verified", "copy", "cp -r", "to bfloat16", "from_pretrained + save_pretrained")

CHILD = """
import json, os, resource, sys, time
variant, source, out = sys.argv[1:]
start = time.perf_counter()
if variant == "cp -r":
    import subprocess
    subprocess.run(["cp", "-r", source, out], check=True)
elif variant.startswith("from_pretrained"):
    from transformers import AutoModelForCausalLM
    AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(out, max_shard_size="1GB")
else:
    from ladderize.convert.pipeline import convert_checkpoint
    from ladderize.convert.recipe import Recipe
    recipe = Recipe(ladder="all", dtype="bfloat16" if variant == "to bfloat16" else None)
    convert_checkpoint(source, out, recipe, copy=variant == "copy", verify="verified" in variant)
if variant == "cp -r" or variant.startswith("from_pretrained"):
    for name in sorted(os.listdir(out)):
        descriptor = os.open(os.path.join(out, name), os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
seconds = time.perf_counter() - start
# not ru_maxrss, which a process inherits from the one that started it
own = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak_rss_bytes": own, "peak_rss_children_bytes": children}))
"""


def make_source(folder: Path, gigabytes: float) -> Path:
    """A random Llama of this size in float32, written as two shards by transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, vocab = 1024, 2816, 32000
    per_layer = 4 * (4 * hidden * hidden + 3 * hidden * inner)
    layers = max(1, round((gigabytes * 1e9 - 8 * vocab * hidden) / per_layer))
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    torch.set_default_dtype(torch.float32)
    model = LlamaForCausalLM(config)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // 2 + 4 * vocab * hidden)
    return folder


def run(variant: str, source: Path, work: Path) -> dict[str, float]:
    """One variant in its own process; the output is removed and the disk drained before the next.

    A copy that is thrown away comes first: on a virtual machine the first touch of memory that the host has taken back
    costs several times the copy itself, and would be charged to whoever happens to come next.
    """
    out = work / "out"
    shutil.copytree(source, out)
    shutil.rmtree(out)
    os.sync()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", CHILD, variant, str(source), str(out)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        sys.exit(f"{variant} failed:\n{result.stderr}")
    shutil.rmtree(out)
    os.sync()
    return json.loads(result.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where to work; default: the system's temporary folder")
    parser.add_argument("--out", type=Path, help="write raw samples as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as name:
        work = Path(name)
        source = make_source(work / "source", args.gigabytes)
        shards = sorted(source.glob("*.safetensors"))
        size, shard = sum(p.stat().st_size for p in shards), max(p.stat().st_size for p in shards)
        for path in shards:  # warm the page cache
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
        os.sync()
        print(f"source: {size / 1e9:.2f} GB in {len(shards)} shards, the largest {shard / 1e9:.2f} GB", flush=True)
        samples: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
        for repeat in range(args.repeat):
            for variant in random.Random(repeat).sample(
                VARIANTS, len(VARIANTS)
            ):  # none always runs after the same other
                samples[variant].append(run(variant, source, work))
                print(
                    f"  {repeat + 1}/{args.repeat} {variant}: {samples[variant][-1]['seconds']:.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
    median = {variant: statistics.median(s["seconds"] for s in runs) for variant, runs in samples.items()}
    peak = {variant: max(s["peak_rss_bytes"] for s in runs) for variant, runs in samples.items()}
    children = {variant: max(s["peak_rss_children_bytes"] for s in runs) for variant, runs in samples.items()}
    print(f"\n{'variant':36}{'median s':>10}{'GB/s':>8}{'vs cp -r':>10}{'peak RSS MB':>13}{'children MB':>13}")
    for variant in VARIANTS:
        ratio = median["cp -r"] / median[variant]
        print(
            f"{variant:36}{median[variant]:>10.2f}{size / 1e9 / median[variant]:>8.2f}{ratio:>9.2f}x"
            f"{peak[variant] / 1e6:>13.0f}{children[variant] / 1e6:>13.0f}"
        )
    if args.out:
        record = {
            "schema_version": 1,
            "when": time.strftime("%Y-%m-%d"),
            "machine": platform.platform(),
            "cpu_count": os.cpu_count(),
            "python": platform.python_version(),
            "source_bytes": size,
            "largest_shard_bytes": shard,
            "samples": samples,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
