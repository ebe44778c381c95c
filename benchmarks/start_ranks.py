"""How long it takes to start a group of two ranks that do nothing, and to notice that one was killed.

ladderize's way (torch's start_processes, forked from a server that has imported torch and transformers) beside torch's
elastic launcher, interleaved. Ranks of both import what the runtime's ranks import. Prints a table and
writes benchmarks/results/start_ranks.json.

    .venv/bin/python benchmarks/start_ranks.py
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path

import torch

ROUNDS = 3
RESULTS = Path(__file__).parent / "results" / "start_ranks.json"


def nothing(ranks=None):
    import transformers.models.llama.modeling_llama  # noqa: F401

    return ranks.size if ranks is not None else 2


def die(ranks=None):
    import transformers.models.llama.modeling_llama  # noqa: F401

    rank = ranks.rank if ranks is not None else int(os.environ["RANK"])
    if rank == 1:
        print(f"killed {time.time()}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def ours(function):
    from ladderize.runtime import launch

    return launch.run(function, tp_size=2, device="cpu", threads=1)


def elastic(function):
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
    )
    return elastic_launch(config, function)()[0]


WAYS = {"ladderize": ours, "elastic": elastic}


def measure(way: str) -> dict[str, float]:
    """In a process of its own: the first start, a second one, and from a rank's death to the error."""
    script = f"""
import sys, time, json
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, logging
import start_ranks as s
logging.disable(logging.CRITICAL)
times = []
for _ in range(2):
    begin = time.perf_counter()
    assert s.WAYS[{way!r}](s.nothing) == 2
    times.append(time.perf_counter() - begin)
try:
    s.WAYS[{way!r}](s.die)
except Exception as error:
    print(json.dumps([*times, time.time()]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    first, second, noticed = json.loads(done.stdout.strip().splitlines()[-1])
    killed = next(float(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("killed"))
    return {"first_s": first, "next_s": second, "noticed_s": noticed - killed}


def main() -> None:
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way in WAYS:
            samples[way].append(measure(way))
    table = {
        way: {key: statistics.median(sample[key] for sample in found) for key in found[0]}
        for way, found in samples.items()
    }
    RESULTS.write_text(
        json.dumps(
            {
                "cores": len(os.sched_getaffinity(0)),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "medians": table,
                "samples": samples,
            },
            indent=2,
        )
        + "\n"
    )
    print(f"{'':12}{'first start':>14}{'next start':>14}{'death noticed':>16}")
    for way, row in table.items():
        print(f"{way:12}{row['first_s']:>12.2f} s{row['next_s']:>12.2f} s{row['noticed_s']:>14.2f} s")


if __name__ == "__main__":
    main()
