"""Run transformers' common tests of models on our model class: ``make test-transformers``.

    python scripts/transformers_tests.py [--source FOLDER] [arguments of pytest]

FOLDER: an unpacked source distribution or a checkout of the transformers that is installed; without it pip downloads
the former, which has no tests of generation. Nothing of it is copied into the repository.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parent.parent


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps"], check=True)


def downloaded(folder: Path) -> Path:
    """The source distribution of the transformers that is installed, in ``folder``."""
    name = f"transformers-{transformers.__version__}"
    pip("download", "--no-binary", ":all:", "--dest", str(folder), name.replace("-", "=="))
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path)
    own, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        source = own.source or downloaded(Path(temporary))
        pip("install", "--target", f"{temporary}/needed", "parameterized")
        environment = {**os.environ, "LADDERIZE_TRANSFORMERS_TESTS": str(source.resolve() / "tests")}
        environment["PYTHONPATH"] = os.pathsep.join([f"{temporary}/needed", os.environ.get("PYTHONPATH", "")])
        relaxed = ["-p", "no:warnings", "-p", "no:cacheprovider", "-o", "addopts=-q"]  # their marks are not ours
        command = [sys.executable, "-m", "pytest", *relaxed, "tests/transformers_common.py", *others]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
