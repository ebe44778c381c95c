"""The one way to open a model and a tokenizer; ``register`` tells transformers of our classes."""

import hashlib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.quantised import quantisation_of
from ladderize.checkpoint.reading import Checkpoint, has_tokenizer, split_revision
from ladderize.errors import UserError
from ladderize.families.base import Family
from ladderize.families.registry import find_family, is_ladderized
from ladderize.families.supported import SUPPORTED

# Transformers' Auto classes of models -> the part of our classes' names.
AUTO_MODELS = {"AutoModel": "Model"} | {
    f"AutoModelFor{task}": f"For{task}"
    for task in ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
}


def ladderized_name(family: Family, name: str) -> str:
    """Return module and name of a class of converted models: ``Config``, ``Model``, ``ForCausalLM``, ..."""
    kind = "configuration" if name == "Config" else "modeling"
    return f"{kind}_ladderized.Ladderized{family.class_prefix}{name}"


def auto_map(family: Family) -> dict[str, str]:
    """Return the names of our classes, by transformers' Auto classes, as config.json has them."""
    return {auto: ladderized_name(family, name) for auto, name in {"AutoConfig": "Config", **AUTO_MODELS}.items()}


def ladderized_class(family: Family, kind: str) -> Any:
    """Return a class of converted models (``Config``, ``DecoderLayer``, ...), as every converted checkpoint has it."""
    module, name = ladderized_name(family, kind).split(".")
    return getattr(import_module(f"ladderize.convert.remote_code.{module}"), name)


def dense_class(family: Family, kind: str) -> Any:
    """Return transformers' own class of a family: ``RMSNorm``, ``RotaryEmbedding``, ``ForCausalLM``, ..."""
    import transformers

    module = getattr(transformers, f"{family.class_prefix}ForCausalLM").__module__
    return getattr(import_module(module), f"{family.class_prefix}{kind}")


def register() -> None:
    """Register converted models with transformers' Auto classes; they then load without ``trust_remote_code``, and
    ``save_pretrained`` also writes the .py files of a converted checkpoint."""
    import transformers

    for family in SUPPORTED:
        config = ladderized_class(family, "Config")
        transformers.AutoConfig.register(family.ladderized_type, config, exist_ok=True)
        config.register_for_auto_class()
        for auto, name in AUTO_MODELS.items():
            model_class = ladderized_class(family, name)
            getattr(transformers, auto).register(config, model_class, exist_ok=True)
            model_class.register_for_auto_class(auto)


def load(
    model: str | Path, *, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False, **kwargs: Any
) -> "PreTrainedModel":
    """Return a causal language model (a folder or a hub id), ladderized or not, in eval mode. A ladderized checkpoint
    always runs this package's code, never the copy in its folder.

    device: such as "cuda:1"; None leaves it to ``kwargs`` (``device_map``) or the CPU.
    trust_remote_code: run the code of other models.
    """
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(model, sound="any")
    register()
    folder = checkpoint.folder
    family = find_family(checkpoint.config)
    quantised = quantisation_of(checkpoint.config, folder) if family is not None else None
    problem = quantised.problem_in_transformers if quantised is not None else None
    if problem is not None:
        raise UserError(f"{model}: {problem}; `ladderize eval --engine vllm` and `vllm serve` run them")
    if is_ladderized(checkpoint.config):
        trust_remote_code = False
    if device is not None:
        kwargs["device_map"] = {"": device}
    config = model_config(checkpoint, trust_remote_code)
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True, **kwargs
    ).eval()


def skeleton(checkpoint: Checkpoint) -> "PreTrainedModel":
    """Return a checkpoint's causal language model on the meta device: all of its modules, and no values."""
    import torch
    from transformers import AutoModelForCausalLM

    register()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config(checkpoint))


def model_config(checkpoint: Checkpoint, trust_remote_code: bool = False) -> "PreTrainedConfig":
    """Return transformers' config of a checkpoint: its class. Of the keys only those that count are the checkpoint's
    (checkpoint/opening.py)."""
    from transformers import AutoConfig

    kind = type(AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code))
    return kind.from_dict(dict(checkpoint.config))


def load_tokenizer(
    model: str | Path, *, trust_remote_code: bool = False, **kwargs: Any
) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer of a checkpoint (a folder or a hub id); None where its folder has none. trust_remote_code:
    run a stranger's tokenizer code."""
    from transformers import AutoTokenizer

    register()  # otherwise transformers warns of an unknown config
    folder = Path(model).expanduser()
    if folder.is_dir() and not has_tokenizer(folder):
        return None
    name, revision = split_revision(str(folder if folder.is_dir() else model))
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code, **kwargs)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise UserError(f"{model}: its tokenizer cannot be loaded ({' '.join(str(error).split())[:200]})") from None


def tokenizer_hash(folder: Path) -> str:
    """Return a hash of everything that decides how text becomes ids."""
    digest = hashlib.sha256()
    others = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
    for pattern in ("tokenizer*", "chat_template*", *others):
        for path in sorted(path for path in folder.glob(pattern) if path.is_file()):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
