"""Which vLLM the plugin takes, as far as it can be told without one."""

import re

import pytest

from ladderize.errors import UserError
from ladderize.vllm import environment
from ladderize.vllm.environment import REQUIREMENT, check_vllm, is_newer, version_problem
from tests.helpers import ROOT

# names of the standard library; a decoder is given "strict", and keeps it
LACKING = {"json": "loads other", "json:JSONDecoder": "decode loose", "json:Gone": "x", "json.no_such_module": "x"}


@pytest.mark.parametrize(
    ("version", "taken", "newer"),
    [
        ("0.9.2", False, False),
        ("0.1.dev1+g4ee52b7", False, False),  # a build of a shallow clone
        ("0.32.0", True, False),
        ("0.32.1rc1+cpu", True, False),
        ("0.34.0rc1", True, True),
        ("0.320.1", True, True),
        ("dev", True, True),
    ],
)
def test_versions(monkeypatch, version, taken, newer):
    """Older ones are refused; newer ones where they lack what is touched."""
    monkeypatch.setattr(environment, "installed_version", lambda: version)
    monkeypatch.setattr(environment, "TOUCHED", {"json": "loads"})
    assert is_newer() == newer
    if taken:
        check_vllm()
    else:
        with pytest.raises(UserError, match=re.escape(f"this is vLLM {version}; pip install")):
            check_vllm()
    monkeypatch.setattr(environment, "TOUCHED", LACKING)
    problem = version_problem()
    assert (problem is None) == (taken and not newer)
    if newer:
        assert "json:other, json:JSONDecoder.loose, json:Gone, json.no_such_module;" in problem


def test_the_advice_is_what_the_extra_installs():
    assert f'vllm = ["{REQUIREMENT}"]' in (ROOT / "pyproject.toml").read_text()
