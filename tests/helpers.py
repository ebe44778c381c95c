"""Small models and the command line, for all tests."""

import contextlib
import io
import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ladderize.blocks import Blocks
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.cli import main
from ladderize.console import Console, printable
from ladderize.convert.remote_code.modeling_ladderized import LadderizedLlamaForCausalLM
from ladderize.families.registry import family_of
from ladderize.files.records import Record
from ladderize.layout import APART, ATTENTION_MODES, BLOCKING, MLP_MODES, Layout, parse_ranges
from ladderize.modeling import ladderized_class
from ladderize.runtime.decode import Sampling, sample
from tests.warm import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
STORIES = ROOT.parent / "shared" / "fixtures" / "stories260K"
SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True}
LLAMA_3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

# name -> (ladder, spd, sync_tp_size, config extras)
LAYOUTS = {
    "dense": ("", "", None, {}),
    "ladder all": ("all", "", None, {}),
    "ladder last half": ("2:", "", None, {}),
    "ladder first": ("0", "", None, {}),
    "ladder gaps": ("1,3", "", None, {}),
    "ladder with biases": ("all", "", None, BIASES),
    "spd all 2": ("", "all", 2, {}),
    "spd all 4": ("", "all", 4, {}),
    "spd more ranks than kv heads": ("", "all", 8, {}),
    "spd some": ("", "0,2", 4, {}),
    "spd with biases": ("", "all", 4, BIASES),
    "mixed": ("2:", "0:2", 2, {}),
    "same layer": ("all", "all", 4, {}),
    "same layer with biases": ("1:3", "1:4", 2, BIASES),
    "delayed all 2": ("", "", 2, {}, "all"),
    "delayed more ranks than kv heads": ("", "", 8, {}, "all"),
    "delayed with biases": ("", "", 4, BIASES, "1:3"),
    "spd and delayed": ("", "0,2:", 4, {}, "1,3"),
    "same layer delayed with biases": ("", "1:", 2, BIASES, "1:"),
    "every mode": ("0", "3", 4, {}, "2:"),
}

