"""Configurations of decoders whose sync points are blocking, overlapped, delayed or dropped, one by one.

The class of a family, such as LadderizedLlamaConfig, is made of transformers' own when it is first asked for.
"""

import sys
from dataclasses import dataclass

import transformers

ATTENTION_MODES = ("blocking", "overlapped", "delayed", "dropped")
MLP_MODES = ("blocking", "overlapped", "delayed")


@dataclass(repr=False)  # transformers' shows all of a config
class LadderizedConfig:
    """A layout, before a family's own configuration among the bases of a class.

    attention_sync: the mode of each layer's attention sync point: "blocking" (the dense model), "overlapped" (Ladder
        Residual, arXiv 2501.06589), "delayed" (each rank reads its own partial at once, the others' a sub-module
        later) or "dropped" (Sync-Point Drop, arXiv 2502.20727).
    mlp_sync: the same for each layer's MLP sync point, which is not "dropped"; the last is "blocking".
    sync_tp_size: the number of virtual ranks that the delayed and dropped sync points were made for; None when there
        are none.

    Left out, all three mean a dense model. An impossible layout raises ValueError.
    """

    # The state between two layers can be a pair of tensors, which pipeline stages do not hand on.
    base_model_pp_plan = None

    attention_sync: list[str] | None = None
    mlp_sync: list[str] | None = None
    sync_tp_size: int | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        for key in ("attention_sync", "mlp_sync"):
            if not isinstance(getattr(self, key), list | tuple | None):
                raise ValueError(f"{key} is {getattr(self, key)!r}, but must be a list of modes, one for each layer")
        self.attention_sync = list(self.attention_sync or ["blocking"] * self.num_hidden_layers)
        self.mlp_sync = list(self.mlp_sync or ["blocking"] * self.num_hidden_layers)
        self.check_layout()

    def to_dict(self):
        """Return the config; PEFT calls this before it looks up which modules an adapter changes by default: those of
        the family's dense model, also where PEFT was imported after this file."""
        dense = self.model_type.removeprefix("ladderized_")
        for name, modules in vars(sys.modules.get("peft.utils.constants", object)).items():
            if name.startswith("TRANSFORMERS_MODELS_TO_") and dense in modules:
                modules.setdefault(self.model_type, modules[dense])
        return super().to_dict()

    def check_layout(self):
        for key, modes, allowed in (
            ("attention_sync", self.attention_sync, ATTENTION_MODES),
            ("mlp_sync", self.mlp_sync, MLP_MODES),
        ):
            if len(modes) != self.num_hidden_layers:
                raise ValueError(f"{key} has {len(modes)} entries for {self.num_hidden_layers} layers")
            for layer, mode in enumerate(modes):
                if mode not in allowed:
                    raise ValueError(f"{key}[{layer}] is {mode!r}, but must be one of {', '.join(allowed)}")
        if self.mlp_sync[-1] != "blocking":
            raise ValueError(
                f"the last mlp_sync must be 'blocking', not {self.mlp_sync[-1]!r}: nothing follows to hide it"
            )
        apart = {"delayed", "dropped"}.intersection(self.attention_sync + self.mlp_sync)
        if bool(apart) != (self.sync_tp_size is not None):
            raise ValueError(
                f"sync_tp_size is {self.sync_tp_size}: it goes with delayed and dropped sync points, and only with them"
            )
        if self.sync_tp_size is not None:
            n, kv_heads = self.sync_tp_size, self.num_key_value_heads
            if (
                type(n) is not int
                or n < 1
                or self.num_attention_heads % n
                or self.intermediate_size % n
                or (kv_heads % n and n % kv_heads)
            ):
                raise ValueError(
                    f"sync_tp_size {n} does not fit {self.num_attention_heads} heads, {kv_heads} key-value heads "
                    f"and intermediate size {self.intermediate_size}"
                )


def family_config(prefix):
    """Return the configuration class of a family with a layout.

    prefix: the beginning of its class names in transformers, such as Llama.
    """
    name = f"Ladderized{prefix}Config"
    if name not in globals():
        dense = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
        named = {"__module__": __name__, "model_type": f"ladderized_{dense.model_type}"}
        globals()[name] = type(name, (LadderizedConfig, dense), named)
    return globals()[name]


def __getattr__(name):
    if name.startswith("Ladderized") and name.endswith("Config"):
        return family_config(name.removeprefix("Ladderized").removesuffix("Config"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
