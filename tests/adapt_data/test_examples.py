"""What a row of training data becomes: ids, what is scored, where it is cut, and what is wrong with it."""

import json
import random
from datetime import datetime

import numpy as np
import pytest
from tokenizers import pre_tokenizers, processors

from ladderize.errors import UserError
from ladderize.modeling import load_tokenizer
from tests.adapt_data.rows import BOS, DEMO, EOS, MARKED, PLAIN, QWEN3, R1, TOOLS, TURNS, encode, one, scored_text


def test_ids_are_taken_as_they_are():
    assert one(None, {"input_ids": [5, 6, 7], "text": "never read"}) == ([5, 6, 7], [True] * 3)
    assert one(None, {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]})[1] == [True, False, True]


def test_text_gets_bos_and_eos(tokenizer):
    ids = tokenizer("the cat")["input_ids"]
    assert ids[0] == BOS
    assert one(tokenizer, {"text": "the cat"}) == ([*ids, EOS], [True] * (len(ids) + 1))
    assert one(tokenizer, {"text": "the cat</s>"})[0] == [*ids, EOS]  # not twice


@pytest.mark.parametrize(("prompt", "rest"), [("the cat", " sat"), (" th", "e")], ids=["apart", "growing together"])
def test_only_the_completion_is_scored(tokenizer, prompt, rest):
    """And the prompt's tokens stay what they are when the model is asked, whatever follows."""
    example = one(tokenizer, {"prompt": prompt, "completion": rest})
    alone = tokenizer(rest, add_special_tokens=False)["input_ids"]
    assert example[0] == [*tokenizer(prompt)["input_ids"], *alone, EOS]
    assert scored_text(tokenizer, example) == [rest + "</s>"]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by markers"])
def test_only_the_assistant_is_scored(chat, template):
    tokenizer = chat(template)
    example = one(tokenizer, {"messages": TURNS})
    whole = "<s><system>be kind<user>hello<assistant>hi there </s><user>and?<assistant>bye</s>"
    assert tokenizer.decode(example[0]) == whole
    assert example[0].count(BOS) == 1
    assert scored_text(tokenizer, example) == ["hi there </s>", "bye</s>"]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]
    assert one(tokenizer, {"conversations": turns}) == example


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by markers"])
def test_offsets_without_spaces(template):
    """Llama 3's tokenizer leaves the spaces out of its offsets: a turn that ends or begins in one is still scored as a
    whole."""
    fresh = load_tokenizer(DEMO)
    fresh.chat_template = template
    fresh.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fresh.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    said = [("user", "hello"), ("assistant", " hi  "), ("user", " x"), ("assistant", "y")]
    turns = [{"role": role, "content": content} for role, content in said]
    assert scored_text(fresh, one(fresh, {"messages": turns})) == [" hi  </s>", "y</s>"]


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
CALLED = [TURNS[1], CALL, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "it is 7"}]
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}


@pytest.mark.parametrize(
    "more", [{}, {"tools": [SCHEMA]}, {"tools": [SCHEMA], "chat_template_kwargs": {"mood": "sad"}}]
)
def test_tools_and_variables_are_the_templates(chat, more):
    """As ``apply_chat_template`` renders them; the schemas may be JSON text, and Arrow adds keys that are null."""
    tokenizer = chat(TOOLS)
    expected = tokenizer.apply_chat_template(
        CALLED, tools=more.get("tools"), **more.get("chat_template_kwargs", {}), return_dict=False
    )
    assert ("sad" in tokenizer.decode(expected)) == ("chat_template_kwargs" in more)
    as_text = {name: json.dumps(value) for name, value in more.items()}
    from_arrow = dict.fromkeys(("tools", "chat_template_kwargs")) | more
    if "tools" in more:
        from_arrow["tools"] = [{**SCHEMA, "strict": None}]
    for columns in (more, as_text, from_arrow):
        example = one(tokenizer, {"messages": CALLED, **columns}, seq_len=500)
        assert example[0] == expected
        assert scored_text(tokenizer, example) == [f"{json.dumps(CALL['tool_calls'])}</s>", "it is 7</s>"]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by markers"])
