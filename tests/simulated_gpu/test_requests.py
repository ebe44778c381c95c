"""Continuous batching on the simulated GPU."""

from contextlib import nullcontext

import pytest
import torch

from ladderize.runtime.requests.continuous import ContinuousBatch, Prompt
from ladderize.runtime.requests.reading import TextReader
from ladderize.runtime.sampling import Sampling
from tests.helpers import SHAPE, fresh_rng
from tests.simulated_gpu.device import DEVICE, SimulatedGpu
from tests.simulated_gpu.groups import Alike, collectives
from tests.simulated_gpu.models import RANKS, seed
from tests.simulated_gpu.test_runtime import noise, opened

HOST = torch.device("cpu")


def reader(folder, device, backend):
    generator = opened(folder, device, backend, 1, 100)
    return TextReader(generator.model, lambda positions: generator.rope, 24, torch.float32)


def texts(*lengths):
    rng = fresh_rng()
    return [rng.integers(3, SHAPE["vocab_size"], length) for length in lengths]


@pytest.mark.parametrize("name", ["ladder", "both"])
def test_continuous_batching(folders, name):
    """More texts than rows, greedy and sampled; a prompt that is read in several passes."""
    samplings = [Sampling(), Sampling(temperature=0.8, top_k=7, seed=3)]

    def drawn():
        return [
            Prompt(number, ids.tolist(), length, samplings[number % 2])
            for number, (ids, length) in enumerate(zip(texts(5, 9, 30, 3, 7), (3, 6, 4, 5, 2), strict=True))
        ]

    def new(device, backend, off=nullcontext):
        own = reader(folders[name], device, backend)
        batch = ContinuousBatch(own, rows=2, longest_prompt=30, longest_text=40, eos=(), tokenizer=None)
        with off(own.model):
            return batch.run(prompts)

    with torch.inference_mode():
        prompts = drawn()
        while any(new(HOST, Alike(RANKS), noise) != new(HOST, Alike(RANKS)) for _ in range(12)):
            prompts = drawn()  # texts that rounding does not change
        expected = new(HOST, Alike(RANKS))
        with SimulatedGpu(seed(), RANKS) as gpu:
            found = new(DEVICE, collectives("one-shot", gpu))
            steps = gpu.replays  # all decode steps are graphs
            assert steps > 0
            # for each step, group of prompts that were read, and graph that was captured
            assert gpu.syncs["copy to host"] <= steps + len(prompts)
            assert gpu.syncs.keys() == {"copy to host", "synchronize"}
            assert gpu.syncs["synchronize"] == 1
    assert found == expected
    assert not gpu.problems, gpu.problems[0]
