"""The command ``ladderize generate``: prompts in, text out as it is made. Files of prompts: ``generate_file``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TextStreamer

from ladderize.chat_template import Conversation, render, said_by_user
from ladderize.console import SILENT, Console, printable
from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.modeling import load_tokenizer
from ladderize.ranks.device import check_device, default_device
from ladderize.ranks.environment import is_main_rank
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.choose import check_backend, choose
from ladderize.runtime.decode import generate_tokens
from ladderize.runtime.launch import Report, check_group_size, run
from ladderize.runtime.sampling import GenerateOptions
from ladderize.runtime.spec import ModelSpec, WeightCache, checkpoint_spec, eos_ids, open_generator

Question = str | Conversation  # a text to continue, or a conversation without its last answer


@dataclass(frozen=True)
class GeneratedText(Record):
    prompt: str
    text: str
    prompt_tokens: int
    new_ids: list[int]
    finish_reason: str  # stop, at an EOS, or length


@dataclass(frozen=True)
class GenerateDocument(Record):
    """The output of ``ladderize generate --json``."""

    model: str
    layout: str
    tp_size: int
    dtype: str
    texts: list[GeneratedText]


def generate(options: GenerateOptions, *, console: Console = SILENT) -> GenerateDocument | None:
    """Continue ``options.prompt`` as one batch on the tensor-parallel runtime. Returns None on other ranks than 0. A
    console that speaks shows texts, a single one as it is made. Raises UserError or LayoutError."""
    with console.stage(f"reading {options.model}"):
        spec = open_spec(options)
        tokenizer = tokenizer_of(spec)
        questions = [Conversation(said_by_user(text)) if options.chat else text for text in options.prompt]
        prompts = [prompt_ids(question, spec, tokenizer, options) for question in questions]
    answers: list[list[int]] = []
    answer(spec, options, prompts, 0, lambda batch: answers.extend(batch[1]), console)
    if not is_main_rank():
        return None
    ends = end_ids(spec, options)
    texts = []
    for text, prompt, new in zip(options.prompt, prompts, answers, strict=True):
        reason = "stop" if new and new[-1] in ends else "length"
        texts.append(GeneratedText(text, answer_text(tokenizer, prompt, new), len(prompt), new, reason))
        if not _streams(options, console):
            console.result(f"> {text}\n{texts[-1].text}\n")
    return GenerateDocument(spec.name, str(spec.layout), options.tp_size, spec.dtype, texts)


def _streams(options: GenerateOptions, console: Console) -> bool:
    """Return True where the only text is shown while it is made."""
    return len(options.prompt) == 1 and console.speaks and not console.as_json


def open_spec(options: GenerateOptions) -> ModelSpec:
    """Return the model after all checks that need neither weights nor ranks."""
    device = options.device or default_device()
    check_device(device)
    check_backend(options.backend, options.tp_size, device)
    check_group_size(options.tp_size, device)
    return checkpoint_spec(str(options.model), tp_size=options.tp_size, dtype=options.dtype)


def tokenizer_of(spec: ModelSpec) -> Any:
    """Return the checkpoint's tokenizer; raises UserError where there is none."""
    tokenizer = load_tokenizer(spec.folder) if spec.folder is not None else None
    if tokenizer is None:
        raise UserError(f"{spec.name} has no tokenizer, and generate needs one")
    return tokenizer