@pytest.mark.parametrize("silent", [[2], [4], [2, 4]])
def test_turns_of_weight_0_are_context(chat, template, silent):
    tokenizer = chat(template)
    turns = [{**turn, "weight": int(number not in silent)} for number, turn in enumerate(TURNS)]
    named = [{"from": turn["role"], "value": turn["content"], "weight": turn["weight"]} for turn in turns]
    if len(silent) == 2:
        with pytest.raises(UserError, match="none of which the loss could score"):
            encode(tokenizer, {"messages": turns})
        return
    (left,) = {2, 4} - {*silent}
    whole = one(tokenizer, {"messages": TURNS}, seq_len=100)
    runs = scored_text(tokenizer, whole)
    for row in ({"messages": turns}, {"conversations": named}):
        ids, scored = one(tokenizer, row, seq_len=100)
        assert ids == whole[0]
        assert scored_text(tokenizer, (ids, scored)) == [runs[[2, 4].index(left)]]
        assert all(before for now, before in zip(scored, whole[1], strict=True) if now)


def test_other_forms_of_the_same_conversation(chat):
    tokenizer = chat(PLAIN)
    example = one(tokenizer, {"messages": TURNS})
    in_parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    named = [{"from": turn["role"], "value": turn["content"]} for turn in TURNS]
    for row in ({"messages": in_parts}, {"messages": named}, {"conversations": TURNS}):
        assert one(tokenizer, row) == example
    parts = [{"type": "text", "text": text} for text in ("two", "lines")]
    joined, both = ([{"role": "user", "content": text}, TURNS[2]] for text in (parts, "two\nlines"))
    assert one(tokenizer, {"messages": joined}) == one(tokenizer, {"messages": both})
    ids, scored = one(tokenizer, {"prompt": TURNS[:4], "completion": TURNS[4:]})
    assert ids == example[0]
    assert scored_text(tokenizer, (ids, scored)) == ["bye</s>"]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by markers"])
def test_a_conversation_that_begins_with_the_assistant(chat, template):
    tokenizer, turns = chat(template), TURNS[2:]
    ids, scored = one(tokenizer, {"messages": turns}, seq_len=100)
    assert ids == tokenizer.apply_chat_template(turns, return_dict=False)
    assert scored_text(tokenizer, (ids, scored)) == ["hi there </s>", "bye</s>"]


@pytest.mark.parametrize("thought", ["<think>\nwhy\n</think>\n\n", "why\n</think>\n\n", "<think>why</think>"])
def test_a_template_that_drops_the_thought_of_a_finished_turn(chat, thought):
    """DeepSeek-R1's asks for a thought. A turn follows its prompt in its own words, and is context without them."""
    tokenizer = chat(R1)
    turns = [*TURNS[:2], {"role": "assistant", "content": f"{thought}yes"}, *TURNS[3:]]
    first = thought.removeprefix("<think>").removeprefix("\n")
    begin = "<s>be kind<U>hello<A>"
    expected = [(f"{begin}<think>\n", f"{first}yes</s>"), (f"{begin}yes</s><U>and?<A><think>\n", "bye</s>")]
    examples = encode(tokenizer, {"messages": turns}, seq_len=200)
    assert [tokenizer.decode(ids) for ids, _ in examples] == [prompt + text for prompt, text in expected]
    assert [scored_text(tokenizer, example) for example in examples] == [[text] for _, text in expected]


def test_today_is_always_the_same_day(chat):
    formats = ["%d %b %Y", "%B %d, %Y", "%A, %-d %B %y", "%Y-%m-%d %H:%M"]
    calls = "".join(f"{{{{ strftime_now('{text}') }}}}" for text in formats)
    tokenizer = chat("\n{{ date_string }}" + calls + PLAIN)
    text = tokenizer.decode(one(tokenizer, {"messages": TURNS}, seq_len=300)[0])
    dates = "".join(datetime(2024, 7, 26).strftime(text) for text in formats)
    assert text.startswith(f"\n26 Jul 2024{dates}<s><system>be kind")


def a_chat(kinds):
    """Random turns, which begin and end in letters: u and a, of the user and the assistant, A that thought before."""

    def text():
        return " ".join("".join(random.choices("abcdefghij", k=4)) for _ in range(random.randint(1, 4)))

    texts = {"u": text, "a": text, "A": lambda: f"<think>\n{text()}\n</think>\n\n{text()}"}
    return [{"role": "user" if kind == "u" else "assistant", "content": texts[kind]()} for kind in kinds]


def by_transformers(tokenizer, messages, number):
    made = {"tokenize": True, "return_dict": False}
    prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, **made)
    whole = tokenizer.apply_chat_template(messages[: number + 1], **made)
    assert whole[: len(prompt)] == prompt
    return whole, [place >= len(prompt) for place in range(len(whole))]


