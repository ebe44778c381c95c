"""What a model may not ask for if it is to be trained on the runtime."""

from collections.abc import Mapping
from typing import Any

import torch

from ladderize.errors import UserError
from ladderize.runtime.decode import rope_table
from ladderize.runtime.shards import check_activation


def check_trainable(config: Mapping[str, Any]) -> None:
    """Raise UserError for a config.json of which transformers would train something else than the runtime does."""
    check_activation(config)
    rope_table(dict(config), 1, torch.device("cpu"))  # raises it for a rope that changes with the text's length
    dropout = config.get("attention_dropout") or 0.0
    if dropout:
        raise UserError(
            f"config.json: attention_dropout is {dropout!r}, which training with --tp-size does not have; set it to 0,"
            " or leave --tp-size out"
        )
