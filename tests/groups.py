"""What the ranks of the runtime's tests do; functions here are pickled by name and run in other processes."""

import inspect
import os
import signal
import time
from datetime import timedelta
from itertools import chain

import torch

from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.messages import Observed, Recording
from ladderize.runtime.bench.trace import traced_events
from ladderize.runtime.collectives import shm
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.gloo import MOST_SIZES, Gloo
from ladderize.runtime.collectives.shm import SharedMemory
from ladderize.runtime.decode import Generator, Sampling, generate_tokens
from ladderize.runtime.spec import WeightCache, checkpoint_spec, open_generator

MAX_BYTES = 1 << 18
ALONE = Ranks(0, 1, torch.device("cpu"))


class Counting(Observed):
    def __init__(self, inner):
        super().__init__(inner)
        self.started, self.waited, self.most_in_flight = 0, 0, 0

    def send(self, all_reduce, x):
        handle = all_reduce(x)
        self.started += 1
        self.most_in_flight = max(self.most_in_flight, self.started - self.waited)

        def finish():
            self.waited += 1
            return handle.wait()

        return Handle(finish)


def make_generator(
    folder, batch, columns, group=ALONE, collectives=None, *, pack=True, replicate_vocab=False, dtype="auto", **more
):
    collectives = collectives or Collectives()
    spec = checkpoint_spec(str(folder), tp_size=collectives.ranks, dtype=dtype)
    weights = WeightCache(group.device, pack=pack, replicate_vocab=replicate_vocab)
    generator = open_generator(spec, collectives, weights, group, batch, columns, **more)
    return Generator(generator.model, generator.rope, generator.cache)  # eager, also on a GPU


def generated(generator, prompts, steps, sampling, eos=()):
    return by_row(generate_tokens(generator, prompts, max_new_tokens=steps, sampling=sampling, eos=eos))


def by_row(chunks):
    return [list(chain.from_iterable(row)) for row in zip(*chunks, strict=True)]


def run_models(group, items, backend, replicate_vocab=False):
    """items: name -> (folder, ids, prompts, steps). Logits of ids, logits of the last step of decoding them, greedy
    tokens, counts."""
    collectives, chosen = choose(backend, group, max_bytes=MAX_BYTES)
    results = {}
    with torch.inference_mode():
        for name, (folder, ids, prompts, steps) in items.items():
            counting = Counting(collectives)
            generator = make_generator(folder, ids.shape[0], 96, group, counting, replicate_vocab=replicate_vocab)
            logits = generator.model.logits(generator.read(ids))
            passes = counting.started
            generator.read(ids[:, :4])
            for token in ids[:, 4:].unbind(1):
                last = generator.decode_one_token(token)
            rows = generated(generator, prompts, steps, Sampling())
            results[name] = {
                "logits": logits.float().numpy(), "last": last.float().numpy(), "tokens": rows, "backend": chosen,
                "all_reduces": passes, "started": counting.started, "waited": counting.waited,
                "in_flight": counting.most_in_flight,
            }  # fmt: skip
            same = group.gather(rows)
            assert all(other == rows for other in same), "ranks chose different tokens"
    collectives.settle()
    return results


def run_all_models(group, jobs, backend):
    return [run_models(group, items, backend, replicate_vocab) for items, replicate_vocab in jobs]


def reduce_randomly(group, backend, rounds, seed):
    """Sums of fresh random messages of changing shapes, several in flight; every rank knows all inputs, so each checks
    itself. Nothing grows with the number of shapes."""
    collectives, _ = choose(backend, group, max_bytes=MAX_BYTES)
    numbers = torch.Generator().manual_seed(seed)
    worst = 0.0
    for _ in range(rounds):
        assert backend != "gloo" or len(collectives.free) <= MOST_SIZES
        pending = []
        for _ in range(int(torch.randint(1, 4, (), generator=numbers))):
            shape = torch.randint(1, 9, (3,), generator=numbers).tolist()
            dtype = (torch.float32, torch.bfloat16)[int(torch.randint(2, (), generator=numbers))]
            inputs = torch.randn(group.size, *shape, generator=numbers).to(dtype)
            pending.append((inputs, collectives.all_reduce_async(inputs[group.rank].clone())))
        for inputs, handle in pending:
            expected = inputs.float().sum(0)
            tolerance = 1e-5 if inputs.dtype == torch.float32 else 0.02
            error = (handle.wait().float() - expected).abs().max() / (expected.abs().max() + 1)
            worst = max(worst, float(error) / tolerance)
        own = torch.full((2, 3), float(group.rank))
        gathered = collectives.all_gather(own)
        assert torch.equal(gathered[0], torch.arange(group.size).repeat_interleave(3).float())
    collectives.settle()
    return worst


def reduce_long(group, size):
    """Wrong elements of one long sum over gloo, where rank 1 is late."""
    collectives, _ = choose("gloo", group, max_bytes=MAX_BYTES)
    wrong = 0
    for round_ in range(3):
        if group.rank == 1:
            time.sleep(0.1)
        handle = collectives.all_reduce_async(torch.full((size,), float(group.rank + 1 + round_)))
        wrong += int((handle.wait() != 3.0 + 2 * round_).sum())
    collectives.settle()
    return sum(group.gather(wrong))


