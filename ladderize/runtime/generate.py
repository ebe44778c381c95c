"""The command ``ladderize generate``: prompts in, text out as it is made. Files of prompts: ``generate_file``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from ladderize.chat_template import Conversation, render, said_by_user
from ladderize.console import SILENT, Console, printable
from ladderize.errors import UsageError, UserError
from ladderize.files.records import Record
from ladderize.modeling import load_tokenizer
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import is_main_rank
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.choose import check_backend, choose
from ladderize.runtime.decode import generate_tokens
from ladderize.runtime.launch import Report, check_group_size, run
from ladderize.runtime.sampling import GenerateOptions
from ladderize.runtime.spec import ModelSpec, WeightCache, checkpoint_spec, eos_ids, open_generator

Asked = str | Conversation  # a text to continue, or a conversation without its last answer


@dataclass(frozen=True)
class GenerateTask:
    """All prompts, and the options for continuing them.

    eos: the tokens that end a text.
    prompts: token ids of each.
    batch_size: texts at a time.
    streams: show the first text while it is made.
    """

    spec: ModelSpec
    options: GenerateOptions
    eos: tuple[int, ...]
    prompts: list[list[int]]
    batch_size: int
    streams: bool = False

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))

    def parts(self, done: int, size: int) -> Iterator[range]:
        """Yield the numbers of ``size`` texts at a time, from the part that holds the first unfinished text.

        done: the number of finished texts.
        """
        for first in range(done - done % size, len(self.prompts), size):
            yield range(first, min(first + size, len(self.prompts)))


@dataclass(frozen=True)
class GeneratedText(Record):
    """A prompt and its continuation.

    finish_reason: stop, at an EOS, or length.
    """

    prompt: str
    text: str
    prompt_tokens: int
    new_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class GenerateDocument(Record):
    """The output of ``ladderize generate --json``."""

    model: str
    layout: str
    tp_size: int
    dtype: str
    texts: list[GeneratedText]


def generate(
    model: str | Path,
    prompts: Sequence[str],
    options: GenerateOptions | None = None,
    *,
    console: Console = SILENT,
) -> GenerateDocument | None:
    """Continue ``prompts`` as one batch on the tensor-parallel runtime. Returns None on other ranks than 0.

    A console that speaks shows texts, a single one as it is made. Raises UserError or LayoutError.

    model: a folder or a hub id.
    """
    options = options or GenerateOptions()
    if not prompts:
        raise UsageError("there is nothing to continue: give a prompt")
    with console.stage(f"reading {model}"):
        spec = check_generate(str(model), options)
        tokenizer = tokenizer_of(spec)
        asked: list[Asked] = [Conversation(said_by_user(text)) if options.chat else text for text in prompts]
        ids = [prompt_ids(each, spec, tokenizer, options) for each in asked]
    streams = len(ids) == 1 and console.speaks and not console.as_json
    task = GenerateTask(spec, options, end_ids(spec, options), ids, len(ids), streams)
    made: list[list[int]] = []
    answer_on_runtime(task, 0, lambda batch: made.extend(batch[1]), console)
    if not is_main_rank():
        return None
    texts = [
        GeneratedText(
            prompt=prompt,
            text=answer_text(tokenizer, before, new),
            prompt_tokens=len(before),
            new_ids=new,
            finish_reason="stop" if new and new[-1] in task.eos else "length",
        )
        for prompt, new, before in zip(prompts, made, ids, strict=True)
    ]
    if not streams:
        for text in texts:
            console.result(f"> {text.prompt}\n{text.text}\n")
    return GenerateDocument(spec.name, str(spec.layout), options.tp_size, spec.dtype, texts)


# ---- prompts ----


def check_generate(model: str, options: GenerateOptions) -> ModelSpec:
    """Return the model after all checks that need neither weights nor ranks. Raises UserError or LayoutError."""
    check_device(options.device)
    check_backend(options.backend, options.tp_size, options.device)
    check_group_size(options.tp_size, options.device)
    return checkpoint_spec(model, tp_size=options.tp_size, dtype=options.dtype, revision=options.revision)


def tokenizer_of(spec: ModelSpec) -> Any:
    """Return the checkpoint's tokenizer. Raises UserError where there is none."""
    tokenizer = load_tokenizer(spec.folder) if spec.folder is not None else None
    if tokenizer is None:
        raise UserError(f"{spec.name} has no tokenizer, and generate needs one")
    return tokenizer


