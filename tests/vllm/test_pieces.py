"""What vLLM does on GPUs, as far as it shows without one: the compiled model as it is cut there, each piece as a CUDA
graph is, against transformers; messages on a stream of their own; which all-reduce it takes."""

import inspect
import itertools
from collections import deque
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ladderize.layout import HIDING
from ladderize.runtime.collectives.observed import Recording
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
    sends = [mode in HIDING for both in zip(config.attention_sync, config.mlp_sync, strict=True) for mode in both]
    messages = sum(sends)
    assert (counts["ladderize::start"], counts["ladderize::wait_in_place"]) == (messages, messages)
    # one at attention, and one where a message is waited for, another is sent, or both
    syncs = sum(before or sent for before, sent in itertools.pairwise([False, *sends, False]))
    assert counts["cuts"] == config.num_hidden_layers + syncs
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


def communicator(backend, sums):
    """vLLM's communicator of two ranks on GPUs, whose ``backend`` doubles what it is given. Into ``sums`` goes each
    address that it was told to write to, or None."""
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.symm_mem import SymmMemCommunicator

    def doubled(x, **named):
        assert named.keys() <= inspect.signature(kind.all_reduce).parameters.keys()
        total = named.get("out", named.get("out_tensor"))
        sums.append(None if total is None else total.data_ptr())
        return torch.mul(x, 2, out=total)

    def made(cls, **attributes):
        one = object.__new__(cls)
        vars(one).update(attributes, all_reduce=doubled)
        return one

    kind = {"custom": CustomAllreduce, "symm_mem": SymmMemCommunicator}.get(backend, PyNcclCommunicator)
    whole = object.__new__(CudaCommunicator)
    none = ("fi_ar_comm", "qr_comm", "fi_pcie_ipc_ar_comm", "aiter_ar_comm", "ca_comm", "symm_mem_comm")
    vars(whole).update(dict.fromkeys(none), use_aiter_allreduce=False)
    whole.pynccl_comm = made(PyNcclCommunicator, disabled=False, world_size=2)
    if backend == "custom":
        limits = {"world_size": 2, "max_size": 1 << 20, "batch_invariant": False}
        whole.ca_comm = made(CustomAllreduce, disabled=False, _ptr=0, _IS_CAPTURING=False, **limits)
    elif backend == "symm_mem":
        whole.symm_mem_comm = made(SymmMemCommunicator, should_use_symm_mem=lambda x: True)
    elif backend == "quick":
        quick = {"should_quick_allreduce": lambda x: True, "quick_all_reduce": doubled, "disabled": False}
        whole.qr_comm = SimpleNamespace(**quick)
    return whole


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("backend", ["custom", "symm_mem", "nccl", "quick"])
def test_vllms_all_reduce_on_a_stream(backend, captured):
    """start and wait on the simulated GPU, also inside a CUDA graph of the whole pass. Only quick all-reduces have a
    result of their own, which is copied."""
    from ladderize.vllm import messages
    from tests.simulated_gpu.device import DEVICE, HANDLERS, SimulatedGpu

    places, sums = [], []  # of the sums, and where they were written

    def passed(x):
        for number in range(3):
            partial = x * (number + 1)
            total = torch.empty_like(partial)
            places.append(total.data_ptr())
            torch.ops.ladderize.start(partial, total, x, "messages")
            made = x + 1
            torch.ops.ladderize.wait_in_place(total, made, partial, "messages")
            x = made + total
            del partial, total
        return x

    messages.define_operators()
    operators = {  # no kernels, but functions that start some
        torch.ops.ladderize.start: lambda gpu, *arguments: messages._start(*arguments),
        torch.ops.ladderize.wait_in_place: lambda gpu, *arguments: messages._wait_in_place(*arguments),
    }
    group = SimpleNamespace(world_size=2, device_communicator=communicator(backend, sums))
    with SimulatedGpu(int(torch.randint(1 << 30, ()))) as gpu, torch.inference_mode():
        carried = Recording(messages.VllmOnStream(group, DEVICE))  # as ``bench --profile`` has it
        sender = SimpleNamespace(alone=False, collectives=carried, in_flight=deque(), forward=None)
        context = SimpleNamespace(no_compile_layers={"messages": sender})
        x = torch.ones(8, device=DEVICE)
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
        assert found.tolist() == [148] * 8  # 1, 1 + 1 + 2 * 1, 4 + 1 + 2 * 8, 21 + 1 + 2 * 63
        assert [message.bytes for message in carried.messages] == [32] * 3
        assert sums == ([None] * 3 if backend == "quick" else places)
    assert not gpu.problems, gpu.problems[0]
    assert not gpu.recorded
