"""``generate``."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import AS_JSON, argument, option
from ladderize.commands.builder import MEMORY, MODELS, OUTPUT, GivenOptions, command
from ladderize.commands.shared import compute_options, loading, start_server
from ladderize.console import Console
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.runtime.sampling import DEFAULT_TEXTS_AT_A_TIME, GenerateOptions, Sampling

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
    num_samples: int | None = option("Texts, or the most rows to answer.", min=1, shown="all rows of --prompt-file")
    out: Path | None = option("The .jsonl file to write, for adapt --data.", metavar="FILE")
    batch_size: int = option("With --out: texts at a time. The KV cache grows with it.", DEFAULT_TEXTS_AT_A_TIME, min=1)
    as_json: bool = option(AS_JSON, False)


@command(
    GenerateOptions,
    Sampling,
    GenerateArguments,
    panels={
        "Prompts": "prompt chat",
        "Training data (--prompt-file or --from-bos)": "prompt_file from_bos num_samples out batch_size",
        "Sampling": "max_new_tokens temperature top_k top_p seed ignore_eos",
        MODELS: "revision",
        MEMORY: "tp_size backend dtype device threads",
        OUTPUT: "json",
    },
    configurable=False,
)
def generate(given: GivenOptions) -> None:
    """Generate text, or training data: answers to instructions, or texts of the model's own."""
    arguments = given.fill(GenerateArguments)
    _check_mode(arguments)
    if arguments.prompt:
        given.refuse({"batch_size"}, "with --prompt, whose texts are answered together")
    untold = {"temperature": 1.0} if arguments.out is not None and given.params["temperature"] is None else {}
    sampling = given.fill(Sampling, **untold)
    console = Console(arguments.as_json)
    with loading(given, console):
        start_server(given.params["tp_size"])
        device = compute_options(given.params["device"], given.params["threads"])
        from ladderize.runtime.generate import generate as generate_texts
        from ladderize.runtime.generate_file import generate_file
    options = given.fill(GenerateOptions, sampling=sampling, device=device)
    document: Record | None
    if arguments.out is None:
        document = generate_texts(arguments.model, arguments.prompt, options, console=console)
    else:
        document = generate_file(
            arguments.model,
            arguments.out,
            arguments.prompt_file,
            options,
            samples=arguments.num_samples,
            batch_size=arguments.batch_size,
            console=console,
        )
    if document is not None:  # None on other ranks than 0
        console.document(document.to_dict())


def _check_mode(arguments: GenerateArguments) -> None:
    """Raise UsageError unless there is one source of prompts, with OUT where it needs one."""
    if sum(map(bool, (arguments.prompt, arguments.prompt_file, arguments.from_bos))) != 1:
        raise UsageError(
            "give one of --prompt TEXT, --prompt-file FILE to answer many, or --from-bos to sample texts of the model's"
            " own"
        )
    if bool(arguments.prompt) == bool(arguments.out):
        raise UsageError("--prompt-file and --from-bos need --out FILE, the .jsonl file to write; --prompt has none")
    if arguments.prompt and arguments.num_samples:
        raise UsageError("--num-samples is for --prompt-file and --from-bos; leave it out")