@pytest.mark.parametrize("kinds", ["uAuA", "uAuuauA"])
def test_each_turn_behind_its_own_prompt(chat, kinds):
    """Where the template writes earlier turns anew, as Qwen3's does."""
    tokenizer, messages = chat(QWEN3), a_chat(kinds)
    turns = [number for number, kind in enumerate(kinds) if kind != "u"]
    expected = [by_transformers(tokenizer, messages, number) for number in turns]
    assert encode(tokenizer, {"messages": messages}, seq_len=2000) == expected
    seq_len = random.randint(2, 120)
    cut = [(ids[:seq_len], scored[:seq_len]) for ids, scored in expected]
    assert encode(tokenizer, {"messages": messages}, seq_len=seq_len) == [part for part in cut if any(part[1][1:])]


def test_ids_and_texts_are_cut_into_pieces(tokenizer):
    for count in random.sample(range(5, 40), 8):
        ids, mask = np.random.randint(2, 500, count).tolist(), np.random.randint(0, 2, count).tolist()
        mask[1] = 1
        parts = [(ids[n : n + 4], [bool(m) for m in mask[n : n + 4]]) for n in range(0, count, 4)]
        kept = [part for part in parts if any(part[1][1:])]
        assert encode(None, {"input_ids": ids, "loss_mask": mask}, seq_len=4) == kept
    whole = one(tokenizer, {"text": "the cat sat on a mat. " * 5}, seq_len=500)[0]
    pieces = [ids for ids, _ in encode(tokenizer, {"text": "the cat sat on a mat. " * 5}, seq_len=7)]
    # a last piece of one token has nothing to predict
    assert [token for ids in pieces for token in ids] in (whole, whole[:-1])
    assert [BOS in ids for ids in pieces] == [True] + [False] * (len(pieces) - 1)


def test_completions_and_conversations_are_cut_off(chat):
    tokenizer = chat(PLAIN)
    prompt = len(tokenizer("the cat")["input_ids"])
    row = {"prompt": "the cat", "completion": " sat on a mat"}
    assert one(tokenizer, row, seq_len=prompt + 2)[1] == [False] * prompt + [True] * 2
    assert encode(tokenizer, row, seq_len=prompt) == []
    whole = one(tokenizer, {"messages": TURNS})
    cut = one(tokenizer, {"messages": TURNS}, seq_len=len(whole[0]) - 1)
    assert cut == (whole[0][:-1], whole[1][:-1])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"other": 1}, "has other; a row needs input_ids, messages"),
        ({"input_ids": [4]}, "gives 1 tokens"),
        ({"input_ids": [3, 527]}, "holds the token id 527, but the model's vocabulary ends at 526"),
        ({"input_ids": [4, 5], "loss_mask": [1, 0]}, "none of which the loss could score"),
        ({"conversations": [{"from": "bing", "value": "x"}]}, "turn 1 of its conversations is from 'bing'; known are"),
        ({"messages": []}, "its messages has no turns"),
        ({"messages": [{"role": "user"}]}, "turn 1 of its messages has no role and content that are strings"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "has content that is no text"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, "has the weight 0.5, which is neither"),
        ({"messages": TURNS, "tools": "[{"}, "its tools is not JSON"),
        ({"messages": TURNS, "chat_template_kwargs": ["x"]}, "its chat_template_kwargs is no object"),
        ({"messages": TURNS, "chat_template_kwargs": {"chat_template": "x"}}, "multiple values for keyword argument"),
        ({"prompt": TURNS[:1], "completion": "x"}, "its completion is no list of turns"),
    ],
)
def test_bad_rows(chat, row, message):
    with pytest.raises(UserError, match=f"^there, row 1:? .*{message}"):
        encode(chat(PLAIN), row)


@pytest.mark.parametrize(
    ("template", "count", "message"),
    [
        (None, 5, "the tokenizer has no chat template, which a conversation needs"),
        ("{{ raise_exception('roles must alternate') }}", 5, r"refuses the conversation \(roles must alternate\)"),
        (PLAIN.replace("m.content", "'x'") + "?", 5, "turn 3: the chat template does not show what"),
        (PLAIN, 2, "gives 0 tokens, none of which the loss could score"),
        (MARKED, 2, "none of which the loss could score"),
        ("{{ ''.__class__.__mro__ }}", 5, "is unsafe"),  # a stranger's program, in a sandbox
        ("{{ range(10000000) | list }}", 5, "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", 5, "maximum recursion depth"),
    ],
)
def test_conversations_that_cannot_be_used(chat, template, count, message):
    with pytest.raises(UserError, match=f"^there, row 1: .*{message}"):
        encode(chat(template), {"messages": TURNS[:count]})
