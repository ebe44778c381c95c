"""The command line: parse, call, print. Heavy imports live inside the commands, so that ``--help`` is instant."""

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ladderize import __version__
from ladderize.console import DEBUG, Console, UsageError, UserError, error_boundary, human_bytes, is_main_rank, table
from ladderize.layout import RangeSyntaxError, format_ranges

app = typer.Typer(
    name="ladderize",
    help="Turn a dense Llama checkpoint into one that waits less for communication under tensor parallelism.",
    epilog="--debug, given anywhere, shows the traceback behind an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

MAX_SEED = 2**32 - 1
DEFAULT_LAYOUTS = "dense,ladder,spd,spd+ladder"
RANGES = "half-open and comma-separated like 16:32, :8, -16:, 4,8:12 or all"
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit, for a model from the hub.")]


def main() -> None:
    """The console script."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    if debug:
        os.environ[DEBUG] = "1"  # for the ranks that a command starts
    with error_boundary(debug=debug):
        app(arguments, prog_name="ladderize")


def _check_dtype(dtype: str) -> None:
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise UsageError(f"--dtype {dtype} is not one of auto, float32, bfloat16, float16")


def _check_taus(tau1: float | None, tau2: float) -> None:
    if math.isnan(tau2) or (tau1 is not None and not tau1 <= tau2):
        raise UsageError(f"--tau1 {tau1} and --tau2 {tau2} are not in order")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ladderize {__version__}")
        raise typer.Exit


@app.callback()
def root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    pass


@app.command()
def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint folder or a hub id; it is never touched.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write; it appears whole or not at all.")],
    ladder: Annotated[
        str | None, typer.Option(metavar="RANGES", help=f"Layers whose all-reduces are overlapped (Ladder Residual); {RANGES}.")
    ] = None,
    spd: Annotated[
        str | None,
        typer.Option(metavar="RANGES", help="Layers whose attention all-reduce is dropped (Sync-Point Drop), or auto, by --sensitivity."),
    ] = None,
    sync_tp_size: Annotated[int | None, typer.Option(min=1, help="Virtual ranks that --spd is made for; a property of the model.")] = None,
    sensitivity: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="For --spd auto: what `ladderize sensitivity` wrote; alone, drops its in-sensitive blocks."),
    ] = None,
    spd_fraction: Annotated[
        float | None, typer.Option(metavar="F", help="For --spd auto: drop this part of all layers, above 0 and at most 1.")
    ] = None,
    max_ppl_increase: Annotated[
        float | None, typer.Option(metavar="X", help="For --spd auto: drop as long as the summed sensitivities are at most X perplexity.")
    ] = None,
    head_map: Annotated[str | None, typer.Option(metavar="FILE", help="Store attention heads in the orders of this head_map.json.")] = None,
    dense: Annotated[bool, typer.Option("--dense", help="Make every sync point blocking again: a plain Llama.")] = False,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML with these keys, or a ladderize.yaml, instead of the options.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Store weights as float32, float16 or bfloat16.  [default: as in SRC]")] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Write new weight files of at most this size, such as 5GB.")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy unchanged weights instead of hard-linking them.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a checkpoint.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not load the output in plain transformers before it appears.")] = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Convert a Llama checkpoint to another layout of its sync points. Weights change only with --dtype, in order with --head-map."""
    from ladderize.convert.pipeline import convert_checkpoint
    from ladderize.convert.recipe import Recipe, read_recipe

    given = {
        "ladder": ladder, "spd": spd, "sync_tp_size": sync_tp_size, "dense": dense, "dtype": dtype, "max_shard_size": max_shard_size,
        "head_map": head_map, "sensitivity": sensitivity, "spd_fraction": spd_fraction, "max_ppl_increase": max_ppl_increase,
    }  # fmt: skip
    if recipe is not None and (clash := [key for key, value in given.items() if value not in (None, False)]):
        raise UsageError(f"--recipe and --{clash[0].replace('_', '-')} both say what to do; give one of them")
    console = Console(as_json)
    if not out.strip():
        raise UsageError("OUT is empty; name the folder to write")
    what = read_recipe(recipe) if recipe is not None else Recipe(**given)  # type: ignore[arg-type]
    try:
        report = convert_checkpoint(
            src, out, what, revision=revision, copy=copy, overwrite=overwrite, dry_run=dry_run, verify=not no_verify, console=console
        )
    except RangeSyntaxError as error:
        if recipe is None:
            raise
        raise UserError(f"{recipe}: {error}") from None
    console.document(report)
    for remark in report["remarks"]:
        console.note(f"Note: {remark}")
    if selection := report["spd_selection"]:
        shown = [{**row, "sensitivity": f"{row['sensitivity']:.4g}", "dropped": row["dropped"] or ""} for row in selection["blocks"]]
        console.result(table(shown, right=["block", "sensitivity"]) + f"\n\nselected {selection['rule']}")
        console.result(
            f"estimate {selection['estimated_ppl_increase']:+.4g} perplexity, the sum over the dropped blocks: right to first order;\n"
            f"         measure the true increase with `ladderize eval {src} {out} --perplexity FILE`\n"
        )
    if dry_run:
        console.result(table(report["layers"], right=["layer"]) + "\n")
    console.result(f"layout   {report['layout']}")
    console.result(f"weights  {human_bytes(report['weight_bytes'])} in {len(report['weight_files'])} files, {_how(report)}")
    if report["permuted_layers"]:
        console.result(f"heads    in another order in layers {format_ranges(report['permuted_layers'])}")
    if dry_run:
        files = [*report["weight_files"], *report["carried_over"], *report["extra_files"]]
        files.append("config.json, README.md, ladderize.yaml and the model code")
        console.result(f"files    {', '.join(files)}")
    if report["not_carried_over"]:
        console.result(f"left     {', '.join(report['not_carried_over'])} (not carried over)")
    console.result(f"{'would write' if dry_run else 'wrote'} {report['out']}")


def _how(report: dict[str, Any]) -> str:
    if "weights" in report:
        return " and ".join(f"{count} {how}" for how, count in report["weights"].items())
    rewritten = len(report["weight_files_rewritten"])
    counts = {"to be rewritten": rewritten, "to be taken over as they are": len(report["weight_files"]) - rewritten}
    return " and ".join(f"{count} {how}" for how, count in counts.items() if count)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder or a hub id (only its .json files are fetched).")],
    tp_size: Annotated[
        int | None, typer.Option(min=2, help="Ranks to count bytes for.  [default: the layout's sync_tp_size, else up to 8]")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Print the table of all layers too.")] = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Print a checkpoint's layout, size, sync points per token and bytes moved, beside the dense model's."""
    from ladderize.convert.inspection import inspect_checkpoint

    console = Console(as_json)
    report = inspect_checkpoint(model, revision=revision, tp_size=tp_size)
    console.document(report)
    if layers:
        console.result(table(report["layers"], right=["layer"]) + "\n")
    console.result(f"model       {report['model']} ({report['model_type']})")
    console.result(f"layout      {report['layout']}")
    console.result(f"parameters  {report['parameters']:,} stored as {report['dtype']}")
    console.result(f"\nper token, on each of {report['tp_size']} ranks:")
    rows = [{"": name, "dense": report["dense"][key], "this layout": report["this"][key]} for name, key in (
        ("blocking all-reduces", "blocking"), ("overlapped all-reduces", "overlapped"), ("dropped sync points", "dropped"),
        ("bytes reduced", "reduced_bytes"), ("bytes sent (ring)", "sent_bytes"), ("of these, waited for", "exposed_sent_bytes"),
    )]  # fmt: skip
    console.result(table(rows, right=["dense", "this layout"]))


@app.command("eval")
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
    _check_dtype(dtype)
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
    from ladderize.eval.results import check_writable, write_json

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


Device = Annotated[str | None, typer.Option(help="cpu or cuda.  [default: cuda if there is one]")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of each process.  [default: cores / processes]")]
ReplicateVocab = Annotated[
    bool, typer.Option("--replicate-vocab", help="Every rank holds the whole embedding and LM head, which need no all-reduce then.")
]
Compile = Annotated[bool, typer.Option("--compile", help="Run what lies between two all-reduces through torch.compile.")]
Backend = Annotated[str, typer.Option(help="auto, nccl, symm_mem, gloo, shm, or none (no communication: for timing, results are wrong).")]


def _runtime_options(device: str | None, backend: str, dtype: str, threads: int | None, ranks: int) -> str:
    """Check what the runtime's commands share; returns the device."""
    from ladderize.runtime.collectives import check_backend

    device = _compute_options(device, dtype, threads)
    check_backend(backend, ranks, device)
    return device


def _compute_options(device: str | None, dtype: str, threads: int | None) -> str:
    """Check where and how to compute; returns the device."""
    from ladderize.runtime.distributed import cores, default_device

    _check_dtype(dtype)
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device {device} is not cpu or cuda")
    if device == "cuda" and default_device() != "cuda":
        raise UserError("--device cuda, but torch sees no GPU here")
    if threads is not None and threads > len(cores()):
        raise UserError(f"--threads {threads} is more than the {len(cores())} cores that this process may use")
    return device or default_device()


@app.command()
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder or a hub id, converted or not.")],
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", metavar="TEXT", help="What to continue; several make one batch.")],
    tp_size: Annotated[int, typer.Option(min=1, help="Processes to split the model over; under torchrun, as many as it started.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens, or at an EOS token.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token, always.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample among the fewest tokens of this probability.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the random draws: the same for every --tp-size.")] = 0,
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
    """Continue text on ladderize's own tensor-parallel runtime, in any layout."""
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise UsageError(f"--{'top-k' if top_k is not None else 'top-p'} has no effect with --temperature 0; give a temperature")
    if backend == "none":
        raise UsageError("--backend none sums nothing, so its text would be noise; it is for bench")
    device = _runtime_options(device, backend, dtype, threads, tp_size)
    if replicate_vocab and tp_size == 1:
        raise UsageError("--replicate-vocab has no effect with one rank")
    from ladderize.runtime.distributed import check_tp_size
    from ladderize.runtime.generate import Sampling
    from ladderize.runtime.spec import checkpoint_spec
    from ladderize.runtime.text import GenerateOptions, generate_text

    console = Console(as_json)
    check_tp_size(tp_size, device)
    spec = checkpoint_spec(model, tp_size=tp_size, dtype=dtype, revision=revision)
    options = GenerateOptions(
        tp_size=tp_size, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, chat=chat, backend=backend, device=device, threads=threads,
        sampling=Sampling(temperature, top_k or 0, 1.0 if top_p is None else top_p, seed), replicate_vocab=replicate_vocab,
        compile=compile_,
    )  # fmt: skip
    console.document(generate_text(spec, prompt, options, console))


@app.command()
def bench(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Checkpoints; the first is what others are compared with.")
    ] = None,
    random_weights: Annotated[
        str | None, typer.Option(metavar="CONFIG", help="A shape instead of checkpoints: 1b, 3b, 8b, 70b, 405b or a config.json.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=f"With --random-weights: names, or name=RANGE of layers.  [default: {DEFAULT_LAYOUTS}]"),
    ] = None,
    num_layers: Annotated[int | None, typer.Option(min=1, help="With --random-weights: so many layers instead of the config's.")] = None,
    sync_tp_size: Annotated[
        int | None, typer.Option(min=1, help="With --random-weights: virtual ranks of spd.  [default: as many as ranks]")
    ] = None,
    tp_size: Annotated[int, typer.Option(min=1, help="Processes to split the model over; under torchrun, as many as it started.")] = 1,
    emulate_tp: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="One process computes rank 0's part of N, and --link stands for the others.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="LINK", help="ALPHA_US,BETA_GB_S: an all-reduce takes alpha + bytes/beta; or a published link's name."),
    ] = None,
    batch_size: Annotated[str, typer.Option(metavar="A,B", help="Batch sizes, comma-separated.")] = "1",
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens to make; the first belongs to the prefill.")] = 33,
    dtype: Annotated[str, typer.Option(help="auto (as stored; bfloat16 for random weights), float32, bfloat16 or float16.")] = "auto",
    backend: Backend = "auto",
    warmup: Annotated[int, typer.Option(min=1, help="Rounds that are not counted.")] = 2,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds that are; medians are reported.")] = 7,
    baselines: Annotated[str, typer.Option(metavar="A,B", help="Of the first model: parallel (one all-reduce a layer), no-comm.")] = "",
    profile: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write Chrome traces here, and fail if a layout that overlaps shows no overlap.")
    ] = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="Time checkpoints unchecked, without the fp32 reference.")] = False,
    replicate_vocab: ReplicateVocab = False,
    compile_: Compile = False,
    device: Device = None,
    threads: Threads = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of prompts and of the order of variants.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="STEM", help="Draw STEM.png and STEM.svg.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything, raw samples too, as JSON.")] = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Time layouts against each other on ladderize's own tensor-parallel runtime, and show what they wait for."""
    from ladderize.runtime.command import BenchArguments, plan

    device = _runtime_options(device, backend, dtype, threads, emulate_tp or tp_size)
    arguments = BenchArguments(
        models=tuple(models or ()), random_weights=random_weights, layout=layout, num_layers=num_layers, sync_tp_size=sync_tp_size,
        tp_size=tp_size, emulate_tp=emulate_tp, link=link, batch_size=batch_size, prompt_len=prompt_len, output_len=output_len, dtype=dtype,
        backend=backend, warmup=warmup, repeat=repeat, baselines=baselines, profile=profile, check=not no_check, compile=compile_,
        replicate_vocab=replicate_vocab, device=device, threads=threads, seed=seed, revision=revision,
    )  # fmt: skip
    from ladderize.eval.results import check_writable, write_json

    if out is not None:
        check_writable(out)
    from ladderize.figure import check_plot

    if plot is not None:
        check_plot(plot)
    specs, options = plan(arguments)
    from ladderize.runtime.bench import run_bench, unproven
    from ladderize.runtime.report import summary

    console = Console(as_json)
    document = run_bench(specs, options, console)
    console.document(document)
    console.result(summary(document))
    if is_main_rank():
        if out is not None:
            write_json(out, document)
            console.note(f"wrote {out}")
        if plot is not None:
            from ladderize.runtime.plot import draw

            console.note(f"drew {' and '.join(map(str, draw(document, plot)))}")
    if failed := unproven(document):
        raise UserError(f"nothing overlapped in the trace of {' and '.join(failed)}, although the layout overlaps: its row is no result")


