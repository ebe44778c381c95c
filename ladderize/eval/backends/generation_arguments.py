"""How a task of lm-eval wants its texts generated; what only transformers does is refused on the other backends."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from ladderize.errors import UserError
from ladderize.files.documents import read_json
from ladderize.runtime.sampling import Sampling

GENERATION_ARGUMENTS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
# transformers' own default where neither a task nor generation_config.json says anything
TRANSFORMERS_TOP_K = 50
# what transformers would change logits or texts by, and what says that it does not
NEUTRAL_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "typical_p": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "num_beams": (None, 1),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None, {}),
}


@dataclass(frozen=True)
class Generation:
    """One request's wishes. stops: strings that end a text, that of the end of a text among them."""

    stops: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling


def generation_of(
    arguments: Mapping[str, Any], default_max_gen_toks: int, eos: str, folder: Path | None, seed: int
) -> Generation:
    """``generation_kwargs`` of a task, as lm-eval's HF backend understands them. Raises UserError for others.

    folder: the checkpoint's, whose generation_config.json has defaults for sampling.
    """
    try:
        given = dict(normalize_gen_kwargs(dict(arguments), default_max_gen_toks))
        _check_known(given)
        stops = handle_stop_sequences(given["until"], eos=eos)
        if not all(isinstance(stop, str) for stop in stops):
            raise ValueError("until holds what is no string")
        count = int(given["max_gen_toks"])
        sampling = _sampling(given, folder, seed) if given["do_sample"] else Sampling()
    except (ValueError, TypeError) as error:
        raise UserError(f"a task's generation_kwargs cannot be used: {' '.join(str(error).split())[:200]}") from None
    if count < 1:
        raise UserError(f"a task asks for max_gen_toks {count}; at least 1 token is generated")
    return Generation(tuple(stops), count, sampling)


def _check_known(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in GENERATION_ARGUMENTS:
            raise UserError(
                f"the task asks for generation with {name}, which only --backend hf does; the other backends do"
                f" {', '.join(GENERATION_ARGUMENTS)}"
            )


def _sampling(given: Mapping[str, Any], folder: Path | None, seed: int) -> Sampling:
    temperature = float(given.get("temperature", 0.0))
    if temperature <= 0:
        raise UserError("a task asks for do_sample without a temperature above 0; give one, or leave do_sample out")
    defaults = _generation_config(folder)
    top_k = given.get("top_k", defaults.get("top_k", TRANSFORMERS_TOP_K))
    top_p = given.get("top_p", defaults.get("top_p", 1.0))
    return Sampling(temperature, int(top_k or 0), 1.0 if top_p is None else float(top_p), seed)


def refuse_other_defaults(name: str, folder: Path | None) -> None:
    """Raise UserError where generation_config.json changes what transformers generates in a way that we do not."""
    for key, value in _generation_config(folder).items():
        if key in NEUTRAL_DEFAULTS and value not in NEUTRAL_DEFAULTS[key]:
            raise UserError(f"{name}: generation_config.json sets {key}, which only --backend hf does")


def _generation_config(folder: Path | None) -> dict[str, Any]:
    path = folder / "generation_config.json" if folder is not None else None
    return read_json(path, advice="repair or delete it") if path is not None and path.exists() else {}
