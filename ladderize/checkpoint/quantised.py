"""Quantised checkpoints: what ``quantization_config`` says of each projection, and whether the tensors keep it.

A layout changes no weight, so such a checkpoint passes through a conversion as it is. Nothing here computes with
quantised weights.
"""

import dataclasses
import fnmatch
import functools
import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ladderize.checkpoint.quantisation_formats import FORMATS, Scheme
from ladderize.checkpoint.reading import FLOAT_DTYPES, Checkpoint, TensorInfo
from ladderize.errors import UserError
from ladderize.families.registry import complete_config
from ladderize.files.documents import read_json

QUANTISATION_KEYS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"  # where older releases of modelopt say what others say in config.json
STATED_IN = QUANTISATION_KEYS[0]
LM_HEAD = "lm_head"
LINEAR_CLASSES = ("Linear", "LinearBase")  # of all projections, as a group's targets name them
ROW_PARALLEL = ("o_proj", "down_proj")  # split by columns under tensor parallelism, the others by rows
KV_SCALE = re.compile(r"(model\.layers\.\d+\.self_attn)\.(?:[kv]_proj\.)?(?:[qkv]_(?:scale|zero_point)|kv_scale)")
ACTIVATION_SCALES = ("input_scale", "activation_scale", "output_scale")
STATIC_SCALES = (
    "the static scales of activations or of the KV cache were measured on the model before this conversion, whose"
    " activations are others; measure the converted model, and calibrate anew where it is worse"
)
QUANTISE_LAST = "convert and retrain the unquantised model, then quantise the result"
MOST_CHOICES = 300_000  # that matching a stranger's regular expression may have to try
LONGEST_NAME = 60  # of a module: what one repetition can try


@dataclass(frozen=True)
class Quantisation:
    """What a config says. rules: (regular expressions of modules, their scheme), the first that matches counts.
    ignored: of modules that no rule is for. head: whether the rules reach the LM head too. kv_cache: whether scales of
    the KV cache may be there."""

    method: str
    rules: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...]
    head: bool
    kv_cache: bool

    def scheme_of(self, module: str) -> Scheme | None:
        """Of a projection by its name; None where it is not quantised."""
        if (module == LM_HEAD and not self.head) or _matches(module, self.ignored):
            return None
        return next((scheme for patterns, scheme in self.rules if _matches(module, patterns)), None)

    @property
    def words(self) -> str:
        """``compressed-tensors int-quantized: int8 weights, one scale per channel; dynamic activations``."""
        schemes = dict.fromkeys(f"{scheme.stored_as}: {scheme.words}" for _, scheme in self.rules)
        return " / ".join([*schemes, *(["scales of the KV cache"] if self.kv_cache else [])])

    @property
    def problem_in_transformers(self) -> str | None:
        """Why transformers does not run it here, in words, or None."""
        for _, scheme in self.rules:
            package = FORMATS[scheme.stored_as].package
            if package is None:
                return f"transformers does not run weights quantised as {scheme.stored_as}"
            if package and importlib.util.find_spec(package) is None:
                name = package.replace("_", "-")
                return f"transformers needs {name} for weights quantised as {scheme.stored_as} (pip install {name})"
        return None

    @property
    def not_run(self) -> str | None:
        """Why nothing is computed with it in transformers here and now, on a CPU, in words, or None. What transformers
        may run, but was not seen to: all but compressed-tensors, and of that packed weights with zero points, which
        5.23 does not load."""
        if (problem := self.problem_in_transformers) is not None:
            return problem
        for _, scheme in self.rules:
            packed = FORMATS[scheme.stored_as].packs_columns and "asymmetric" in scheme.marks
            if self.method != "compressed-tensors" or packed:
                zeros = " with zero points" if packed else ""
                return f"transformers was not seen to run weights quantised as {scheme.stored_as}{zeros} on a CPU"
        return None

    @property
    def is_fp8(self) -> bool:
        """Whether every rule multiplies 8-bit floats."""
        return all(scheme.is_fp8 for _, scheme in self.rules)


def _matches(module: str, patterns: Iterable[str]) -> bool:
    return any(_compiled(pattern).match(module) for pattern in patterns)


