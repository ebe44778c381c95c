"""``ladderize generate --from-bos``: texts that a model makes of its own, to distil from where there is no data.

A sample depends on its number, the seed and the sampling options. Batches are cut at multiples of their size wherever a
run begins anew, so a sample is always computed in the same row of the same products: a run that was killed makes the
same bytes in the end.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ladderize.console import SILENT, Console, human_bytes
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import check_writable, read_json
from ladderize.files.output import existing_parent
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.modeling import load_tokenizer
from ladderize.ranks.environment import is_main_rank
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.decode import Generator, generate_tokens
from ladderize.runtime.launch import run
from ladderize.runtime.sampling import Sampling
from ladderize.runtime.spec import ModelSpec, WeightCache, eos_ids, open_generator
from ladderize.runtime.texts.options import DEFAULT_SAMPLES_AT_A_TIME, GenerateOptions
from ladderize.runtime.texts.prompts import open_spec
from ladderize.runtime.texts.sample_file import (
    SampleFile,
    SamplesIdentity,
    check_sample_options,
    check_sample_target,
    common_identity,
)

SHORTEST_LINE = len('{"input_ids": [1, 2]}\n')


@dataclass(frozen=True)
class Corpus:
    """What is to be made: ``samples`` texts in ``out``, ``batch_size`` at a time, from ``bos`` until one of ``eos`` or
    max_new_tokens."""

    out: Path
    samples: int
    batch_size: int
    overwrite: bool
    bos: int
    eos: tuple[int, ...]


@dataclass(frozen=True)
class CorpusIdentity(SamplesIdentity):
    """tokenizer: whether there is one."""

    bos: int
    tokenizer: bool


class CorpusFile(SampleFile):
    """Texts with their ids. ``tokens`` (without BOS) and ``ended`` (by ``eos``) count what is written."""

    def __init__(
        self, out: Path, identity: Mapping[str, Any], samples: int, *, eos: Sequence[int], overwrite: bool
    ) -> None:
        self.eos = frozenset(eos)
        self.tokens = self.ended = 0
        super().__init__(out, identity, samples, overwrite=overwrite)

    def tally(self, record: Mapping[str, Any]) -> None:
        ids = record["input_ids"]
        if not isinstance(ids, list) or not ids:
            raise ValueError(ids)
        self.tokens += len(ids) - 1
        self.ended += len(ids) > 1 and ids[-1] in self.eos

    def write(self, rows: Sequence[Sequence[int]], texts: Sequence[str] | None) -> None:
        """Append samples: ids with BOS, and their texts where there is a tokenizer."""
        records: list[dict[str, Any]] = [{"input_ids": list(ids)} for ids in rows]
        if texts is not None:
            records = [{"text": text, **record} for text, record in zip(texts, records, strict=True)]
        self.append(records)


@dataclass(frozen=True)
class CorpusDocument(Record):
    """``ladderize generate --from-bos --json``. tokens: without BOS. backend and output_tokens_per_s: None if nothing
    was left to do."""

    model: str
    layout: str
    tp_size: int
    backend: str | None
    dtype: str
    out: str
    samples: int
    tokens: int
    eos_share: float
    resumed_samples: int
    seconds: float
    output_tokens_per_s: float | None

    def summary(self) -> str:
        rate = self.output_tokens_per_s
        speed = f", {rate:.0f} tokens/s" if rate is not None else ""
        return f"{self.samples} samples, {self.tokens} tokens{speed}, {self.eos_share:.0%} ended with EOS: {self.out}"


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
    check_corpus_usage(Path(out), samples, batch_size, options)
    out = resolved(Path(out), "--out ")
    if is_main_rank():
        check_writable(out)
        check_sample_target(out, overwrite)
    spec = open_spec(model, options)
    assert spec.folder is not None
    check_corpus_space(out, samples)
    tokenizer = load_tokenizer(spec.folder)
    if options.max_new_tokens + 1 > spec.positions:
        raise UserError(
            f"--max-new-tokens {options.max_new_tokens} and the BOS token exceed the model's {spec.positions} positions"
        )
    if tokenizer is None:
        console.note(f"{spec.name} has no tokenizer: the lines get input_ids without text")
    if not spec.layout.is_dense:
        console.note(f"{spec.name} is converted ({spec.layout}): these are samples of it, not of the dense model")
    eos = () if options.ignore_eos else eos_ids(spec)
    corpus = Corpus(
        out, samples, min(batch_size or DEFAULT_SAMPLES_AT_A_TIME, samples), overwrite, bos_id(spec, tokenizer), eos
    )
    document: CorpusDocument | None = run(
        _sample, spec, corpus, options, console, tp_size=options.tp_size, device=options.device, threads=options.threads
    )
    if document is not None:
        console.result(document.summary())
    return document


def check_corpus_usage(out: Path, samples: int, batch_size: int | None, options: GenerateOptions) -> None:
    """Raise UsageError for options that make no corpus."""
    if options.chat:
        raise UsageError("--from-bos begins with the BOS token alone; leave --chat out")
    if options.stop:
        raise UsageError("--stop has no effect without --prompt-file")
    check_sample_options(out, samples, batch_size)
    if options.sampling.temperature == 0:
        raise UsageError(
            "--temperature 0 with --from-bos would give the same text every time; give a temperature above 0"
        )


def check_corpus_space(out: Path, samples: int) -> None:
    """Refuse more lines than the disk holds even if each text had one token."""
    needed, free = samples * SHORTEST_LINE, shutil.disk_usage(existing_parent(out)).free
    if needed > free:
        raise UserError(
            f"--num-samples {samples:,} takes at least {human_bytes(needed)} beside {out}, where {human_bytes(free)}"
            " are free; lower it, or choose another disk"
        )


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


def _sample(
    group: Ranks, spec: ModelSpec, corpus: Corpus, options: GenerateOptions, console: Console
) -> CorpusDocument | None:
    """One rank's part; rank 0 alone holds the file."""
    assert spec.folder is not None
    tokenizer = load_tokenizer(spec.folder) if group.is_main else None
    with contextlib.ExitStack() as stack:
        file = None
        if group.is_main:
            identity = CorpusIdentity(**common_identity(spec, options), bos=corpus.bos, tokenizer=tokenizer is not None)
            file = stack.enter_context(
                CorpusFile(corpus.out, identity.to_dict(), corpus.samples, eos=corpus.eos, overwrite=corpus.overwrite)
            )
        before = group.broadcast(file.samples if file is not None else 0)
        if before:
            console.note(f"{before} samples are already there")
        backend, seconds, made = None, 0.0, 0
        if before < corpus.samples:
            generator, backend = _open(group, spec, corpus, options, console)
            begin = time.perf_counter()
            with console.progress("sampling", corpus.samples - before) as advance, torch.inference_mode():
                for rows in batches(generator, corpus, options, before, advance):
                    made += sum(len(ids) - 1 for ids in rows)
                    if file is not None:
                        file.write(
                            rows,
                            tokenizer.batch_decode(rows, skip_special_tokens=True) if tokenizer is not None else None,
                        )
            seconds = time.perf_counter() - begin
            generator.model.collectives.close()
        if file is None:
            return None
        file.finish()
        return CorpusDocument(
            model=spec.name,
            layout=str(spec.layout),
            tp_size=group.size,
            backend=backend,
            dtype=spec.dtype,
            out=str(corpus.out),
            samples=file.samples,
            tokens=file.tokens,
            eos_share=file.ended / file.samples,
            resumed_samples=before,
            seconds=seconds,
            output_tokens_per_s=made / seconds if made else None,
        )