Data = Annotated[str, typer.Option("--data", metavar="FILE", help="Text (.txt, .jsonl) or token ids (.npy, .npz, file.npz:array).")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto (as stored), float32, bfloat16 or float16.")]


@app.command()
def sensitivity(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A dense checkpoint folder or hub id.")],
    data: Data,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write sensitivity.json here, as it grows; the same command goes on from it.")],
    sync_tp_size: Annotated[int | None, typer.Option(min=1, help="Virtual ranks to drop sync points for.")] = None,
    mode: Annotated[
        str, typer.Option(help="spd or ladder: the paper's sweep from the last block; each or each-ladder: one block alone.")
    ] = "spd",
    samples: Annotated[int, typer.Option(min=1, help="Windows to score, drawn from the data.")] = 128,
    seq_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a window.  [default: rows of ids, else 2048 or the model's limit]")
    ] = None,
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
    _check_taus(tau1, tau2)
    device = _compute_options(device, dtype, threads)
    from ladderize.eval.results import check_writable, write_json
    from ladderize.runtime.distributed import already_started, set_threads

    if already_started():
        raise UserError("sensitivity runs in one process; start it without torchrun or accelerate launch")
    set_threads(threads, 1)
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

    previous = read_json(out) if out.exists() and not overwrite else None
    document = measure_sensitivity(model, options, console=console, previous=previous, save=lambda value: write_json(out, value))
    console.document(document)
    console.result(table(list(rows_for_table(document)), right=["block", "S", "perplexity"]))
    console.result(f"dense perplexity {document['perplexity'][-1]:.4f}")
    console.note(f"wrote {out}")
    if plot is not None:
        from ladderize.eval.sensitivity_plot import draw

        console.note(f"drew {' and '.join(map(str, draw(document, plot)))}")


Samples = Annotated[int | None, typer.Option(min=1, help="Windows to train on.  [default: what the data give, up to 1024]")]
Heldout = Annotated[int | None, typer.Option(min=1, help="Other windows, for early stopping and the table.  [default: a tenth, up to 64]")]
SeqLen = Annotated[int | None, typer.Option(min=2, help="Tokens of a window.  [default: rows of ids, else 2048 or the model's limit]")]
Epochs = Annotated[int, typer.Option(min=1, help="At most; a block that gets no better for --patience epochs is done.")]
Patience = Annotated[int, typer.Option(min=1, help="Epochs without a better held-out loss.")]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Peak learning rate.  [default: 5e-5 at width 4096, times 4096/width]")]
StepWindows = Annotated[int | None, typer.Option("--batch-size", min=1, help="Windows per step.  [default: 2048 tokens]")]
MaxMemory = Annotated[str, typer.Option(metavar="SIZE", help="Teacher states beyond this lie on disk.")]
WorkDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Unfinished work.  [default: OUT.ladderize-work, gone when done]")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a checkpoint.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not load the output in plain transformers before it appears.")]


