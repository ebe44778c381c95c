"""The conversion of a checkpoint: plan, write, verify, rename into place."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ladderize import __version__
from ladderize.checkpoint.quantised import QUANTISE_LAST
from ladderize.checkpoint.reading import split_revision
from ladderize.checkpoint.tensors import fingerprint
from ladderize.checkpoint.writing import write_weights
from ladderize.console import SCHEMA_VERSION, SILENT, Console, code_span, printable
from ladderize.convert.plan import RECORD, Changes, ConversionReport, Plan, make_plan
from ladderize.convert.recipe import Recipe
from ladderize.convert.verify import verify as verify_output
from ladderize.families.registry import family_of
from ladderize.files import output
from ladderize.files.documents import MAX_YAML_BYTES, parse_yaml
from ladderize.files.regular import read_bytes, resolved
from ladderize.layout import CONFIG_KEYS, MODES, Layout, format_ranges, usual_ranks
from ladderize.modeling import auto_map

REMOTE_CODE = Path(__file__).parent / "remote_code"


def convert_checkpoint(
    src: str | Path,
    out: str | Path,
    recipe: Recipe | Layout,
    changes: Changes | None = None,
    *,
    copy: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = True,
    console: Console = SILENT,
) -> ConversionReport:
    """Convert the checkpoint ``src`` (a folder or a hub id) into the folder ``out``; return a report.

    The output appears whole or not at all, and ``src`` is never touched. Weight files that do not change are
    hard-linked where possible; ``copy=True`` copies them. Errors are UserError, LayoutError or OSError.
    """
    if not dry_run:
        output.clean_up(resolved(out, "OUT "))
    plan = make_plan(str(src), Path(out), recipe, changes or Changes(), overwrite=overwrite)
    report, source = plan.report, plan.source.folder
    if dry_run:
        return report
    copied = {name: source / name for name in report.carried_over}
    if not plan.after.is_dense:
        copied |= {path.name: path for path in REMOTE_CODE.glob("*_ladderized.py")}
    card = source_card(source)
    if card is not None:
        copied["README.source.md"] = card
    texts = {
        **plan.without_code,
        **plan.changes.extra_files,
        "config.json": json.dumps(make_config(plan), indent=2, allow_nan=False) + "\n",
        RECORD: yaml.safe_dump(make_record(plan), sort_keys=False, allow_unicode=True),
        "README.md": make_card(plan),
    }
    verified = None
    with output.atomic_folder(Path(report.out), overwrite=overwrite) as folder:
        with console.progress("writing weights", report.weight_bytes, is_bytes=True) as advance:
            weights = write_weights(source, plan.shards, folder, copy=copy, advance=advance)
        for name, path in copied.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        if verify:
            problem = plan.quantisation.not_run if plan.quantisation is not None else None
            way = f"class and tensors alone: {problem}" if problem else "loading the output in plain transformers"
            with console.stage(f"verifying: {way}"):
                verified = verify_output(folder, report.weight_bytes, plan.quantisation)
    return replace(report, verified=verified, written=True, weights=dict(weights))


def make_config(plan: Plan) -> dict[str, Any]:
    """Return the output's config.json: the source's, with model type, code and layout replaced."""
    dropped = {*CONFIG_KEYS, "auto_map", "ladder_layers", *(["torch_dtype"] if plan.recipe.dtype else [])}
    config = {key: value for key, value in plan.config.items() if key not in dropped}
    if plan.recipe.dtype:
        config["dtype"] = plan.recipe.dtype
    family = family_of(config)
    if plan.after.is_dense:
        return config | {"model_type": family.model_type, "architectures": [f"{family.class_prefix}ForCausalLM"]}
    return config | {
        "model_type": family.ladderized_type,
        "architectures": [f"Ladderized{family.class_prefix}ForCausalLM"],
        "auto_map": auto_map(family),
        **plan.after.to_config(),
    }


def make_record(plan: Plan) -> dict[str, Any]:
    """Return the content of ladderize.yaml: the recipe, the source, and the version that made the output."""
    source = {"name": plan.report.source, "layout": str(plan.before), "fingerprint": fingerprint(plan.source)}
    record = {
        "schema_version": SCHEMA_VERSION,
        "ladderize_version": __version__,
        "layout": str(plan.after),
        "recipe": plan.recipe.to_dict(),
        "source": source,
    }
    if plan.changes.replace:
        record["replaced_tensors"] = sorted(plan.changes.replace)
    if plan.changes.config:
        record["changed_config"] = dict(plan.changes.config)
    return record | dict(plan.changes.record)


MARK = "<!-- written by ladderize convert -->"  # distinguishes our cards from those that people write


def split_front_matter(text: str) -> tuple[dict[str, Any], str]:
    """Return a card's YAML front matter and its body; ({}, text) where there is no readable front matter."""
    text = text.replace("\r\n", "\n")
    end = text.find("\n---", 4) if text.startswith("---\n") else -1
    try:
        data = parse_yaml(text[4 : end + 1]) if 0 < end <= MAX_YAML_BYTES else None
    except ValueError:
        data = None
    return (data, text[end + 4 :].lstrip("-\n")) if isinstance(data, dict) else ({}, text)


