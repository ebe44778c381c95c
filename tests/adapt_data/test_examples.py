"""What a row of training data becomes: ids, what is scored, where it is cut, and what is wrong with it."""

import random

import pytest
from tokenizers import pre_tokenizers, processors

from ladderize.adapt.data.examples import Encoder
from ladderize.chat_template import ChatRenderer
from ladderize.errors import UserError
from ladderize.modeling import load_tokenizer
from ladderize.rows import BadRow, Row
from tests.adapt_data.rows import (
    BOS,
    DEMO,
    EOS,
    MARKED,
    PLAIN,
    QWEN3,
    TURNS,
    VOCAB,
    encode,
    one,
    plain_example,
    scored_text,
)


def test_ids_are_taken_as_they_are(tokenizer):
    example = one(None, {"input_ids": [5, 6, 7], "text": "never read"})
    assert (example.ids.tolist(), example.scored.tolist()) == ([5, 6, 7], [True] * 3)
    masked = one(None, {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]})
    assert masked.scored.tolist() == [True, False, True]


def test_text_gets_bos_and_eos_unless_it_is_a_passage(tokenizer):
    ids = tokenizer("the cat")["input_ids"]
    assert ids[0] == BOS
    assert one(tokenizer, {"text": "the cat"}).ids.tolist() == [*ids, EOS]
    assert one(tokenizer, {"text": "the cat"}).scored.all()
    assert one(tokenizer, {"text": "the cat"}, is_passage=True).ids.tolist() == ids
    assert one(tokenizer, {"text": "the cat</s>"}).ids.tolist() == [*ids, EOS]  # not twice


def test_only_the_completion_is_scored(tokenizer):
    example = one(tokenizer, {"prompt": "the cat", "completion": " sat"})
    assert example.ids.tolist() == [
        *tokenizer("the cat")["input_ids"],
        *tokenizer(" sat", add_special_tokens=False)["input_ids"],
        EOS,
    ]
    assert scored_text(tokenizer, example) == [" sat</s>"]
    # tokens that grow together across the border: the prompt stays what it is when the model is asked
    assert tokenizer(" th" + "e")["input_ids"] != [
        *tokenizer(" th")["input_ids"],
        *tokenizer("e", add_special_tokens=False)["input_ids"],
    ]
    joined = one(tokenizer, {"prompt": " th", "completion": "e"})
    assert joined.ids.tolist() == [
        *tokenizer(" th")["input_ids"],
        *tokenizer("e", add_special_tokens=False)["input_ids"],
        EOS,
    ]
    assert scored_text(tokenizer, joined) == ["e</s>"]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by markers"])
def test_only_the_assistant_is_scored(chat, template):
    tokenizer = chat(template)
    example = one(tokenizer, {"messages": TURNS})
    whole = "<s><system>be kind<user>hello<assistant>hi there </s><user>and?<assistant>bye</s>"
    assert tokenizer.decode(example.ids) == whole
    assert example.ids.tolist().count(BOS) == 1
    assert scored_text(tokenizer, example) == ["hi there </s>", "bye</s>"]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    sharegpt = one(
        tokenizer, {"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]}
    )
    assert plain_example(sharegpt) == plain_example(example)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by markers"])
def test_offsets_without_spaces(tokenizer, template):
    """Llama 3's tokenizer leaves the spaces out of its offsets: a turn that ends or begins in one is still scored as a
    whole."""
    fresh = load_tokenizer(DEMO)
    fresh.chat_template = template
    backend = fresh.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    turns = [
        *TURNS[:2],
        {"role": "assistant", "content": " hi  "},
        {"role": "user", "content": " x"},
        {"role": "assistant", "content": "y"},
    ]
    assert scored_text(fresh, one(fresh, {"messages": turns})) == [" hi  </s>", "y</s>"]


def test_conversations_that_cannot_be_used(chat, tokenizer):
    with pytest.raises(UserError, match="there: a conversation, but the tokenizer has no chat template"):
        encode(tokenizer, {"messages": TURNS})
    unlike = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    problem = encode(chat(unlike), {"messages": TURNS}).problem
    assert "there: turn 3: the chat template does not begin it with the prompt for it" in str(problem)
    assert "put {% generation %}" in str(problem)
    refusing = "{{ raise_exception('roles must alternate') }}"
    assert "refuses the conversation (roles must alternate)" in str(encode(chat(refusing), {"messages": TURNS}).problem)
    assert "no token that the loss could score" in str(encode(chat(PLAIN), {"messages": TURNS[:2]}).problem)


def a_chat(kinds):
    """Random turns, which begin and end in letters: u and a, of the user and the assistant, A that thought before."""

    def text():
        return " ".join("".join(random.choices("abcdefghij", k=4)) for _ in range(random.randint(1, 4)))

    texts = {"u": text, "a": text, "A": lambda: f"<think>\n{text()}\n</think>\n\n{text()}"}
    return [{"role": "user" if kind == "u" else "assistant", "content": texts[kind]()} for kind in kinds]


def by_transformers(tokenizer, messages, number):
    """The example that message ``number`` gives alone."""
    made = {"tokenize": True, "return_dict": False}
    prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, **made)
    whole = tokenizer.apply_chat_template(messages[: number + 1], **made)
    assert whole[: len(prompt)] == prompt
    return whole, [place >= len(prompt) for place in range(len(whole))]


