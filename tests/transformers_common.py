"""transformers' own common tests of models, on a dense layout and three others: ``make test-transformers``.

They are not part of this repository. LADDERIZE_TRANSFORMERS_TESTS names their folder, ``tests`` of transformers' source
distribution or of a checkout, which has those of generation and of exporters too.
"""

import importlib
import os
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from ladderize.convert.remote_code.configuration_ladderized import LadderizedLlamaConfig
from ladderize.families.supported import LLAMA
from ladderize.layout import Layout
from ladderize.modeling import AUTO_MODELS, ladderized_class, register
from tests.helpers import SHAPE

SOURCE = Path(os.environ["LADDERIZE_TRANSFORMERS_TESTS"])
PACKAGE = "transformers_tests"
MIXINS = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}


def common_tests() -> ModuleType:
    """transformers' test_modeling_common, with empty classes where the source distribution lacks what it imports."""
    for name in ("", *{f".{name.partition('.')[0]}" for name in MIXINS}):
        package = ModuleType(PACKAGE + name)
        package.__path__ = [str(SOURCE.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    for name, mixin in MIXINS.items():
        if not SOURCE.joinpath(*name.split(".")).with_suffix(".py").exists():
            module = ModuleType(f"{PACKAGE}.{name}")
            setattr(module, mixin, type(mixin, (), {}))
            sys.modules[module.__name__] = module
    module = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    for task in ("", "_FOR_SEQUENCE_CLASSIFICATION", "_FOR_TOKEN_CLASSIFICATION", "_FOR_QUESTION_ANSWERING"):
        known = getattr(module, f"MODEL{task}_MAPPING_NAMES")  # which labels a class takes
        known[LLAMA.ladderized_type] = known["llama"].replace("Llama", "LadderizedLlama")
    return module


register()
common = common_tests()


class Tester:
    batch_size, seq_length, is_training = 2, 7, True
    hidden_size, num_attention_heads, num_hidden_layers = SHAPE["hidden_size"], SHAPE["num_attention_heads"], 2

    def __init__(self, layers: dict[str, Any]) -> None:
        self.layout = Layout.from_layers(self.num_hidden_layers, **layers)

    def get_config(self) -> LadderizedLlamaConfig:
        shape = {**SHAPE, "num_hidden_layers": self.num_hidden_layers}
        return LadderizedLlamaConfig(**shape, **self.layout.to_config())

    def prepare_config_and_inputs_for_common(self) -> tuple[LadderizedLlamaConfig, dict[str, torch.Tensor]]:
        ids = torch.randint(3, SHAPE["vocab_size"], (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class OfALayout(common.ModelTesterMixin, common.GenerationTesterMixin):
    layers: ClassVar[dict[str, Any]] = {}
    all_model_classes = tuple(ladderized_class(LLAMA, what) for what in AUTO_MODELS.values())

    def setUp(self) -> None:
        self.model_tester = Tester(self.layers)


LAYOUTS = {
    "DenseTest": {}, "LadderTest": {"ladder": [0, 1]}, "SpdTest": {"spd": [0, 1], "sync_tp_size": 4},
    "MixedTest": {"spd": [0], "ladder": [1], "sync_tp_size": 2},
}  # fmt: skip
for name, layers in LAYOUTS.items():
    globals()[name] = type(name, (OfALayout, unittest.TestCase), {"layers": layers, "__module__": __name__})
