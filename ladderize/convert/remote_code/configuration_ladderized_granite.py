"""Configuration of a Granite whose sync points are blocking, overlapped or dropped, one by one."""

from transformers import GraniteConfig

from .configuration_ladderized import LadderizedConfig


class LadderizedGraniteConfig(LadderizedConfig, GraniteConfig):
    model_type = "ladderized_granite"
