"""``generate``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ladderize.commands.options import (
    LOADING,
    MAX_SEED,
    AsJson,
    Backend,
    Compile,
    Device,
    DtypeOption,
    ReplicateVocab,
    Revision,
    Threads,
    TpSize,
    compute_options,
    options_from,
)
from ladderize.console import Console
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.runtime.sampling import Sampling
from ladderize.runtime.texts.options import DEFAULT_SAMPLES_AT_A_TIME, GenerateOptions

PROMPTS, FILES, SAMPLING = "Prompts", "Training data (--prompt-file or --from-bos)", "Sampling"


def generate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint, converted or not: folder or hub id.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="Text to continue. Give it several times for a batch.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Format prompts with the model's chat template, as conversations always are.",
            rich_help_panel=PROMPTS,
        ),
    ] = False,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Answer each row of a file (.jsonl, .parquet: messages, conversations, prompt or text; .txt: lines)"
            " into --out. A killed run goes on when run again.",
            rich_help_panel=FILES,
        ),
    ] = None,
    from_bos: Annotated[
        bool,
        typer.Option(
            "--from-bos",
            help="Sample texts from BOS alone into --out. A killed run goes on when run again.",
            rich_help_panel=FILES,
        ),
    ] = False,
    num_samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of texts, or of rows to answer.",
            show_default="all rows of --prompt-file",
            rich_help_panel=FILES,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The .jsonl file to write, for adapt --data.", rich_help_panel=FILES),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Texts at a time. The KV cache grows with it.",
            show_default=str(DEFAULT_SAMPLES_AT_A_TIME),
            rich_help_panel=FILES,
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace --out once the new one is complete.", rich_help_panel=FILES),
    ] = False,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Most tokens per text; an EOS token ends it earlier.", rich_help_panel=SAMPLING
        ),
    ] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            help="Sampling temperature. 0: greedy.",
            show_default="0; 1 for training data",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Sample from the k likeliest tokens.", rich_help_panel=SAMPLING),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            max=1.0,
            help="Sample from the fewest tokens whose probabilities sum to p.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=MAX_SEED,
            help="Sampling seed; the same draws for every --tp-size.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at EOS tokens.", rich_help_panel=SAMPLING)
    ] = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop",
            metavar="TEXT",
            help="With --prompt-file: end an answer before this text. Give it several times for several.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    revision: Revision = None,
    tp_size: TpSize = 1,
    backend: Backend = "auto",
    dtype: DtypeOption = "auto",
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
    replicate_vocab: ReplicateVocab = False,
    compile_: Compile = False,
) -> None:
    """Generate text on ladderize's tensor-parallel runtime, or training data: answers to instructions, or texts of the
    model's own."""
    _check_mode(ctx.params)
    makes_data = from_bos or prompt_file is not None
    sampling = options_from(Sampling, ctx.params, temperature=float(makes_data) if temperature is None else temperature)
    console = Console(as_json)
    with console.stage(LOADING):
        device = compute_options(device, threads)
        from ladderize.runtime.texts.answers import answer_prompts
        from ladderize.runtime.texts.corpus import sample_corpus
        from ladderize.runtime.texts.prompts import generate as generate_texts
    options = options_from(
        GenerateOptions, ctx.params, sampling=sampling, stop=tuple(stop or ()), compile=compile_, device=device
    )
    document: Record | None
    if prompt_file is not None and out is not None:
        document = answer_prompts(
            model,
            prompt_file,
            out,
            options,
            samples=num_samples,
            batch_size=batch_size,
            overwrite=overwrite,
            console=console,
        )
    elif out is not None and num_samples is not None:
        document = sample_corpus(
            model, out, num_samples, options, batch_size=batch_size, overwrite=overwrite, console=console
        )
    else:
        document = generate_texts(model, prompt or [], options, console=console)
    if document is not None:  # which it is on other ranks than 0
        console.document(document.to_dict())


def _check_mode(given: Mapping[str, Any]) -> None:
    """Raise UsageError unless there is something to continue, with all that it needs and nothing that is another's."""
    if given["from_bos"]:
        _check_from_bos(given)
    elif given["prompt_file"] is not None:
        if given["prompt"]:
            raise UsageError("--prompt-file brings the prompts; leave --prompt out")
        if given["out"] is None:
            raise UsageError("--prompt-file needs --out FILE: the .jsonl file that the answers go to")
    elif useless := [name for name in ("num_samples", "out", "batch_size", "overwrite") if given[name]]:
        raise UsageError(f"--{useless[0].replace('_', '-')} has no effect without --from-bos or --prompt-file")
    elif not given["prompt"]:
        raise UsageError(
            "there is nothing to continue: give --prompt TEXT, --prompt-file FILE to answer many, or --from-bos to"
            " sample texts of the model's own"
        )


def _check_from_bos(given: Mapping[str, Any]) -> None:
    """Raise UsageError for what --from-bos lacks or cannot go with."""
    for name in ("prompt", "prompt_file", "chat"):
        if given[name]:
            option = name.replace("_", "-")
            raise UsageError(f"--from-bos begins with the BOS token alone; leave --{option} out")
    if given["num_samples"] is None or given["out"] is None:
        missing = "--num-samples N" if given["num_samples"] is None else "--out FILE"
        raise UsageError(f"--from-bos needs {missing}: how many texts, and the .jsonl file that they go to")
