"""What vLLM does on GPUs, as far as it shows without one: the compiled model as it is cut there, each piece as a CUDA
graph is, against transformers; messages on a stream of their own; which all-reduce it takes."""

from collections import deque
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ladderize.layout import HIDING
from tests.vllm.jobs import IN_PIECES, Counts, Generate
from tests.vllm.models import check, make, random_prompts


def test_pieces_are_cuda_graphs(engines, tmp_path):
    model = make("drawn", tmp_path)
    prompts = random_prompts(2, 9, 33)
    how = {"compilation_config": IN_PIECES}
    alone, together, counts = engines(2).run(tmp_path, Generate(prompts[:1]), Generate(prompts), Counts(), **how)
    check(model, prompts[:1], alone)
    check(model, prompts, together)
    config = model.config
    messages = sum(mode in HIDING for mode in (*config.attention_sync, *config.mlp_sync))
    assert (counts["ladderize::start"], counts["ladderize::wait_in_place"]) == (messages, messages)
    assert counts["replays"] > counts["pieces"]


# ---- that it would be found ----


def test_an_input_that_moves_is_found():
    """A piece that reads a result in memory of its own, as the wait of CPUs has."""
    from tests.vllm.pieces import Pieces

    library, kept = torch.library.Library("ladderize_test", "FRAGMENT"), []

    def elsewhere(x):
        kept.append(x.clone())
        return kept[-1]

    library.define("elsewhere(Tensor x) -> Tensor")
    library.impl("elsewhere", elsewhere, "CompositeExplicitAutograd")
    torch.library.register_fake("ladderize_test::elsewhere", torch.empty_like, lib=library)
    run = torch.compile(
        lambda x: torch.ops.ladderize_test.elsewhere(x + 1) * 2,
        backend=lambda graph, inputs: Pieces(graph, ["ladderize_test::elsewhere"]).run,
        fullgraph=True,
    )
    x = torch.ones(5)
    assert run(x).tolist() == [4] * 5
    with pytest.raises(AssertionError, match="not from where they are"):
        run(x)
    library._destroy()


# ---- on a stream ----


@pytest.mark.parametrize("captured", [False, True])
def test_vllms_all_reduce_on_a_stream(captured):
    """start and wait on the simulated GPU, also inside a CUDA graph of the whole pass."""
    from ladderize.vllm import messages
    from tests.simulated_gpu.device import DEVICE, HANDLERS, SimulatedGpu

    def passed(x):
        for number in range(3):
            partial = x * (number + 1)
            torch.ops.ladderize.start(partial, x, "messages")
            made = x + 1
            torch.ops.ladderize.wait_in_place(partial, made, "messages")
            x = made + partial
            del partial
        return x

    messages.define_operators()
    operators = {  # no kernels, but functions that start some
        torch.ops.ladderize.start: lambda gpu, *arguments: messages._start(*arguments),
        torch.ops.ladderize.wait_in_place: lambda gpu, *arguments: messages._wait_in_place(*arguments),
    }
    group = SimpleNamespace(world_size=2, _all_reduce_out_place=lambda partial: partial * 2)
    with SimulatedGpu(int(torch.randint(1 << 30, ()))) as gpu, torch.inference_mode():
        carried = messages.VllmOnStream(group, DEVICE)
        sender = SimpleNamespace(alone=False, collectives=carried, in_flight=deque(), forward=None)
        context = SimpleNamespace(no_compile_layers={"messages": sender})
        x = torch.ones(5, device=DEVICE)
        known = mock.patch.object(messages, "get_forward_context", return_value=context)
        with known, mock.patch.dict(HANDLERS, operators):
            gpu.syncs.clear()
            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    found = passed(x)
                graph.replay()
            else:
                found = passed(x)
            assert not gpu.syncs
        assert found.tolist() == [148] * 5  # 1, 1 + 1 + 2 * 1, 4 + 1 + 2 * 8, 21 + 1 + 2 * 63
    assert not gpu.problems, gpu.problems[0]
    assert not gpu.recorded
