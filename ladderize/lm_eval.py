"""lm-eval's own command line with the model ``ladderize``: ``python -m ladderize.lm_eval --model ladderize ...``.

lm-eval 0.4.13 looks for models in its own package only. Later releases find ladderize's by its entry point, and then
this is the same as ``lm_eval``.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence

from ladderize.boundary import DEBUG, error_boundary
from ladderize.errors import UsageError

MODEL_CLASS = "ladderize.eval.backends.runtime_lm:RuntimeLM"


def register_with_lm_eval() -> None:
    """Make ``--model ladderize`` known to lm-eval in this process; the class is imported when it is asked for."""
    import lm_eval.models  # noqa: F401 - lm-eval registers its own models first
    from lm_eval.api.registry import model_registry

    if "ladderize" not in model_registry:
        model_registry.register("ladderize", target=MODEL_CLASS)


def run_lm_eval() -> None:
    """lm-eval's command line with this process's arguments; what it raises is one sentence, as ladderize says it."""
    from lm_eval.__main__ import cli_evaluate

    register_with_lm_eval()
    with error_boundary(debug=bool(os.environ.get(DEBUG))):
        check_model_args(sys.argv[1:])
        cli_evaluate()


def check_model_args(arguments: Sequence[str]) -> None:
    """Raise UsageError where ``--model_args`` says something twice: lm-eval takes the last, without a word."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model_args", "-a", nargs="+", action="extend", default=[])
    given = [part for word in parser.parse_known_args(arguments)[0].model_args for part in word.split(",")]
    counts = Counter(part.partition("=")[0] for part in given if "=" in part)
    for name, count in counts.items():
        if count > 1:
            raise UsageError(f"--model_args has {name} {count} times; leave one")


if __name__ == "__main__":
    run_lm_eval()