def prompt_ids(
    question: Question, spec: ModelSpec, tokenizer: Any, options: GenerateOptions, *, as_data: bool = False
) -> list[int]:
    """Return the ids of a text to continue, with the tokenizer's own special tokens, or of a conversation up to where
    the assistant's answer begins, with those of its template alone.

    as_data: the template sees the date that it sees in training.
    Raises UserError for ids that the model does not have, and for more than fit into it.
    """
    ids: list[int]
    if isinstance(question, Conversation):
        text, _ = render(tokenizer, question, as_data=as_data, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        ids = tokenizer(question, verbose=False)["input_ids"]
    check_prompt(ids, spec, options)
    return ids


def check_prompt(ids: list[int], spec: ModelSpec, options: GenerateOptions) -> None:
    """Raise UserError for ids that the model cannot continue."""
    vocabulary, positions = spec.config["vocab_size"], spec.positions
    if not ids:
        raise UserError("a prompt is empty and the tokenizer adds no BOS token, so there is nothing to continue")
    if max(ids) >= vocabulary:
        raise UserError(f"{spec.name}: its tokenizer makes the token {max(ids)}, but the model has {vocabulary} only")
    if len(ids) + options.max_new_tokens > positions:
        raise UserError(
            f"a prompt of {len(ids)} tokens and --max-new-tokens {options.max_new_tokens} exceed the model's"
            f" {positions} positions"
        )


def end_ids(spec: ModelSpec, options: GenerateOptions) -> tuple[int, ...]:
    return () if options.ignore_eos else eos_ids(spec)


def answer(
    spec: ModelSpec, options: GenerateOptions, prompts: Sequence[list[int]], done: int, report: Report, console: Console
) -> None:
    """Continue the prompts (token ids of each) behind the first ``done`` ones, of which rank 0 knows, on ladderize's
    own ranks. ``report`` is called with each batch: (number of its first text, new ids of each)."""
    device = options.device or default_device()
    run(_answer_on_rank, spec, options, prompts, done, console, tp_size=options.tp_size, device=device, report=report)


def _answer_on_rank(
    group: Ranks, spec: ModelSpec, options: GenerateOptions, prompts: Sequence[list[int]], done: int, console: Console
) -> None:
    done = group.broadcast(done)
    if done == len(prompts):
        return
    rows = len(prompts) if options.out is None else min(options.concurrency, len(prompts))
    longest, ends = max(map(len, prompts)), end_ids(spec, options)
    largest = max(spec.config["hidden_size"] * longest, spec.config["vocab_size"])
    collectives, backend = choose(options.backend, group, max_bytes=spec.torch_dtype.itemsize * largest * rows)
    with console.progress("loading", spec.config["num_hidden_layers"]) as advance:
        weights, columns = WeightCache(group.device, pack=True, advance=advance), longest + options.max_new_tokens
        generator = open_generator(spec, collectives, weights, group, rows, columns)
    if note := generator.model.operations.note:
        console.warn(note)
    console.note(f"{spec.layout}; {backend}")
    live = _Live(tokenizer_of(spec), skip_special_tokens=True) if group.is_main and _streams(options, console) else None
    with torch.inference_mode():
        # batches begin at multiples of their size, wherever an earlier run ended
        for first in range(done - done % rows, len(prompts), rows):
            batch = [*prompts[first : first + rows]]
            new: list[list[int]] = [[] for _ in batch]
            batch += batch[-1:] * (rows - len(batch))  # computed, and not waited for
            for chunk in generate_tokens(
                generator,
                batch,
                max_new_tokens=options.max_new_tokens,
                sampling=options.sampling,
                eos=ends,
                first_row=first,
            ):
                for ids, more in zip(new, chunk, strict=False):
                    ids += more
                if live is not None:
                    live.put(torch.tensor(chunk[0]))
                if all(ids[-1] in ends for ids in new):
                    break
            group.report((first, new))
    if live is not None:
        live.end()
    generator.model.collectives.settle()


class _Live(TextStreamer):
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(printable(text), end="\n" if stream_end else "", flush=True)


def answer_text(tokenizer: Any, prompt: list[int], new: list[int]) -> str:
    """Return the text that ``new`` adds to a prompt, without special tokens. It is decoded with the prompt, since ids
    decoded alone may lose the space that they begin with (SentencePiece)."""
    before = str(tokenizer.decode(prompt, skip_special_tokens=True))
    both = str(tokenizer.decode([*prompt, *new], skip_special_tokens=True))
    return both[len(before) :] if both.startswith(before) else str(tokenizer.decode(new, skip_special_tokens=True))
