"""How long the parts of a forward pass take by themselves, and of a whole pass in some layout. Imports no torch.

All layers of a Llama are alike, so a pass is a few figures. Each wait comes right after the next sub-module (DESIGN
section 2), so one message is in flight at a time, and times add up over sync points.
"""

from dataclasses import dataclass

from ladderize.files.records import Record


@dataclass(frozen=True)
class Workload(Record):
    """What is served at a time: ``batch_size`` texts of ``prompt_len`` tokens, and ``output_len`` new tokens of each.

    The first new token belongs to the prefill, as in ``ladderize bench``.
    """

    batch_size: int
    prompt_len: int
    output_len: int

    @property
    def decode_steps(self) -> int:
        return self.output_len - 1


@dataclass(frozen=True)
class PassParts:
    """One forward pass of one rank, in seconds: a prefill, or the mean decode step.

    attention, mlp: the compute of one sub-module. attention_apart, mlp_apart: the same in a layer whose attention sync
    is dropped, where a rank computes its virtual ranks one by one. rest: outside of all layers. message: one all-reduce
    of a layer, alone; message_bytes: its size. vocabulary: the collectives that every layout waits for. contention:
    while a message is in flight, compute runs at the rate 1 - contention.
    """

    layers: int
    attention: float
    mlp: float
    attention_apart: float
    mlp_apart: float
    rest: float
    message: float
    message_bytes: int
    vocabulary: float
    contention: float
