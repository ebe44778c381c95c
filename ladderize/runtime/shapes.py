"""The bundled sizes of Llama, and other configs without weights. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.files.documents import read_json

SHAPES = Path(__file__).parent / "shapes.json"


def known_shapes() -> dict[str, dict[str, Any]]:
    """The bundled configs of Llama's sizes: facts from the published config.json files."""
    shapes: dict[str, dict[str, Any]] = json.loads(SHAPES.read_text(encoding="utf-8"))
    return shapes


def read_shape(name: str, option: str = "--random-weights") -> dict[str, Any]:
    """A config by a bundled size's name, a config.json, or a folder that holds one. option: that named it."""
    shapes = known_shapes()
    if name in shapes:
        return shapes[name]
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UserError(f"{option} {name} is neither one of {', '.join(shapes)} nor a config.json or its folder")
    return read_json(path)
