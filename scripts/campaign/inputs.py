"""Commands that are given damaged files and strange arguments."""

import contextlib
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import yaml

from ladderize.console import printable
from scripts.campaign.places import COMMANDS, processes_in, start

CPU_S = 10.0  # of the whole command, its ranks included: other programs run on the machine
WALL_S = 120.0
STRANGE = (None, True, -1, 0, 0.5, 1e308, 10**30, "", "x" * 9000, "\x1b[31m\u202e", "a|b`c`<b>", [], {}, [[[]]],
           "../../etc/passwd", "nan", "/dev/zero")  # fmt: skip
WORDS = ("", "-1", "0", "1.5", "nan", "inf", "1e400", "\u0663", "x" * 5000, "a,,b", "9:1", "::", "all,all", "../..",
         "/", "/dev/zero", "\x1b[31m\u202e", "*", "--", "100%", "cuda:9", "{}", "\n", "-0", "1_0", "0x10")  # fmt: skip
READ = (  # a file, and commands that read it
    ("dense/config.json", ("convert", "generate", "eval", "sensitivity", "bench", "spd", "plan", "sweep")),
    ("dense/model.safetensors", ("convert", "generate", "eval", "sensitivity", "bench", "spd", "blocks", "sweep")),
    ("spd/config.json", ("eval", "full", "align", "bench", "inspect", "blocks")),
    ("spd/ladderize.yaml", ("eval", "full", "inspect")),
    ("lora/adapter_config.json", ("merge",)),
    ("lora/adapter_model.safetensors", ("merge",)),
    ("lora/adaptation.json", ("merge",)),
    ("s.json", ("sensitivity", "report of sensitivity", "plan", "plan alone")),
    ("ids.npy", ("eval", "sensitivity", "full", "align", "blocks", "spd", "plan")),
    ("shape-256.json", ("bench of a shape", "plan of a shape")),
    ("found/results.json", ("report",)),
    ("eval.json", ("compare", "report of results")),
    ("found/bench.json", ("report",)),
    ("machine.json", ("plan of a machine",)),
    ("rows.jsonl", ("full of rows", "eval of rows")),
    ("recipe.yaml", ("convert by recipe",)),
    ("options.yaml", ("eval of a file",)),
    ("sweep.yaml", ("sweep", "sweep alone")),
)


def add_files(place: Path) -> None:
    """What only the damaged commands read."""
    (place / "rows.jsonl").write_text("".join(json.dumps({"input_ids": [1, 5, 9 + n, 4, 8]}) + "\n" for n in range(24)))
    (place / "recipe.yaml").write_text(yaml.safe_dump({"ladder": "2:", "spd": "0,1", "sync_tp_size": 2}))
    (place / "options.yaml").write_text(yaml.safe_dump({"batch_size": 2, "seq_len": 16, "dtype": "float32"}))
    machine = place / "machine.json"
    _, errors = start(COMMANDS["calibrate"].arguments(place, machine)).communicate()
    assert machine.exists(), errors


def arguments_of(name: str, place: Path, out: Path) -> list[object]:
    dense = place / "dense"
    others: dict[str, list[object]] = {
        "inspect": ["inspect", place / "spd"],
        "convert by recipe": ["convert", dense, out, "--recipe", place / "recipe.yaml"],
        "plan alone": ["plan", dense, "--hardware", "a100-80gb", "--link", "nvlink", "--tp-size", 2, "--sensitivity",
                       place / "s.json", "--max-ppl-increase", "50%", "--sync-tp-size", 2, "--prompt-len", 8,
                       "--output-len", 8],
        "plan of a shape": ["plan", "--shape", place / "shape-256.json", "--hardware", "h100-sxm", "--tp-size", 2,
                            "--link", "nvlink", "--prompt-len", 8, "--output-len", 8],
        "plan of a machine": ["plan", "--shape", "1b", "--hardware", place / "machine.json", "--link",
                              "nvlink", "--tp-size", 2],
        "bench of a shape": ["bench", "--random-weights", place / "shape-256.json", "--prompt-len", 4,
                             "--output-len", 3, "--repeat", 1, "--threads", 1],
        "report of sensitivity": ["report", place / "s.json", "--out", out],
        "report of results": ["report", place / "eval.json", "--out", out],
        "full of rows": ["adapt", place / "spd", out, "--data", place / "rows.jsonl", "--max-steps", 2,
                         "--device", "cpu", "--batch-size", 2, "--seq-len", 16, "--no-verify", "--write", "last"],
        "eval of rows": ["eval", dense, "--perplexity", place / "rows.jsonl", "--device", "cpu"],
        "eval of a file": ["eval", dense, "--perplexity", place / "ids.npy", "--device", "cpu", "--config",
                           place / "options.yaml"],
        "sweep alone": ["sweep", place / "sweep.yaml", "--out", out, "--dry-run"],
    }  # fmt: skip
    return others[name] if name in others else COMMANDS[name].arguments(place, out)


