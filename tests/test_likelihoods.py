"""The scores of continuations that share a context against lm-eval's own class, which scores each by itself."""

import random

import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM

from ladderize.demo.command import MODEL
from ladderize.eval import likelihoods
from ladderize.eval.likelihoods import LikelihoodLM
from ladderize.modeling import load_tokenizer
from tests.helpers import FAMILIES, LAYOUTS, SHAPE, make_model

POSITIONS = 48


def drawn_requests(vocab_size):
    """Questions with answers of 1 token and more, some too long for the model, some twice."""

    def ids(most):
        return [random.randrange(vocab_size) for _ in range(random.randint(1, most))]

    requests = []
    for number in range(9):
        context = ids(POSITIONS + 9 if number % 3 == 0 else 20)
        requests += [((str(number), str(k)), context, ids(15)) for k in range(random.randint(1, 5))]
    return [*requests, *random.sample(requests, 3)]


@pytest.mark.parametrize("model_type", ["llama", *FAMILIES])
def test_answers_are_those_of_lm_eval(model_type, monkeypatch):
    monkeypatch.setattr(likelihoods, "MOST_SHARED", random.choice([1, 40, 1024]))
    layout = random.choice(list(LAYOUTS))
    vocabulary = SHAPE["vocab_size"]
    model = make_model(layout, model_type=model_type, max_position_embeddings=POSITIONS)
    tokenizer, requests = load_tokenizer(MODEL), drawn_requests(vocabulary)
    how = {"pretrained": model, "tokenizer": tokenizer, "batch_size": random.randint(1, 7), "logits_cache": False}
    models = (backend(**how) for backend in (LikelihoodLM, HFLM))
    found, expected = (model._loglikelihood_tokens(requests, disable_tqdm=True) for model in models)
    np.testing.assert_allclose([score for score, _ in found], [score for score, _ in expected], rtol=1e-4, atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_the_greedy_answer_is_known():
    model = make_model("dense")
    lm = LikelihoodLM(pretrained=model, tokenizer=load_tokenizer(MODEL), batch_size=4, logits_cache=False)
    context = torch.randint(3, SHAPE["vocab_size"], (1, 9))
    greedy = model.generate(context, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, 9:].tolist()
    other = [*greedy[:3], (greedy[3] + 1) % SHAPE["vocab_size"]]
    answers = lm._loglikelihood_tokens([(("", ""), context[0].tolist(), one) for one in (greedy, other, greedy[:1])])
    assert [same for _, same in answers] == [True, False, True]
