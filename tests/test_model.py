"""The HF model of every layout and family against the oracle, and against transformers' own where it is dense."""

import itertools

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ladderize.families.registry import family_of
from ladderize.modeling import dense_class
from tests.helpers import BIASES, FAMILIES, LAYOUTS, SHAPE, make_model, random_ids
from tests.oracle import Oracle, assert_likeliest

TIGHT = {"rtol": 1e-4, "atol": 2e-4}  # 4e-5 was seen in float32; other layouts differ by more than 1e-2
OF_FAMILIES = list(itertools.product(("dense", "ladder all", "spd all 4", "mixed", "same layer"), FAMILIES))


@pytest.mark.parametrize(
    ("name", "family", "attention"),
    [
        *((name, "llama", "sdpa") for name in LAYOUTS),
        *((*one, "sdpa") for one in OF_FAMILIES),
        *((name, "llama", "eager") for name in ("same layer with biases", "every mode")),
        *((name, "llama", "flex_attention") for name in ("same layer with biases", "every mode")),
    ],
)
def test_logits_and_hidden_states_equal_the_oracle(name, family, attention):
    """Of a batch that is padded on the left, and with windows shorter than the texts."""
    model = make_model(name, model_type=family, attn_implementation=attention)
    ids, mask = random_ids(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiling flex_attention takes 20 seconds
        output = model(ids, attention_mask=mask, output_hidden_states=True)
    logits, streams = Oracle(model.state_dict(), model.config)(ids, mask)
    assert len(output.hidden_states) == len(streams) == SHAPE["num_hidden_layers"] + 1
    for got, expected in zip((output.logits, *output.hidden_states), (logits, *streams), strict=True):
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], **TIGHT)


def test_layouts_differ():
    """The oracle tests would pass if every layout meant the same; it does not."""
    ids = random_ids(1, 9)
    with torch.no_grad():
        logits = {name: make_model(name, seed=5)(ids).logits for name in LAYOUTS if not LAYOUTS[name][3]}
    for a, b in itertools.combinations(logits, 2):
        assert (logits[a] - logits[b]).abs().max() > 1e-2, (a, b)


@pytest.mark.parametrize(
    "extra", [{}, BIASES, {"tie_word_embeddings": True}, *({"model_type": one} for one in FAMILIES)]
)
def test_dense_is_bit_equal_to_transformers_own_class(extra):
    model = make_model("dense", **extra)
    own = dense_class(family_of({"model_type": extra.get("model_type", "llama")}), "ForCausalLM")
    dense = own(own.config_class.from_dict(model.config.to_dict() | {"model_type": own.config_class.model_type})).eval()
    dense.load_state_dict(model.state_dict())
    ids = random_ids(3, 13)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, dense(ids).logits)
    assert list(model.state_dict()) == list(dense.state_dict())


@pytest.mark.parametrize("name", LAYOUTS)
def test_cached_decoding_equals_the_oracle(name):
    model = make_model(name)
    ids = random_ids(2, 12)
    expected, _ = Oracle(model.state_dict(), model.config)(ids)
    with torch.no_grad():
        output = model(ids[:, :5], use_cache=True)
        steps = [output.logits]
        for position in range(5, 12):
            output = model(ids[:, position : position + 1], past_key_values=output.past_key_values, use_cache=True)
            steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, 1), expected, **TIGHT)


def test_continuous_batching_decodes_what_generate_does():
    """Its paged cache is not the one that attention updates before transformers 5.24."""
    model, rows = make_model("every mode"), [random_ids(1, length)[0].tolist() for length in (7, 4)]
    how = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected = [model.generate(torch.tensor([row]), generation_config=how)[0, len(row) :].tolist() for row in rows]
    found = model.generate_batch(rows, generation_config=how, progress_bar=False)
    assert [found[name].generated_tokens for name in sorted(found)] == expected


def oracle_of(model):
    """Logits of one text [n, vocab]."""
    oracle = Oracle(model.state_dict(), model.config)
    return lambda ids: oracle(torch.as_tensor(ids)[None])[0][0]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, "llama") for name in ("ladder all", "spd all 4", "same layer", "mixed", "every mode")),
        *(("mixed", family) for family in FAMILIES),
    ],
)
def test_greedy_generation_of_a_padded_batch(name, family):
    """Longer than every window, which a cache forgets what lies before."""
    model = make_model(name, model_type=family)
    short, long = random_ids(1, 4), random_ids(1, 7)
    batch = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), short], 1), long])
    mask = (batch != 0).long()
    text = model.generate(batch, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert text.shape == (2, 15)
    for prompt, tokens in zip((short, long), text[:, 7:].tolist(), strict=True):
        assert_likeliest(oracle_of(model), prompt[0].tolist(), tokens)


@pytest.mark.parametrize("name", ["ladder all", "same layer", "delayed more ranks than kv heads"])
def test_static_cache(name):
    model = make_model(name)
    prompt = random_ids(2, 5)
    static = {"cache_implementation": "static", "disable_compile": True}
    for cache in (static, {}):
        text = model.generate(prompt, max_new_tokens=6, do_sample=False, **cache)
        assert text.shape == (2, 11)
        for row in text.tolist():
            assert_likeliest(oracle_of(model), row[:5], row[5:])


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("name", ["ladder all", "spd with biases", "same layer delayed with biases"])
def test_gradients_equal_the_oracles(name, reentrant):
    model, ids = make_model(name).double().train(), random_ids(2, 7)
    if reentrant is not None:
        model.enable_input_require_grads()  # what reentrant checkpointing needs
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(ids, labels=ids, use_cache=False).loss.backward()
    weights = {key: value.detach().clone().requires_grad_() for key, value in model.state_dict().items()}
    oracle = Oracle(weights, model.config)
    oracle.weights = weights
    logits, _ = oracle(ids)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, key
        torch.testing.assert_close(parameter.grad, weights[key].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["same layer with biases", "every mode"])
def test_fullgraph_compile(name):
    model = make_model(name)
    ids = random_ids(2, 8)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, **TIGHT)


def test_label_smoothing_is_that_of_a_llama(tmp_path):
    """Trainer shifts the labels only of models whose class it knows as a causal one."""
    model = make_model("dense")
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE))
    llama.load_state_dict(model.state_dict())
    ids = random_ids(2, 9)
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    inputs = [{"input_ids": ids, "labels": ids.clone()} for _ in range(2)]
    losses = [Trainer(one, arguments).compute_loss(one, own) for one, own in zip((model, llama), inputs, strict=True)]
    torch.testing.assert_close(*losses)