def suffix_of(name: str) -> str:
    if name in COMMANDS:
        return COMMANDS[name].suffix
    return {"report of results": ".html", "report of sensitivity": ".html"}.get(name, "")


def damage(draw: random.Random, path: Path) -> None:
    """Bytes changed, cut off or doubled; or, of a document, any value somewhere replaced or removed."""
    raw = path.read_bytes()
    if path.suffix in (".json", ".yaml", ".jsonl") and draw.random() < 0.75:
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in raw.splitlines()]
            change_somewhere(draw, lines)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            document = json.loads(raw) if path.suffix == ".json" else yaml.safe_load(raw)
            change_somewhere(draw, document)
            path.write_text(json.dumps(document) if path.suffix == ".json" else yaml.safe_dump(document))
    elif path.suffix == ".csv" and draw.random() < 0.75:
        rows = [line.split(",") for line in raw.decode().splitlines()]
        row = draw.choice(rows)
        row[draw.randrange(len(row))] = str(draw.choice(STRANGE))
        path.write_text("\n".join(map(",".join, rows)) + "\n")
    elif path.suffix == ".safetensors" and draw.random() < 0.75:
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change_somewhere(draw, header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    else:
        at = draw.randrange(len(raw))
        changed = bytearray(raw)
        changed[at] ^= 1 << draw.randrange(8)
        path.unlink()  # another checkpoint may link it
        path.write_bytes(draw.choice([bytes(changed), raw[:at], raw[:at] + raw, b"", raw[at:]]))


def change_somewhere(draw: random.Random, document: Any) -> None:
    holder = document
    while True:
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if not isinstance(holder[key], dict | list) or not holder[key] or draw.random() < 0.2:
            break
        holder = holder[key]
    if draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(STRANGE)


def strange_argument(draw: random.Random, arguments: list[object]) -> str:
    """Replace a word that is no path; returns the option before it."""
    places = [at for at, word in enumerate(arguments) if at and str(arguments[at - 1]).startswith("--")
              and not str(word).startswith("--")]  # fmt: skip
    at = draw.choice(places or [len(arguments) - 1])
    arguments[at] = draw.choice(WORDS)
    return f"{arguments[at - 1]} {str(arguments[at])[:20]!r}"


def give_one(draw: random.Random, place: Path, folder: Path) -> str:
    """What came of a command with something wrong: "accepted", "refused", or what was not as it should be."""
    shutil.copytree(place, folder / "place")
    _relocate(place, folder / "place")
    place = folder / "place"
    if draw.random() < 0.25:
        chosen = draw.choice([*COMMANDS, *{name for _, names in READ for name in names}])
        out = folder / f"out{suffix_of(chosen)}"
        arguments = arguments_of(chosen, place, out)
        what = strange_argument(draw, arguments)
    else:
        name, names = draw.choice(READ)
        chosen = draw.choice(names)
        out = folder / f"out{suffix_of(chosen)}"
        damage(draw, place / name)
        arguments, what = arguments_of(chosen, place, out), name
    before = set(folder.rglob("*"))
    process = start(arguments, cwd=folder)
    begin, used = time.monotonic(), dict[int, float]()
    while not process.has_ended() and time.monotonic() - begin < WALL_S:
        time.sleep(0.2)
        used |= {one: _cpu_seconds(one) for one in processes_in(folder)}
    if not process.has_ended():
        process.kill()
        process.communicate()
        return f"{chosen} with {what}: longer than {WALL_S:g} s"
    wall, cpu = time.monotonic() - begin, sum((used | {process.pid: _cpu_seconds(process.pid)}).values())
    _, errors = process.communicate()
    if process.returncode == 0:
        return "accepted"
    if cpu > CPU_S or (wall > CPU_S and cpu < wall / 10):
        return f"{chosen} with {what}: {cpu:.1f} s of CPU time, {wall:.1f} s"
    sentences = [line for line in errors.splitlines() if line.startswith("Error: ")]
    right = process.returncode in (1, 2) and len(sentences) == 1 and "unexpected error" not in errors
    if not right or "Traceback" in errors or printable(errors) != errors:
        return f"{chosen} with {what}: exit code {process.returncode}: {errors[-500:]}"
    # the results of models that were evaluated before are kept, and of the stages of a sweep
    if "eval" not in chosen and chosen != "sweep":
        left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path not in before)
        left = [name for name in left if "ladderize-work" not in name]
        if left:
            return f"{chosen} with {what}: left {left}: {sentences[0][-200:]}"
    return "refused"


def _relocate(before: Path, now: Path) -> None:
    """The files that name others."""
    for path in (now / "sweep.yaml", now / "s.json"):
        path.write_text(path.read_text().replace(str(before), str(now)))


def _cpu_seconds(process: int) -> float:
    """Of a process, which may have ended, and of its threads."""
    with contextlib.suppress(OSError):
        times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    return 0.0
