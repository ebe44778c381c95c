"""KL and same-top share of ``eval`` against two plain forwards of transformers; predictions kept for later runs; and
what keeps them from being compared."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from transformers import Gemma2Config, Gemma2ForCausalLM

from ladderize import EvalOptions, UserError, convert_checkpoint, evaluate
from ladderize.convert.recipe import Recipe
from ladderize.eval import text
from ladderize.eval.results import EvaluatedModel
from ladderize.eval.text import prepare_folder
from ladderize.modeling import load
from tests.helpers import SHAPE, fresh_rng, listing, refusal, save_llama

SEQ_LEN = 12


@pytest.fixture
def trio(tmp_path) -> list[Path]:
    """A random Llama, two conversions of it, and ids whose last window is short."""
    dense = save_llama(tmp_path / "dense", seed=int(torch.randint(1 << 30, ())))
    convert_checkpoint(dense, tmp_path / "spd", Recipe(spd="all", sync_tp_size=2), verify=False)
    convert_checkpoint(dense, tmp_path / "both", Recipe(spd="1:", ladder="all", sync_tp_size=4), verify=False)
    np.save(tmp_path / "ids.npy", fresh_rng().integers(3, SHAPE["vocab_size"], 6 * SEQ_LEN + 5))
    return [dense, tmp_path / "spd", tmp_path / "both"]


def evaluated(folder: Path, *models: Path, **more: object) -> list[EvaluatedModel]:
    shared = {"perplexity": str(folder / "ids.npy"), "seq_len": SEQ_LEN, "batch_size": 4}
    return [entry.model for entry in evaluate(EvalOptions(models, **{**shared, **more})).models]


def logits_of(model: Path, windows: list[np.ndarray], dtype: torch.dtype) -> list[torch.Tensor]:
    """Each window alone through plain transformers, all but the last position: fp64 log-probabilities."""
    loaded = load(model, dtype=str(dtype).removeprefix("torch."))
    with torch.no_grad():
        return [loaded(input_ids=torch.from_numpy(w)[None]).logits[0, :-1].float().log_softmax(-1) for w in windows]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 5e-2)])
def test_against_two_plain_forwards(trio, tmp_path, monkeypatch, dtype, tolerance):
    monkeypatch.setattr(text, "LOGITS_AT_A_TIME", 5 * SHAPE["vocab_size"])
    ids = np.load(tmp_path / "ids.npy")
    windows = [ids[start : start + SEQ_LEN] for start in range(0, len(ids), SEQ_LEN)]
    results = evaluated(tmp_path, *trio, dtype=str(dtype).removeprefix("torch."))
    dense = logits_of(trio[0], windows, dtype)
    assert results[0].predictions is None
    for folder, model in zip(trio, results, strict=True):
        own = logits_of(folder, windows, dtype)
        given = [torch.from_numpy(window[1:, None]) for window in windows]
        nll = [-float(p.gather(1, ids).double().sum()) for p, ids in zip(own, given, strict=True)]
        assert model.perplexity.window_nll == pytest.approx(nll, rel=tolerance)
        if (found := model.predictions) is None:
            continue
        kl = [(p.double().exp() * (p.double() - q.double())).sum(-1) for p, q in zip(dense, own, strict=True)]
        everything = torch.cat(kl).numpy()
        same = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in zip(dense, own, strict=True)]).double()
        assert found.reference == str(trio[0])
        assert found.tokens == len(everything) == 6 * (SEQ_LEN - 1) + 4
        assert found.mean_kl == pytest.approx(everything.mean(), rel=tolerance)
        assert found.p99_kl == pytest.approx(np.quantile(everything, 0.99), rel=tolerance)
        assert found.low < found.mean_kl < found.high
        # where two tokens are as likely rounding decides which is the top
        tops = [torch.cat(each).topk(2).values for each in (dense, own)]
        ties = float(sum(top[:, 0] - top[:, 1] < tolerance for top in tops).clamp(max=1).double().mean())
        assert abs(found.same_top_share - float(same.mean())) <= ties + 1e-9
        assert everything.mean() > 0.01  # or nothing was compared


def test_one_at_a_time_as_all_together(trio, tmp_path):
    kept = tmp_path / "kept"
    evaluated(tmp_path, trio[0], seq_len=SEQ_LEN // 2, keep_predictions=kept)
    evaluated(tmp_path, trio[0], keep_predictions=kept)  # the folder is of the later run
    windows = [f"window-{number}.safetensors" for number in range(7)]
    assert listing(kept) == ["head.safetensors", "predictions.json", *windows]
    together = evaluated(tmp_path, *trio)
    for number in (1, 2):
        (alone,) = evaluated(tmp_path, trio[number], reference=kept)
        expected = together[number]
        assert alone.predictions == expected.predictions
        assert alone.perplexity.window_nll == expected.perplexity.window_nll


def test_a_reference_of_something_else_or_changed(trio, tmp_path):
    kept = tmp_path / "kept"
    evaluated(tmp_path, trio[0], keep_predictions=kept)
    np.save(tmp_path / "other.npy", fresh_rng().integers(3, 90, 70))
    with pytest.raises(UserError, match="their windows are others .--perplexity, --seq-len"):
        evaluated(tmp_path, trio[1], perplexity=str(tmp_path / "other.npy"), reference=kept)
    other = save_llama(tmp_path / "other", vocab_size=120)
    with pytest.raises(UserError, match="their vocabulary has 97 tokens, and this one 120"):
        evaluated(tmp_path, other, reference=kept)
    for name, change in (
        ("window-3", lambda path: path.write_bytes(path.read_bytes()[:100])),
        ("window-2", Path.unlink),
        ("head", lambda path: path.write_bytes(b"\x80\x04pickle")),
    ):
        change(kept / f"{name}.safetensors")
        with pytest.raises(UserError, match=f"{name}.safetensors cannot be read"):
            evaluated(tmp_path, trio[1], reference=kept)


def test_only_predictions_are_removed_from_a_folder(tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "window-0.safetensors").touch()
    prepare_folder(folder)
    assert list(folder.iterdir()) == []
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not an empty folder"):
        prepare_folder(folder)


def test_a_full_disk_leaves_nothing_that_is_valid(trio, tmp_path, monkeypatch):
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(text, "save_file", mock.Mock(side_effect=full))
    options = ("--perplexity", tmp_path / "ids.npy", "--seq-len", SEQ_LEN)
    message = refusal("eval", trio[0], *options, "--keep-predictions", tmp_path / "kept")
    assert "head.safetensors: the predictions cannot be kept (" in message
    assert "o space left on device" in message
    assert "predictions.json" not in listing(tmp_path / "kept")


def test_an_architecture_that_may_cap_its_logits_is_refused(tmp_path):
    shape = {key: value for key, value in SHAPE.items() if key not in ("bos_token_id", "eos_token_id")}
    config = Gemma2Config(**shape, head_dim=4, final_logit_softcapping=2.0, sliding_window=16)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    np.save(tmp_path / "ids.npy", fresh_rng().integers(3, 90, 3 * SEQ_LEN))
    said = refusal("eval", tmp_path / "gemma", "--perplexity", tmp_path / "ids.npy")
    assert "--perplexity is for the families of models that ladderize converts, not for a gemma2" in said


def test_logits_that_are_scaled_in_bfloat16(tmp_path):
    """Granite divides its logits, which rounds them: they are its output layer's product with scaled states."""
    shared = {"dtype": torch.bfloat16, "model_type": "granite", "logits_scaling": 2.5}
    dense = save_llama(tmp_path / "dense", seed=int(torch.randint(1 << 30, ())), **shared)
    convert_checkpoint(dense, tmp_path / "both", Recipe(spd="1:", ladder="all", sync_tp_size=4), verify=False)
    np.save(tmp_path / "ids.npy", fresh_rng().integers(3, SHAPE["vocab_size"], 20 * SEQ_LEN))
    windows = list(np.load(tmp_path / "ids.npy").reshape(-1, SEQ_LEN))
    models = [dense, tmp_path / "both"]
    entries = evaluated(tmp_path, *models)
    p, q = (torch.stack(logits_of(model, windows, torch.bfloat16)).double() for model in models)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    assert entries[1].predictions.mean_kl == pytest.approx(kl, rel=0.1)
    ids = torch.from_numpy(np.stack(windows))[:, 1:, None]
    expected = -p.gather(-1, ids).sum((1, 2))
    assert entries[0].perplexity.window_nll == pytest.approx(expected.tolist(), rel=0.02)
    evaluated(tmp_path, dense, keep_predictions=tmp_path / "kept")
    (found,) = evaluated(tmp_path, tmp_path / "both", reference=tmp_path / "kept")
    assert found.predictions == entries[1].predictions
