"""What vLLM does on GPUs, as far as it shows without one: the compiled model as it is cut there, each piece as a CUDA
graph is, against transformers; messages on a stream of their own; which all-reduce it takes."""

from collections import deque
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ladderize.layout import OVERLAPPED
from tests.vllm.jobs import IN_PIECES, Counts, Generate
from tests.vllm.models import check, make, random_prompts


@pytest.mark.parametrize("name", ["ladder all", "spd and ladder", "drawn"])
def test_pieces_are_cuda_graphs(engines, tmp_path, name):
    model = make(name, tmp_path)
    prompts = random_prompts(2, 9, 33)
    how = {"compilation_config": IN_PIECES}
    alone, together, counts = engines(2).run(tmp_path, Generate(prompts[:1]), Generate(prompts), Counts(), **how)
    check(model, prompts[:1], alone)
    check(model, prompts, together)
    config = model.config
    messages = [*config.attention_sync, *config.mlp_sync].count(OVERLAPPED)
    assert (counts["ladderize::start"], counts["ladderize::wait_in_place"]) == (messages, messages)
    assert counts["replays"] > counts["pieces"]


# ---- that it would be found ----


@pytest.fixture
def operators():
    """elsewhere: a result in memory of its own, as the wait of CPUs has. later, now: a sum of what nobody holds."""
    library, kept = torch.library.Library("ladderize_test", "FRAGMENT"), []

    def elsewhere(x):
        kept.append(x.clone())
        return kept[-1]

    def now(made):
        made.copy_(kept.pop())

    library.define("elsewhere(Tensor x) -> Tensor")
    library.define("later(Tensor x, Tensor(a!) reads) -> ()")
    library.define("now(Tensor(a!) made) -> ()")
    for name, function in (
        ("elsewhere", elsewhere),
        ("later", lambda x, reads: kept.append(x)),
        ("now", now),
    ):
        library.impl(name, function, "CompositeExplicitAutograd")
        shape = torch.empty_like if name == "elsewhere" else lambda *arguments: None
        torch.library.register_fake(f"ladderize_test::{name}", shape, lib=library)
    yield torch.ops.ladderize_test
    library._destroy()


def in_pieces(function):
    from tests.vllm.pieces import Pieces

    cuts = [f"ladderize_test::{name}" for name in ("elsewhere", "later", "now")]
    return torch.compile(function, backend=lambda graph, inputs: Pieces(graph, cuts).run, fullgraph=True)


def test_an_input_that_moves_is_found(operators):
    run, x = in_pieces(lambda x: operators.elsewhere(x + 1) * 2), torch.ones(5)
    assert run(x).tolist() == [4] * 5
    with pytest.raises(AssertionError, match="not from where they are"):
        run(x)


def test_a_message_that_nobody_holds_is_found(operators):
    def sends(x):
        partial, made = x * 2, x * 5
        operators.later(partial, made)
        made = made + 1
        operators.now(made)
        return made * 1

    assert in_pieces(sends)(torch.ones(5)).isnan().all()


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
