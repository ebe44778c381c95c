"""Messages between the ranks of vLLM's tensor-parallel group that are in flight while a sub-module computes.

``start`` and ``wait`` are operators of torch, so that they keep their place when vLLM compiles the model or captures it
in a CUDA graph. The compiler moves pure operators, so ``start`` is declared to write the input of the hiding
sub-module, and ``wait`` its output, which neither touches.

On CPUs the compiler sees the whole model, and may use an argument's memory again after the call: there a message in
flight has memory of its own, and ``wait`` returns a tensor of its own. On GPUs vLLM cuts the graph at both operators,
and each piece may be a CUDA graph, which reads from the address that it was captured with: there a piece allocates the
place of the sum, as vLLM's do for attention's output."""

import functools
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import GroupCoordinator, get_tp_group
from vllm.distributed.device_communicators import flashinfer_all_reduce
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger

from ladderize.errors import UserError
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.emulated import emulate
from ladderize.runtime.collectives.gpu import OnStream
from ladderize.vllm.environment import BACKEND_VARIABLE, MessageBackend

logger = init_logger("vllm.ladderize")


class Pending(NamedTuple):
    """A message [tokens, hidden] in flight."""

    partial: Tensor
    total: Tensor  # the place of its sum: the partial itself where that is summed in place; on CPUs it is elsewhere
    norm: Any = None  # the one behind the sum
    arrived: bool = False  # ``total`` holds the sum


