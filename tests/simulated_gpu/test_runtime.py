"""The runtime's paths on a GPU, on the simulated one: the numbers are those of the host, in whatever order a GPU that
keeps to streams and events may run things."""

from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem

from ladderize.errors import UserError
from ladderize.memory import available_bytes, check_room
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Handle
from ladderize.runtime.collectives.choose import _peers_reachable, choose
from ladderize.runtime.collectives.gpu import HIGH, RENDEZVOUS_TIMEOUT, Nccl
from ladderize.runtime.decode import BUCKET, are_sound, generate_tokens
from ladderize.runtime.sampling import Sampling
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from tests.groups import by_row, make_generator
from tests.helpers import SHAPE, random_ids
from tests.simulated_gpu.device import DEVICE, MEMORY_BYTES, SimulatedGpu
from tests.simulated_gpu.groups import LAYOUTS, RANKS, Alike, AlikeRanks, Store, collectives, process_group, seed

MESSAGES = ("nccl all-reduce", "one_shot_all_reduce_copy", "multimem_one_shot_all_reduce", "ladderize_spin_kernel")
SCHEDULES = [SEQUENTIAL, Schedule("domino"), Schedule("domino", 3)]


def flights(gpu):
    """Of every message the products that the computing stream was given between its start and its wait; None of one
    that the computing stream itself took. The event that is recorded right behind it is the one that is waited for,
    once."""
    found = []
    for start, entry in enumerate(gpu.log):
        if entry[0] != "run" or entry[2] not in MESSAGES:
            continue
        if entry[1] == "main":
            found.append(None)
            continue
        kind, stream, event = gpu.log[start + 1]
        assert (kind, stream) == ("record", entry[1])
        (wait,) = [place for place, other in enumerate(gpu.log) if other == ("wait", "main", event)]
        given = [other[2] for other in gpu.log[start:wait] if other[:2] == ("run", "main")]
        found.append(sum(label in ("mm", "addmm", "bmm") for label in given))
    return found


def opened(folder, device, backend, batch, columns, schedule=SEQUENTIAL):
    generator = make_generator(folder, batch, columns, Ranks(0, 1, device), backend, pack=device == DEVICE)
    generator.schedule = schedule
    return generator


def run(generator, ids, padding, draws, sampling):
    """Reads a prompt, and the same with padding and with more tokens: logits, then tokens that were drawn."""
    model, device = generator.model, generator.device
    ids, padding, draws = (t.to(device) for t in (ids, padding, draws))
    plain = model.logits(generator.read(ids))
    padded = model.logits(generator.read(ids, padding)[:, -1:])[:, 0]
    sound = are_sound(padded)
    new = generator.decode_n_tokens(padded.argmax(-1), draws, sampling, sound)
    return plain, padded, new, sound


def clear_inputs(folder, sampling):
    """For ``run``, with what it gives on the host: the tokens that are drawn are the same where logits are off by ten
    times what another order of the sums does."""
    while True:
        inputs = random_ids(3, 9), torch.tensor([0, 4, 2]), torch.rand(3, 4)
        host = opened(folder, torch.device("cpu"), Alike(RANKS), 3, 20)
        expected = run(host, *inputs, sampling)

        def noisy(linear, x, model=host.model, exact=host.model.operations.product):
            product = exact(linear, x)
            return product + 1e-5 * torch.randn_like(product) if linear is model.head else product

        with mock.patch.object(host.model.operations, "product", noisy):
            if all(torch.equal(run(host, *inputs, sampling)[2], expected[2]) for _ in range(12)):
                return inputs, expected


