"""Configuration of a Mistral whose sync points are blocking, overlapped or dropped, one by one."""

from transformers import MistralConfig

from .configuration_ladderized import LadderizedConfig


class LadderizedMistralConfig(LadderizedConfig, MistralConfig):
    model_type = "ladderized_mistral"