def source_card(folder: Path) -> Path | None:
    """Return the card that the source's authors wrote: README.md, or, where that is ours, the one kept with it."""
    readme, kept = folder / "README.md", folder / "README.source.md"
    if readme.is_file() and MARK.encode() not in read_bytes(readme):
        return readme
    return kept if kept.is_file() else None


def make_card(plan: Plan) -> str:
    """Return the text of README.md."""
    header = yaml.safe_dump(_front_matter(plan), sort_keys=False, allow_unicode=True).strip()
    paragraphs = [f"---\n{header}\n---", MARK, f"# {printable(Path(plan.report.out).name)}"]
    name = family_of(plan.source.config).class_prefix
    again = "" if plan.before.is_dense else f" (which was: {plan.before})"
    made_of = f"made of {code_span(plan.report.source)}{again} with ladderize {__version__}"
    if plan.after.is_dense:
        paragraphs.append(f"A dense {name}, {made_of}. Every sync point is blocking; any tool for a {name} reads it.")
    else:
        first, *others, last = (f"{plan.after.count(key)} {key}{mode.explained}" for key, mode in MODES.items())
        counts = ", ".join([first.replace(" ", " are ", 1), *others]) + f" and {last}"
        number = 2 * plan.after.num_layers
        paragraphs.append(f"A {name} of another layout, {made_of}.")
        paragraphs.append(f"**Layout.** {plan.after}: of {number} sync points per token, {counts}.")
    paragraphs += _changes(plan)
    if not plan.after.is_dense:
        paragraphs += [_accuracy(plan), _usage(plan)]
    if source_card(plan.source.folder) is not None:
        paragraphs.append("The source's own card is in [README.source.md](README.source.md).")
    return "\n\n".join(paragraphs) + "\n"


def _front_matter(plan: Plan) -> dict[str, Any]:
    """Return the source's front matter merged with ours. That of an earlier conversion names the hub's model still."""
    readme = plan.source.folder / "README.md"
    card = readme if readme.is_file() else source_card(plan.source.folder)
    front, _ = split_front_matter(card.read_text(encoding="utf-8-sig", errors="replace") if card is not None else "")
    tags = front.get("tags")
    of_modes = {mode.tag: mode.layers for mode in MODES.values() if mode.tag is not None}
    kept = [tag for tag in tags if tag not in ("ladderize", *of_modes)] if isinstance(tags, list) else []
    ours = [tag for tag, layers in of_modes.items() if layers in plan.after.kinds]
    front |= {"library_name": "transformers", "tags": [*kept, "ladderize", *ours]}
    if plan.hub_id:
        front["base_model"] = split_revision(plan.hub_id)[0]
    if "license" not in front and "LICENSE" in plan.report.carried_over:
        front |= {"license": "other", "license_link": "LICENSE"}
    return front


def _changes(plan: Plan) -> Iterator[str]:
    """Yield paragraphs on weights and config that differ from the source's, the quantisation, and warnings."""
    moved = [f"{name} of layers {format_ranges(layers)}" for name, layers in plan.changes.moved.items() if layers]
    if moved:
        yield f"**Order.** The {' and the '.join(moved)} lie in another order, which changes nothing in a dense model."
    if plan.changes.replace:
        number = len(plan.changes.replace)
        yield f"**Weights.** {number} tensors have other values than the source's; `ladderize.yaml` names them."
    if plan.changes.config:
        stated = ", ".join(f"{key} is {json.dumps(value)}" for key, value in plan.changes.config.items())
        yield f"**Config.** Unlike the source's, {stated}."
    if plan.quantisation is not None:
        yield f"**Quantisation.** {plan.quantisation.words}, as in the source."
    if plan.changes.note:
        yield plan.changes.note
    for warning in plan.report.warnings:
        yield f"**Warning.** {warning[:1].upper()}{warning[1:]}."


def _accuracy(plan: Plan) -> str:
    engine, better = "", ""
    if plan.quantisation is not None:
        engine = "" if plan.quantisation.not_run is None else " --engine vllm"
        better = f" Where it is worse than it may be,\n{QUANTISE_LAST}."
    return (
        "**Accuracy.** A conversion changes what the model computes. Measure this checkpoint\nbeside its source"
        f" (`ladderize eval{engine}`) before you rely on it.{better}"
    )


def _usage(plan: Plan) -> str:
    name, layout = Path(plan.report.out).name, plan.after
    limits = "Without the plugin vLLM computes the same (with\n`--trust-remote-code`), but nothing is overlapped."
    if layout.sync_tp_size is not None:
        limits = (
            f"The number of ranks must divide {layout.sync_tp_size}, for which\nits sync points were delayed or"
            " dropped. Engines without the plugin refuse this checkpoint."
        )
    return f"""**Loading.** Without ladderize, the model class in this folder is run. The tokenizer needs the same \
argument, because
transformers reads the model's config first; without it, transformers asks before it goes on:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
```

With ladderize, no code from this folder is run: `ladderize.load("{name}")` and
`ladderize.load_tokenizer("{name}")`, or, after `ladderize.register()`, transformers' Auto classes
without `trust_remote_code`.

**Serving.** vLLM serves it with ladderize's plugin, and runs no code from this folder:

```sh
pip install ".[vllm]"  # in a clone of ladderize
vllm serve {name} --tensor-parallel-size {usual_ranks(plan.source.config, layout)}
```

{limits}"""
