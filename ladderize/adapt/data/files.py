"""Texts and arrays of ids as rows: passages of a file, which are cut as training needs them."""

import codecs
from array import array
from pathlib import Path
from typing import BinaryIO

from ladderize.adapt.data.passages import Passages
from ladderize.errors import UserError
from ladderize.files.id_arrays import open_ids
from ladderize.rows.formats import BadRows, Row


class TextRows:
    """A text in passages of about ``passage_bytes`` that end where a line does (or a word, where no line ends near).
    All of them together are the text."""

    def __init__(self, path: Path, passage_bytes: int = Passages.text_bytes) -> None:
        self.path, self.bad = path, BadRows()
        self._offsets = array("q", [0])
        decoder = codecs.getincrementaldecoder("utf-8")()
        with path.open("rb") as file:
            try:
                while block := file.read(1 << 20):
                    decoder.decode(block)
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                raise UserError(f"{path} is not UTF-8 text") from None
            size = file.tell()
            while size > self._offsets[-1]:
                self._offsets.append(_end_of_passage(file, self._offsets[-1], size, passage_bytes))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read(self, number: int) -> Row:
        begin, end = self._offsets[number], self._offsets[number + 1]
        with self.path.open("rb") as file:
            file.seek(begin)
            content = file.read(end - begin)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.path} was changed while it was in use; start again") from None
        return Row({"text": text}, f"{self.path}, bytes {begin} to {end - 1}", is_passage=True)


def _end_of_passage(file: BinaryIO, offset: int, size: int, passage_bytes: int) -> int:
    if size - offset <= passage_bytes * 5 // 4:
        return size  # no last passage that is too short to be of use
    file.seek(offset)
    block = file.read(passage_bytes)
    least = passage_bytes * 3 // 4  # a line that ended before would leave much of a row empty
    end = block.rfind(b"\n", least) + 1 or block.rfind(b" ", least) + 1
    if not end:
        end = len(block) - 1
        while block[end] & 0xC0 == 0x80:  # inside a character
            end -= 1
    return offset + end


class IdRows:
    """An array of token ids: a row of two dimensions is a row; one of one dimension is cut into passages of
    ``passage_ids`` ids, the last with what is left."""

    def __init__(self, path: Path, key: str | None, passage_ids: int = Passages.ids) -> None:
        self._passage_ids = passage_ids
        self.bad = BadRows()
        self._name = f"{path}:{key}" if key else str(path)
        self._array = open_ids(path, key)

    def __len__(self) -> int:
        if not self._array.size:
            return 0
        return len(self._array) if self._array.ndim == 2 else max(1, len(self._array) // self._passage_ids)

    def read(self, number: int) -> Row:
        if self._array.ndim == 2:
            return Row({"input_ids": self._array[number]}, f"{self._name}, row {number + 1}")
        begin = number * self._passage_ids
        ids = self._array[begin : begin + self._passage_ids if number + 1 < len(self) else None]
        return Row({"input_ids": ids}, f"{self._name}, ids {begin} to {begin + len(ids) - 1}", is_passage=True)