@pytest.mark.parametrize("kinds", ["ua", "uA", "uAuA", "uauAua", "uAuuauA", "uAuAu"])
def test_each_turn_behind_its_own_prompt(chat, kinds):
    """Where the template writes earlier turns anew, as Qwen3's does."""
    tokenizer, messages = chat(QWEN3), a_chat(kinds)
    encoded = encode(tokenizer, {"messages": messages}, seq_len=2000)
    turns = [number for number, kind in enumerate(kinds) if kind != "u"]
    assert [*map(plain_example, encoded.examples)] == [by_transformers(tokenizer, messages, n) for n in turns]
    names = [f"there, example {number}" for number in range(1, len(turns) + 1)] if len(turns) > 1 else ["there"]
    assert [example.origin for example in encoded.examples] == names
    assert (encoded.problem, encoded.truncated, encoded.dropped) == (None, 0, 0)


def test_turns_that_the_template_leaves_as_they_were_share_an_example(chat):
    """Two answers to one question: the first, which was thought about, is the beginning of the second's prompt."""
    tokenizer, messages = chat(QWEN3), a_chat("uAuAA")
    first, both = encode(tokenizer, {"messages": messages}, seq_len=2000).examples
    assert plain_example(first) == by_transformers(tokenizer, messages, 1)
    earlier, (ids, scored) = by_transformers(tokenizer, messages, 3), by_transformers(tokenizer, messages, 4)
    assert ids[: len(earlier[0])] == earlier[0]
    assert plain_example(both) == (ids, earlier[1] + scored[len(earlier[0]) :])


def test_turns_of_their_own_are_counted_wherever_they_are_cut(chat, monkeypatch):
    tokenizer, messages = chat(QWEN3), a_chat("uA" * 12)
    every = [by_transformers(tokenizer, messages, number) for number in range(1, 24, 2)]
    encoder, row = Encoder(tokenizer, 2, VOCAB), Row({"messages": messages}, "there")
    rendered, render = [], ChatRenderer.render
    monkeypatch.setattr(ChatRenderer, "render", lambda *a, **more: rendered.append(len(a[1])) or render(*a, **more))
    for encoder.seq_len in range(2, len(every[3][0]), 7):
        (cut,) = encoder.encode([row])
        expected = [(ids[: encoder.seq_len], scored[: encoder.seq_len]) for ids, scored in every]
        kept = [example for example in expected if any(example[1])]
        assert [*map(plain_example, cut.examples)] == kept
        whole = sum(len(ids) <= encoder.seq_len for ids, _ in every)
        assert (cut.truncated, cut.dropped) == (len(kept) - whole, len(every) - len(kept))
    assert not [count for count in rendered if 14 < count < 24]


