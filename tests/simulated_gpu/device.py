"""A GPU that is not there: tensors of device ``cuda:0`` whose values lie in ordinary memory, streams, events, graphs.

Like a GPU it does later what it is told now. An operation becomes a node that depends on what its stream did before and
on the events that the stream has waited for; nothing runs until the host asks for a value. Then nodes run in a random
order that these dependencies allow, with streams preferred one over the other by turns, so that a wait that is missing
is found out: whoever reads too early reads NaN. Memory holds NaN when it is new, and again after the allocator could
have given it to somebody else: that is when its last tensor is gone, in the order of the stream that it was allocated
on. Nobody may use ``record_stream``, which would put that off.

What a GPU refuses is refused: tensors of the host among those of the device, a host that waits while a graph is
captured, a stream that is not joined when a capture ends. ``syncs`` counts how often the host waited. Every operation
is also shown to torch's own checker of races (``torch.cuda._sanitizer``).

A tensor is of torch's meta device for C++, which so computes shapes and takes no fast path of the CPU, and says
``cuda:0`` to Python.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.utils import other as accelerate_saving
from torch.cuda import _sanitizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from ladderize.runtime.collectives import emulated

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
MEMORY_BYTES = 80 << 30
aten = torch.ops.aten
# the host has to know the result, or how large it is
SYNCS = {
    aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.unique_dim, aten._unique2,
    aten.is_nonzero, aten.item, aten.unique_consecutive,
}  # fmt: skip
VIEWS, INDEXED = {aten._unsafe_view, aten.lift_fresh, aten.lift}, {aten.index, aten.index_put_, aten.index_put}


class Node:
    """One operation of the device. label: its name. after: what it depends on."""

    def __init__(self, label: str, stream: "Stream", run: Callable[[], object] | None, after: list["Node"]) -> None:
        self.label, self.stream, self.run, self.after = label, stream, run, after
        self.done = False
        self.graph: Graph | None = None


def _behind(frontier: list[Node]) -> set[Node]:
    """The nodes of ``frontier`` and all that they come after, but those that are done."""
    found, stack = set[Node](), list(frontier)
    while stack:
        node = stack.pop()
        if not node.done and node not in found:
            found.add(node)
            stack += node.after
    return found


class Memory:
    """What a tensor and its views share. It is the allocator's again when the last of them is gone."""

    def __init__(self, gpu: "SimulatedGpu", storage: torch.UntypedStorage, fill: int) -> None:
        self.gpu, self.storage, self.fill = gpu, storage, fill
        self.stream, self.graph = gpu.current, gpu.capturing
        gpu.bytes += storage.nbytes()
        gpu.peak = max(gpu.peak, gpu.bytes)

    @property
    def pointer(self) -> int:
        return self.storage.data_ptr() or id(self)

    def __del__(self) -> None:
        if not self.gpu.closed:
            self.gpu.free(self)


