"""``generate``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.choices import AS_JSON, MAX_SEED, argument, flag, option
from ladderize.commands.builder import ADVANCED, MEMORY, MODELS, OUTPUT, GivenOptions, command
from ladderize.commands.shared import LOADING, compute_options, start_server
from ladderize.console import Console
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.runtime.requests.options import DEFAULT_SAMPLES_AT_A_TIME, GenerateOptions
from ladderize.runtime.sampling import Sampling

GOES_ON = "A killed run goes on when run again."


@dataclass(frozen=True)
class GenerateArguments:
    model: str = argument("MODEL", "A checkpoint, converted or not: folder or hub id.")
    prompt: tuple[str, ...] = option(
        "Text to continue. Give it several times for a batch.", (), flags="--prompt -p", metavar="TEXT"
    )
    prompt_file: Path | None = option(
        "Answer each row of a file (.jsonl, .parquet: messages, conversations, prompt or text; .txt: lines) into --out."
        f" {GOES_ON}",
        metavar="FILE",
    )
    from_bos: bool = option(f"Sample texts from BOS alone into --out. {GOES_ON}", False)
    num_samples: int | None = option("Number of texts, or of rows to answer.", min=1, shown="all rows of --prompt-file")
    out: Path | None = option("The .jsonl file to write, for adapt --data.", metavar="FILE")
    batch_size: int | None = option(
        "Texts at a time. The KV cache grows with it.", min=1, shown=str(DEFAULT_SAMPLES_AT_A_TIME)
    )
    overwrite: bool = option("Replace --out once the new one is complete.", False)
    temperature: float | None = option("Sampling temperature. 0: greedy.", min=0.0, shown="0; 1 for training data")
    top_k: int | None = option("Sample from the k likeliest tokens.", min=1)
    top_p: float | None = option("Sample from the fewest tokens whose probabilities sum to p.", min=0.0, max=1.0)
    seed: int = option("Sampling seed; the same draws for every --tp-size.", Sampling.seed, min=0, max=MAX_SEED)
    as_json: bool = option(AS_JSON, False)


@command(
    GenerateOptions,
    GenerateArguments,
    panels={
        "Prompts": "prompt chat",
        "Training data (--prompt-file or --from-bos)": "prompt_file from_bos num_samples out batch_size overwrite",
        "Sampling": "max_new_tokens temperature top_k top_p seed ignore_eos stop",
        MODELS: "revision",
        MEMORY: "tp_size backend dtype device threads",
        OUTPUT: "json",
        ADVANCED: "replicate_vocab compile",
    },
    configurable=False,
)
def generate(given: GivenOptions) -> None:
    """Generate text on ladderize's tensor-parallel runtime, or training data: answers to instructions, or texts of the
    model's own."""
    own = given.fill(GenerateArguments)
    _check_mode(own)
    usual = float(own.from_bos or own.prompt_file is not None)  # temperature
    sampling = given.fill(Sampling, temperature=usual if own.temperature is None else own.temperature)
    console = Console(own.as_json)
    with console.stage(LOADING):
        start_server(given.params["tp_size"])
        device = compute_options(given.params["device"], given.params["threads"])
        from ladderize.runtime.texts.answers import answer_prompts
        from ladderize.runtime.texts.corpus import sample_corpus
        from ladderize.runtime.texts.prompts import generate as generate_texts
    options = given.fill(GenerateOptions, sampling=sampling, device=device)
    how: dict[str, Any] = {"batch_size": own.batch_size, "overwrite": own.overwrite, "console": console}
    document: Record | None
    if own.prompt_file is not None and own.out is not None:
        document = answer_prompts(own.model, own.prompt_file, own.out, options, samples=own.num_samples, **how)
    elif own.out is not None and own.num_samples is not None:
        document = sample_corpus(own.model, own.out, own.num_samples, options, **how)
    else:
        document = generate_texts(own.model, own.prompt, options, console=console)
    if document is not None:  # which it is on other ranks than 0
        console.document(document.to_dict())


def _check_mode(own: GenerateArguments) -> None:
    """Raise UsageError unless there is something to continue, with all that it needs and nothing that is another's."""
    if own.from_bos:
        for name in ("prompt", "prompt_file"):
            if getattr(own, name):
                raise UsageError(f"--from-bos begins with the BOS token alone; leave {flag(name)} out")
        if own.num_samples is None or own.out is None:
            missing = "--num-samples N" if own.num_samples is None else "--out FILE"
            raise UsageError(f"--from-bos needs {missing}: how many texts, and the .jsonl file that they go to")
    elif own.prompt_file is not None:
        if own.prompt:
            raise UsageError("--prompt-file brings the prompts; leave --prompt out")
        if own.out is None:
            raise UsageError("--prompt-file needs --out FILE: the .jsonl file that the answers go to")
    elif useless := [name for name in ("num_samples", "out", "batch_size", "overwrite") if getattr(own, name)]:
        raise UsageError(f"{flag(useless[0])} has no effect without --from-bos or --prompt-file")
    elif not own.prompt:
        raise UsageError(
            "there is nothing to continue: give --prompt TEXT, --prompt-file FILE to answer many, or --from-bos to"
            " sample texts of the model's own"
        )
