"""Configuration of a Qwen2 whose sync points are blocking, overlapped or dropped, one by one."""

from transformers import Qwen2Config

from .configuration_ladderized import LadderizedConfig


class LadderizedQwen2Config(LadderizedConfig, Qwen2Config):
    model_type = "ladderized_qwen2"