class SimTensor(torch.Tensor):
    """A tensor of the simulated GPU. backing: its values, once they are computed."""

    @staticmethod
    def __new__(cls, backing: torch.Tensor, memory: Memory, base: torch.Tensor | None = None) -> "SimTensor":
        """base: a tensor of the same memory, with which autograd must know that this one shares it."""
        with torch.inference_mode(torch.is_inference_mode_enabled() if base is None else base.is_inference()):
            shape = _shape(backing)
            if base is not None:
                storage = base.untyped_storage()
                shape = shape.new_empty(0).set_(storage, backing.storage_offset(), backing.size(), backing.stride())
            made = torch.Tensor._make_subclass(cls, shape)
        made.backing, made.memory = backing, memory
        return made

    device, is_cuda = property(lambda self: DEVICE), property(lambda self: True)

    def data_ptr(self) -> int:
        return self.backing.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file holds the values, as on the host: ``torch.save``."""
        return self.cpu().__reduce_ex__(protocol)

    def record_stream(self, stream: "Stream") -> None:
        self.memory.gpu.recorded.append(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _simulated((args, kwargs))[0].memory.gpu.dispatch(func, args, kwargs or {})


class Event:
    def __init__(self, gpu: "SimulatedGpu") -> None:
        self.gpu, self.frontier = gpu, list[Node]()
        gpu.checker._handle_event_creation(id(self))
        gpu.kept.append(self)  # so that its id stays its own

    def record(self, stream: "Stream | None" = None) -> None:
        stream = stream or self.gpu.current
        self.frontier = list(stream.frontier)
        self.gpu.log.append(("record", stream.name, self))
        self.gpu.checker._handle_event_record(id(self), stream.cuda_stream)


class Stream:
    """frontier: the nodes that the next operation comes after."""

    def __init__(self, gpu: "SimulatedGpu", priority: int = 0) -> None:
        self.gpu, self.priority, self.frontier = gpu, priority, list[Node]()
        self.cuda_stream = len(gpu.streams)
        self.name = f"stream {self.cuda_stream}" if self.cuda_stream else "main"
        gpu.streams.append(self)
        gpu.checker._handle_stream_creation(self.cuda_stream)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.gpu.waits += 1
        if self.gpu.waits - 1 == self.gpu.left_out:
            return
        captured = [node for node in event.frontier if node.graph is not None]
        if self.gpu.capturing is not None and self.gpu.is_capturing(self) and len(captured) < len(event.frontier):
            raise RuntimeError("CUDA error: a capturing stream depends on work that is not captured")
        self.gpu.log.append(("wait", self.name, event))
        self.frontier = [*dict.fromkeys([*self.frontier, *event.frontier])]
        self.gpu.checker._handle_event_wait(id(event), self.cuda_stream)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.gpu.synchronize(self.frontier)
        self.gpu.checker._handle_stream_synchronization(self.cuda_stream)


class Graph:
    """A captured graph: its nodes, which every replay runs anew."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self.gpu, self.nodes = gpu, list[Node]()

    def replay(self) -> None:
        gpu, stream = self.gpu, self.gpu.current
        if gpu.capturing is not None:
            raise RuntimeError("CUDA error: a graph is replayed while another is captured")
        before, again = list(stream.frontier), dict[Node, Node]()
        for node in self.nodes:
            inside = [again[other] for other in node.after if other in again]
            again[node] = gpu.add(Node(node.label, node.stream, node.run, inside or before))
        inner = {other for node in self.nodes for other in node.after}
        stream.frontier = [again[node] for node in self.nodes if node not in inner] or before
        gpu.replays += 1


class Dispatching(TorchDispatchMode):
    def __init__(self, gpu: "SimulatedGpu") -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.gpu.dispatch(func, args, kwargs or {})


