"""``eval`` and ``sensitivity``."""

from pathlib import Path
from typing import Annotated

import typer

from ladderize.commands.options import (
    MAX_SEED,
    AsJson,
    Data,
    Device,
    DtypeOption,
    Revision,
    SeqLen,
    Threads,
    check_dtype,
    check_taus,
    compute_options,
)
from ladderize.console import Console, UsageError, UserError, table


def evaluate(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Checkpoint folders or hub ids; the first is the one to compare with.")
    ],
    tasks: Annotated[str, typer.Option(metavar="A,B", help="lm-eval tasks or groups, comma-separated.")] = "",
    include_path: Annotated[str | None, typer.Option(metavar="DIR", help="A folder with lm-eval tasks of your own.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Samples per task, for a quick look.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in the prompt.  [default: the task's own]")] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Put prompts through the model's chat template.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward pass.")] = 8,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.  [default: cuda if there is one]")] = None,
    revision: Revision = None,
    seed: Annotated[int, typer.Option(min=0, help="For sampling and few-shot examples.")] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run a checkpoint's own Python code; not needed for ladderized ones.")
    ] = False,
    perplexity: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text (.txt, .jsonl) or token ids (.npy, .npz, file.npz:array) to score.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=2, help="Window of --perplexity.  [default: rows of ids, else 2048 or the model's limit]")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write results as JSON, anew after every task.")] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate models alike with lm-eval's tasks and by perplexity; print one table."""
    check_dtype(dtype)
    if seq_len is not None and perplexity is None:
        raise UsageError("--seq-len has no effect without --perplexity")
    names = tuple(dict.fromkeys(task.strip() for task in tasks.split(",") if task.strip()))
    if not names and perplexity is None:
        raise UsageError("nothing to evaluate: name --tasks, or a file for --perplexity")
    for value, option in (
        (include_path, "--include-path"),
        (limit, "--limit"),
        (num_fewshot, "--num-fewshot"),
        (apply_chat_template, "--apply-chat-template"),
    ):
        if value not in (None, False) and not names:
            raise UsageError(f"{option} has no effect without --tasks")
    from ladderize.files.documents import check_writable, write_json

    if out is not None:
        check_writable(out)
    from ladderize.eval.harness import EvalOptions, comparison, evaluate_models

    console = Console(as_json)
    options = EvalOptions(
        tasks=names, include_path=include_path, limit=limit, num_fewshot=num_fewshot, apply_chat_template=apply_chat_template,
        batch_size=batch_size, dtype=dtype, device=device, revision=revision, seed=seed, trust_remote_code=trust_remote_code,
        perplexity=perplexity, seq_len=seq_len,
    )  # fmt: skip
    save = (lambda document: write_json(out, document)) if out is not None else (lambda document: None)
    document = evaluate_models(models, options, console=console, save=save)
    console.document(document)
    console.result(table(comparison(document), right=["value", "stderr", "difference"]))
    if out is not None:
        console.note(f"wrote {out}")


def sensitivity(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A dense checkpoint folder or hub id.")],
    data: Data,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write sensitivity.json here, as it grows; the same command goes on from it.")],
    sync_tp_size: Annotated[int | None, typer.Option(min=1, help="Virtual ranks to drop sync points for.")] = None,
    mode: Annotated[
        str, typer.Option(help="spd or ladder: the paper's sweep from the last block; each or each-ladder: one block alone.")
    ] = "spd",
    samples: Annotated[int, typer.Option(min=1, help="Windows to score, drawn from the data.")] = 128,
    seq_len: SeqLen = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the windows that are drawn.")] = 0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Windows at a time.  [default: 4096 tokens]")] = None,
    tau1: Annotated[float | None, typer.Option(help="S up to here: in-sensitive.  [default: 0.05; 0.02 from 30B parameters]")] = None,
    tau2: Annotated[float, typer.Option(help="S above: extremely sensitive; between: sensitive.")] = 10.0,
    dtype: DtypeOption = "auto",
    device: Device = None,
    threads: Threads = None,
    plot: Annotated[Path | None, typer.Option(metavar="STEM", help="Draw STEM.png and STEM.svg.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure anew, whatever --out holds.")] = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much each block suffers when its sync points are dropped (Sync-Point Drop) or overlapped."""
    from ladderize.eval.sensitivity import MODES, SensitivityOptions, measure_sensitivity, rows_for_table

    if mode not in MODES:
        raise UsageError(f"--mode {mode} is not one of {', '.join(MODES)}")
    if (sync_tp_size is None) != mode.endswith("ladder"):
        drops = not mode.endswith("ladder")
        raise UsageError(f"--mode {mode} {'needs --sync-tp-size N' if drops else 'drops nothing, so --sync-tp-size has no effect'}")
    check_taus(tau1, tau2)
    device = compute_options(device, dtype, threads)
    from ladderize.files.documents import check_writable, write_json
    from ladderize.runtime.launch import already_started, set_threads

    if already_started():
        raise UserError("sensitivity runs in one process; start it without torchrun or accelerate launch")
    set_threads(threads, 1)
    out = out.expanduser()
    check_writable(out)
    if plot is not None:
        from ladderize.figure import check_plot

        check_plot(plot)
    console = Console(as_json)
    options = SensitivityOptions(
        data=data, mode=mode, sync_tp_size=sync_tp_size, samples=samples, seq_len=seq_len, seed=seed, batch_size=batch_size, tau1=tau1,
        tau2=tau2, dtype=dtype, device=device, revision=revision,
    )  # fmt: skip
    from ladderize.convert.checkpoint import read_json

    previous = read_json(out, advice="name another file, or pass --overwrite") if out.exists() and not overwrite else None
    document = measure_sensitivity(model, options, console=console, previous=previous, save=lambda value: write_json(out, value))
    console.document(document)
    console.result(table(list(rows_for_table(document)), right=["block", "S", "perplexity"]))
    console.result(f"dense perplexity {document['perplexity'][-1]:.4f}")
    console.note(f"wrote {out}")
    if plot is not None:
        from ladderize.eval.sensitivity_plot import draw

        console.note(f"drew {' and '.join(map(str, draw(document, plot)))}")
