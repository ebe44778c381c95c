"""The model card (README.md) of an output: the source's front matter with ours merged in, and what was done."""

from collections.abc import Sequence
from typing import Any

import yaml

from ladderize import __version__
from ladderize.files.yaml12 import parse_yaml
from ladderize.layout import Layout, format_ranges

MARK = "<!-- written by ladderize convert -->"  # tells our cards from those that people write
TAGS = {"ladder": "ladder-residual", "spd": "sync-point-drop"}


def split_front_matter(text: str) -> tuple[dict[str, Any], str]:
    """A card's YAML front matter and its body; ({}, text) where there is none that can be read."""
    text = text.replace("\r\n", "\n")
    if text.startswith("---\n") and (end := text.find("\n---", 4)) != -1:
        try:
            data = parse_yaml(text[4 : end + 1])
        except ValueError:
            data = None
        if isinstance(data, dict):
            return data, text[end + 4 :].lstrip("-\n")
    return {}, text


def make_card(
    name: str,
    source: str,
    source_card: str,
    layout: Layout,
    before: Layout,
    *,
    hub_id: str | None,
    ranks: int,
    permuted: Sequence[int] = (),
    replaced: int = 0,
    note: str = "",
) -> str:
    """The text of README.md.

    hub_id: where the source came from, if from the hub. ranks: how many the example of serving starts. permuted: layers
    with another order of heads. replaced: how many tensors have other values than the source's. note: a paragraph on
    how they came about.
    """
    front, _ = split_front_matter(source_card)
    tags = front.get("tags")
    tags = tags if isinstance(tags, list) else []
    ours = ["ladderize", *(tag for kind, tag in TAGS.items() if kind in str(layout))]
    front = {**front, "library_name": "transformers", "tags": [*tags, *(tag for tag in ours if tag not in tags)]}
    if hub_id:
        front["base_model"] = hub_id
    return "\n".join(
        [
            "---",
            yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip(),
            "---",
            "",
            MARK,
            "",
            _body(name, source, layout, before, ranks, permuted, replaced, note, bool(source_card)),
            "",
        ]
    )


def _changes(permuted: Sequence[int], replaced: int) -> str:
    """What became of the weights; empty where they are the source's (apart from their dtype)."""
    sentences = []
    if permuted:
        sentences.append(
            f"The attention heads of layers {format_ranges(permuted)} are in another order, which makes no"
            " difference to a dense model."
        )
    if replaced:
        sentences.append(f"{replaced} tensors have other values than the source's; `ladderize.yaml` names them.")
    return f"\n\n**Weights.** {' '.join(sentences)}" if sentences else ""


def _serving(name: str, layout: Layout, ranks: int) -> str:
    """How to serve it, and what engines without our plugin make of it."""
    if layout.sync_tp_size is None:
        limits = "Without the plugin vLLM computes the same (with\n`--trust-remote-code`), but nothing is overlapped."
    else:
        limits = (
            f"The number of ranks must divide {layout.sync_tp_size}, for which\nits sync points were dropped. Engines"
            " without the plugin refuse this checkpoint."
        )
    return f"""**Serving.** vLLM serves it with ladderize's plugin, and runs no code from this folder:

```sh
pip install "ladderize[vllm]"
vllm serve {name} --tensor-parallel-size {ranks}
```

{limits}"""


def _body(
    name: str,
    source: str,
    layout: Layout,
    before: Layout,
    ranks: int,
    permuted: Sequence[int],
    replaced: int,
    note: str,
    has_source_card: bool,
) -> str:
    changes = _changes(permuted, replaced) + (f"\n\n{note}" if note else "")
    blocking, overlapped, dropped = (layout.count(mode) for mode in ("blocking", "overlapped", "dropped"))
    original = "\n\nThe source's own card is in [README.source.md](README.source.md)." if has_source_card else ""
    accuracy = (
        ", and nothing here was retrained by it. Measure this checkpoint\nbeside its source (`ladderize eval`) and"
        " adapt it"
    )
    if replaced:
        accuracy = ". Measure this checkpoint beside its source (`ladderize eval`)"
    if layout.is_dense:
        again = f" (which was: {before})" if not before.is_dense else ""
        return (
            f"# {name}\n\nA dense Llama, made of `{source}`{again} with ladderize {__version__}. "
            f"Every sync point is blocking; any Llama tool reads it.{changes}{original}"
        )
    return f"""# {name}

Converted from `{source}` with ladderize {__version__}.

**Layout.** {layout}: of {2 * layout.num_layers} sync points per token, {blocking} are blocking, {overlapped} overlapped
(Ladder Residual, arXiv 2501.06589) and {dropped} dropped (Sync-Point Drop, arXiv 2502.20727).{changes}

**Accuracy.** A conversion changes what the model computes{accuracy} before you rely on it.

**Loading.** Without ladderize, the model class in this folder is run. The tokenizer needs the same argument, because
transformers reads the model's config first; without it, transformers asks before it goes on:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
```

With ladderize, no code from this folder is run:

```python
import ladderize
model = ladderize.load("{name}")
tokenizer = ladderize.load_tokenizer("{name}")
```

After `ladderize.register()`, transformers' Auto classes need no `trust_remote_code` either.

{_serving(name, layout, ranks)}{original}"""
