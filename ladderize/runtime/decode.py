"""Prefill and decode on a static cache, sampling that is the same on every rank, and stopping.

Prompts of different lengths are padded on the left, which attention never sees."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ladderize.checkpoint.config import head_dim
from ladderize.errors import UserError
from ladderize.families.base import ROPE
from ladderize.families.registry import known_family
from ladderize.memory import check_room
from ladderize.modeling import dense_class
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.model import TPLlama
from ladderize.runtime.sampling import Sampling
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.step import Step

# A CUDA graph of a decode step has a fixed number of cache columns in view: one graph for each multiple of this.
BUCKET = 256
# So many graphs are captured ahead, for 8192 tokens: each holds logits of its own, and most texts end long before.
GRAPHS_AHEAD = 32
# Up to so many tokens a prefill is captured, too, and of so many shapes: the host starts kernels more slowly than a GPU
# runs those of a few thousand tokens. Longer ones keep the GPU busy.
PREFILL_TOKENS, PREFILL_GRAPHS = 1 << 12, 8

PromptShape = tuple[int, bool, Schedule]  # tokens, whether they are padded, and how they are read


def sample(logits: Tensor, sampling: Sampling, draw: Tensor) -> Tensor:
    """Return ids [batch] for logits [batch, vocab] by inversion: the kept tokens' distribution at ``draw`` [batch]."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()  # a difference in 16 bits would make ties of logits that differ
    best = logits.amax(-1, keepdim=True)  # subtracted first: a tiny temperature must not make ties of infinities
    # no temperature that is 0, or whose reciprocal is infinite, in float32: 0 / 0 is no number
    scaled = (logits - best) / max(sampling.temperature, torch.finfo(torch.float32).tiny)
    if not sampling.top_k and sampling.top_p >= 1:  # every token is kept: no need to sort a whole vocabulary
        # in float64: a GPU's running sum of a long row differs from rank to rank, but so little that no draw tells
        cumulative = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
        index = torch.searchsorted(cumulative, draw.double().unsqueeze(-1) * cumulative[:, -1:], right=True)
        return index.clamp(max=logits.shape[-1] - 1).squeeze(-1)
    scaled, order = scaled.sort(stable=True, dim=-1, descending=True)
    if sampling.top_k:
        scaled[:, sampling.top_k :] = -torch.inf
    probabilities = scaled.softmax(-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    # nucleus: the fewest tokens whose probability reaches top_p, and never less than one (Holtzman et al., arXiv
    # 1904.09751)
    kept = cumulative - probabilities < sampling.top_p
    kept[:, 0] = True
    total = (probabilities * kept).sum(-1)
    index = (cumulative <= (draw * total).unsqueeze(-1)).sum(-1)
    index = torch.minimum(index, kept.sum(-1) - 1)
    return order.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def view_length(columns: int, cache: KVCache) -> int:
    """Return the number of cache columns in view where ``columns`` are used. On a GPU it is a multiple of BUCKET, since
    cuDNN plans anew for every other shape."""
    is_cpu = cache.keys.device.type == "cpu"
    return columns if is_cpu else min(cache.columns, -(-columns // BUCKET) * BUCKET)


def are_sound(logits: Tensor) -> Tensor:
    """Return a bool []: the largest logit of every row is a finite number. A NaN anywhere makes it NaN."""
    return logits.amax(-1).isfinite().all()


def rope_table(config: dict[str, object], positions: int, device: torch.device) -> Tensor:
    """Return cos + i sin [positions, head_dim / 2], of the family's own rotary embedding in transformers, with all its
    scalings; of several rotations side by side. Raises UserError for a rope that the runtime does not support."""
    from transformers import CONFIG_MAPPING

    family = known_family(config)
    decoder, family_config = family.describe(config), CONFIG_MAPPING[family.model_type].from_dict(config)
    stated: Any = family_config.rope_parameters or {}
    rope_type, usual = stated.get("rope_type", "default"), getattr(family_config, "original_max_position_embeddings", 0)
    if rope_type == "dynamic" or (rope_type == "longrope" and positions > usual):
        limit = f" behind {usual} tokens" if usual else ""
        raise UserError(
            f"config.json: rope_type {rope_type} changes with the length of the text{limit}, which the runtime does not"
            " support"
        )
    rotary, half = dense_class(family, "RotaryEmbedding")(family_config), head_dim(config) // 2
    tables = []
    for name in decoder.rotations or [ROPE]:
        kind = () if name == ROPE else (name,)
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(positions)[None], *kind)
        rotating = cos.shape[-1] // 2  # the two halves of what rotates turn alike
        if 2 * rotating != int(2 * half * decoder.rotary_share):
            raise UserError(
                f"config.json: rope turns {2 * rotating} of a head's {2 * half} numbers (partial_rotary_factor), which"
                " the runtime does not support in this family"
            )
        turned = torch.complex(cos[0, :, :rotating], sin[0, :, :rotating])
        tables.append(torch.cat((turned, turned.new_ones(positions, half - rotating)), -1))
    return torch.cat(tables, -1).to(device)


@dataclass
class Generator:
    """A model with a cache for ``batch`` rows and ``columns`` positions. All ranks call the same methods in the same
    order."""

    model: TPLlama
    rope: Tensor  # of rope_table
    cache: KVCache
    graphs: bool = False  # decode through CUDA graphs
    position: int = 0  # columns written so far, in every row
    padding: Tensor | None = None  # [batch] columns of padding on the left, None where there are none
    schedule: Schedule = SEQUENTIAL  # of reading prompts; a decode step is always one part
    _steps: "dict[int, FixedPass]" = field(default_factory=dict)  # captured, by the columns in view
    _prefills: "dict[PromptShape, FixedPass]" = field(default_factory=dict)
    _seen: "Counter[PromptShape]" = field(default_factory=Counter)
    pool: Any = None  # of the graphs' memory

    @property
    def device(self) -> torch.device:
        return self.cache.keys.device

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read the prompts, one for each row of the cache; return the next logits of each, [batch, vocab]."""
        longest = max(map(len, prompts))
        paddings = [longest - len(prompt) for prompt in prompts]
        rows = [[0] * count + list(prompt) for count, prompt in zip(paddings, prompts, strict=True)]
        ids = torch.tensor(rows).to(self.device)
        padding = torch.tensor(paddings).to(self.device) if any(paddings) else None
        captured = self._prefills.get((longest, padding is not None, self.schedule))
        if captured is not None:
            self.position, self.padding = longest, padding
            return captured.replay(ids, 0, padding)
        return self.model.logits(self.read(ids, padding)[:, -1:])[:, 0]

    def read(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        """Begin anew with ids [batch, tokens]; return the normed hidden states of all, [batch, tokens, hidden]."""
        (rows, tokens), kept = ids.shape, self.cache.keys.shape[1]
        if rows != kept or tokens > self.cache.columns:
            raise ValueError(f"{rows} x {tokens} tokens for a cache of {kept} x {self.cache.columns}")
        self.position, self.padding = tokens, padding
        if padding is not None:
            mask = f"the mask of {rows:,} prompts of different lengths up to {tokens:,} tokens"
            advice = "generate fewer texts at a time, or prompts of one length"
            check_room(rows * tokens * tokens * 4, self.device, mask, advice)  # in all its forms
        return self.model.forward(ids, prompt_step(self.rope, tokens, padding), self.cache, self.schedule)

    def decode_one_token(self, tokens: Tensor) -> Tensor:
        """Append one token to each row, [batch]; return the logits of the next, [batch, vocab]."""
        if self.position >= self.cache.columns:
            raise ValueError(f"the cache of {self.cache.columns} positions is full")
        position, self.position = self.position, self.position + 1
        if self.graphs:
            graph = self._graph(view_length(self.position, self.cache))
            return graph.replay(tokens[:, None], position, self.padding)
        if self.padding is None:
            step = Step(self.rope[position][None, None, None], position, self.position)
        else:
            step = padded_step(self.rope, position, self.padding, torch.arange(self.position, device=self.device))
        return self.model.logits(self.model.forward(tokens[:, None], step, self.cache))[:, 0]

    def prepare(self, lengths: Sequence[int], steps: int) -> None:
        """Capture the graphs that ``steps`` decode steps after prompts of these lengths replay. Capturing one takes as
        long as several steps, and would make a token between them late. A prefill is captured when its shape comes for
        the second time."""
        if not self.graphs:
            return
        tokens = max(lengths)
        last = min(tokens + steps, self.cache.columns)
        views = sorted({view_length(used, self.cache) for used in range(tokens + 1, last + 1)})
        for length in views[:GRAPHS_AHEAD]:
            self._graph(length)
        shape = tokens, min(lengths) < tokens, self.schedule
        small = len(lengths) * tokens <= PREFILL_TOKENS and tokens <= self.cache.columns
        if small and len(self._prefills) < PREFILL_GRAPHS and shape not in self._prefills:
            if self._seen[shape]:
                self._prefills[shape] = FixedPass(self, tokens, is_prompt=True, padded=shape[1]).capture(self)
            self._seen[shape] += 1

    def _graph(self, length: int) -> "FixedPass":
        if length not in self._steps:
            self._steps[length] = FixedPass(self, length).capture(self)
        return self._steps[length]

    def decode_n_tokens(self, tokens: Tensor, draws: Tensor, sampling: Sampling, sound: Tensor | None = None) -> Tensor:
        """Append ``tokens`` [batch], then sample and append as many as ``draws`` [batch, n]; return these [batch, n].

        On a GPU nothing here waits for the device.

        sound: a bool [] that becomes false where logits are NaN or infinite.
        """
        new = []
        for draw in draws.unbind(1):
            logits = self.decode_one_token(tokens)
            if sound is not None:
                sound &= are_sound(logits)
            tokens = sample(logits, sampling, draw)
            new.append(tokens)
        return torch.stack(new, 1)


def capture(run: Callable[[], Any], device: torch.device, *, pool: Any = None, warm_ups: int = 2) -> tuple[Any, Any]:
    """Return a CUDA graph of ``run``, which starts many kernels at once, and its output, which each replay fills anew.
    ``pool``: memory that graphs share; each one's output is then read before the next is replayed."""
    side = torch.cuda.Stream(device)  # for the warm-up, as capturing asks for
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog thread may look at events meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = run()
    return graph, output


class FixedPass:
    """A decode step with ``length`` cache columns in view, or a prefill of them, that reads token ids, position and
    padding from buffers.

    ``capture`` makes it a CUDA graph. Graphs of one generator share a pool of memory: each one's output is read before
    the next is replayed. It holds no generator: a cycle would keep graphs alive, and NCCL does not end before they do.
    """

    def __init__(self, generator: Generator, length: int, *, is_prompt: bool = False, padded: bool = True) -> None:
        rows, device = generator.cache.keys.shape[1], generator.device
        self.model, self.rope, self.cache, self.length = generator.model, generator.rope, generator.cache, length
        self.schedule, self.is_prompt = generator.schedule, is_prompt
        self.ids = torch.zeros(rows, length if is_prompt else 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.padding = torch.zeros(rows, dtype=torch.long, device=device) if padded else None
        self.columns = torch.arange(length, device=device)

    def set(self, ids: Tensor, position: int, padding: Tensor | None) -> None:
        self.ids.copy_(ids)
        self.position.fill_(position)
        if self.padding is not None:
            self.padding.copy_(padding) if padding is not None else self.padding.zero_()

    def run(self) -> Tensor:
        if self.is_prompt:
            step, schedule = prompt_step(self.rope, self.length, self.padding), self.schedule
        else:
            assert self.padding is not None
            step, schedule = padded_step(self.rope, self.position, self.padding, self.columns), SEQUENTIAL
        return self.model.logits(self.model.forward(self.ids, step, self.cache, schedule)[:, -1:])[:, 0]

    def capture(self, generator: Generator) -> "FixedPass":
        generator.pool = generator.pool or torch.cuda.graph_pool_handle()
        cache = self.cache
        kept = cache.keys[..., :1, :].clone(), cache.values[..., :1, :].clone()  # a step that is captured writes there
        self.graph, self.logits = capture(self.run, generator.device, pool=generator.pool)
        cache.keys[..., :1, :], cache.values[..., :1, :] = kept
        return self

    def replay(self, ids: Tensor, position: int, padding: Tensor | None) -> Tensor:
        self.set(ids, position, padding)
        self.graph.replay()
        return self.logits


def padded_step(rope: Tensor, position: int | Tensor, padding: Tensor, columns: Tensor) -> Step:
    """Return the step of one token of each row in the column ``position``, with ``columns`` [length] in view. padding:
    [batch] columns of it on the left."""
    seen = (columns <= position) & (columns[None] >= padding[:, None])
    factors = _rope_factors(rope, (position - padding)[:, None].clamp(min=0))
    return Step(factors, position, len(columns), seen[:, None, None])


def prompt_step(rope: Tensor, tokens: int, padding: Tensor | None) -> Step:
    """Return the step of prompts that fill ``tokens`` columns. ``padding``: [batch] columns of it on the left; None:
    there is none."""
    columns = torch.arange(tokens, device=rope.device)
    if padding is None:
        return Step(_rope_factors(rope, columns[None]), 0, 0, causal=True)
    real = columns[None] >= padding[:, None]
    # a column of padding sees itself alone: a row of the mask that allows nothing would make NaN
    itself = torch.eye(tokens, dtype=torch.bool, device=rope.device)
    mask = (columns[:, None] >= columns) & real[:, None, :] | itself
    positions = (columns[None] - padding[:, None]).clamp(min=0)
    return Step(_rope_factors(rope, positions), 0, 0, mask[:, None])


def _rope_factors(rope: Tensor, positions: Tensor) -> Tensor:
    """Return rope's factors [batch or 1, tokens, 1, head_dim / 2] at positions [batch or 1, tokens]."""
    return rope[positions].unsqueeze(2)


def generate_tokens(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    eos: Sequence[int] = (),
    first_row: int = 0,
) -> Iterator[list[list[int]]]:
    """Yield the new tokens of each row, a few steps at a time. A row that has ended yields nothing after its EOS.
    ``first_row``: the number of the first row for ``sampling``, where the rows are some of many."""
    draws = sampling.draws(len(prompts), max_new_tokens, first_row).to(generator.device)
    # a host that waits for every token keeps a GPU idle; a CPU has nothing to gain
    chunk = 8 if generator.device.type == "cuda" else 1
    ended = [False] * len(prompts)
    generator.prepare([len(prompt) for prompt in prompts], max_new_tokens - 1)
    logits = generator.prefill(prompts)
    sound = are_sound(logits)
    new = sample(logits, sampling, draws[:, 0])[:, None]
    done = 1
    while True:
        if not sound:
            raise UserError(
                "the model's logits are NaN or infinite, so nothing was generated from them; check its weights, or"
                " compute in float32"
            )
        rows: list[list[int]] = [[] for _ in prompts]
        for row, ids in enumerate(new.tolist()):
            for token in ids:
                if not ended[row]:
                    rows[row].append(token)
                    ended[row] = token in eos
        yield rows
        if all(ended) or done >= max_new_tokens:
            return
        steps = min(chunk, max_new_tokens - done)
        new = generator.decode_n_tokens(new[:, -1], draws[:, done : done + steps], sampling, sound)
        done += steps
