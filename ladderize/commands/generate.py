"""``generate``."""

import math
from pathlib import Path
from typing import Annotated

import typer

from ladderize.commands.options import (
    MAX_SEED,
    AsJson,
    Backend,
    Compile,
    Device,
    ReplicateVocab,
    Revision,
    Threads,
    _runtime_options,
    options_from,
)
from ladderize.console import Console, UsageError
from ladderize.files.records import Record
from ladderize.ranks.launcher import is_main_rank

DEFAULT_SAMPLES_AT_A_TIME = 64


def generate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder or a hub id, converted or not.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="What to continue; several make one batch."),
    ] = None,
    from_bos: Annotated[
        bool,
        typer.Option(
            "--from-bos", help="Sample texts of the model itself into --out, for adapt; if killed, run it again."
        ),
    ] = False,
    num_samples: Annotated[int | None, typer.Option(min=1, metavar="N", help="With --from-bos: so many texts.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --from-bos: a .jsonl of text and input_ids.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                f"With --from-bos: texts at a time; the KV cache grows with it.  [default: {DEFAULT_SAMPLES_AT_A_TIME}]"
            ),
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With --from-bos: replace --out once the new one is whole.")
    ] = False,
    tp_size: Annotated[
        int, typer.Option(min=1, help="Processes to split the model over; under torchrun, as many as it started.")
    ] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens, or at an EOS token.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0: the likeliest token, always.  [default: 1 with --from-bos, else 0]"),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Sample among the fewest tokens of this probability.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Of the random draws: the same for every --tp-size.")
    ] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts through the model's chat template.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past EOS tokens.")] = False,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    backend: Backend = "auto",
    device: Device = None,
    threads: Threads = None,
    replicate_vocab: ReplicateVocab = False,
    compile_: Compile = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Continue text on ladderize's own tensor-parallel runtime, in any layout, or sample a corpus from the model
    itself."""
    given = {"--num-samples": num_samples, "--out": out, "--batch-size": batch_size, "--overwrite": overwrite or None}
    if from_bos:
        _check_from_bos(prompt, chat, num_samples, out, temperature)
    elif useless := [option for option, value in given.items() if value is not None]:
        raise UsageError(f"{useless[0]} has no effect without --from-bos")
    elif not prompt:
        raise UsageError(
            "there is nothing to continue: give --prompt TEXT, or --from-bos to sample texts of the model's own"
        )
    temperature = float(from_bos) if temperature is None else temperature
    if not math.isfinite(temperature):
        raise UsageError(f"--temperature must be finite, not {temperature}")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise UsageError(
            f"--{'top-k' if top_k is not None else 'top-p'} has no effect with --temperature 0; give a temperature"
        )
    if backend == "none":
        raise UsageError("--backend none sums nothing, so its text would be noise; it is for bench")
    device = _runtime_options(device, backend, dtype, threads, tp_size)
    if replicate_vocab and tp_size == 1:
        raise UsageError("--replicate-vocab has no effect with one rank")
    from ladderize.files.documents import check_writable
    from ladderize.runtime.decode import Sampling
    from ladderize.runtime.launch import check_group_size
    from ladderize.runtime.spec import checkpoint_spec
    from ladderize.runtime.texts.corpus import sample_corpus
    from ladderize.runtime.texts.prompts import GenerateOptions, generate_text

    console = Console(as_json)
    if out is not None and is_main_rank():
        check_writable(out)
    check_group_size(tp_size, device)
    spec = checkpoint_spec(model, tp_size=tp_size, dtype=dtype, revision=revision)
    sampling = options_from(Sampling, ctx.params, temperature=temperature)
    options = options_from(GenerateOptions, ctx.params, sampling=sampling, compile=compile_, device=device)
    document: Record | None
    if out is None or num_samples is None:
        document = generate_text(spec, prompt or [], options, console)
    else:
        batch_size = batch_size or DEFAULT_SAMPLES_AT_A_TIME
        document = sample_corpus(spec, out, num_samples, options, console, batch_size=batch_size, overwrite=overwrite)
    if document is not None:  # which it is on other ranks than 0
        console.document(document.to_dict())


def _check_from_bos(
    prompt: list[str] | None, chat: bool, num_samples: int | None, out: Path | None, temperature: float | None
) -> None:
    """Raise UsageError for what --from-bos lacks or cannot go with."""
    if prompt or chat:
        raise UsageError(f"--from-bos begins with the BOS token alone; leave {'--prompt' if prompt else '--chat'} out")
    if num_samples is None or out is None:
        missing = "--num-samples N" if num_samples is None else "--out FILE"
        raise UsageError(f"--from-bos needs {missing}: how many texts, and the .jsonl file that they go to")
    if out.suffix != ".jsonl":
        raise UsageError(f"--out {out} must end in .jsonl, which tells --data and --perplexity how to read it")
    if temperature == 0:
        raise UsageError(
            "--temperature 0 with --from-bos would give the same text every time; give a temperature above 0"
        )