class SimulatedGpu:
    """The device; torch uses it inside ``with SimulatedGpu(seed, ranks) as gpu``.

    ranks: of the group that its collectives stand for, where every rank sends the same. log: what was told to which
    stream, in order. problems: what torch's checker of races has found, which must be nothing. left_out: the number of
    a wait for an event, which does nothing.
    """

    def __init__(self, seed: int, ranks: int = 1, *, left_out: int | None = None) -> None:
        self.rng, self.ranks = random.Random(seed), ranks
        self.checker = _sanitizer.EventHandler()
        self.streams, self.pending, self.kept = list[Stream](), list[Node](), list[Event]()
        self.log, self.problems = list[tuple[Any, ...]](), list[Any]()
        self.left_out, self.waits = left_out, 0
        self.captures = self.replays = 0  # of graphs
        self.recorded = list[Stream]()
        self.known: dict[tuple[Any, ...], Any] = {}  # shapes of results
        self.syncs = Counter[str]()
        self.bytes = self.peak = 0
        self.closed = False
        self.capturing: Graph | None = None
        self.pinned = list[torch.Tensor]()  # memory of the host that is kept: nobody else gets its addresses
        self.symmetric: set[int] = set()  # memory that symmetric memory has given out
        self.multicast = 0
        self.stack = contextlib.ExitStack()
        self.current = Stream(self)
        self.capture_stream: Stream | None = None

    # ---- tensors ----

    def new(self, shape: torch.Tensor) -> SimTensor:
        """Memory for a tensor like ``shape``, full of what nobody may read."""
        backing = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
        # NaN, or integers that are no index
        fill = 0xFF if shape.dtype.is_floating_point or shape.dtype.is_complex else 0x7F
        backing.untyped_storage().fill_(fill)
        memory = Memory(self, backing.untyped_storage(), fill)
        self.checker._handle_memory_allocation(memory.pointer)
        return SimTensor(backing, memory)

    def free(self, memory: Memory) -> None:
        """What the allocator may do from now on: give it to the next who asks, on the stream that it was allocated
        on."""
        self.bytes -= memory.storage.nbytes()
        stream, storage, fill = memory.stream, memory.storage, memory.fill
        if memory.graph is not None and memory.graph is not self.capturing:
            return  # a graph's memory, which nobody else gets
        self.launch("poison", lambda: storage.fill_(fill), set(), {memory.pointer}, stream)
        self.checker._handle_memory_deallocation(memory.pointer)

    # ---- operations ----

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves = _tensors((args, kwargs))
        own = _simulated(leaves)
        # ``aten.to.device``, which inference mode does not take apart, has it among its arguments
        target = kwargs.get("device") or next((one for one in args if isinstance(one, torch.device)), None)
        here = target is not None and torch.device(target).type in ("cuda", "meta")
        with _disable_current_modes():
            if not own and not here:
                return func(*args, **kwargs)
            with Dispatching(self):  # in inference mode operations come here before they are taken apart
                if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return parts
            packet = func.overloadpacket
            if packet is aten._to_copy:
                return self.copied(args[0], kwargs, here or target is None)
            if packet is aten.copy_:
                return self.copied_into(*args[:2])
            if (handler := HANDLERS.get(packet)) is not None:
                return handler(self, *args, **kwargs)
            if packet in INDEXED:  # indices may come from the host
                args = (args[0], [self._index(index) for index in args[1]], *args[2:])
                leaves = _tensors((args, kwargs))
                own = _simulated(leaves)
            host = [leaf for leaf in leaves if not isinstance(leaf, SimTensor)]
            if any(leaf.ndim for leaf in host) or (host and func.namespace != "aten"):
                raise RuntimeError(f"{func}: expected all tensors to be on the same device, cuda:0 and cpu were given")
            return self.operation(func, args, kwargs, own)

    def operation(self, func: Any, args: Any, kwargs: Any, own: list[SimTensor]) -> Any:
        schema = func._schema
        backings = tree_map_only(SimTensor, lambda tensor: tensor.backing, (args, kwargs))
        if "device" in backings[1]:
            backings[1]["device"] = HOST
        passed = [*zip(schema.arguments, args, strict=False)]
        passed += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
        writes = _simulated(
            [value for argument, value in passed if argument.alias_info and argument.alias_info.is_write]
        )
        aliases = [returned.alias_info for returned in schema.returns]
        if not writes and own and (any(aliases) or func.overloadpacket in VIEWS):  # no kernel runs
            made = func(*backings[0], **backings[1])
            return tree_map_only(torch.Tensor, lambda tensor: SimTensor(tensor, own[0].memory, own[0]), made)
        indices = args[1] if func.overloadpacket in INDEXED else ()
        bools = any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices)
        if func.overloadpacket in SYNCS or bools:
            self.host_waits(str(func.overloadpacket))
            made = func(*backings[0], **backings[1])
            return tree_map_only(torch.Tensor, self.uploaded, made)
        label = func.overloadpacket.__name__
        reads, written = {one.memory.pointer for one in own}, {one.memory.pointer for one in writes}
        if torch.Tag.nondeterministic_seeded in func.tags:  # in the order of the program, whatever the order of nodes
            copies = tree_map_only(torch.Tensor, torch.clone, backings)
            drawn = func(*copies[0], **copies[1])
            if writes:
                (into,) = writes
                self.launch(label, lambda: into.backing.copy_(drawn), reads, written)
                return into
            made = self.new(drawn)
            self.launch(label, lambda backing=made.backing: backing.copy_(drawn), reads, {made.memory.pointer})
            return made
        if writes:
            self.launch(label, lambda: func(*backings[0], **backings[1]), reads - written, written)
            if not schema.returns:
                return None
            return writes[0] if len(schema.returns) == 1 else tuple(writes)
        outputs = tree_map_only(torch.Tensor, self.new, self.shapes(func, args, kwargs))
        kept = [leaf.backing for leaf in _simulated(outputs)]
        pointers = {leaf.memory.pointer for leaf in _simulated(outputs)}

        def run() -> None:
            for into, value in zip(kept, _tensors(func(*backings[0], **backings[1])), strict=True):
                into.copy_(value)

        self.launch(label, run, reads, pointers)
        return outputs

    def shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What ``func`` gives, as tensors without values."""
        leaves, spec = tree_flatten((args, kwargs))
        described = [
            (leaf.dtype, leaf.size(), leaf.stride()) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
            for leaf in leaves
        ]
        key = (func, spec, *described)
        if key not in self.known:
            given = tree_map_only(torch.Tensor, _shape, (args, kwargs))
            if "device" in kwargs:
                given[1]["device"] = torch.device("meta")
            self.known[key] = func(*given[0], **given[1])
        return self.known[key]

    def launch(
        self, label: str, run: Callable[[], object], reads: set[int], writes: set[int], stream: Stream | None = None
    ) -> None:
        stream = stream or self.current
        stream.frontier = [self.add(Node(label, stream, run, list(stream.frontier)))]
        self.log.append(("run", stream.name, label, reads, writes))
        names = {pointer: [label] for pointer in reads | writes}
        launched = (stream.cuda_stream, reads - writes, writes, set(), label, names)
        self.problems += self.checker._handle_kernel_launch(*launched)

    def add(self, node: Node) -> Node:
        if self.capturing is not None and self.is_capturing(node.stream):
            node.graph = self.capturing
            self.capturing.nodes.append(node)
        else:
            self.pending.append(node)
        return node

    # ---- between host and device ----

    def uploaded(self, values: torch.Tensor) -> SimTensor:
        made, values = self.new(values), values.clone()
        self.launch("copy to device", lambda: made_backing.copy_(values), set(), {made.memory.pointer})
        made_backing = made.backing
        return made

    def _index(self, index: Any) -> Any:
        return self.uploaded(index) if isinstance(index, torch.Tensor) and not isinstance(index, SimTensor) else index

    def copied(self, tensor: torch.Tensor, options: dict[str, Any], to_device: bool) -> torch.Tensor:
        dtype = options.get("dtype") or tensor.dtype
        if not isinstance(tensor, SimTensor):
            form = options.get("memory_format") or torch.preserve_format
            return self.uploaded(torch.empty_like(tensor, dtype=dtype, memory_format=form).copy_(tensor))
        if not to_device:
            self.host_waits("copy to host")
            return tensor.backing.clone().to(dtype)
        if dtype == tensor.dtype and options.get("device") is not None and options.get("memory_format") is None:
            return SimTensor(tensor.backing, tensor.memory, tensor)  # it is there already
        made = self.new(torch.empty_like(_shape(tensor), dtype=dtype))
        into, values = made.backing, tensor.backing
        self.launch("_to_copy", lambda: into.copy_(values), {tensor.memory.pointer}, {made.memory.pointer})
        return made

    def copied_into(self, into: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if not isinstance(into, SimTensor):
            self.host_waits("copy to host")
            return into.copy_(values.backing)
        target = into.backing
        if isinstance(values, SimTensor):
            source, reads = values.backing, {values.memory.pointer}
        else:  # pageable memory is copied before the call returns, pinned memory when the device comes to it
            address = values.untyped_storage().data_ptr()
            is_pinned = any(address == kept.untyped_storage().data_ptr() for kept in self.pinned)
            source, reads = values if is_pinned else values.clone(), set()
        self.launch("copy_", lambda: target.copy_(source), reads, {into.memory.pointer})
        return into

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned.append(tensor.clone())
        return self.pinned[-1]

    def host_waits(self, why: str) -> None:
        self.syncs[why] += 1
        self.current.synchronize()

    def synchronize(self, frontier: list[Node] | None = None) -> None:
        """Run what ``frontier`` comes after (None: everything), and perhaps more, in an order that it allows."""
        if self.capturing is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        needed = _behind(self.pending if frontier is None else frontier)
        more = frontier is None or self.rng.random() < 0.5
        queues: dict[Stream, list[Node]] = {}
        for node in self.pending:
            if more or node in needed:
                queues.setdefault(node.stream, []).append(node)
        left, order = len(needed), list[Stream]()
        while left:
            if not order or self.rng.random() < 0.02:
                order = self.rng.sample(self.streams, len(self.streams))
            node = next(node for stream in order if (node := self._ready(queues.get(stream))) is not None)
            queues[node.stream].remove(node)
            if node.run is not None:
                with _disable_current_modes():
                    node.run()
            node.done = True
            left -= node in needed
        self.pending = [node for node in self.pending if not node.done]

    @staticmethod
    def _ready(queue: list[Node] | None) -> Node | None:
        # the first of a stream, or what the allocator does behind it
        return next((node for node in (queue or [])[:8] if all(other.done for other in node.after)), None)

    # ---- graphs ----

    def is_capturing(self, stream: Stream) -> bool:
        """A stream takes part in a capture where it began, or once it has waited for an event of it."""
        joined = (node.graph is not None and node.graph is self.capturing for node in stream.frontier)
        return stream is self.capture_stream or any(joined)

    @contextlib.contextmanager
    def capture(self, graph: Graph, pool: object = None, stream: Stream | None = None, **more: Any) -> Iterator[None]:
        self.synchronize()
        self.captures += 1
        before = {other: list(other.frontier) for other in self.streams}
        self.capture_stream = stream or Stream(self)
        self.capturing = graph
        self.capture_stream.frontier = []
        self.checker._handle_device_synchronization()
        self.launch("begin", lambda: None, set(), set(), self.capture_stream)
        try:
            with self.on(self.capture_stream):
                yield
            inside = _behind(self.capture_stream.frontier)
            for other in self.streams:
                if any(node.graph is graph and node not in inside for node in other.frontier):
                    raise RuntimeError(f"CUDA error: {other.name} was forked and not joined when the capture ended")
        finally:
            self.capturing = None
            for other in self.streams:
                other.frontier = before.get(other, [])
            # what was captured is ordered by the replay
            self.checker._handle_device_synchronization()

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        with mock.patch.object(self, "current", stream):
            yield

    # ---- NCCL, where every rank sends the same ----

    def all_reduce(self, tensor: SimTensor, op: object = None, group: object = None, async_op: bool = False) -> None:
        assert not async_op, "on a stream of torch's own: not simulated"
        values, pointer = tensor.backing, tensor.memory.pointer
        self.launch("nccl all-reduce", lambda: values.mul_(self.ranks), {pointer}, {pointer})

    def all_gather(self, output: SimTensor, input: SimTensor, group: object = None, async_op: bool = False) -> None:
        assert not async_op
        if output.numel() != self.ranks * input.numel() or not input.is_contiguous():
            raise RuntimeError("output tensor size must be equal to world_size times input tensor size")
        into, values = output.backing, input.backing
        shape, reads, writes = (self.ranks, *values.shape), {input.memory.pointer}, {output.memory.pointer}
        self.launch("nccl all-gather", lambda: into.view(shape).copy_(values.expand(shape)), reads, writes)

    # ---- in the place of torch.cuda ----

    def __enter__(self) -> "SimulatedGpu":
        def synchronize(*device: object) -> None:
            self.syncs["synchronize"] += 1
            self.synchronize()
            self.checker._handle_device_synchronization()

        def make_empty(*sizes: Any, pin_memory: bool = False, empty: Any = torch.empty, **options: Any) -> torch.Tensor:
            made = empty(*sizes, **options)
            return self.pin(made) if pin_memory else made

        replaced: dict[str, Any] = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "synchronize": synchronize,
            "Stream": lambda device=None, priority=0: Stream(self, priority),
            "Event": lambda **options: Event(self),
            "current_stream": lambda *device: self.current,
            "stream": self.on,
            "CUDAGraph": lambda *options, **more: Graph(self),
            "graph": self.capture,
            "graph_pool_handle": object,
            "is_current_stream_capturing": lambda: self.capturing is not None,
            "memory_allocated": lambda *device: self.bytes,
            "max_memory_allocated": lambda *device: self.peak,
            "memory_reserved": lambda *device: self.peak,
            "reset_peak_memory_stats": lambda *device: setattr(self, "peak", self.bytes),
            "mem_get_info": lambda *device: (MEMORY_BYTES - self.peak, MEMORY_BYTES),
            "get_device_name": lambda *device: "simulated",
            "get_device_properties": lambda *device: SimpleNamespace(name="simulated", total_memory=MEMORY_BYTES),
        }
        idle = lambda nanoseconds: self.launch("ladderize_spin_kernel", lambda: None, set(), set())  # noqa: E731
        # the checker keeps a stack trace of every access, which takes as long as all the rest
        no_trace = SimpleNamespace(extract=lambda *arguments, **options: [])
        patches = [
            mock.patch.multiple(torch.cuda, **replaced),
            mock.patch.object(emulated, "idle_on_gpu", return_value=idle),
            mock.patch.object(torch.cuda.nccl, "version", return_value=(2, 28, 3)),
            mock.patch.object(torch, "Generator", HostGenerator),
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: self.pin(tensor)),  # noqa: PLW0108
            mock.patch.object(torch, "empty", make_empty),
            mock.patch.object(dist, "all_reduce", mock.create_autospec(dist.all_reduce, side_effect=self.all_reduce)),
            mock.patch.object(
                dist, "all_gather_single", mock.create_autospec(dist.all_gather_single, side_effect=self.all_gather)
            ),
            # to C++ all storages are empty, so that Accelerate would take all tensors for one
            mock.patch.object(accelerate_saving, "id_tensor_storage", lambda tensor: (DEVICE, id(tensor), 1)),
            WithIndex(),
            mock.patch.object(
                _sanitizer, "traceback", SimpleNamespace(StackSummary=no_trace, walk_stack=lambda frame: None)
            ),
        ]
        for patch in patches:
            self.stack.enter_context(patch)
        before = torch._C._only_lift_cpu_tensors()
        self.stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        torch._C._set_only_lift_cpu_tensors(True)
        self.stack.enter_context(Dispatching(self))
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.closed = True
        self.stack.close()
        if kind is None and self.left_out is None:
            assert not self.problems, self.problems[0]
            assert not self.recorded


class WithIndex(TorchFunctionMode):
    """``cuda`` is ``cuda:0``: which GPU is the current one is asked of a CUDA that is not there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__set__ and isinstance(args[0], SimTensor):
            args[0].backing, args[0].memory = args[1].backing, args[1].memory
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):  # C++ would make the lists tensors by itself
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor([*part]) if isinstance(part, (list, range)) else part for part in index)
            args = (args[0], index, *args[2:])
        return func(*map(_with_index, args), **{name: _with_index(value) for name, value in (kwargs or {}).items()})


def _with_index(value: Any) -> Any:
    return DEVICE if (isinstance(value, (str, torch.device)) and str(value) == "cuda") else value


class HostGenerator(torch.Generator):
    """Draws on the host whatever the device."""

    def __new__(cls, device: object = None) -> "HostGenerator":
        return super().__new__(cls)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def _simulated(values: Any) -> list[SimTensor]:
    return [leaf for leaf in _tensors(values) if isinstance(leaf, SimTensor)]


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


HANDLERS: dict[Any, Callable[..., Any]] = {
    # a view with a bit that says "conjugated" would need the bit on the tensor that C++ sees
    aten._conj: lambda gpu, tensor: gpu.dispatch(aten.conj_physical.default, (tensor,), {}),
    aten._neg_view: lambda gpu, tensor: gpu.dispatch(aten.neg.default, (tensor,), {}),
}
