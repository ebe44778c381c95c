"""Configuration of a Qwen3 whose sync points are blocking, overlapped or dropped, one by one."""

from transformers import Qwen3Config

from .configuration_ladderized import LadderizedConfig


class LadderizedQwen3Config(LadderizedConfig, Qwen3Config):
    model_type = "ladderized_qwen3"
