"""What a conversion changes besides the layout, and what it says about it: for those who call the converter."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ladderize.checkpoint.reading import TensorInfo
from ladderize.convert.heads import HeadMap


@dataclass(frozen=True)
class Changes:
    """Nothing, as it stands.

    head_map: the order of heads, instead of the recipe's; q, k, v and o are stored in it. replace: tensors whose values
    are taken from another safetensors file (``TensorInfo.file``, an absolute path) as they are, in the new order of
    heads already; they are stored in the dtype of those that they replace. record: more keys of ladderize.yaml.
    extra_files: JSON files to add, name -> text; they win over those of the source. note: a paragraph for the model
    card.
    """

    head_map: HeadMap | None = None
    replace: Mapping[str, TensorInfo] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    extra_files: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def permuted_layers(self) -> list[int]:
        """The layers whose heads get another order."""
        return self.head_map.permuted_layers if self.head_map is not None else []

    @property
    def replaced_tensors(self) -> list[str]:
        return sorted(self.replace)