def prompt_ids(
    asked: Asked, spec: ModelSpec, tokenizer: Any, options: GenerateOptions, *, as_data: bool = False
) -> list[int]:
    """Return the ids of a text to continue, or of a conversation up to where the assistant's answer begins.

    A text gets the tokenizer's own special tokens (for Llama: BOS before it), a conversation only those of its
    template.

    as_data: the template sees the date that it sees in training.
    Raises UserError for ids that the model does not have, and for more than fit into it.
    """
    ids: list[int]
    if isinstance(asked, Conversation):
        text, _ = render(tokenizer, asked, as_data=as_data, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        ids = tokenizer(asked, verbose=False)["input_ids"]
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
    """Return the tokens that end a text."""
    return () if options.ignore_eos else eos_ids(spec)


# ---- answers ----


def answer_on_runtime(task: GenerateTask, done: int, report: Report, console: Console) -> None:
    """Continue the prompts that are not ``done`` on ladderize's own ranks.

    report: is called with each batch: (number of its first text, new ids of each).
    """
    ranks = {name: getattr(task.options, name) for name in ("tp_size", "device", "threads")}
    run(_answer_on_rank, task, done, console, **ranks, report=report)


def _answer_on_rank(group: Ranks, task: GenerateTask, done: int, console: Console) -> None:
    done = group.broadcast(done)
    if done == len(task.prompts):
        return
    spec, options, rows = task.spec, task.options, task.batch_size
    largest = max(spec.config["hidden_size"] * task.longest, spec.config["vocab_size"])
    collectives, backend = choose(options.backend, group, max_bytes=spec.torch_dtype.itemsize * largest * rows)
    with console.progress("loading", spec.config["num_hidden_layers"]) as advance:
        weights, columns = WeightCache(group.device, pack=True), task.longest + options.max_new_tokens
        generator = open_generator(spec, collectives, weights, group, rows, columns, advance=advance)
    if note := generator.model.operations.note:
        console.warn(note)
    console.note(f"{spec.layout}; {backend}")
    live = _Live(tokenizer_of(spec), skip_special_tokens=True) if task.streams and group.is_main else None
    with torch.inference_mode():
        for numbers in task.parts(done, rows):
            prompts = [task.prompts[number] for number in numbers]
            prompts += prompts[-1:] * (rows - len(prompts))  # computed, and not waited for
            new: list[list[int]] = [[] for _ in numbers]
            for made in generate_tokens(
                generator,
                prompts,
                max_new_tokens=options.max_new_tokens,
                sampling=options.sampling,
                eos=task.eos,
                first_row=numbers[0],
            ):
                for ids, more in zip(new, made, strict=False):
                    ids += more
                if live is not None:
                    live.put(torch.tensor(made[0]))
                if all(ids[-1] in task.eos for ids in new):
                    break
            group.report((numbers[0], new))
    if live is not None:
        live.end()
    generator.model.collectives.settle()


class _Live(TextStreamer):
    """A printer of a text while it is made."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(printable(text), end="\n" if stream_end else "", flush=True)


def answer_text(tokenizer: Any, prompt: list[int], new: list[int]) -> str:
    """Return the text that ``new`` adds to a prompt, without special tokens.

    It is decoded with the prompt, since ids decoded alone may lose the space that they begin with (SentencePiece).
    """
    before = str(tokenizer.decode(prompt, skip_special_tokens=True))
    both = str(tokenizer.decode([*prompt, *new], skip_special_tokens=True))
    return both[len(before) :] if both.startswith(before) else str(tokenizer.decode(new, skip_special_tokens=True))
