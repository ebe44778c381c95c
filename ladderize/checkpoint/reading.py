"""The files of a checkpoint, read without loading it: the index, and every safetensors header. Checkpoints come from
strangers: an index may not name a path outside its folder, a header may not lie about sizes, and nothing is unpickled.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladderize.errors import UserError
from ladderize.files.documents import read_json
from ladderize.files.regular import check_regular, open_regular, resolved

if TYPE_CHECKING:
    import torch

# safetensors' name -> bytes of an element, torch's name
KNOWN_DTYPES: dict[str, tuple[int, str]] = {
    **{"F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16")},
    **{"I64": (8, "int64"), "I32": (4, "int32"), "I16": (2, "int16"), "I8": (1, "int8"), "BOOL": (1, "bool")},
    **{"U64": (8, "uint64"), "U32": (4, "uint32"), "U16": (2, "uint16"), "U8": (1, "uint8")},
    **{"F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"), "F8_E8M0": (1, "float8_e8m0fnu")},
    "C64": (8, "complex64"),
}
DTYPE_BYTES = {stored: width for stored, (width, _) in KNOWN_DTYPES.items()}
FLOAT_DTYPES = {stored: KNOWN_DTYPES[stored][1] for stored in ("F64", "F32", "F16", "BF16")}
STORED_NAMES = {name: stored for stored, (_, name) in KNOWN_DTYPES.items()}

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
OTHER_WEIGHTS = (*PICKLES, ".gguf", ".h5", ".msgpack", ".onnx")  # neither downloaded nor carried over


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is in a file, and its name there; start is stop where no value is stored: all are zero."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_stored(self) -> bool:
        """True if its values are in the file."""
        return self.nbytes > 0 or self.numel == 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder: its config, the place of each tensor by the name in the model, which may differ from that in
    the file, and warnings of what is read otherwise than it is written."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    warnings: tuple[str, ...] = ()

    @property
    def weight_files(self) -> list[str]:
        return sorted({tensor.file for tensor in self.tensors.values()})


def has_tokenizer(folder: Path) -> bool:
    """Return whether a checkpoint's folder holds tokenizer files."""
    return any(folder.glob("tokenizer*"))


def check_entries(folder: Path) -> None:
    """Raise UserError unless every file in ``folder`` is regular: transformers opens all that it finds."""
    for entry in folder.iterdir():
        if entry.exists() and not entry.is_dir():
            check_regular(entry)