class Messages:
    """The messages of one model. At most one is in flight: each is waited for before the next all-reduce begins. The
    operators find this object by ``name`` in vLLM's forward context, where attention layers are found, too."""

    def __init__(self, name: str, vllm_config: VllmConfig) -> None:
        define_operators()
        self.name = name
        self.in_flight: deque[Handle] = deque()
        self.forward: object = None  # vLLM's context of the forward pass that sent last
        backend = MessageBackend.from_environment()
        self.emulated = backend.link is not None
        self.collectives, why = _collectives(backend, vllm_config)
        self.alone = self.collectives.ranks == 1
        self.cuts_graph = torch.device(get_tp_group().device).type != "cpu"
        # nothing is summed for timings, and by one rank: there a message is its own sum
        self.out_of_place = self.cuts_graph and not (self.alone or self.emulated)
        logger.info("Messages in flight: %s", why)
        if isinstance(vllm_config.additional_config, dict):
            # the graph depends on it (``all_reduce``), so the key of vLLM's compile cache must, too
            vllm_config.additional_config["ladderize_messages"] = self.collectives.name
        vllm_config.compilation_config.static_forward_context[name] = self

    def prepare(self, partial: Tensor, norm: Any = None) -> Pending:
        """Return the message of ``partial`` [tokens, hidden], which nobody may change until it has arrived. Call this
        before a wait and a start: with nothing between them they are one cut in vLLM's graph."""
        return Pending(partial, torch.empty_like(partial) if self.out_of_place else partial, norm)

    def start(self, message: Pending, reads: Tensor) -> None:
        """Start to sum a message, which the caller keeps; a sub-module that reads ``reads`` hides it."""
        if not self.alone:
            total = message.total if self.out_of_place else None
            torch.ops.ladderize.start(message.partial, total, reads, self.name)

    def wait(self, message: Pending, made: Tensor) -> Tensor:
        """Return the sum [tokens, hidden] of a message, which a sub-module that made ``made`` has hidden. One rank
        waits, too. Without an operator here, Inductor (torch 2.13, CPUs) fuses later readers of the partial with an
        earlier norm, ahead of the product that fills it."""
        if message.arrived:
            return message.total
        if not self.cuts_graph:
            return torch.ops.ladderize.wait(message.partial, made, self.name)
        # the partial is named, so that its memory is not used again before
        partial = message.partial if self.out_of_place else None
        torch.ops.ladderize.wait_in_place(message.total, made, partial, self.name)
        return message.total

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum over the ranks, and wait for it. Two ranks over gloo swap their partials, which is one step
        where gloo's all-reduce takes two. Otherwise the all-reduce is vLLM's own."""
        if self.emulated or (self.collectives.name == "gloo" and self.collectives.ranks == 2):
            message, reads = self.prepare(partial), torch.empty_like(partial)  # nothing hides it
            self.start(message, reads)
            return self.wait(message, reads)
        return get_tp_group().all_reduce(partial)


@functools.cache
def define_operators() -> torch.library.Library:
    """Define the operators in ``torch.ops.ladderize``, once in a process; return their library."""
    library = torch.library.Library("ladderize", "FRAGMENT")
    library.define("start(Tensor partial, Tensor(a!)? total, Tensor(b!) reads, str messages) -> ()")
    library.define("wait(Tensor partial, Tensor(a!) made, str messages) -> Tensor")
    library.define("wait_in_place(Tensor(a!) total, Tensor(b!) made, Tensor? partial, str messages) -> ()")
    for name, function, traced in (
        ("start", _start, lambda *arguments: None),
        ("wait", _wait, lambda partial, *arguments: torch.empty_like(partial)),
        ("wait_in_place", _wait_in_place, lambda *arguments: None),
    ):
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ladderize::{name}", traced, lib=library)
    return library


def _messages(name: str) -> Messages:
    messages: Messages = get_forward_context().no_compile_layers[name]
    return messages


def _start(partial: Tensor, total: Tensor | None, reads: Tensor, messages: str) -> None:
    sender, forward = _messages(messages), get_forward_context()
    if sender.in_flight and sender.forward is forward:
        raise RuntimeError("a message was started while another was in flight")
    while sender.in_flight:  # left over from a pass that ended in an error: the other ranks have sent theirs, too
        sender.in_flight.popleft().wait()
    sender.forward = forward
    collectives: Any = sender.collectives
    if total is not None:
        sender.in_flight.append(collectives.all_reduce_async(partial, total))
        return
    needs_copy = partial.device.type == "cpu" and not collectives.copies
    sender.in_flight.append(collectives.all_reduce_async(partial.clone() if needs_copy else partial))


def _wait(partial: Tensor, made: Tensor, messages: str) -> Tensor:
    receiver = _messages(messages)
    # an operator must not return its argument
    return partial.clone() if receiver.alone else receiver.in_flight.popleft().wait()


def _wait_in_place(total: Tensor, made: Tensor, partial: Tensor | None, messages: str) -> None:
    receiver = _messages(messages)
    if not receiver.alone:
        receiver.in_flight.popleft().wait()


def _collectives(backend: MessageBackend, vllm_config: VllmConfig) -> tuple[Collectives, str]:
    """Return the collectives of the messages, and one sentence on the choice. All ranks call it."""
    group = get_tp_group()
    device = torch.device(group.device)
    if backend.link is not None:
        emulated = emulate(backend.ranks, backend.link, device)
        return emulated, f"emulated, {backend.ranks} ranks over {backend.link.name}: for timing only"
    if group.world_size == 1:
        return Collectives(), "none, there is one rank"
    if device.type == "cuda":
        return VllmOnStream(group, device), "vLLM's all-reduces, on a stream of their own"
    ranks = Ranks(group.rank_in_group, group.world_size, device, group=group.cpu_group)
    model = vllm_config.model_config
    numbers = vllm_config.scheduler_config.max_num_batched_tokens * model.get_hidden_size()
    try:
        return choose(backend.name, ranks, max_bytes=numbers * model.dtype.itemsize)
    except UserError as error:
        raise ValueError(f"{BACKEND_VARIABLE}={backend.name}: {error}") from None


# vLLM's communicators that can write a sum where they are told to, and the argument that tells them
TAKES_OUTPUT = {"fi_ar_comm": "output", "ca_comm": "out", "symm_mem_comm": "out", "pynccl_comm": "out_tensor"}


class VllmOnStream(OnStream):
    """Collectives by vLLM's all-reduce on a stream of its own: FlashInfer's, a custom kernel, symmetric memory or NCCL,
    by the size. vLLM chooses. Those of ``TAKES_OUTPUT`` write the sum where it belongs; of the others it is copied."""

    name = "vllm"

    def __init__(self, group: GroupCoordinator, device: torch.device) -> None:
        super().__init__(group.world_size, device)
        self.communicator = GroupCommunicator(group)

    def all_reduce_async(self, x: Tensor, total: Tensor | None = None) -> Handle:
        return self.send(x, x if total is None else total)

    def reduce(self, x: Tensor, total: Tensor) -> None:
        summed = self.communicator.all_reduce(x, total)
        if summed is not total:
            total.copy_(summed)


class GroupCommunicator:
    """vLLM's communicator of a group, whose all-reduce writes where it is told. It keeps none of the group's
    communicators, which vLLM ends with the group."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group = group
        self.total: Tensor | None = None  # the place of the sum that is under way
        self.fi_pcie_ipc_ar_comm = None  # FlashInfer's over PCIe works on one stream only: the computing one
        for name, argument in TAKES_OUTPUT.items():
            inner = getattr(group.device_communicator, name)
            kind = FlashInferOutput if name == "fi_ar_comm" else OutputCommunicator
            setattr(self, name, inner and kind(weakref.proxy(inner), argument, self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group.device_communicator, name)

    def all_reduce(self, x: Tensor, total: Tensor) -> Tensor:
        """Return the sum as vLLM's communicator does, which asks for its own of what it is given."""
        self.total = total
        try:
            summed: Tensor = type(self.group.device_communicator).all_reduce(self, x)
        finally:
            self.total = None
        return summed


class OutputCommunicator:
    """One of vLLM's communicators, whose all-reduce writes into ``whole.total``: it is given so by ``argument``."""

    def __init__(self, inner: Any, argument: str, whole: GroupCommunicator) -> None:
        self.inner, self.argument, self.whole = inner, argument, whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def all_reduce(self, x: Tensor, **named: Any) -> Any:
        return self.inner.all_reduce(x, **{self.argument: self.whole.total}, **named)

    def custom_all_reduce(self, x: Tensor) -> Any:
        """Return the sum as ``CustomAllreduce`` does, which calls ``all_reduce`` of what it is given."""
        return self.inner.__class__.custom_all_reduce(self, x)


class FlashInferOutput(OutputCommunicator):
    """FlashInfer's all-reduce takes an output; vLLM's call of it, which is repeated here, gives it none."""

    def all_reduce(self, x: Tensor, **named: Any) -> Any:
        flashinfer: Any = flashinfer_all_reduce
        workspace = flashinfer.get_fi_ar_workspace(
            world_size=self.world_size,
            rank=self.rank,
            max_token_num=self.max_num_tokens,
            hidden_dim=x.shape[1],
            dtype=x.dtype,
            group=self.group,
        )
        return flashinfer.flashinfer_comm.allreduce_fusion(
            input=x,
            workspace=workspace,
            pattern=flashinfer.flashinfer_comm.AllReduceFusionPattern.kAllReduce,
            launch_with_pdl=True,
            trigger_completion_at_end=len(x) > flashinfer.PDL_ADVANCE_LAUNCH_TOKENS,
            output=self.whole.total,
        )
