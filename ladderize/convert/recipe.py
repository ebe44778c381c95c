"""A recipe: the options that decide what a conversion computes, as a dataclass and as YAML."""

import difflib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from ladderize.console import UsageError, UserError
from ladderize.convert.weights import DTYPES, parse_size
from ladderize.convert.yaml12 import Yaml12Loader, load_yaml
from ladderize.layout import Layout, RangeSyntaxError, parse_ranges


@dataclass(frozen=True)
class Recipe:
    """What ``ladderize convert`` is to do; None means: leave it as it is in the source.

    ladder, spd: ranges of layers. sync_tp_size: virtual ranks for spd. dense: all sync points blocking again.
    dtype: float32, float16 or bfloat16. max_shard_size: such as 5GB.
    """

    ladder: str | None = None
    spd: str | None = None
    sync_tp_size: int | None = None
    dense: bool = False
    dtype: str | None = None
    max_shard_size: str | None = None

    def __post_init__(self) -> None:
        if self.dense and self.names_layers:
            raise UsageError("--dense makes every sync point blocking; it does not go with --ladder or --spd")
        if self.spd is not None and self.sync_tp_size is None:
            raise UsageError("--spd needs --sync-tp-size N, the number of ranks that the sync points are dropped for")
        if self.sync_tp_size is not None and self.spd is None:
            raise UsageError("--sync-tp-size has no effect without --spd; leave it out, or name the layers to drop")
        if self.sync_tp_size is not None and (type(self.sync_tp_size) is not int or self.sync_tp_size < 1):
            raise UsageError(f"--sync-tp-size must be a positive integer, not {self.sync_tp_size!r}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype} is not one of {', '.join(DTYPES)}")
        if self.max_shard_size is not None:
            parse_size(self.max_shard_size)

    @property
    def names_layers(self) -> bool:
        return self.ladder is not None or self.spd is not None

    def layout(self, source: Layout) -> Layout:
        """The layout that this recipe makes of a source's; raises LayoutError for ranges that do not fit."""
        layers = source.num_layers
        if self.dense:
            return Layout.dense(layers)
        if not self.names_layers:
            return source
        ladder = parse_ranges(self.ladder, layers, option="--ladder") if self.ladder is not None else []
        spd = parse_ranges(self.spd, layers, option="--spd") if self.spd is not None else []
        return Layout.from_layers(layers, ladder=ladder, spd=spd, sync_tp_size=self.sync_tp_size)

    def to_dict(self) -> dict[str, Any]:
        """Only what was said, so that the YAML reads like the command line."""
        return {key: value for key, value in asdict(self).items() if value not in (None, False)}


class RecipeLoader(Yaml12Loader):
    """YAML without silently repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return mapping


def read_recipe(path: Path) -> Recipe:
    """Read a recipe file, or the ``recipe`` key of a ladderize.yaml."""
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a recipe file")
    try:
        document = load_yaml(path.read_text(encoding="utf-8"), RecipeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML (a range that ends in a colon needs quotes): {' '.join(str(error).split())}") from None
    if isinstance(document, dict) and "recipe" in document:
        document = document["recipe"]
    if not isinstance(document, dict) or not document:
        raise UserError(f"{path} holds no recipe; write for example 'ladder: 16:32'")
    known = [field.name for field in fields(Recipe)]
    for key in document:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
            raise UserError(f"{path}: unknown key {key!r}; {hint}")
    for key in ("ladder", "spd"):
        if key in document:
            document[key] = _ranges_text(document[key], f"{path}: {key}")
    for key, wanted in (("dense", bool), ("dtype", str)):
        if key in document and not isinstance(document[key], wanted):
            raise UserError(f"{path}: {key} is {document[key]!r}, but must be a {wanted.__name__}")
    try:
        return Recipe(**document)
    except (UsageError, RangeSyntaxError) as error:
        raise UserError(f"{path}: {error}") from None


def _ranges_text(value: Any, where: str) -> str:
    if isinstance(value, list) and all(isinstance(item, int | str) and not isinstance(item, bool) for item in value):
        return ",".join(map(str, value))
    if isinstance(value, int | str) and not isinstance(value, bool):
        return str(value)
    raise UserError(f"{where} is {value!r}; write ranges such as 16:32, or a list of layers")
