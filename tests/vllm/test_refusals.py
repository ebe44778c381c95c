"""What cannot be served is refused in the process that the user started, in one sentence, before workers exist."""

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


def test_tp_size_that_does_not_divide(refused):
    message = refused("spd 4", tensor_parallel_size=8)
    assert "--tensor-parallel-size 8 does not divide the 4 virtual ranks (sync_tp_size)" in message
    assert "this model runs on 1, 2, 4 " in message
    assert "tensor-parallel-size" in refused("dense", tensor_parallel_size=3)


SHARDED = {"enable_lora": True, "fully_sharded_loras": True}


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("dense", {"pipeline_parallel_size": 2}, "a ladderized model has no pipeline stages"),
        ("ladder all", {"enable_dbo": True}, "--enable-dbo and --ubatch-size run batches side by side"),
        ("ladder all", {"runner": "pooling"}, "context parallelism and --runner pooling were not tested"),
        ("ladder all", {"compilation_config": {"use_inductor_graph_partition": True}}, "may change the order"),
        ("ladder all", {"compilation_config": {"mode": 1}}, "may change the order of messages"),
        ("ladder all", {"hf_overrides": {"architectures": ["LlamaForCausalLM"]}}, "would compute a dense one"),
        ("ladder all", SHARDED, "--fully-sharded-loras sums inside each projection"),
        ("spd 4", {"enable_lora": True}, "adapters need a process for each virtual rank; use --tensor-parallel-size 4"),
        ("spd 4", {"quantization": "fp8_per_tensor"}, "quantised weights and adapters need a process for each"),
    ],
)
def test_what_was_not_tested(refused, name, options, sentence):
    assert sentence in refused(name, **options)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"attention_sync": ["overlapped"] * 3}, "attention_sync"),
        ({"mlp_sync": ["dropped", "blocking", "blocking", "blocking"]}, "mlp_sync"),
        ({"attention_sync": ["dropped"] * 4, "sync_tp_size": 3}, "sync_tp_size"),
        ({"attention_sync": ["dropped"] * 4, "sync_tp_size": "2"}, "sync_tp_size"),
    ],
)
def test_a_config_that_is_no_layout(refused, config, sentence):
    """Named in one sentence, whoever wrote it."""
    message = refused("ladder all", config=config)
    assert sentence in message
    assert len(message.splitlines()) <= 6, message  # pydantic adds lines around the sentence