def test_long_rows_are_cut(tokenizer):
    encoded = encode(None, {"input_ids": list(range(2, 11))}, seq_len=4)
    assert [(example.ids.tolist(), example.origin) for example in encoded.examples] == [
        ([2, 3, 4, 5], "there, piece 1"),
        ([6, 7, 8, 9], "there, piece 2"),
    ]  # the 10 alone has nothing to predict
    assert [len(example.ids) for example in encode(None, {"input_ids": list(range(2, 12))}, seq_len=4).examples] == [
        4,
        4,
        2,
    ]
    masked = encode(None, {"input_ids": [2, 3, 4, 5], "loss_mask": [0, 0, 0, 1]}, seq_len=2)
    assert ([example.ids.tolist() for example in masked.examples], masked.dropped) == ([[4, 5]], 1)


def test_long_completions_are_cut_off(chat):
    tokenizer = chat(PLAIN)
    prompt = len(tokenizer("the cat")["input_ids"])
    row = {"prompt": "the cat", "completion": " sat on a mat"}
    encoded = encode(tokenizer, row, seq_len=prompt + 2)
    assert (encoded.truncated, encoded.dropped, len(encoded.examples[0].ids)) == (1, 0, prompt + 2)
    assert encoded.examples[0].scored.tolist() == [False] * prompt + [True] * 2
    encoded = encode(tokenizer, row, seq_len=prompt)
    assert (encoded.truncated, encoded.dropped, encoded.examples, encoded.problem) == (0, 1, (), None)
    whole = one(tokenizer, {"messages": TURNS})
    encoded = encode(tokenizer, {"messages": TURNS}, seq_len=len(whole.ids) - 1)
    assert scored_text(tokenizer, encoded.examples[0])[-1] == "bye"


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by markers"])
def test_where_a_conversation_is_cut_changes_nothing_before(chat, template, monkeypatch):
    encoder, row = Encoder(chat(template), 10_000, VOCAB), Row({"messages": TURNS * 12}, "there")
    ((whole,),) = (encoded.examples for encoded in encoder.encode([row]))
    ids, scored = plain_example(whole)
    rendered, render = [], ChatRenderer.render
    monkeypatch.setattr(ChatRenderer, "render", lambda *a, **more: rendered.append(len(a[1])) or render(*a, **more))
    for encoder.seq_len in range(2, 60):
        (cut,) = encoder.encode([row])
        expected = (ids[: encoder.seq_len], scored[: encoder.seq_len])
        assert [plain_example(example) for example in cut.examples] == ([expected] if any(expected[1][1:]) else [])
        assert cut.problem is None
    assert not [count for count in rendered if 20 < count < 60]  # turns that are cut off need not be found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"other": 1}, "has other; a row needs input_ids, messages"),
        ({"text": None}, "has nothing"),
        ([1], "not an object"),
        ({"text": 5}, "its text is not a string"),
        ({"prompt": "a", "completion": 1}, "its completion is not a string"),
        ({"prompt": "a"}, "has prompt; a row needs"),
        ({"input_ids": [1, "2"]}, "not a list of integers"),
        ({"input_ids": [-1, 2]}, "negative"),
        ({"input_ids": [4]}, "gives 1 tokens"),
        ({"input_ids": []}, "gives 0 tokens"),
        ({"input_ids": [4, 5], "loss_mask": [1]}, "loss_mask is not a list of 0 and 1"),
        ({"input_ids": [4, 5], "loss_mask": [1, 2]}, "loss_mask is not a list"),
        ({"input_ids": [4, 5], "loss_mask": [1, 0]}, "no token that"),
        ({"messages": []}, "not a list of turns"),
        ({"messages": [{"role": "user"}]}, "turn 1 of its messages has no role and content"),
        ({"conversations": [{"from": "bing", "value": "x"}]}, "from 'bing'; known are human"),
    ],
)
def test_bad_rows(values, message):
    problem = encode(None, values).problem
    assert isinstance(problem, BadRow)
    assert str(problem).startswith("there: ")
    assert message in str(problem)


def test_what_no_skipping_mends(tokenizer):
    with pytest.raises(UserError, match="there: holds the token id 9, but the model's vocabulary ends at 8"):
        encode(None, {"input_ids": [3, 9]}, vocab_size=9)
    with pytest.raises(UserError, match="there is text, but the model has no tokenizer"):
        encode(None, {"text": "x"})
    with pytest.raises(UserError, match="--seq-len 1"):
        encode(None, {"input_ids": [3, 9]}, seq_len=1)
