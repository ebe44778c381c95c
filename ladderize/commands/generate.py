"""``generate``."""

from pathlib import Path
from typing import Annotated

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

PROMPTS, CORPUS, SAMPLING = "Prompts", "Sampling a corpus (--from-bos)", "Sampling"


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
        bool, typer.Option("--chat", help="Format prompts with the model's chat template.", rich_help_panel=PROMPTS)
    ] = False,
    from_bos: Annotated[
        bool,
        typer.Option(
            "--from-bos",
            help="Sample texts from BOS alone into --out, as training data. A killed run goes on when run again.",
            rich_help_panel=CORPUS,
        ),
    ] = False,
    num_samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of texts.", rich_help_panel=CORPUS)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The .jsonl file to write (text and input_ids).", rich_help_panel=CORPUS),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Texts at a time. The KV cache grows with it.",
            show_default=str(DEFAULT_SAMPLES_AT_A_TIME),
            rich_help_panel=CORPUS,
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace --out once the new one is complete.", rich_help_panel=CORPUS),
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
            show_default="0; 1 with --from-bos",
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
    """Generate text on ladderize's tensor-parallel runtime, or sample a training corpus from the model itself."""
    given = {"--num-samples": num_samples, "--out": out, "--batch-size": batch_size, "--overwrite": overwrite or None}
    if from_bos:
        _check_from_bos(prompt, chat, num_samples, out)
    elif useless := [option for option, value in given.items() if value is not None]:
        raise UsageError(f"{useless[0]} has no effect without --from-bos")
    elif not prompt:
        raise UsageError(
            "there is nothing to continue: give --prompt TEXT, or --from-bos to sample texts of the model's own"
        )
    sampling = options_from(Sampling, ctx.params, temperature=float(from_bos) if temperature is None else temperature)
    console = Console(as_json)
    with console.stage(LOADING):
        device = compute_options(device, threads)
        from ladderize.runtime.texts.corpus import sample_corpus
        from ladderize.runtime.texts.prompts import generate as generate_texts
    options = options_from(GenerateOptions, ctx.params, sampling=sampling, compile=compile_, device=device)
    document: Record | None
    if out is None or num_samples is None:
        document = generate_texts(model, prompt or [], options, console=console)
    else:
        document = sample_corpus(
            model, out, num_samples, options, batch_size=batch_size, overwrite=overwrite, console=console
        )
    if document is not None:  # which it is on other ranks than 0
        console.document(document.to_dict())


def _check_from_bos(prompt: list[str] | None, chat: bool, num_samples: int | None, out: Path | None) -> None:
    """Raise UsageError for what --from-bos lacks or cannot go with."""
    if prompt or chat:
        raise UsageError(f"--from-bos begins with the BOS token alone; leave {'--prompt' if prompt else '--chat'} out")
    if num_samples is None or out is None:
        missing = "--num-samples N" if num_samples is None else "--out FILE"
        raise UsageError(f"--from-bos needs {missing}: how many texts, and the .jsonl file that they go to")
