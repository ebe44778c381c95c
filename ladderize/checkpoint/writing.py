"""Writes a checkpoint's folder, whole or not at all; its weights are linked, copied, or streamed."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ladderize.checkpoint.reading import INDEX, WEIGHTS, Checkpoint, read_weight_map
from ladderize.checkpoint.shards import Shard, index_for, write_shard
from ladderize.console import SILENT, Console, human_bytes, sentence
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.temporaries import fsync


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint's folder.

    source: the checkpoint that weights and carried files come from.
    shards: the weight files.
    carried: other files of the source, relative to it, that are copied byte for byte.
    copied: name -> a file from elsewhere.
    texts: name -> the text of a file.
    """

    source: Checkpoint
    shards: list[Shard]
    carried: list[Path]
    copied: Mapping[str, Path]
    texts: Mapping[str, str]


def write_checkpoint(
    content: Content,
    out: Path,
    *,
    copy: bool = False,
    overwrite: bool = False,
    check: Callable[[Path], None] = lambda folder: None,
    console: Console = SILENT,
) -> Counter[str]:
    """Write a checkpoint; return how many weight files were linked, copied and rewritten.

    copy: copy unchanged weight files instead of hard-linking them.
    check: receives the finished folder before it appears as ``out``; if it raises, nothing appears.
    Raises UserError where the disk is full or fails.
    """
    check_space(content, out, copy=copy)
    try:
        with output.atomic_folder(out, overwrite=overwrite) as folder:
            with console.progress(
                "writing weights", sum(shard.read_bytes for shard in content.shards), is_bytes=True
            ) as advance:
                how = write_weights(content, folder, copy=copy, advance=advance)
            for relative in content.carried:
                (folder / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(content.source.folder / relative, folder / relative)
            for name, path in content.copied.items():
                shutil.copyfile(path, folder / name)
            for name, text in content.texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            check(folder)
    except OSError as error:
        raise UserError(f"writing OUT {out} failed ({sentence(error)}); nothing was left there") from error
    return how


def write_weights(content: Content, folder: Path, *, copy: bool, advance: Callable[[int], None]) -> Counter[str]:
    """Write the weight files and their index; return how many were linked, copied and rewritten."""
    source, how = content.source.folder, Counter[str]()
    with ThreadPoolExecutor(1) as behind:
        on_disk = []
        for shard in content.shards:
            if shard.rewritten:
                write_shard(content.source, shard, folder / shard.file, advance)
                how["rewritten"] += 1
            else:
                how[output.transfer(source / shard.file, folder / shard.file, copy=copy, advance=advance)] += 1
            on_disk.append(behind.submit(fsync, folder / shard.file))  # syncs while the next file is written
        for done in on_disk:
            done.result()  # Linux reports a disk error only once: the fsync at the end would not see it
    if [shard.file for shard in content.shards] != [WEIGHTS]:
        index = index_for(content.shards)
        if "rewritten" not in how and index["weight_map"] == read_weight_map(source):
            shutil.copyfile(source / INDEX, folder / INDEX)
        else:
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return how


def check_space(content: Content, out: Path, *, copy: bool) -> None:
    """Raise UserError where the disk has too little space, before anything is written."""
    parent = output.existing_parent(out)
    same_disk = parent.stat().st_dev == content.source.folder.resolve().stat().st_dev
    needed = sum(shard.nbytes for shard in content.shards if shard.rewritten or copy or not same_disk)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(
            f"OUT {out} needs {human_bytes(needed)}, but only {human_bytes(free)} are free there; choose another disk"
        )
