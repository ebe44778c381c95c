"""Where a prefill and a decode step of the runtime go on two cores, operation by operation.

    python benchmarks/profile_cpu.py [--prompt-len 1024] [--out benchmarks/results/profile_cpu.json]

The bfloat16 Llama of decode_cpu.py over shm, both ranks at work. Every call of a product, a compiled kernel, a copy
into shared memory and a wait is timed; what is left of a pass is Python, and what PyTorch does beside (embedding,
output token). The clocks are read 300 to 400 times in a step, which takes 0.1 ms of it.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from decode_cpu import in_group, make_model

STEPS = 16
NAMES = {"rms_norm": "norms", "gated": "silu * up", "rotate": "rope, KV cache", "attend": "attention"}
NAMES |= {"attend_prompt": "attention", "product": "products"}


def profiled(rank: int, store: str, folder: str, batch: int, prompt: int, rounds: int, results: str) -> None:
    import torch

    in_group(rank, store)
    from ladderize.ranks.device import set_up_heap
    from ladderize.ranks.group import Ranks
    from ladderize.runtime import cpu_operations
    from ladderize.runtime.collectives.choose import choose
    from ladderize.runtime.collectives.shm import SharedMemory
    from ladderize.runtime.decode import Sampling, sample
    from ladderize.runtime.layers import Linear
    from ladderize.runtime.spec import WeightCache, checkpoint_spec, open_generator

    seconds: dict[str, float] = {}

    def timed(name, function):
        def call(*arguments, **more):
            begin = time.perf_counter()
            try:
                return function(*arguments, **more)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin

        return call

    Linear.__call__ = timed("products", Linear.__call__)
    cpu_operations.attend = timed("attention", cpu_operations.attend)  # of prompts, where no kernel has it
    SharedMemory._take = timed("waiting", SharedMemory._take)
    SharedMemory._post = timed("copies to shared memory", SharedMemory._post)
    SharedMemory._sum = timed("sums, residual", SharedMemory._sum)
    set_up_heap()
    group = Ranks(rank, 2, torch.device("cpu"))
    collectives, _ = choose("shm", group, max_bytes=4 * prompt * 8192 * batch)
    weights = WeightCache(group.device, pack=True)
    spec = checkpoint_spec(folder, tp_size=2)
    generator = open_generator(spec, collectives, weights, group, batch, prompt + STEPS + 1)
    operations = generator.model.operations
    for kernel, name in NAMES.items():
        setattr(operations, f"_{kernel}", timed(name, getattr(operations, f"_{kernel}")))
    ids = torch.randint(3, 8000, (batch, prompt), generator=torch.Generator().manual_seed(0)).tolist()
    draws = torch.zeros(batch, STEPS)
    found: dict[str, list[dict[str, float]]] = {"prefill": [], "decode": []}

    def measured(phase, passes, function):
        seconds.clear()
        group.barrier()
        begin = time.perf_counter()
        result = function()
        whole = time.perf_counter() - begin
        parts = {**seconds, "Python and the rest": whole - sum(seconds.values()), "all": whole}
        found[phase].append({name: value / passes * 1e3 for name, value in parts.items()})
        return result

    with torch.inference_mode():
        for _ in range(rounds + 2):
            tokens = measured("prefill", 1, lambda: sample(generator.prefill(ids), Sampling(), draws[:, 0]))
            measured("decode", STEPS, lambda start=tokens: generator.decode_n_tokens(start, draws, Sampling()))
    if rank == 0:
        medians = {
            phase: {name: statistics.median(sample.get(name, 0.0) for sample in samples[2:]) for name in samples[-1]}
            for phase, samples in found.items()
        }
        Path(results).write_text(json.dumps(medians))
    collectives.settle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch

    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        for batch in (1, 8):
            arguments = f"{folder}/store{batch}", folder, batch, args.prompt_len, args.rounds, f"{folder}/medians"
            torch.multiprocessing.spawn(profiled, arguments, nprocs=2)
            for phase, parts in json.loads(Path(f"{folder}/medians").read_text()).items():
                table[f"{phase}, batch {batch}"] = parts
    names = list(dict.fromkeys(name for parts in table.values() for name in parts))
    print(f"{'ms of rank 0':26}" + "".join(f"{column:>20}" for column in table))
    for name in names:
        print(f"{name:26}" + "".join(f"{parts.get(name, 0.0):20.2f}" for parts in table.values()))
    if args.out:
        args.out.write_text(
            json.dumps(
                {"schema_version": 1, "torch": torch.__version__, "prompt_len": args.prompt_len, "medians_ms": table},
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