def _blockwise(
    data: str, samples: int | None, heldout: int | None, seq_len: int | None, layers: str | None, epochs: int, patience: int,
    lr: float | None, batch_size: int | None, max_memory: str, seed: int, dtype: str, device: str | None, threads: int | None,
    work_dir: Path | None,
) -> Any:  # fmt: skip
    """The options of block-to-block distillation, checked."""
    if lr is not None and not 0 < lr < math.inf:
        raise UsageError(f"--lr must be above 0, not {lr:g}")
    from ladderize.convert.weights import parse_size

    size = parse_size(max_memory, option="--max-memory")
    device = _compute_options(device, dtype, threads)
    from ladderize.adapt.blockwise import BlockwiseOptions
    from ladderize.adapt.distill import DistillOptions
    from ladderize.runtime.distributed import set_threads

    set_threads(threads, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return BlockwiseOptions(
        data=data, samples=samples, heldout=heldout, seq_len=seq_len, layers=layers, dtype=dtype, device=device, work_dir=work_dir,
        distill=DistillOptions(epochs=epochs, patience=patience, lr=lr, batch_size=batch_size, max_memory=size, seed=seed),
    )  # fmt: skip


@app.command()
def adapt(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A converted checkpoint folder or hub id; it is never touched.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write; it appears whole or not at all.")],
    method: Annotated[str, typer.Option(help="blocks: every converted block learns to answer as the dense block does.")],
    teacher: Annotated[str, typer.Option(metavar="DENSE", help="The dense checkpoint that MODEL was converted from.")],
    data: Data,
    layers: Annotated[
        str | None, typer.Option(metavar="RANGES", help=f"Blocks to train; {RANGES}.  [default: all that compute otherwise than DENSE]")
    ] = None,
    samples: Samples = None,
    heldout: Heldout = None,
    seq_len: SeqLen = None,
    epochs: Epochs = 10,
    patience: Patience = 2,
    lr: LearningRate = None,
    batch_size: StepWindows = None,
    max_memory: MaxMemory = "8GB",
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the windows and their order.")] = 0,
    dtype: Annotated[str, typer.Option(help="To compute in: auto (float32 if stored so, else bfloat16), float32 or bfloat16.")] = "auto",
    device: Device = None,
    threads: Threads = None,
    work_dir: WorkDir = None,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Win back accuracy: retrain the converted blocks of a checkpoint against the dense model."""
    if method != "blocks":
        raise UsageError(f"--method {method} is not known; there is blocks (block-to-block distillation)")
    if dtype == "float16":
        raise UsageError("--dtype float16 is too narrow to train in; take bfloat16 or float32")
    options = _blockwise(
        data, samples, heldout, seq_len, layers, epochs, patience, lr, batch_size, max_memory, seed, dtype, device, threads, work_dir
    )
    from ladderize.adapt.blockwise import adapt_blocks, block_rows, perplexity_rows

    console = Console(as_json)
    document = adapt_blocks(model, out, teacher, options, console=console, overwrite=overwrite, verify=not no_verify, revision=revision)
    if not is_main_rank():
        return
    console.document(document)
    console.result(table(block_rows(document["blocks"]), right=["block"]) + "\n")
    console.result(table(perplexity_rows(document["heldout_perplexity"]), right=["perplexity", "stderr", "difference"]))
    console.result(f"wrote {out}")


@app.command()
def spd(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A dense checkpoint folder or hub id; it is never touched.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write; it appears whole or not at all.")],
    sync_tp_size: Annotated[int, typer.Option(min=2, help="Virtual ranks to drop sync points for; a property of OUT.")],
    data: Data,
    spd_fraction: Annotated[float | None, typer.Option(help="Part of all blocks to drop, least sensitive first.  [default: 0.7]")] = None,
    max_ppl_increase: Annotated[float | None, typer.Option(help="Drop while the summed sensitivities stay within this instead.")] = None,
    calibration_samples: Annotated[int, typer.Option(min=1, help="Of the windows to train on, for sensitivity and grouping.")] = 128,
    tau1: Annotated[float | None, typer.Option(help="S up to here: dropped as it is.  [default: 0.05; 0.02 from 30B parameters]")] = None,
    tau2: Annotated[float, typer.Option(help="S above: extremely sensitive.")] = 10.0,
    head_grouping: Annotated[
        str, typer.Option(help="error: of every distilled block, by its error; paper: of extremely sensitive ones, by the paper; none.")
    ] = "error",
    samples: Samples = None,
    heldout: Heldout = None,
    seq_len: SeqLen = None,
    epochs: Epochs = 10,
    patience: Patience = 2,
    lr: LearningRate = None,
    batch_size: StepWindows = None,
    max_memory: MaxMemory = "8GB",
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the windows and their order.")] = 0,
    dtype: Annotated[str, typer.Option(help="To compute in: auto (float32 if stored so, else bfloat16), float32 or bfloat16.")] = "auto",
    device: Device = None,
    threads: Threads = None,
    work_dir: WorkDir = None,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Sync-Point Drop in one command: sensitivity, head grouping, distillation, conversion, and what each step won."""
    if spd_fraction is not None and max_ppl_increase is not None:
        raise UsageError("--spd-fraction and --max-ppl-increase both say how much to drop; give one of them")
    if head_grouping not in ("error", "paper", "none"):
        raise UsageError(f"--head-grouping {head_grouping} is not one of error, paper, none")
    if dtype == "float16":
        raise UsageError("--dtype float16 is too narrow to train in; take bfloat16 or float32")
    _check_taus(tau1, tau2)
    options = _blockwise(
        data, samples, heldout, seq_len, None, epochs, patience, lr, batch_size, max_memory, seed, dtype, device, threads, work_dir
    )
    from ladderize.workflows.spd import SpdOptions, block_rows, perplexity_rows, run_spd

    console = Console(as_json)
    fraction = 0.7 if spd_fraction is None and max_ppl_increase is None else spd_fraction
    what = SpdOptions(
        sync_tp_size=sync_tp_size, training=options, spd_fraction=fraction, max_ppl_increase=max_ppl_increase,
        calibration_samples=calibration_samples, tau1=tau1, tau2=tau2, head_grouping=head_grouping, revision=revision,
    )  # fmt: skip
    document = run_spd(model, out, what, console=console, overwrite=overwrite, verify=not no_verify)
    if not is_main_rank():
        return
    console.document(document)
    console.result(table(block_rows(document), right=["block", "S"]) + "\n")
    console.result(table(perplexity_rows(document["perplexity"]), right=["perplexity", "stderr", "difference"]))
    console.result(f"wrote {out}")


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the converted models and results here.  [default: a temporary folder]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few samples, two of the four conversions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert the bundled tiny Llama to four layouts, win one's accuracy back; see what each costs in accuracy and gains in time."""
    from ladderize.demo.run import run_demo

    console = Console(as_json)
    console.document(run_demo(out, quick=quick, console=console))
