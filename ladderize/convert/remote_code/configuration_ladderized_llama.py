"""Configuration of a Llama whose sync points are blocking, overlapped or dropped, one by one."""

from transformers import LlamaConfig

from .configuration_ladderized import LadderizedConfig


class LadderizedLlamaConfig(LadderizedConfig, LlamaConfig):
    model_type = "ladderized_llama"