@functools.lru_cache(1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what it says of quantisation: that of a model whose weights are floats."""
    return {key: value for key, value in config.items() if key not in QUANTISATION_KEYS}


def dense_targets(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a dense model, where ``quantization_config`` names a class of ours: the class that ours is made of.

    The other way nothing need change: names of modules stay, and a class matches by its parents too.
    """
    found = {key: config[key] for key in QUANTISATION_KEYS if key in config}
    return {**config, **{key: _renamed(value) for key, value in found.items()}}


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    return value.removeprefix("Ladderized") if isinstance(value, str) else value


def quantisation_of(config: Mapping[str, Any], folder: Path | None = None) -> Quantisation | None:
    """What a config, or modelopt's own file in ``folder``, says; None where weights are floats.

    Raises UserError for a method, a format or an option that is not known here.
    """
    stated = next((config[key] for key in QUANTISATION_KEYS if config.get(key)), None)
    if stated is None and folder is not None and (folder / MODELOPT_FILE).is_file():
        stated = {"quant_method": "modelopt", **read_json(folder / MODELOPT_FILE)}
    if stated is None:
        return None
    if not isinstance(stated, dict):
        _refuse(f"is {str(stated)[:60]!r}, but must be an object")
    method = stated.get("quant_method")
    if not isinstance(method, str) or method not in QUANTISATION_METHODS:
        known = ", ".join(QUANTISATION_METHODS)
        if method is None:
            _refuse(f"names no method; a conversion knows {known}")
        _refuse(f"names the method {str(method)[:60]!r}, but a conversion knows {known}")
    return QUANTISATION_METHODS[method](stated)


def _refuse(problem: str) -> NoReturn:
    raise UserError(f"config.json: {STATED_IN} {problem}; convert the unquantised model, and quantise the result")


# ---- the config of each method ----


def _compressed_tensors(config: Mapping[str, Any]) -> Quantisation:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        _refuse("has no config_groups, so nothing says what is quantised")
    for key in ("sparsity_config", "transform_config"):
        if (other := config.get(key)) and not (isinstance(other, dict) and other.get("format") == "dense"):
            _refuse(f"has a {key}, which a conversion does not know")
    schemes: dict[str, Scheme] = {}  # of each target; the last group that names it counts
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(weights := group.get("weights"), dict):
            _refuse(f"has the group {name!r} without weights")
        stored_as = f"{config['quant_method']} {group.get('format') or config.get('format')}"
        if stored_as not in FORMATS:
            known = ", ".join(row.split()[-1] for row in FORMATS if row.startswith("compressed-tensors "))
            _refuse(f"has the group {name!r} in the format {stored_as.split()[-1]!r}, but a conversion knows {known}")
        rows, columns = _compressed_parts(weights, name)
        marks = set() if weights.get("symmetric", True) else {"asymmetric"}
        marks |= {"outputs"} if _activations(group.get("output_activations"), name) == "static" else set()
        kind = str(weights.get("type", "int"))
        bits = _integer(weights.get("num_bits", 8), "num_bits", most=8)
        if kind not in ("int", "float") or (kind == "float" and bits != 8):
            _refuse(
                f"has the group {name!r} with {bits} bits of the type {kind[:60]!r}, which a conversion does not know"
            )
        activations = _activations(group.get("input_activations"), name)
        scheme = Scheme(stored_as, bits, kind, rows, columns, activations, frozenset(marks))
        schemes |= dict.fromkeys(_names(group.get("targets"), "targets"), scheme)
    # whatever the order of groups, names come before regular expressions, and these before classes
    order = sorted(schemes, key=lambda target: (target in LINEAR_CLASSES, target.startswith("re:"), target))
    rules = [((_compressed_target(target),), schemes[target]) for target in order]
    ignored = tuple(map(_compressed_target, _names(config.get("ignore"), "ignore")))
    return Quantisation(config["quant_method"], tuple(rules), ignored, True, bool(config.get("kv_cache_scheme")))


def _compressed_parts(weights: Mapping[str, Any], group: str) -> tuple[int | None, int | None]:
    """Rows and columns of a scale, as ``Scheme`` has them."""
    size, block = weights.get("group_size"), weights.get("block_structure")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "group":
        return 1, _integer(size, "group_size")
    if strategy == "block":
        return _block(block, "block_structure")
    if strategy not in ("tensor", "channel"):
        _refuse(f"has the group {group!r} with the strategy {str(strategy)[:60]!r}, which a conversion does not know")
    return (None if strategy == "tensor" else 1), None


def _activations(scheme: Any, group: str) -> str:
    if not scheme:
        return "none"
    dynamic = scheme.get("dynamic", False) if isinstance(scheme, dict) else None
    if type(dynamic) is not bool:
        _refuse(f"has the group {group!r} with activations that are neither static nor dynamic")
    return "dynamic" if dynamic else "static"


def _compressed_target(target: str) -> str:
    """A regular expression: of a class (all projections are Linear), of ``re:``, or of a name."""
    if target in LINEAR_CLASSES:
        return ".*"
    if not target.startswith("re:"):
        return re.escape(target) + r"\Z"
    return _safe_pattern(target.removeprefix("re:"))


def takes_for_ever(pattern: str) -> bool:
    """Whether matching a stranger's regular expression with the name of a module could."""
    repeats, either = len(re.findall(r"[*+{]", pattern)), len(re.findall(r"(?<!\()\?", pattern))
    groups = pattern.count("(") + 1
    alternatives = (pattern.count("|") / groups + 1) ** groups
    return bool(re.search(r"\)[*+{]", pattern)) or LONGEST_NAME**repeats * 2**either * alternatives > MOST_CHOICES


def _safe_pattern(pattern: str) -> str:
    """A stranger's regular expression. Raises UserError where that is none, or not to be matched safely."""
    if takes_for_ever(pattern):
        _refuse(f"has the regular expression {pattern[:60]!r}, which repeats too much to be matched safely")
    try:
        re.compile(pattern)
    except re.error as error:
        _refuse(f"has the regular expression {pattern[:60]!r}, which is none ({error})")
    return pattern


def _fp8(config: Mapping[str, Any]) -> Quantisation:
    activations = config.get("activation_scheme", "dynamic")
    if activations not in ("static", "dynamic"):
        _refuse(f"has the activation_scheme {str(activations)[:60]!r}, which is neither static nor dynamic")
    block = config.get("weight_block_size")
    if block is None:
        scheme = Scheme("fp8", 8, "float", None, None, activations)
    else:
        scheme = Scheme("fp8 with blocks", 8, "float", *_block(block, "weight_block_size"), "dynamic")
    ignored = [*_names(config.get("ignored_layers"), "ignored_layers")]
    ignored += _names(config.get("modules_to_not_convert"), "modules_to_not_convert")
    return Quantisation("fp8", (((".*",), scheme),), tuple(map(_part_of_name, ignored)), False, True)


def _modelopt(config: Mapping[str, Any]) -> Quantisation:
    stated = config.get("quantization", config)
    if not isinstance(stated, dict):
        _refuse("of modelopt must hold an object")
    algorithms = {"FP8": (None, "static"), "FP8_PER_CHANNEL_PER_TOKEN": (1, "dynamic")}
    if (algorithm := str(stated.get("quant_algo")).upper()) not in algorithms:
        _refuse(f"has the quant_algo {algorithm[:60]!r}, but a conversion knows {', '.join(algorithms)}")
    rows, activations = algorithms[algorithm]
    excluded = [*_names(stated.get("exclude_modules"), "exclude_modules"), *_names(stated.get("ignore"), "ignore")]
    # wildcards; older releases mean a part of the name
    ignored = [pattern for name in excluded for pattern in (fnmatch.translate(name), ".*" + re.escape(name))]
    scheme = Scheme("modelopt", 8, "float", rows, None, activations)
    return Quantisation("modelopt", (((".*",), scheme),), tuple(ignored), True, True)


def _awq(config: Mapping[str, Any]) -> Quantisation:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm" or config.get("bits", 4) != 4:
        _refuse(f"has AWQ's version {version[:60]!r} with {str(config.get('bits'))[:9]} bits, not gemm with 4 bits")
    scheme = Scheme("awq", 4, "int", 1, _group_size(config), "none")
    ignored = map(_part_of_name, _names(config.get("modules_to_not_convert"), "modules_to_not_convert"))
    return Quantisation("awq", (((".*",), scheme),), tuple(ignored), False, False)


def _gptq(config: Mapping[str, Any]) -> Quantisation:
    if config.get("dynamic"):
        _refuse("has GPTQ's rules for single modules (dynamic), which a conversion does not know")
    bits = config.get("bits")
    if bits not in (2, 3, 4, 8):
        _refuse(f"has {str(bits)[:9]} bits, not 2, 3, 4 or 8")
    marks = frozenset({"reordered"} if config.get("desc_act") else ())
    scheme = Scheme("gptq", bits, "int", 1, _group_size(config), "none", marks)
    blocks = config.get("modules_in_block_to_quantize") or []
    flat = [name for part in blocks for name in (part if isinstance(part, list) else [part])]
    targets = tuple(map(_part_of_name, _names(flat, "modules_in_block_to_quantize"))) or (".*",)
    return Quantisation("gptq", ((targets, scheme),), (), bool(config.get("lm_head")), False)


QUANTISATION_METHODS: dict[Any, Callable[[Mapping[str, Any]], Quantisation]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
}


def _part_of_name(name: str) -> str:
    """Whole parts of a module's name: ``layers.1`` is in ``model.layers.1.mlp``, not in ``model.layers.10.mlp``."""
    return rf"(.*\.)?{re.escape(name)}(\..*)?\Z"


def _names(value: Any, key: str) -> list[str]:
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        _refuse(f"has {key} that are no list of names")
    return value


def _integer(value: Any, key: str, most: int = 2**31) -> int:
    if type(value) is not int or not 1 <= value <= most:
        _refuse(f"has the {key} {str(value)[:60]!r}, which is not a number from 1 to {most}")
    return value


def _group_size(config: Mapping[str, Any]) -> int | None:
    size = config.get("group_size", 128)
    return None if size == -1 else _integer(size, "group_size")


def _block(value: Any, key: str) -> tuple[int, int]:
    if not isinstance(value, Sequence) or len(value) != 2:
        _refuse(f"has the {key} {str(value)[:60]!r}, which is not [rows, columns]")
    return _integer(value[0], key), _integer(value[1], key)


# ---- tensors ----


def plain_view(
    checkpoint: Checkpoint, quantisation: Quantisation | None, expected: Mapping[str, tuple[int, ...]]
) -> Checkpoint:
    """The checkpoint as if its projections held floats, for the checks that all checkpoints pass: each quantised
    projection's tensors are checked, and a weight of its shape stands for them. Nothing can be read from it.

    expected: every tensor of the unquantised model, name -> shape. Raises UserError for companions that are missing, of
    another shape or dtype, or of another format.
    """
    if quantisation is None:
        return checkpoint
    _check_kv_scales(checkpoint, quantisation)
    tensors = {name: info for name, info in checkpoint.tensors.items() if not KV_SCALE.fullmatch(name)}
    own: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        own[module][last] = info
    stored = next((info.dtype for name, info in tensors.items() if name.endswith("norm.weight")), "BF16")
    quantised = 0
    for name, shape in expected.items():
        module = name.removesuffix(".weight")
        if not name.endswith(("_proj.weight", LM_HEAD + ".weight")):
            continue
        scheme = quantisation.scheme_of(module)
        if scheme is None:
            if strange := sorted(own[module].keys() - {"weight", "bias"}):
                raise UserError(
                    f"{checkpoint.folder}: {module} has the tensor {strange[0]}, but {STATED_IN} leaves it unquantised;"
                    " one of them is another model's"
                )
            continue
        quantised += 1
        has_bias = f"{module}.bias" in expected
        found = {last: info for last, info in own[module].items() if not (has_bias and last == "bias")}
        _check_companions(checkpoint.folder, module, found, scheme, (shape[0], shape[1]))
        for last in found:
            del tensors[f"{module}.{last}"]
        tensors[name] = TensorInfo(name, next(iter(found.values())).file, stored, shape, 0, 0)
    if not quantised:
        raise UserError(
            f"config.json: {STATED_IN} names no projection of this model; its targets are wrong, or another model's"
        )
    return dataclasses.replace(checkpoint, config=plain_config(checkpoint.config), tensors=tensors)


def _check_companions(
    folder: Path, module: str, found: Mapping[str, TensorInfo], scheme: Scheme, shape: tuple[int, int]
) -> None:
    tensors = FORMATS[scheme.stored_as].tensors
    known = set()
    for name, companion in tensors.items():
        given = next((alias for alias in (name, companion.also) if alias in found), None)
        wanted = companion.needed in ("always", scheme.activations, *scheme.marks)
        if given is None:
            if wanted:
                raise UserError(
                    f"{folder}: the tensor {module}.{name} is missing; a projection that is quantised as"
                    f" {scheme.stored_as} needs it"
                )
            continue
        if not wanted and not companion.optional:
            continue
        known.add(given)
        info, shapes = found[given], companion.shapes(scheme, *shape)
        if info.shape not in shapes:
            raise UserError(
                f"{folder}: {info.name} has shape {list(info.shape)}, but a projection of {list(shape)} that is"
                f" quantised as {scheme.stored_as} asks for {list(shapes[0])}"
            )
        if info.dtype not in companion.dtypes:
            raise UserError(
                f"{folder}: {info.name} is stored as {info.dtype}, but {scheme.stored_as} asks for"
                f" {' or '.join(companion.dtypes)}"
            )
    if strange := sorted(found.keys() - known):
        raise UserError(
            f"{folder}: {module} has the tensor {strange[0]}, which does not belong to {scheme.stored_as}"
            f" ({scheme.words}); the checkpoint mixes formats or its config.json is another model's"
        )


def _check_kv_scales(checkpoint: Checkpoint, quantisation: Quantisation) -> None:
    full = complete_config(checkpoint.config)
    allowed = [(), (1,), *((full[key], 1, 1) for key in ("num_attention_heads", "num_key_value_heads"))]
    for name, info in checkpoint.tensors.items():
        if not KV_SCALE.fullmatch(name):
            continue
        if not quantisation.kv_cache:
            raise UserError(f"{checkpoint.folder}: {name} is there, but {STATED_IN} names no scales of a cache")
        if info.shape not in allowed or info.dtype not in FLOAT_DTYPES:
            raise UserError(
                f"{checkpoint.folder}: {name} is {info.dtype} {list(info.shape)}, but a scale of the KV cache is one"
                " number, or one for each head"
            )


def has_measured_scales(tensors: Iterable[str]) -> bool:
    """Whether scales of activations or of the KV cache are among these names."""
    return any(name.rpartition(".")[2] in ACTIVATION_SCALES or KV_SCALE.fullmatch(name) for name in tensors)


def check_ranks(
    config: Mapping[str, Any], quantisation: Quantisation, ranks: int, expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise UserError unless every projection is whole groups and blocks along what ranks split, and each of several
    ``ranks`` has whole ones, and whole packed words.

    expected: as for ``plain_view``.
    """
    kv_heads = complete_config(config)["num_key_value_heads"]
    for name, (*shape,) in expected.items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or (scheme := quantisation.scheme_of(module)) is None:
            continue
        split = 1 if module.endswith(ROW_PARALLEL) else 0
        shares = min(ranks, kv_heads) if module.endswith(("k_proj", "v_proj")) else ranks
        what, group = ("rows", "columns")[split], (scheme.rows, scheme.columns)[split]
        if group is not None and shape[split] % group:
            key = "group_size" if scheme.rows == 1 else "the block size"
            raise UserError(
                f"config.json: {key} {group} does not divide the {shape[split]} {what} of {module}; repair the file"
            )
        width, step = shape[split] // shares, scheme.steps()[split]
        if ranks > 1 and width % step:
            raise UserError(
                f"{module} is quantised in groups of {step} {what}, which do not divide the {width} {what} of each of"
                f" the {ranks} virtual ranks; choose a smaller --sync-tp-size, or overlap instead of dropping"
            )
