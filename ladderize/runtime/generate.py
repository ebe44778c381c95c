"""The command ``ladderize generate``: prompts in, text out as it is made."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ladderize.chat_template import chat_template_of, render_prompt
from ladderize.console import SILENT, Console, is_text, printable
from ladderize.errors import UsageError, UserError
from ladderize.files.records import Record
from ladderize.modeling import load_tokenizer
from ladderize.ranks.device import check_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.choose import check_backend, choose
from ladderize.runtime.decode import Generator, generate_tokens
from ladderize.runtime.launch import check_group_size, run
from ladderize.runtime.sampling import GenerateOptions
from ladderize.runtime.spec import ModelSpec, WeightCache, checkpoint_spec, eos_ids, open_generator


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


class PromptEncoder:
    """An encoder from prompts to token ids, which it checks against the model's vocabulary and length.

    max_new_tokens: tokens that have to fit behind them.
    date: the date that a chat template is told; None: today.
    """

    def __init__(self, spec: ModelSpec, max_new_tokens: int, *, date: str | None = None) -> None:
        self.spec, self.max_new_tokens, self.date = spec, max_new_tokens, date
        self.tokenizer = tokenizer_of(spec)

    def ids(self, asked: str | Sequence[dict[str, Any]], origin: str = "") -> list[int]:
        """Return the ids of a text to continue, or of a conversation up to where the assistant's answer begins.

        A text gets the tokenizer's own special tokens (for Llama: BOS before it), a conversation only those of its
        template. Raises UserError, which names ``origin`` where there is one.
        """
        try:
            ids = self._text_ids(asked) if isinstance(asked, str) else self._chat_ids(asked)
            vocabulary, positions = self.spec.config["vocab_size"], self.spec.positions
            if not ids:
                raise UserError(
                    "a prompt is empty and the tokenizer adds no BOS token, so there is nothing to continue"
                )
            if max(ids) >= vocabulary:
                raise UserError(
                    f"{self.spec.name}: its tokenizer makes the token {max(ids)}, but the model has {vocabulary} only"
                )
            if len(ids) + self.max_new_tokens > positions:
                raise UserError(
                    f"a prompt of {len(ids)} tokens and --max-new-tokens {self.max_new_tokens} exceed the model's"
                    f" {positions} positions"
                )
        except UserError as problem:
            raise UserError(f"{origin}: {problem}" if origin else str(problem)) from None
        return ids

    def _text_ids(self, text: str) -> list[int]:
        if not is_text(text):
            raise UserError(f"the prompt {text[:80]!a} holds half of a surrogate pair, which is not a character")
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        return ids

    def _chat_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        chat_template_of(self.tokenizer, self.spec.name)
        text = render_prompt(self.tokenizer, messages, **({} if self.date is None else {"date_string": self.date}))
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


@dataclass(frozen=True)
class GeneratedText(Record):
    """A prompt and its continuation.

    finish_reason: eos or length.
    """

    prompt: str
    text: str
    prompt_tokens: int
    new_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class GenerateDocument(Record):
    """The output of ``ladderize generate --json``.

    decode_ms_per_token: None if one step was made.
    """

    model: str
    layout: str
    tp_size: int
    backend: str
    dtype: str
    prefill_ms: float
    decode_ms_per_token: float | None
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
    options, prompts = options or GenerateOptions(), list(prompts)
    if not prompts:
        raise UsageError("there is nothing to continue: give a prompt")
    with console.stage(f"reading {model}"):
        spec = check_generate(str(model), options)
        encoder = PromptEncoder(spec, options.max_new_tokens)
        ids = [encoder.ids([{"role": "user", "content": prompt}] if options.chat else prompt) for prompt in prompts]
    document: GenerateDocument | None = run(
        _generate,
        spec,
        prompts,
        ids,
        options,
        console,
        tp_size=options.tp_size,
        device=options.device,
        threads=options.threads,
    )
    return document


def _generate(
    group: Ranks, spec: ModelSpec, prompts: list[str], ids: list[list[int]], options: GenerateOptions, console: Console
) -> GenerateDocument | None:
    """Generate on one rank."""
    generator, backend = open_batch(group, spec, len(ids), max(map(len, ids)), options, console)
    console.note(f"{spec.layout}; {backend}")
    eos = () if options.ignore_eos else eos_ids(spec)
    tokenizer = tokenizer_of(spec) if group.is_main else None
    live = TextStream(tokenizer) if group.is_main and len(ids) == 1 and console.speaks and not console.as_json else None
    new: list[list[int]] = [[] for _ in ids]
    begin = first = time.perf_counter()
    steps = 0
    with torch.inference_mode():
        for made in generate_tokens(
            generator, ids, max_new_tokens=options.max_new_tokens, sampling=options.sampling, eos=eos
        ):
            if not steps:
                first = time.perf_counter()
            steps += max(map(len, made))
            for row_ids, more in zip(new, made, strict=True):
                row_ids += more
            if live is not None:
                print(printable(live.push(made[0])), end="", flush=True)
    seconds = time.perf_counter() - first
    generator.model.collectives.close()
    if live is not None:
        print(printable(live.rest()), flush=True)
    if not group.is_main:
        return None
    texts = [
        GeneratedText(
            prompt=prompt,
            text=TextStream(tokenizer).all(new_ids),
            prompt_tokens=len(given),
            new_ids=new_ids,
            finish_reason="eos" if new_ids and new_ids[-1] in eos else "length",
        )
        for prompt, new_ids, given in zip(prompts, new, ids, strict=True)
    ]
    document = GenerateDocument(
        model=spec.name,
        layout=str(spec.layout),
        tp_size=group.size,
        backend=backend,
        dtype=spec.dtype,
        prefill_ms=(first - begin) * 1e3,
        decode_ms_per_token=seconds * 1e3 / (steps - 1) if steps > 1 else None,
        texts=texts,
    )
    if live is None:
        for text in texts:
            console.result(f"> {text.prompt}\n{text.text}\n")
    if document.decode_ms_per_token is not None:
        speed = f"{document.decode_ms_per_token:.2f} ms per token"
        console.note(f"{steps} steps: prefill {document.prefill_ms:.0f} ms, {speed}")
    return document


def open_batch(
    group: Ranks, spec: ModelSpec, rows: int, longest: int, options: GenerateOptions, console: Console
) -> tuple[Generator, str]:
    """Return a generator for ``rows`` prompts of at most ``longest`` tokens, and words for how its ranks
    communicate."""
    row = max(spec.config["hidden_size"] * longest, spec.config["vocab_size"])
    collectives, backend = choose(options.backend, group, max_bytes=4 * row * rows)
    with console.progress("loading", spec.config["num_hidden_layers"]) as advance:
        weights = WeightCache(group.device, pack=True, replicate_vocab=options.replicate_vocab)
        columns = longest + options.max_new_tokens
        generator = open_generator(spec, collectives, weights, group, rows, columns, advance=advance)
    if note := generator.model.operations.note:
        console.warn(note)
    return generator, backend


class TextStream:
    """A decoder of token ids, a few at a time. Text that ends in half a character is held back until the rest comes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = 0

    def push(self, ids: list[int]) -> str:
        self.ids += ids
        text = self.all(self.ids)
        if text.endswith("\ufffd"):
            return ""
        more, self.shown = text[self.shown :], len(text)
        return more

    def rest(self) -> str:
        return self.all(self.ids)[self.shown :]

    def all(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text
