"""What a test asks the ranks of an engine to do, as JSON. Imports nothing heavy: both sides read it."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

ANSWER = "tests.vllm answer: "
SEGMENTS = "LADDERIZE_TEST_SEGMENTS"  # what the names of a group's shared memory begin with
IN_PIECES = {"mode": 2, "backend": "tests.vllm.pieces.backend"}  # compilation_config: traced once, for our own backend


@dataclass
class Generate:
    """Greedy decoding of all prompts at once; ``adapters`` names a LoRA folder, or nothing, for each."""

    prompts: list[list[int]]
    tokens: int = 12
    logprobs: int = 4
    adapters: list[str | None] = field(default_factory=list)


@dataclass
class Streams:
    """The hidden states entering these layers, after reading one prompt."""

    prompt: list[int]
    layers: list[int]


@dataclass
class Refused:
    """The engine is configured, which must fail; nothing is built."""


@dataclass
class Carrier:
    """The name of what carries the model's messages in flight."""


@dataclass
class Counts:
    """What was counted of the pieces of a compiled model (tests/vllm/pieces.py)."""


KINDS = {kind.__name__: kind for kind in (Generate, Streams, Refused, Carrier, Counts)}


@dataclass
class Job:
    """One LLM with the options ``engine``, and what it does, in this order."""

    engine: dict[str, Any]
    steps: list[Any]
    port: int = 0
    environment: dict[str, str] = field(default_factory=dict)  # while it runs

    def to_json(self) -> str:
        steps = [{"kind": type(step).__name__, **dataclasses.asdict(step)} for step in self.steps]
        return json.dumps({"engine": self.engine, "steps": steps, "port": self.port, "environment": self.environment})

    @classmethod
    def from_json(cls, line: str) -> "Job":
        document = json.loads(line)
        steps = [KINDS[step.pop("kind")](**step) for step in document["steps"]]
        return cls(**document | {"steps": steps})
