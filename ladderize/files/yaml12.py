"""YAML read with the scalars of YAML 1.2: ``16:32`` is text and not 992, ``no`` is Norwegian and not false, dates stay
text."""

import re
from typing import Any

import yaml


class Yaml12Loader(yaml.SafeLoader):
    pass


_PREFIX = "tag:yaml.org,2002:"
_REPLACED = {f"{_PREFIX}{name}" for name in ("bool", "int", "float", "timestamp")}
Yaml12Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Yaml12Loader.add_implicit_resolver(f"{_PREFIX}bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
Yaml12Loader.add_implicit_resolver(f"{_PREFIX}int", re.compile(r"^[-+]?[0-9]{1,18}$"), list("-+0123456789"))
Yaml12Loader.add_implicit_resolver(
    f"{_PREFIX}float", re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"), list("-+.0123456789")
)
Yaml12Loader.add_constructor(f"{_PREFIX}int", lambda loader, node: int(node.value))
Yaml12Loader.add_constructor(f"{_PREFIX}float", lambda loader, node: float(node.value))


def load_yaml(text: str, loader: type[Yaml12Loader] = Yaml12Loader) -> Any:
    """Parse one document; raises yaml.YAMLError."""
    return yaml.load(text, Loader=loader)  # noqa: S506  (a SafeLoader)