def assert_alike(found, expected):
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.cpu(), other, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}{schedule.chunks}")
@pytest.mark.parametrize("name", LAYOUTS)
def test_reading_and_decoding(folders, name, schedule):
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9)
    with torch.inference_mode():
        (ids, padding, draws), expected = clear_inputs(folders[name], sampling)
        with SimulatedGpu(seed(), RANKS) as gpu:
            generator = opened(folders[name], DEVICE, collectives("nccl", gpu), 3, 20, schedule)
            gpu.syncs.clear()
            gpu.log.clear()
            generator.read(ids.to(DEVICE))
            products = flights(gpu)
            if schedule.chunks == 2:
                assert products == HIDING[name][schedule.is_domino]
            else:
                assert all(count > 0 for count in products[1:-1])
            found = run(generator, ids, padding, draws, sampling)
            assert not gpu.syncs, "the host waited for the device"
            assert_alike(found, expected)


# Products that the computing stream is given between a message's start and its wait, the embedding's message first. A
# sum that blocks is the computing stream's own where there is nothing else to compute.
HIDING = {
    "dense": ([None, None, None, None, None], [0, 4, 4, 2, 2, 4, 4, 2, 2, 0]),
    "ladder": ([None, 2, 4, 2, None], [0, 4, 6, 4, 6, 8, 6, 4, 2, 0]),
    "spd": ([None, None, None], [0, 8, 8, 8, 8, 0]),
    "both": ([None, 4, None], [0, 6, 10, 10, 6, 0]),
    # one head of one rank at a time, which the simulated attention counts as two products more
    "delayed": ([None, 8, 16, None], [0, 7, 15, 16, 24, 37, 21, 0]),
}


@pytest.mark.parametrize("backend", ["one-shot", "multicast", "emulated"])
def test_backends(folders, backend):
    """Those beside NCCL, on a layout that overlaps, with messages on either side of what one kernel sums."""
    ids = random_ids(1, 5)
    ranks = 1 if backend == "emulated" else RANKS  # its sums are this rank's part alone
    with torch.inference_mode():
        host = opened(folders["ladder"], torch.device("cpu"), Alike(RANKS), 1, 20)
        host.model.collectives.all_reduce_async = lambda x: Handle(lambda: x * ranks)
        expected = host.model.logits(host.read(ids))
        with SimulatedGpu(seed(), RANKS) as gpu:
            made = collectives(backend, gpu)
            generator = opened(folders["ladder"], DEVICE, made, 1, 20)
            ids = ids.to(DEVICE)
            gpu.syncs.clear()
            gpu.log.clear()
            found = generator.model.logits(generator.read(ids))
            assert flights(gpu)[:5] == HIDING["ladder"][0]
            large = torch.ones(1 << 18, device=DEVICE)
            total = made.all_reduce(large)
            assert not gpu.syncs
            labels = [entry[2] for entry in gpu.log if entry[0] == "run"]
            assert ("nccl all-reduce" in labels) == (backend != "emulated")
            assert_alike([found, total], [expected, torch.full((1 << 18,), float(ranks))])
        assert {stream.priority for stream in gpu.streams[1:]} == {HIGH}


