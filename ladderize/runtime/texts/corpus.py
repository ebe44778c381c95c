"""``ladderize generate --from-bos``: texts that a model makes of its own, to distil from where there is no data.

Batches are cut at multiples of their size wherever a run begins anew, so a sample is always computed in the same row of
the same products.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.console import SILENT, Console, human_bytes
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import read_json
from ladderize.files.output import existing_parent
from ladderize.modeling import load_tokenizer
from ladderize.ranks.group import Ranks
from ladderize.runtime.decode import Generator, generate_tokens
from ladderize.runtime.requests.options import DEFAULT_SAMPLES_AT_A_TIME, GenerateOptions
from ladderize.runtime.requests.service import check_request
from ladderize.runtime.sampling import Sampling
from ladderize.runtime.spec import ModelSpec, eos_ids
from ladderize.runtime.texts.prompts import open_batch
from ladderize.runtime.texts.samples import Samples, SamplesDocument, checked_target, make_samples

SHORTEST_LINE = len('{"input_ids": [1, 2]}\n')


@dataclass(frozen=True)
class CorpusDocument(SamplesDocument):
    """tokens: without BOS."""

    tokens: int
    eos_share: float

    def summary(self) -> str:
        return (
            f"{self.samples} samples, {self.tokens} tokens{self.speed}, {self.eos_share:.0%} ended with EOS: {self.out}"
        )


@dataclass(frozen=True)
class CorpusSamples(Samples):
    """Texts that begin with ``bos`` alone."""

    NOUN, DOCUMENT = "samples", CorpusDocument

    bos: int

    def identity(self, spec: ModelSpec, options: GenerateOptions, tokenizer: Any) -> dict[str, Any]:
        return {"bos": self.bos, "tokenizer": tokenizer is not None}

    @contextlib.contextmanager
    def opened(
        self, group: Ranks, spec: ModelSpec, options: GenerateOptions, tokenizer: Any, done: int, console: Console
    ) -> Iterator[tuple[str, Iterator[tuple[Sequence[int], list[list[int]]]]]]:
        generator, backend = open_batch(group, spec, self.batch_size, 1, options, console)
        console.note(
            f"{spec.layout}; {backend}; {human_bytes(generator.cache.nbytes)} of KV cache for {self.batch_size}"
            " samples at a time"
        )
        with console.progress("sampling", self.total - done) as advance:
            yield backend, self.batches(generator, options, done, advance)
        generator.model.collectives.close()

    def batches(
        self, generator: Generator, options: GenerateOptions, done: int, advance: Callable[[int], None]
    ) -> Iterator[tuple[Sequence[int], list[list[int]]]]:
        """The new ids of the samples from number ``done`` on, EOS included, a batch at a time."""
        rows = self.batch_size
        for first in range(done - done % rows, self.total, rows):
            # the others are computed, and not waited for
            wanted = range(max(done - first, 0), min(self.total - first, rows))
            new: list[list[int]] = [[] for _ in range(rows)]
            ended = 0
            steps = generate_tokens(
                generator,
                [[self.bos]] * rows,
                max_new_tokens=options.max_new_tokens,
                sampling=options.sampling,
                eos=self.eos,
                first_row=first,
            )
            for made in steps:
                for ids, more in zip(new, made, strict=True):
                    ids += more
                before, ended = ended, sum(new[row][-1] in self.eos for row in wanted)
                advance(ended - before)
                if ended == len(wanted):
                    break
            advance(len(wanted) - ended)
            yield [first + row for row in wanted], [new[row] for row in wanted]

    def row(self, number: int, new: list[int], tokenizer: Any) -> dict[str, Any]:
        ids = [self.bos, *new]
        text = {} if tokenizer is None else {"text": tokenizer.decode(ids, skip_special_tokens=True)}
        return {**text, "input_ids": ids}

    def counted(self, row: Mapping[str, Any]) -> dict[str, int]:
        ids = row["input_ids"]
        if not isinstance(ids, list) or not ids:
            raise ValueError(ids)
        return {"tokens": len(ids) - 1, "ended": len(ids) > 1 and ids[-1] in self.eos}

    def outcome(self, counts: Mapping[str, int], output_tokens: int) -> dict[str, Any]:
        return {"tokens": counts["tokens"], "eos_share": counts["ended"] / self.total}


def sample_corpus(
    model: str | Path,
    out: str | Path,
    samples: int,
    options: GenerateOptions | None = None,
    *,
    batch_size: int | None = None,
    overwrite: bool = False,
    console: Console = SILENT,
) -> CorpusDocument | None:
    """Write ``samples`` lines of text and ids to ``out``, going on where a killed run of the same command was; see
    docs/files.md.

    model: a folder or a hub id. options: by default sampled at temperature 1. batch_size: texts at a time; the KV cache
    grows with it. None on other ranks than 0. Raises UserError for what cannot be sampled or written.
    """
    options = options or GenerateOptions(sampling=Sampling(temperature=1.0))
    if options.chat:
        raise UsageError("--from-bos begins with the BOS token alone; leave --chat out")
    if options.stop:
        raise UsageError("--stop has no effect without --prompt-file")
    if options.sampling.temperature == 0:
        raise UsageError(
            "--temperature 0 with --from-bos would give the same text every time; give a temperature above 0"
        )
    out = checked_target(Path(out), samples, batch_size, overwrite)
    spec = check_request(str(model), options)
    assert spec.folder is not None
    needed, free = samples * SHORTEST_LINE, shutil.disk_usage(existing_parent(out)).free
    if needed > free:  # even if each text had one token
        raise UserError(
            f"--num-samples {samples:,} takes at least {human_bytes(needed)} beside {out}, where {human_bytes(free)}"
            " are free; lower it, or choose another disk"
        )
    tokenizer = load_tokenizer(spec.folder)
    if options.max_new_tokens + 1 > spec.positions:
        raise UserError(
            f"--max-new-tokens {options.max_new_tokens} and the BOS token exceed the model's {spec.positions} positions"
        )
    if tokenizer is None:
        console.note(f"{spec.name} has no tokenizer: the lines get input_ids without text")
    rows = min(batch_size or DEFAULT_SAMPLES_AT_A_TIME, samples)
    eos = () if options.ignore_eos else eos_ids(spec)
    corpus = CorpusSamples(out, samples, rows, overwrite, eos, bos_id(spec, tokenizer))
    document: CorpusDocument | None = make_samples(spec, corpus, options, console)
    if document is not None:
        console.result(document.summary())
    return document


def bos_id(spec: ModelSpec, tokenizer: Any) -> int:
    """The token that begins a text: of generation_config.json, of config.json, or the tokenizer's; raises UserError if
    none is named."""
    path = spec.folder / "generation_config.json" if spec.folder is not None else None
    found = [read_json(path).get("bos_token_id")] if path is not None and path.is_file() else []
    found += [spec.config.get("bos_token_id"), getattr(tokenizer, "bos_token_id", None)]
    bos = next((value for value in found if value is not None), None)
    if bos is None:
        raise UserError(
            f"{spec.name} has no BOS token (no bos_token_id in its config.json), so --from-bos has nothing to begin"
            " with"
        )
    if type(bos) is not int or not 0 <= bos < spec.config["vocab_size"]:
        raise UserError(f"{spec.name}: bos_token_id is {bos!r}, but the model has {spec.config['vocab_size']} tokens")
    return bos