def die(group, victim, pid_file):
    collectives, _ = choose("shm", group, max_bytes=1024)
    if group.rank != victim:
        pid_file.with_suffix(f".{group.rank}").write_text(str(os.getpid()))
    collectives.all_reduce(torch.ones(8))
    if group.rank == victim:
        time.sleep(0.3)  # most likely they wait by now; that they will is sure
        os.kill(os.getpid(), signal.SIGKILL)
    collectives.all_reduce(torch.ones(8))


def stop(group, victim, pid_file):
    shm.SAME_WORK_TIMEOUT = timedelta(seconds=1)
    collectives, _ = choose("shm", group, max_bytes=1024)
    collectives.all_reduce(torch.ones(8))
    if group.rank == victim:
        pid_file.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    collectives.all_reduce(torch.ones(8))


def fail(group, rank):
    if group.rank == rank:
        raise ValueError("this rank has had enough")
    group.barrier()


def in_turn(group, calls):
    """What each of ``calls``, (function, *arguments), returned, one after the other in one group."""
    return [function(group, *arguments) for function, *arguments in calls]


def values(group, factor):
    told = group.gather(group.rank), group.broadcast(group.rank + 5)
    return [group.rank * factor, group.size, *told, torch.get_num_threads()]


def traced_swaps(group, folder, times):
    """Trace all-reduces over gloo again and again; each trace's events are gone before the next messages come."""
    collectives, _ = choose("gloo", group, max_bytes=MAX_BYTES)
    traced = Recording(collectives)

    def run():
        handles = [traced.all_reduce_async(torch.ones(size)) for size in (8, 64, 512) for _ in range(20)]
        for handle in handles:
            handle.wait()

    for number in range(times):
        traced_events(run, folder / f"{number}-{group.rank}.json", group.device, traced)
        for _ in range(50):
            collectives.all_reduce(torch.ones(64))
    collectives.settle()
    return times


def report_and_die(group):
    """Rank 0 is killed in the middle of its third report; what other ranks report is nobody's concern."""
    group.report(f"rank {group.rank} of {group.size}")
    group.report("again")
    group.barrier()
    if group.rank == 0:
        pipe = inspect.getclosurevars(group.report).nonlocals["pipe"]
        os.write(pipe.fileno(), (1 << 20).to_bytes(4, "big") + b"the beginning of a megabyte")
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


def report_once(group):
    group.report("alone")
    return 7


def split_sums(group, backend, seed):
    """Four ranks as two rows of two: sums, gathers and words stay in their row or column. Returns what each rank
    saw."""
    data, tensor = group.split(2)
    row, column = divmod(group.rank, 2)
    assert (tensor.rank, tensor.size, data.rank, data.size) == (column, 2, row, 2)
    assert tensor.local_size == data.local_size == tensor.others == data.others == 2
    assert (tensor.is_main, data.is_main) == (column == 0, row == 0)
    assert tensor.broadcast(group.rank) == 2 * row
    assert data.broadcast(group.rank) == column
    in_row = Gloo(tensor) if backend == "gloo" else SharedMemory(tensor, max_bytes=1 << 12)
    in_column = Gloo(data) if backend == "gloo" else SharedMemory(data, max_bytes=1 << 12)
    numbers = torch.Generator().manual_seed(seed)
    for _ in range(20):
        inputs = torch.randn(4, int(torch.randint(1, 99, (), generator=numbers)), generator=numbers)
        handles = [in_row.all_reduce_async(inputs[rank].clone()) for rank in (group.rank, 3 - group.rank)]
        across = in_column.all_reduce_async(inputs[group.rank].clone())
        whole = group.sum(inputs[group.rank].clone())
        assert torch.allclose(handles[0].wait(), inputs[2 * row : 2 * row + 2].sum(0))
        assert torch.allclose(handles[1].wait(), inputs[2 - 2 * row : 4 - 2 * row].sum(0))
        assert torch.allclose(across.wait(), inputs[column::2].sum(0))
        assert torch.allclose(whole, inputs.sum(0), atol=1e-5)
        assert torch.equal(in_row.all_gather(torch.tensor([group.rank])), torch.tensor([2 * row, 2 * row + 1]))
    in_row.settle()
    in_column.settle()
    return group.gather((tensor.gather(group.rank), data.gather(group.rank)))


def many_in_flight(group, slots, messages):
    """``messages`` sums under way at once, several times over, where rank 1 is always late."""
    collectives = SharedMemory(group, max_bytes=64, slots=slots)
    wrong = 0
    for round_ in range(5):
        if group.rank == 1:
            time.sleep(0.01)
        handles = [collectives.all_reduce_async(torch.full((4,), float(n + round_))) for n in range(messages)]
        wrong += sum(int((handle.wait() != 2.0 * (n + round_)).sum()) for n, handle in enumerate(handles))
    collectives.settle()
    return sum(group.gather(wrong))
