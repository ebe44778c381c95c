"""Messages of vLLM on GPUs, as far as it shows without one: on a stream of their own, and by which all-reduce."""

import contextlib
import inspect
import weakref
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ladderize.runtime.bench.messages import Recording

FLASHINFER = {"world_size": 2, "rank": 1, "max_num_tokens": 64, "group": "a group"}


@contextlib.contextmanager
def flashinfer(sums) -> Iterator[list]:
    """The calls of FlashInfer, which doubles what it is given."""
    from vllm.distributed.device_communicators import flashinfer_all_reduce

    calls = []

    def doubled(**named):
        calls.append(named)
        total = named.get("output")
        sums.append(None if total is None else total.data_ptr())
        return torch.mul(named["input"], 2, out=total)

    comm = SimpleNamespace(allreduce_fusion=doubled, AllReduceFusionPattern=SimpleNamespace(kAllReduce="sum"))
    with (
        mock.patch.object(flashinfer_all_reduce, "flashinfer_comm", comm, create=True),
        mock.patch.object(flashinfer_all_reduce, "get_fi_ar_workspace", dict),
    ):
        yield calls


def communicator(backend, sums):
    """vLLM's communicator of two ranks on GPUs, whose ``backend`` doubles what it is given. Into ``sums`` goes each
    address that it was told to write to, or None."""
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    from vllm.distributed.device_communicators.flashinfer_all_reduce import FlashInferAllReduce
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
    none = ("fi_ar_comm", "qr_comm", "aiter_ar_comm", "ca_comm", "symm_mem_comm")
    vars(whole).update(dict.fromkeys(none), use_aiter_allreduce=False)
    whole.fi_pcie_ipc_ar_comm = SimpleNamespace(should_use=lambda x: pytest.fail("it works on one stream only"))
    whole.pynccl_comm = made(PyNcclCommunicator, disabled=False, world_size=2)
    if backend == "custom":
        limits = {"world_size": 2, "max_size": 1 << 20, "batch_invariant": False}
        whole.ca_comm = made(CustomAllreduce, disabled=False, _ptr=0, _IS_CAPTURING=False, **limits)
    elif backend == "symm_mem":
        whole.symm_mem_comm = made(SymmMemCommunicator, should_use_symm_mem=lambda x: True)
    elif backend == "flashinfer":
        whole.fi_ar_comm = made(FlashInferAllReduce, disabled=False, should_use_fi_ar=lambda x: True, **FLASHINFER)
        del whole.fi_ar_comm.all_reduce
    elif backend == "quick":
        quick = {"should_quick_allreduce": lambda x: True, "quick_all_reduce": doubled, "disabled": False}
        whole.qr_comm = SimpleNamespace(**quick)
    return whole


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("backend", ["custom", "symm_mem", "nccl", "flashinfer", "quick"])
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
    with flashinfer(sums), SimulatedGpu(int(torch.randint(1 << 30, ()))) as gpu, torch.inference_mode():
        carried = Recording(messages.VllmOnStream(group, DEVICE))  # as ``bench --profile`` has it
        sender = SimpleNamespace(alone=False, collectives=carried, in_flight=deque(), forward=None)
        context = SimpleNamespace(no_compile_layers={"messages": sender})
        x = torch.ones(2, 4, device=DEVICE)
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
        assert found.tolist() == [[148] * 4] * 2  # 1, 1 + 1 + 2 * 1, 4 + 1 + 2 * 8, 21 + 1 + 2 * 63
        assert [message.bytes for message in carried.messages if message.completed] == [32] * 3
        assert sums == ([None] * 3 if backend == "quick" else places)


@pytest.mark.parametrize("tokens", [3, 40])
def test_flashinfer_is_called_as_vllm_calls_it(tokens):
    """But for the place of the sum. vLLM's call depends on the number of tokens."""
    from ladderize.vllm.messages import GroupCommunicator

    whole, x, total = communicator("flashinfer", []), torch.ones(tokens, 8), torch.empty(tokens, 8)
    with flashinfer([]) as calls:
        whole.fi_ar_comm.all_reduce(x)
        GroupCommunicator(SimpleNamespace(device_communicator=whole)).all_reduce(x, total)
    by_vllm, ours = calls
    assert ours == {**by_vllm, "output": total}


@pytest.mark.parametrize("name", ["ca_comm", "pynccl_comm"])
def test_vllm_ends_its_communicators(name):
    """None is kept by ours, which has used them."""
    from ladderize.vllm.messages import GroupCommunicator

    sums = []
    group = SimpleNamespace(device_communicator=communicator("custom" if name == "ca_comm" else "nccl", sums))
    ours, total = GroupCommunicator(group), torch.empty(2, 4)
    ours.all_reduce(torch.ones(2, 4), total)
    assert sums == [total.data_ptr()]
    kept = weakref.ref(getattr(group.device_communicator, name))
    setattr(group.device_communicator, name, None)  # as vLLM does when it takes the group down
    assert kept() is None
