"""bench --engine vllm: real engines, timed; whose class runs."""

import json
from pathlib import Path

import torch

from tests.vllm.engines import ladderize
from tests.vllm.models import SHAPE

SMALL = {key: SHAPE[key] for key in SHAPE if key != "attention_bias"} | {"model_type": "llama", "num_hidden_layers": 2}


def bench(folder: Path, *arguments: object, **variables: str) -> str:
    shape = folder / "config.json"
    shape.write_text(json.dumps(SMALL))
    sizes = ("--prompt-len", 9, "--output-len", 5, "--warmup", 1)
    return ladderize("bench", "--engine", "vllm", "--random-weights", shape, *arguments, *sizes, **variables)


def test_one_rank_from_the_command_to_the_file(tmp_path):
    """Stock and plugin, two batch sizes."""
    out = tmp_path / "bench.json"
    given = ("--layout", "dense", "--baselines", "plugin", "--batch-size", "1,3")
    shown = bench(tmp_path, *given, "--repeat", 2, "--threads", 1, "--out", out, "--json")
    document = json.loads(out.read_text())
    assert json.loads(shown) == document
    assert (document["engine"], document["complete"], document["messages"]) == ("vllm", True, "single")
    rows = [(row["model"], row["architecture"], row["batch_size"]) for row in document["rows"]]
    names = [("dense", "LlamaForCausalLM"), ("plugin's dense", "LadderizedLlamaForCausalLM")]
    assert rows == [(*name, batch) for batch in (1, 3) for name in names]
    for row in document["rows"]:
        assert all(len(samples) == 2 and min(samples) > 0 for samples in row["samples_ms"].values())
    assert document["environment"]["settings"]["OMP_NUM_THREADS"] == "1"


def test_two_ranks_over_gloo_show_the_overlap(tmp_path):
    """Two layouts in one process: each sends its own number of messages, the last of which nothing hides."""
    out, traces = tmp_path / "bench.json", tmp_path / "traces"
    given = ("--layout", "ladder,spd+ladder", "--tp-size", 2, "--batch-size", 2, "--repeat", 1)
    bench(tmp_path, *given, "--profile", traces, "--out", out, LADDERIZE_VLLM_BACKEND="gloo")
    document = json.loads(out.read_text())
    # vLLM's kernels for processors without AVX512 have no sums over shared memory
    own = "vLLM's shared memory" if torch.cpu._is_avx512_supported() else "gloo over lo"
    assert (document["backend"], document["messages"]) == (own, "gloo")
    for row in document["rows"]:
        assert all(row["overlap"][phase]["in_flight_ms"] > 0 for phase in ("prefill", "decode"))
    layers, passes = SMALL["num_hidden_layers"], 5
    for rank in (0, 1):
        for name, messages in (("0-ladder", 2 * layers), ("1-spd+ladder", layers)):
            events = json.loads((traces / f"{name}-batch2-rank{rank}.json").read_text())["traceEvents"]
            assert sum(event.get("name") == "ladderize::start" for event in events) == passes * messages
