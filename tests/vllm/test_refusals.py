"""What cannot be served is refused in the process that the user started, in one sentence, before workers exist."""

import json
import re

import pytest

from tests.helpers import edit_json
from tests.vllm.jobs import Refused
from tests.vllm.models import make


@pytest.fixture
def refused(engines, tmp_path):
    """``refused(name, **options)``: the sentence with which vLLM refuses that model with these options."""

    def configure(name, config=None, **options):
        make(name, tmp_path / "model")
        edit_json(tmp_path / "model" / "config.json", **(config or {}))
        options = {"distributed_executor_backend": "mp", **options}
        (message,) = engines(1).run(tmp_path / "model", Refused(), **options)
        return message

    return configure


@pytest.mark.parametrize(("name", "tp_size", "ranks", "sizes"), [("spd 2", 4, 2, "1, 2"), ("spd 4", 8, 4, "1, 2, 4")])
def test_tp_size_that_does_not_divide(refused, name, tp_size, ranks, sizes):
    message = refused(name, tensor_parallel_size=tp_size)
    assert f"--tensor-parallel-size {tp_size} does not divide the {ranks} virtual ranks (sync_tp_size)" in message
    assert f"this model runs on {sizes} " in message


@pytest.mark.parametrize("name", ["dense", "ladder all"])
def test_tp_size_that_does_not_fit_the_model(refused, name):
    assert "tensor-parallel-size" in refused(name, tensor_parallel_size=3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"enable_dbo": True}, "--enable-dbo and --ubatch-size run batches side by side"),
        (
            {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
            "context parallelism was not tested",
        ),
        ({"runner": "pooling"}, "--runner pooling was not tested"),
        ({"compilation_config": {"use_inductor_graph_partition": True}}, "use_inductor_graph_partition was not tested"),
        ({"compilation_config": {"pass_config": {"fuse_attn_quant": True}}}, "fuse_attn_quant was not tested"),
        ({"compilation_config": {"mode": 1}}, "compilation mode 1 was not tested"),
        ({"hf_overrides": {"architectures": ["LlamaForCausalLM"]}}, "LlamaForCausalLM would compute a dense one"),
        ({"hf_overrides": {"architectures": ["MistralModel"]}}, "MistralModel would compute a dense one"),
    ],
)
def test_what_was_not_tested(refused, options, sentence):
    assert sentence in refused("ladder all", **options)


def test_fully_sharded_adapters(refused):
    message = refused("ladder all", enable_lora=True, fully_sharded_loras=True)
    assert "--fully-sharded-loras sums inside each projection" in message


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"attention_sync": ["overlapped"] * 3}, "attention_sync"),
        ({"attention_sync": ["overlapped", "overlapped", "overlapped", "later"]}, "later"),
        ({"attention_sync": {"0": "overlapped"}}, "attention_sync"),
        ({"mlp_sync": ["overlapped"] * 4}, "mlp_sync"),
        ({"mlp_sync": ["dropped", "blocking", "blocking", "blocking"]}, "mlp_sync"),
        ({"attention_sync": ["dropped"] * 4}, "sync_tp_size"),
        ({"attention_sync": ["dropped"] * 4, "sync_tp_size": 3}, "sync_tp_size"),
        ({"attention_sync": ["dropped"] * 4, "sync_tp_size": -2}, "sync_tp_size"),
        ({"attention_sync": ["dropped"] * 4, "sync_tp_size": 1 << 80}, "sync_tp_size"),
        ({"attention_sync": ["dropped"] * 4, "sync_tp_size": "2"}, "sync_tp_size"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", json.dumps(value))[:40],
)
def test_a_config_that_is_no_layout(refused, config, sentence):
    """Named in one sentence, whoever wrote it."""
    message = refused("ladder all", config=config)
    assert sentence in message
    assert len(message.splitlines()) <= 6, message  # pydantic adds lines around the sentence