@pytest.mark.parametrize("backend", ["nccl", "one-shot"])
def test_a_wait_that_is_left_out_is_found(folders, backend):
    """By torch's checker of races, and by the numbers; whichever of the waits it is."""
    ids = random_ids(2, 5) % (SHAPE["vocab_size"] // RANKS)  # known to this rank: a row of zeros has no wrong sums

    def read(left_out):
        with SimulatedGpu(seed(), RANKS, left_out=left_out) as gpu:
            generator = opened(folders["ladder"], DEVICE, collectives(backend, gpu), 2, 8, Schedule("domino"))
            return gpu, generator.read(ids.to(DEVICE)).cpu()

    with torch.inference_mode():
        sound, expected = read(None)
        for left_out in torch.randperm(sound.waits)[:2].tolist():
            runs = (read(left_out) for _ in range(200))  # of some waits one run in eight is wrong
            assert any(gpu.problems and not torch.allclose(found, expected) for gpu, found in runs), left_out


def same_through_graphs(folder, columns, compute):
    """``compute`` gives on the host what it gives on a GPU that captures graphs, which is returned."""
    with torch.inference_mode():
        expected = compute(opened(folder, torch.device("cpu"), Alike(RANKS), 2, columns))
        with SimulatedGpu(seed(), RANKS) as gpu:
            generator = opened(folder, DEVICE, collectives("one-shot", gpu), 2, columns)
            generator.graphs = True
            assert_alike(compute(generator), expected)
    return gpu


@pytest.mark.parametrize("name", ["dense", "both"])
def test_graphs(folders, name):
    """Decoding through captured graphs, padded and over the edge from one graph's view to the next."""
    start, steps = BUCKET - 2, 4
    ids, padding = random_ids(2, start), torch.tensor([0, 7])
    tokens = random_ids(steps, 2)

    def logits(generator):
        generator.read(ids.to(generator.device), padding.to(generator.device))
        # a graph's output is read before the next replay
        return [generator.decode_one_token(one.to(generator.device)).clone() for one in tokens]

    same_through_graphs(folders[name], 300, logits)


@pytest.mark.parametrize("name", ["ladder", "spd"])
def test_graphs_of_prompts(folders, name):
    """A shape that comes again is replayed, with other ids and other padding, and decoding goes on from it."""
    cases = [[random_ids(1, length)[0].tolist() for length in (9, other)] for other in (9, 4, 9, 6, 9, 2)]
    token = random_ids(2)

    def logits(generator):
        found = []
        for prompts in cases:
            generator.prepare([len(prompt) for prompt in prompts], 2)
            found.append(generator.prefill(prompts).clone())
            found.append(generator.decode_one_token(token.to(generator.device)).clone())
        return found

    gpu = same_through_graphs(folders[name], 20, logits)
    assert (gpu.captures, gpu.replays) == (3, 10)  # of a step, and of prompts without and with padding


def test_no_graph_is_captured_between_tokens(folders):
    """All that a generation replays is there before its first token, also for the view that only its end needs."""
    prompts = [random_ids(1, length)[0].tolist() for length in (BUCKET - 3, BUCKET - 9)]

    def tokens(device, backend):
        generator = opened(folders["both"], device, backend, 2, 300)
        generator.graphs = device == DEVICE
        return generate_tokens(generator, prompts, max_new_tokens=12, sampling=Sampling())

    with torch.inference_mode():
        expected = by_row(tokens(torch.device("cpu"), Alike(RANKS)))
        with SimulatedGpu(seed(), RANKS) as gpu:
            chunks = tokens(DEVICE, collectives("one-shot", gpu))
            first = next(chunks)
            assert (gpu.captures, gpu.replays) == (2, 0)
            found = by_row([first, *chunks])
            assert (gpu.captures, gpu.replays) == (2, 11)
        assert found == expected


H100, PCIE_3, UNKNOWN = "NVIDIA H100 80GB HBM3", "Tesla V100-PCIE-32GB", "simulated"
KIB = 1 << 10


@pytest.mark.parametrize(
    ("gpu_name", "backend", "ranks", "fits", "is_too_long"),
    [
        (H100, "multicast", 8, 256 * KIB, 257 * KIB),
        *((H100, "one-shot", ranks, 256 * KIB, 257 * KIB) for ranks in (2, 4, 8)),
        (PCIE_3, "one-shot", 2, 256 * KIB, 257 * KIB),
        (PCIE_3, "one-shot", 4, 132 * KIB, 133 * KIB),
        (PCIE_3, "one-shot", 8, 51 * KIB, 52 * KIB),
        ("NVIDIA L40S", "one-shot", 4, 253 * KIB, 254 * KIB),  # PCIe 4
        ("NVIDIA L40S", "one-shot", 8, 71 * KIB, 72 * KIB),
        (UNKNOWN, "one-shot", 4, 132 * KIB, 133 * KIB),
        (UNKNOWN, "multicast", 4, 256 * KIB, 257 * KIB),
        ("NVIDIA GeForce RTX 4090", "one-shot", 4, 132 * KIB, 133 * KIB),  # whose driver gives no peer access
    ],
)
def test_the_length_up_to_which_one_kernel_sums(gpu_name, backend, ranks, fits, is_too_long):
    kernel = {"multicast": "multimem_one_shot_all_reduce", "one-shot": "one_shot_all_reduce_copy"}[backend]
    with SimulatedGpu(seed(), ranks) as gpu, mock.patch.object(torch.cuda, "get_device_name", return_value=gpu_name):
        made = collectives(backend, gpu)

        def summed_by(size, dtype):
            gpu.log.clear()
            made.all_reduce(torch.zeros(size // dtype.itemsize, dtype=dtype, device=DEVICE))
            return next(entry[2] for entry in gpu.log if entry[0] == "run" and entry[2] in MESSAGES)

        assert summed_by(fits, torch.bfloat16) == summed_by(fits, torch.float32) == kernel
        assert summed_by(is_too_long, torch.bfloat16) == summed_by(16, torch.float16) == "nccl all-reduce"


def test_ranks_on_unlike_gpus_agree_on_the_length():
    with SimulatedGpu(seed(), 4) as gpu:
        for names in ([H100, H100, H100, PCIE_3], [PCIE_3, H100, H100, H100]):
            with mock.patch.object(AlikeRanks, "gather", return_value=names):
                assert collectives("one-shot", gpu).limit >> 10 == 132


def test_a_rank_that_fails_in_the_rendezvous_leaves_nobody_waiting():
    """The others wait a minute for it and not as long as a collective may take; then all take NCCL."""
    store = Store()

    def fail(buffer, group):
        assert store.timeout == RENDEZVOUS_TIMEOUT
        raise RuntimeError("a container may not share memory handles")

    with SimulatedGpu(seed(), RANKS), process_group(store), mock.patch.object(symm_mem, "rendezvous", fail):
        group = AlikeRanks(0, RANKS, DEVICE)
        chosen, why = choose("auto", group, max_bytes=1 << 20)
        assert type(chosen) is Nccl
        assert "may not share memory handles" in why
        with pytest.raises(UserError, match="--backend symm_mem cannot be used: a container"):
            choose("symm_mem", group, max_bytes=1 << 20)
    assert store.timeout == Store().timeout


def test_memory_that_torch_keeps_ready_is_free_and_a_part_is_left_to_libraries():
    with SimulatedGpu(seed()):
        check_room(MEMORY_BYTES * 15 // 16, DEVICE, "a model", "lower it", processes=8)  # each has a GPU
        with pytest.raises(UserError, match="a model needs"):
            check_room(MEMORY_BYTES * 15 // 16 + 1, DEVICE, "a model", "lower it")
        before = available_bytes(DEVICE)
        assert before == MEMORY_BYTES
        held = torch.zeros(1 << 20, device=DEVICE)
        assert available_bytes(DEVICE) == before - held.nbytes
        del held
        assert torch.cuda.mem_get_info()[0] < before
        assert available_bytes(DEVICE) == before


@pytest.mark.parametrize(
    ("gpus", "unreachable", "symmetric"),
    [(2, {}, True), (2, {(0, 1)}, False), (2, {(1, 0)}, True), (1, {(0, 1)}, True)],
    ids=["all reach each other", "no peer access", "what the other one sees", "a process sees its own GPU only"],
)
def test_symmetric_memory_is_for_gpus_that_reach_each_other(gpus, unreachable, symmetric):
    group = AlikeRanks(0, RANKS, DEVICE)
    reaches = {"can_device_access_peer": lambda own, peer: (own, peer) not in unreachable}
    with (
        mock.patch.multiple(torch.cuda, device_count=lambda: gpus, **reaches),
        mock.patch.object(AlikeRanks, "gather", return_value=[0, 1]),
    ):
        assert _peers_reachable(group) == symmetric
