"""The choice of a group's backend, with its reason."""

import torch

from ladderize.console import sentence
from ladderize.errors import UsageError, UserError
from ladderize.ranks.device import cores
from ladderize.ranks.group import INFERENCE_TIMEOUT, Ranks, host_id
from ladderize.runtime.collectives.base import AcrossGroups, Collectives, NoCommunication, Split
from ladderize.runtime.collectives.gloo import Gloo
from ladderize.runtime.collectives.gpu import Nccl, SymmetricMemory
from ladderize.runtime.collectives.shm import LEAST_SLOTS, SharedMemory


def check_backend(backend: str, ranks: int, device: str) -> None:
    """Raise UsageError for a backend that takes no effect, UserError for one of another device."""
    if backend != "auto" and ranks == 1:
        raise UsageError(f"--backend {backend} has no effect with one rank; leave it out or raise --tp-size")
    if backend in (("gloo", "shm") if device == "cuda" else ("nccl", "symm_mem")):
        others = "CPUs" if device == "cuda" else "GPUs"
        raise UserError(f"--backend {backend} is for {others}, but the ranks would compute on {device}")


def choose(backend: str, group: Ranks, *, max_bytes: int, in_flight: int = 1) -> tuple[Collectives, str]:
    """Return the collectives of a group for messages of at most ``max_bytes``, at most ``in_flight`` of which are
    started before one is waited for, and one sentence on the choice."""
    collectives, why = _chosen(backend, group, max_bytes, in_flight)

    def make_split(size: int) -> Split:
        peers, neighbours = group.split(size, INFERENCE_TIMEOUT)  # training has no groups
        name = backend if backend in ("nccl", "gloo", "none") else "auto"  # shared memory may serve a part alone
        within, across = (
            choose(name if ranks.size > 1 else "auto", ranks, max_bytes=max_bytes, in_flight=in_flight)[0]
            for ranks in (neighbours, peers)
        )
        return Split(within, AcrossGroups(within, across, neighbours.rank))

    collectives.make_split = make_split
    return collectives, why


def _chosen(backend: str, group: Ranks, max_bytes: int, in_flight: int) -> tuple[Collectives, str]:
    check_backend(backend, group.size, group.device.type)
    if group.size == 1:
        return Collectives(), "one rank: no communication"
    if backend == "none":
        return NoCommunication(group.size), "none, as asked for: for timing only, results are wrong"
    if group.device.type == "cuda":
        return _on_gpu(backend, group)
    slots = max(LEAST_SLOTS, in_flight)
    mine = SharedMemory.problem(
        hosts=group.gather(host_id()),
        cores=len(set().union(*group.gather(cores()))),
        max_bytes=max_bytes,
        slots=slots,
        others=max(group.gather(group.others)),
    )
    problem = next(filter(None, group.gather(mine)), None)  # one answer for all ranks
    if backend == "shm" or (backend == "auto" and problem is None):
        if problem is not None:
            raise UserError(f"--backend shm cannot be used: {problem}; --backend gloo can")
        why = "as asked for" if backend == "shm" else "all ranks are on this host"
        return SharedMemory(group, max_bytes=max_bytes, slots=slots), f"shm: {why}"
    return Gloo(group), f"gloo: {'as asked for' if backend == 'gloo' else problem}"


def _on_gpu(backend: str, group: Ranks) -> tuple[Collectives, str]:
    problem = None
    if len(set(group.gather(host_id()))) > 1:
        problem = "the ranks are on several hosts"
    elif not all(group.gather(_peers_reachable(group))):
        problem = "not every GPU can read every other's memory"
    if backend == "symm_mem" and problem:
        raise UserError(f"--backend symm_mem cannot be used: {problem}; --backend nccl can")
    if backend == "nccl" or problem:
        return Nccl(group), f"nccl: {problem or 'as asked for'}"
    try:
        chosen, failure = SymmetricMemory(group), None
    except RuntimeError as error:  # a container may not let processes share memory handles
        chosen, failure = None, sentence(error)
    failures = [failure for failure in group.gather(failure) if failure]
    if failures and backend == "symm_mem":
        raise UserError(f"--backend symm_mem cannot be used: {failures[0]}; --backend nccl can")
    if chosen is None or failures:
        return Nccl(group), f"nccl: symmetric memory is not available ({failures[0]})"
    kernel = "multicast" if chosen.multicast else "one-shot"
    return chosen, f"symm_mem: {kernel} up to {chosen.limit >> 10} KiB, nccl above"


def _peers_reachable(group: Ranks) -> bool:
    """Return True if all devices that this process sees reach each other's memory."""
    index, seen = group.device.index, range(torch.cuda.device_count())
    peers = set(group.gather(index)) - {index}
    return all(torch.cuda.can_device_access_peer(index, peer) for peer in peers if peer in seen)
