"""Decoding on two cores: ladderize's runtime, transformers' generate, and transformers' own TP, with the same weights,
interleaved.

    python benchmarks/decode_cpu.py [--out benchmarks/results/decode_cpu.json]

A bfloat16 Llama of 197M parameters (benchmarks/shapes/200m.json), batch 1. Every contestant is a group of processes
that sleep until it is their turn. Also measured, with both ranks at work as in decoding: the rate of a bfloat16
matrix-vector product over weights that fit no cache, with F.linear and with the packed product that the runtime uses.
Bytes of weights per rank over that rate is the time that no implementation on such products can beat.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

PROMPT, NEW = 32, 48
SHAPE = Path(__file__).parent / "shapes" / "200m.json"


def serve(pipe, prepare, *args) -> None:
    """A contestant's process: prepare once, then one sample whenever asked."""
    sample = prepare(*args)
    pipe.send("ready")
    while pipe.recv() == "go":
        pipe.send(sample())
    os._exit(0)


def make_model(folder: str, shape: Path = SHAPE) -> None:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        **json.loads(shape.read_text()), bos_token_id=1, eos_token_id=None, pad_token_id=0
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def in_group(rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1"
    )
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def runtime(folder: str, rank: int, store: str, backend: str):
    import torch

    in_group(rank, store)
    from ladderize.ranks.group import Ranks
    from ladderize.runtime.collectives.choose import choose
    from ladderize.runtime.decode import Sampling, sample
    from ladderize.runtime.shards import weight_bytes
    from ladderize.runtime.spec import WeightCache, checkpoint_spec, open_generator

    group = Ranks(rank, 2, torch.device("cpu"))
    spec = checkpoint_spec(folder, tp_size=2)
    collectives, _ = choose(backend, group, max_bytes=4 * PROMPT * 8192)
    generator = open_generator(spec, collectives, WeightCache(group.device, pack=True), group, 1, PROMPT + NEW)
    draws = torch.zeros(1, NEW - 1)
    shape, width = generator.model.shape, spec.torch_dtype.itemsize
    # of the embedding a token reads a row
    read = weight_bytes(shape, width, packed=True) - shape.own_vocab * shape.hidden * width

    def step() -> dict:
        with torch.inference_mode():
            tokens = sample(generator.prefill([list(range(3, 3 + PROMPT))]), Sampling(), draws[:, 0])
            begin = time.perf_counter()
            made = generator.decode_n_tokens(tokens, draws, Sampling())
            seconds = time.perf_counter() - begin
        return {
            "ms": seconds / (NEW - 1) * 1e3,
            "ids": [int(tokens), *made[0].tolist()],
            "bytes": read,
        }

    return step


def hugging_face(folder: str, rank: int, store: str, tp: bool):
    import torch

    if tp:
        in_group(rank, store)
    else:
        torch.set_num_threads(2)
    from transformers import AutoModelForCausalLM

    kwargs = {"tp_plan": "auto"} if tp else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kwargs).eval()
    ids = torch.arange(3, 3 + PROMPT)[None]
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def step() -> dict:
        with torch.inference_mode():
            times = []
            for new in (1, NEW):  # the difference is decoding alone
                begin = time.perf_counter()
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, **options
                )
                times.append(time.perf_counter() - begin)
        return {"ms": (times[1] - times[0]) / (NEW - 1) * 1e3, "ids": out[0, PROMPT:].tolist()}

    return step


def matrix_vector(rank: int, store: str, packed: bool):
    """Sizes of one rank's layers, 190 MB of them, so that no cache holds them."""
    import torch
    import torch.nn.functional as F

    in_group(rank, store)
    from ladderize.runtime.cpu_operations import CpuOperations
    from ladderize.runtime.layers import Linear
    from ladderize.runtime.native.library import kernels

    sizes = [(768, 1024), (1024, 512), (2816, 1024), (1024, 1408)] * 16
    weights = [torch.randn(size).bfloat16() for size in sizes]
    if packed:
        operations = CpuOperations(kernels())
        products = [partial(operations.product, Linear(weight, pack=True)) for weight in weights]
    else:
        products = [partial(F.linear, weight=weight) for weight in weights]
    inputs = {width: torch.randn(1, 1, width).bfloat16() for width in (512, 1024, 1408)}
    total = sum(2 * rows * columns for rows, columns in sizes)

    def step() -> dict:
        torch.distributed.barrier()
        begin = time.perf_counter()
        with torch.inference_mode():
            for _ in range(5):
                for multiply, (_, width) in zip(products, sizes, strict=True):
                    multiply(inputs[width])
        return {"ms": (time.perf_counter() - begin) / 5 * 1e3, "bytes": total}

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch
    import transformers

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        contestants = {
            "ladderize TP2 shm": [(runtime, folder, r, f"{folder}/a", "shm") for r in range(2)],
            "ladderize TP2 gloo": [(runtime, folder, r, f"{folder}/b", "gloo") for r in range(2)],
            "transformers, 1 process of 2 threads": [(hugging_face, folder, 0, "", False)],
            "transformers TP2 (tp_plan=auto, gloo)": [(hugging_face, folder, r, f"{folder}/c", True) for r in range(2)],
            "limit: F.linear, both ranks": [(matrix_vector, r, f"{folder}/d", False) for r in range(2)],
            "limit: packed product, both ranks": [(matrix_vector, r, f"{folder}/e", True) for r in range(2)],
        }
        groups = {}
        for name, processes in contestants.items():
            pipes = []
            for arguments in processes:
                ours, theirs = context.Pipe()
                context.Process(target=serve, args=(theirs, *arguments), daemon=True).start()
                pipes.append(ours)
            for pipe in pipes:
                pipe.recv()
            groups[name] = pipes
        samples: dict[str, list[dict]] = {name: [] for name in groups}
        for round_ in range(args.rounds + 2):
            for name, pipes in groups.items():
                for pipe in pipes:
                    pipe.send("go")
                answers = [pipe.recv() for pipe in pipes]
                if round_ >= 2:  # two rounds of warm-up
                    samples[name].append(max(answers, key=lambda answer: answer["ms"]))
        for pipes in groups.values():
            for pipe in pipes:
                pipe.send("stop")
    medians = {name: statistics.median(sample["ms"] for sample in values) for name, values in samples.items()}
    ours = medians["ladderize TP2 shm"]
    weights = samples["ladderize TP2 shm"][0]["bytes"]
    equal = samples["ladderize TP2 shm"][0]["ids"]
    print(
        f"medians of {args.rounds} interleaved rounds, {NEW - 1} tokens each; {weights / 1e6:.0f} MB of weights per"
        " rank"
    )
    for name, value in medians.items():
        scale = weights / samples[name][0]["bytes"] if name.startswith("limit") else 1.0
        same = (
            ""
            if "ids" not in samples[name][0]
            else f", {same_prefix(samples[name][0]['ids'], equal)} equal greedy tokens"
        )
        print(f"{name:40}{value * scale:8.2f} ms per token{value * scale / ours:8.2f} of ladderize's{same}")
    if args.out:
        record = {
            "schema_version": 1,
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "shape": json.loads(SHAPE.read_text()),
            "prompt": PROMPT,
            "new_tokens": NEW,
            "weight_bytes_per_rank": weights,
            "medians_ms": medians,
            "samples_ms": {name: [sample["ms"] for sample in values] for name, values in samples.items()},
            "limit_bytes": {name: values[0]["bytes"] for name, values in samples.items() if name.startswith("limit")},
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def same_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


if __name__ == "__main__":
    main()