def read_tensors(folder: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """Return every tensor that transformers would read from ``folder``, by its name in the file, and warnings."""
    has_index = (folder / INDEX).exists()
    if (folder / WEIGHTS).exists():
        shards = sorted(path.name for path in folder.glob("*.safetensors") if path.name != WEIGHTS)
        warning = f"{WEIGHTS} lies beside {INDEX} and its shards ({_some(shards)}); {WEIGHTS} counts, as for"
        warnings = [f"{warning} transformers: remove what is not meant"] if shards and has_index else []
        return read_header(folder, WEIGHTS), warnings
    if not has_index:
        raise _no_weights(folder)
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / INDEX} has no weight_map; download it again")
    tensors: dict[str, TensorInfo] = {}
    for name in sorted(set(map(str, weight_map.values()))):
        if not re.fullmatch(r"[\w.=+-]+\.safetensors", name):  # another could lead out of the folder
            raise UserError(
                f"{folder / INDEX} names the file {name!r}; only plain .safetensors names in the same folder are read"
            )
        if not (folder / name).exists():
            raise UserError(
                f"{folder / INDEX} names {name}, which is not there; the checkpoint is incomplete, download it again"
            )
        for tensor in read_header(folder, name).values():
            if tensor.name in tensors:
                raise UserError(f"{folder}: {tensor.name} is in both {tensors[tensor.name].file} and {name}")
            tensors[tensor.name] = tensor
    for tensor_name, name in weight_map.items():
        if tensor_name not in tensors or tensors[tensor_name].file != name:
            raise UserError(
                f"{folder / INDEX} says that {tensor_name} is in {name}, but it is not; download both again"
            )
    unnamed = [name for name in tensors if name not in weight_map]
    return tensors, [f"{INDEX} leaves out {_some(unnamed)}, which its files hold; the files count"] if unnamed else []


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def read_header(folder: Path, name: str) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file from its header, which safetensors checks against the file."""
    from safetensors import SafetensorError, safe_open

    path = folder / name
    try:
        with open_regular(path) as file, safe_open(path, framework="np"):
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for key, entry in header.items():
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            tensors[key] = TensorInfo(key, name, entry["dtype"], tuple(entry["shape"]), start, stop)
            if entry["dtype"] not in KNOWN_DTYPES:
                raise ValueError(f"{key} has the unknown dtype {entry['dtype']}")
        return tensors
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({error}); download it again") from None


def _no_weights(folder: Path) -> UserError:
    names = sorted(path.name.removesuffix(".index.json") for path in folder.iterdir())
    others = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.lower().endswith(PICKLES)]
    if others:
        return UserError(
            f"{folder} holds {', '.join(others[:3])}, but neither {WEIGHTS} nor {INDEX}; transformers reads no other"
            f" name, so rename a single file to {WEIGHTS}, and download the index of several"
        )
    content = f"only pickle weights ({', '.join(pickles[:3])})" if pickles else f"neither {WEIGHTS} nor {INDEX}"
    return UserError(
        f"{folder} holds {content}; pickle can run code when opened, so it is not read here:"
        " AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(NEW) writes safetensors"
    )


def fetch_weights(name: str) -> Path:
    """Return the snapshot of a hub id with its weights, downloaded if necessary, without pickle weights."""
    unwanted = ["original/*", "consolidated*", *(f"*{suffix}" for suffix in OTHER_WEIGHTS)]
    return _snapshot(name, ignore_patterns=unwanted)


def resolve_json(source: str) -> tuple[Path, bool]:
    """Return a checkpoint's folder, and whether it is local. Of a hub id only the .json files are downloaded."""
    if not source.strip():
        raise UserError("the name of the checkpoint is empty; name a folder or a hub id")
    path = resolved(source)
    if path.exists():
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        gguf = next((file for file in files if file.suffix == ".gguf"), None)
        if gguf is not None and not (path / "config.json").exists():
            raise UserError(
                f"{gguf} is a GGUF file, which ladderize does not read; transformers makes a checkpoint of it"
                " (docs/models.md#gguf)"
            )
        if not path.is_dir() or not files:
            raise UserError(
                f"{source} is {'empty' if path.is_dir() else 'not a folder'}; name the folder of a Hugging Face"
                " checkpoint, with config.json and safetensors weights, or a hub id"
            )
        check_entries(path)
        return path.resolve(), True
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(@[\w./-]+)?", source):
        raise UserError(
            f"{source} does not exist; name a checkpoint folder or a hub id such as meta-llama/Llama-3.2-1B"
        )
    return _snapshot(source, allow_patterns=["*.json"]), False


def split_revision(name: str) -> tuple[str, str | None]:
    """Return the repository of a model's name, and the branch, tag or commit behind an @: ``org/name@main``. A local
    folder has none."""
    if Path(name).expanduser().exists():
        return name, None
    repo, _, revision = name.partition("@")
    return repo, revision or None


def _snapshot(name: str, **patterns: Any) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repo, revision = split_revision(name)
    try:
        return Path(snapshot_download(repo, revision=revision, **patterns))
    except LocalEntryNotFoundError:
        raise UserError(f"{name} is not a local folder and not in the cache, and the hub cannot be reached") from None
    except (HfHubHTTPError, ValueError, OSError) as error:
        raise UserError(
            f"{name} is not a local folder and cannot be downloaded from the hub: {str(error).splitlines()[0]}"
        ) from None


def torch_dtype(stored: str) -> "torch.dtype":
    """Return torch's dtype for a dtype of safetensors."""
    import torch

    dtype: torch.dtype = getattr(torch, KNOWN_DTYPES[stored][1])
    return dtype
