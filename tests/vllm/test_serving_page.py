"""What docs/ say of vLLM's command line, by vLLM's own parser."""

import shlex
from functools import cache
from typing import Any

from tests.test_docs import OF_VLLM, PAGES, blocks, each_page


@cache
def parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def served(page: Any) -> list[list[str]]:
    """The arguments of each server that a page starts."""
    found = []
    for block in blocks(page):
        for line in block.text.replace("\\\n", " ").splitlines() if block.language in ("sh", "") else []:
            words = shlex.split(line, comments=True) if "vllm" in line else []
            if words[:2] == ["vllm", "serve"]:
                found.append(words[2:])
    return found


@each_page
def test_servers_are_started_with_options_that_exist(page):
    for arguments in served(page):
        assert parser().parse_args(arguments).model_tag


def test_options_in_prose_exist():
    assert sum(len(served(page)) for page in PAGES) > 5
    known = {text for action in parser()._actions for text in action.option_strings}
    assert known >= OF_VLLM