# Of each family that is no Llama: what its models here have beside SHAPE, so that everything of the family matters in a
# few tokens. Windows are shorter than the tests' texts; layers with and without them, or without rope, take turns.
FAMILIES = {
    "mistral": {"sliding_window": 6, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {
        "use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"] * 2,
        "head_dim": 8, "attention_bias": True,
    },
    "granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.5,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    },
    "smollm3": {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 1, 0]},
    "seed_oss": {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "ministral": {"head_dim": 8, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "cwm": {
        "head_dim": 8, "sliding_window": 5, "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gemma3_text": {
        "head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 12, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    },
    "phi3": {
        "head_dim": 8, "sliding_window": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "exaone4": {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
}  # fmt: skip
NORMED_SUMS = ("gemma3_text", "exaone4", "glm4")  # a norm behind each sum: nothing is delayed or dropped

# Adam's first step is as long for a gradient that all but cancels, of which rounding decides the sign. Gradients that
# are clipped to this norm leave of such a one less than Adam's epsilon: then runs that round otherwise train the same.
CLIPPED = ("--max-grad-norm", 1e-4)


def fitting(name: str, model_type: str) -> str:
    """Return the name of a layout that a family can have: this one, or one without delayed and dropped sums."""
    return "ladder gaps" if model_type in NORMED_SUMS and LAYOUTS[name][2] is not None else name


def make_layout(name: str) -> Layout:
    ladder, spd, ranks, _, *delayed = LAYOUTS[name]
    layers = SHAPE["num_hidden_layers"]
    ranges = {"ladder": ladder, "spd": spd, "delayed": "".join(delayed)}
    named = {key: parse_ranges(value, layers) for key, value in ranges.items() if value}
    return Layout.from_layers(layers, **named, sync_tp_size=ranks)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights, norms and biases far from their initial values, so that an error in any of them shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * (0.15 if parameter.ndim > 1 else 0.3)
            parameter.add_(noise.to(parameter.dtype))


def random_layout(layers: int = 4) -> Layout:
    """Any that there is, of 4 virtual ranks where it needs some."""
    attention = random.choices(ATTENTION_MODES, k=layers)
    mlp = [*random.choices(MLP_MODES, k=layers - 1), BLOCKING]
    return Layout(tuple(attention), tuple(mlp), 4 if {*APART} & {*attention, *mlp} else None)


def make_model(
    name: str, *, seed: int | None = None, model_type: str = "llama", **extra: object
) -> LadderizedLlamaForCausalLM:
    """A random model with one of LAYOUTS, of another one where its family cannot have this; a fresh seed each time
    unless one is given."""
    name = fitting(name, model_type)
    family, layout = family_of({"model_type": model_type}), make_layout(name).to_config()
    sizes = {**SHAPE, **FAMILIES.get(model_type, {}), **LAYOUTS[name][3], **extra}
    config = ladderized_class(family, "Config")(**sizes, **layout)
    model = ladderized_class(family, "ForCausalLM")(config).eval()
    randomise(model, int(torch.randint(1 << 30, ())) if seed is None else seed)
    return model


def save_llama(
    folder: Path,
    *,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    model_type: str = "llama",
    **extra: object,
) -> Path:
    config = AutoConfig.for_model(model_type, **{**SHAPE, **FAMILIES.get(model_type, {}), **extra})
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    size = sum(p.numel() * dtype.itemsize for p in model.parameters())
    model.to(dtype).save_pretrained(folder, max_shard_size=size // shards + size // 8 if shards > 1 else "5GB")
    return folder


def blocks_of(folder: Path, dtype: torch.dtype = torch.float32) -> Blocks:
    return Blocks(open_checkpoint(str(folder)), dtype, torch.device("cpu"))


def epochs(most: int) -> Any:
    """A context in which blocks are distilled for so many epochs, an option that Python alone has."""
    from ladderize.adapt.layers.rewrite import METHODS

    blocks = METHODS["blocks"]
    changed = replace(blocks, run=lambda job, options: blocks.run(job, replace(options, epochs=most)))
    return mock.patch.dict(METHODS, {"blocks": changed})


def change_json(path: Path, edit: Callable[[Any], object]) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def edit_json(path: Path, **changes: object) -> None:
    change_json(path, lambda document: document.update(changes))


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> dict[str, torch.Tensor]:
    """Write the weights of ``folder``, which are in one file, anew as ``change`` has edited them in place; returns
    them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()  # it may share its bytes with another checkpoint's
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def change_weights(folder: Path, function: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({name: function(name, x) for name, x in tensors.items()}))


def changed_tensors(one: Path, other: Path) -> set[str]:
    """Of two checkpoints with the same tensors, those whose values differ."""
    before, after = all_tensors(one), all_tensors(other)
    assert list(before) == list(after)
    return {name for name in before if not torch.equal(before[name], after[name])}


def held_bytes(weights: object) -> int:
    """The bytes of the distinct tensors that an object holds, and all that it holds; a norm's second copy is left
    out."""
    tensors: dict[int, torch.Tensor] = {}

    def collect(found: object) -> None:
        if isinstance(found, torch.Tensor):
            tensors[id(found)] = found
        elif isinstance(found, list | tuple):
            for each in found:
                collect(each)
        else:
            for name in {*getattr(found, "__dict__", ()), *getattr(found, "__slots__", ())} - {"doubled"}:
                collect(getattr(found, name))

    collect(weights)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())  # also of packed ones


def fresh_rng() -> np.random.Generator:
    """A generator of numpy with another seed in every test; torch's has the test's own (conftest.py)."""
    return np.random.default_rng(int(torch.randint(1 << 30, ())))


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, SHAPE["vocab_size"], shape)


def random_ranks(ranks: int, neurons: int = SHAPE["intermediate_size"]) -> tuple[int, ...]:
    """A rank for each neuron, as many on each; not those of the order in which neurons lie."""
    found = (torch.randperm(neurons) % ranks).tolist()
    return tuple(found) if ranks == 1 or found != sorted(found) else random_ranks(ranks, neurons)


def clearly_chosen(
    model: torch.nn.Module, prompt: list[int], new: list[int], sampling: Sampling | None = None, row: int = 0
) -> bool:
    """Whether a model of transformers chooses the tokens ``new`` after ``prompt`` also with logits that are off by ten
    times what rounding does: only then must another order of the sums choose them too. sampling: None is greedy; row:
    its number of this text."""
    sampling = sampling or Sampling()
    draws = sampling.draws(1, len(new), row)[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
    return all(sample(logits + 1e-5 * torch.randn_like(logits), sampling, draws).tolist() == new for _ in range(12))


def listing(folder: Path) -> list[str]:
    """Everything in a folder, hidden entries included: what a failed command left behind."""
    return sorted(path.name for path in folder.iterdir())


def training_command(name: str, place: Path, out: Path) -> list[object]:
    """The arguments of a short command of each kind that trains on what is in the fixture ``place``."""
    same = ["--data", place / "ids.npy", "--device", "cpu"]
    adapt = ["adapt", place / "spd", out, *same, "--write", "last"]
    retraining = [*adapt, "--max-steps", 3, "--batch-size", 2, "--seq-len", 16]
    taught = [*adapt, "--no-verify", "--distill-from", place / "dense", "--method"]
    spd = ["spd", place / "dense", out, *same, "--no-verify", "--sync-tp-size", 2, "--repair", "blocks"]
    return {
        "full": [*retraining, "--no-verify"],
        "lora": [*retraining, "--method", "lora", "--lora-rank", 2],
        "align": [*taught, "align"],
        "blocks": [*taught, "blocks", "--samples", 8],
        "spd": [*spd, "--samples", 8],
    }[name]


def assert_there_and_back(kind: type[Record], document: dict[str, object]) -> None:
    rest = {key: value for key, value in document.items() if key not in ("schema_version", "ladderize_version")}
    assert kind.from_dict(document, "a document").to_dict() == rest


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str


def invoke(*arguments: object) -> Outcome:
    """The command line in this process, which spares the imports: exit code, stdout, stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code: object = 0
    with mock.patch.object(sys, "argv", ["ladderize", *map(str, arguments)]):
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                main()
            except SystemExit as stop:
                code = stop.code or 0
    assert isinstance(code, int), code
    outcome = Outcome(code, stdout.getvalue(), stderr.getvalue())
    for shown in outcome[1:]:
        assert printable(shown) == shown  # whatever names a stranger's file holds
    return outcome


def invoke_well(*arguments: object) -> Outcome:
    outcome = invoke(*arguments)
    assert outcome.code == 0, outcome.stderr
    return outcome


@dataclass
class Bar:
    description: str
    total: int
    steps: list[int] = field(default_factory=list)
    details: list[str] = field(default_factory=list)


def record_bars(monkeypatch) -> list[Bar]:
    """The progress that commands in this process show from now on."""
    bars: list[Bar] = []

    @contextlib.contextmanager
    def recorded(self, description, total, *, done=0, is_bytes=False):
        bars.append(bar := Bar(description, total, [done]))

        def advance(steps=1, detail=""):
            bar.steps.append(steps)
            bar.details.append(detail)

        yield advance

    monkeypatch.setattr(Console, "progress", recorded)
    return bars


def one_sentence(outcome: Outcome) -> str:
    """The message of a failed command; checks that it is one line, after stages of the work at most, and no
    traceback."""
    assert outcome.code in (1, 2), outcome
    assert outcome.stdout == ""
    *stages, last = outcome.stderr.strip().splitlines()
    assert last.startswith("Error: "), outcome.stderr
    assert len(last) < 2000
    assert not any(line.startswith(("Error", "Traceback", " ")) for line in stages), outcome.stderr
    return last


def invoke_json(*arguments: object) -> Any:
    return json.loads(invoke_well(*arguments, "--json").stdout)


def refusal(*arguments: object, code: int = 1) -> str:
    outcome = invoke(*arguments)
    message = one_sentence(outcome)
    assert outcome.code == code, outcome
    return message


def all_gone(numbers: Iterable[int]) -> bool:
    """Whether these processes end within PATIENCE; one that nobody has waited for yet has ended too."""

    def alive(number: int) -> bool:
        try:
            return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        except OSError:
            return False

    deadline = time.monotonic() + PATIENCE
    left = list(numbers)
    while (left := list(filter(alive, left))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left
