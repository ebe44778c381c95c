"""Reading a rank's part of a checkpoint: TensorReader (pread of blocks of rows), safetensors' slices, mapped for a
tensor or the whole file, and a pread for every row.

What runtime/loader.py reads with TP2 and TP8: a half or an eighth of the rows, or of the columns, of bfloat16 matrices.
Seconds are medians of interleaved runs with the file in the page cache; the peak is of the resident set, above where it
stood. Prints a table and writes benchmarks/results/read_slices.json.

    .venv/bin/python benchmarks/read_slices.py
"""

import gc
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ladderize.checkpoint.reading import TensorInfo, read_tensors
from ladderize.checkpoint.tensors import TensorReader
from ladderize.memory import PeakMemory

SIZE, MATRICES, ROUNDS = 4096, 12, 7
RANKS = (2, 8)
RESULTS = Path(__file__).parent / "results" / "read_slices.json"


def one_mapping(folder: Path, infos: dict[str, TensorInfo], dim: int, own: int) -> list[Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        parts = []
        for name in infos:
            whole = file.get_slice(name)
            view = whole[:own] if dim == 0 else whole[:, :own]
            parts.append(view.to(torch.bfloat16, copy=True))
        return parts


def mapping_each(folder: Path, infos: dict[str, TensorInfo], dim: int, own: int) -> list[Tensor]:
    parts = []
    for name in infos:
        parts += one_mapping(folder, {name: infos[name]}, dim, own)
    return parts


def tensor_reader(folder: Path, infos: dict[str, TensorInfo], dim: int, own: int) -> list[Tensor]:
    reader = TensorReader(folder)
    return [reader.read(info, dim=dim, start=0, stop=own) for info in infos.values()]


def pread(folder: Path, infos: dict[str, TensorInfo], dim: int, own: int) -> list[Tensor]:
    descriptor = os.open(folder / "model.safetensors", os.O_RDONLY)
    parts = []
    for info in infos.values():
        part = torch.empty((own, SIZE) if dim == 0 else (SIZE, own), dtype=torch.bfloat16)
        raw = memoryview(part.view(torch.uint8).numpy()).cast("B")
        if dim == 0:
            os.preadv(descriptor, [raw], info.start)
        else:
            for row in range(SIZE):
                os.preadv(descriptor, [raw[row * 2 * own : (row + 1) * 2 * own]], info.start + row * 2 * SIZE)
        parts.append(part)
    os.close(descriptor)
    return parts


WAYS: dict[str, Callable[[Path, dict[str, TensorInfo], int, int], list[Tensor]]] = {
    "pread loop": pread,
    "mapped, whole file": one_mapping,
    "mapped, each tensor": mapping_each,
    "TensorReader": tensor_reader,
}


def main() -> None:
    torch.set_num_threads(1)
    samples: dict[str, list[float]] = {}
    peaks: dict[str, int | None] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_file({f"w{i}": torch.randn(SIZE, SIZE).bfloat16() for i in range(MATRICES)}, folder / "model.safetensors")
        infos = read_tensors(folder)
        for round_ in range(ROUNDS + 1):
            for ranks, (dim, what), (way, read) in itertools.product(
                RANKS, enumerate(("rows", "columns")), WAYS.items()
            ):
                with PeakMemory(torch.device("cpu")) as memory:
                    begin = time.perf_counter()
                    parts = read(folder, infos, dim, SIZE // ranks)
                    seconds = time.perf_counter() - begin
                name = f"TP{ranks}, {what}: {way}"
                if round_:  # the first warms up
                    samples.setdefault(name, []).append(seconds)
                peaks[name] = memory.rise
                del parts
                gc.collect()
    table = {
        key: {"seconds": statistics.median(found), "peak_rise_bytes": peaks[key]} for key, found in samples.items()
    }
    about = {
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
        "file_bytes": 2 * MATRICES * SIZE * SIZE,
    }
    RESULTS.write_text(json.dumps({**about, "medians": table, "samples_s": samples}, indent=2) + "\n")
    for key, row in table.items():
        print(f"{key:34}{row['seconds'] * 1e3:>8.1f} ms{(row['peak_rise_bytes'] or 0) / 1e6:>10.1f} MB at the peak")


if __name__ == "__main__":
    main()
