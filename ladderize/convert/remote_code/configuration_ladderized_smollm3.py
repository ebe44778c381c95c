"""Configuration of a SmolLM3 whose sync points are blocking, overlapped or dropped, one by one."""

from transformers import SmolLM3Config

from .configuration_ladderized import LadderizedConfig


class LadderizedSmolLM3Config(LadderizedConfig, SmolLM3Config):
    model_type = "ladderized_smollm3"