def _open(
    group: Ranks, spec: ModelSpec, corpus: Corpus, options: GenerateOptions, console: Console
) -> tuple[Generator, str]:
    """A generator for one batch."""
    rows = corpus.batch_size
    collectives, backend = choose(
        options.backend, group, max_bytes=4 * rows * max(spec.config["hidden_size"], spec.config["vocab_size"])
    )
    with console.progress("loading", spec.config["num_hidden_layers"]) as advance:
        weights = WeightCache(group.device, pack=not options.compile, replicate_vocab=options.replicate_vocab)
        generator = open_generator(
            spec,
            collectives,
            weights,
            group,
            rows,
            1 + options.max_new_tokens,
            compile=options.compile,
            advance=advance,
        )
    console.note(
        f"{spec.layout}; {backend}; {human_bytes(generator.cache.nbytes)} of KV cache for {rows} samples at a time"
    )
    return generator, backend


def batches(
    generator: Generator,
    corpus: Corpus,
    options: GenerateOptions,
    done: int,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[list[list[int]]]:
    """The ids of the samples from number ``done`` on, BOS and EOS included, a batch at a time. All ranks yield the
    same."""
    rows = corpus.batch_size
    for first in range(done - done % rows, corpus.samples, rows):
        wanted = range(
            max(done - first, 0), min(corpus.samples - first, rows)
        )  # the others are computed, and not waited for
        new: list[list[int]] = [[] for _ in range(rows)]
        ended = 0
        steps = generate_tokens(
            generator,
            [[corpus.bos]] * rows,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling,
            eos=corpus.eos,
            first_row=first,
        )
        for made in steps:
            for ids, more in zip(new, made, strict=True):
                ids += more
            before, ended = ended, sum(new[row][-1] in corpus.eos for row in wanted)
            advance(ended - before)
            if ended == len(wanted):
                break
        advance(len(wanted) - ended)
        yield [[corpus.bos, *new[row]] for row in wanted]
