"""The two matrices of a gemm job: streamed to disk as they come, then looked at, never unpickled.

A multipart body is parsed piece by piece and written straight to its file, under a cap for each file; whatever fails,
nothing stays behind. A file is then opened as .npy (pickles refused, header length bounded) or .safetensors (one
tensor), and only its header is read: two dimensions, float32, not empty. The bytes are the training script's business.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from fastapi import HTTPException
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from safetensors import SafetensorError, safe_open

FILE_FIELDS = ("a", "b")
TEXT_BYTES_MAX = 4096
FIELDS_MAX = 16
PART_HEADER_BYTES_MAX = 8192
WRITE_BYTES = 1 << 20  # collected before the disk is bothered
NPY_HEADER_BYTES_MAX = 4096
SAFETENSORS_HEADER_BYTES_MAX = 1 << 20

Offload = Callable[[Callable[[], None]], Awaitable[None]]


@dataclass(slots=True)
class Form:
    """The parsed body: text fields, and files by field name."""

    texts: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)


class _Parts:
    """The parser's callbacks: collects small fields, and the writes of large ones until they are carried out."""

    def __init__(self, directory: Path, file_bytes_max: int) -> None:
        self.form = Form()
        self.writes: list[tuple[IO[bytes], bytes]] = []
        self.ended = False
        self._open: list[IO[bytes]] = []
        self._directory = directory
        self._file_bytes_max = file_bytes_max
        self._fields = 0
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self._name = ""
        self._text = b""
        self._size = 0
        self._file: IO[bytes] | None = None

    def on_part_begin(self) -> None:
        self._fields += 1
        if self._fields > FIELDS_MAX:
            raise HTTPException(422, f"over {FIELDS_MAX} form fields, expected kind, name, a and b")
        self._disposition, self._text, self._size, self._file = b"", b"", 0, None

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]
        self._bound_header()

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._bound_header()

    def on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")[:64]
        if self._name in FILE_FIELDS:
            if self._name in self.form.files:
                raise HTTPException(422, f"{self._name}: sent twice, expected once")
            filename = options.get(b"filename", b"").decode("utf-8", "replace").lower()
            suffix = next((known for known in (".npy", ".safetensors") if filename.endswith(known)), None)
            if suffix is None:
                raise HTTPException(422, f"{self._name}: expected a file whose name ends in .npy or .safetensors")
            path = self._directory / f"{self._name}{suffix}"
            self._file = path.open("wb")
            self._open.append(self._file)
            self.form.files[self._name] = path

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if self._file is not None:
            if self._size > self._file_bytes_max:
                raise HTTPException(413, f"{self._name}: over {self._file_bytes_max} bytes, the most a file may have")
            self.writes.append((self._file, data[start:end]))
        elif self._size > TEXT_BYTES_MAX:
            raise HTTPException(422, f"{self._name}: over {TEXT_BYTES_MAX} bytes, expected a short text")
        else:
            self._text += data[start:end]

    def on_part_end(self) -> None:
        if self._file is None:
            self.form.texts[self._name] = self._text.decode("utf-8", "replace")

    def on_end(self) -> None:
        self.ended = True

    @property
    def waiting_bytes(self) -> int:
        """Bytes that `write` would write."""
        return sum(len(data) for _, data in self.writes)

    def write(self) -> None:
        """Carries out the writes so far; blocks."""
        for file, data in self.writes:
            file.write(data)
        self.writes.clear()

    def close(self) -> None:
        """Closes the files."""
        for file in self._open:
            file.close()

    def _bound_header(self) -> None:
        if len(self._header_name) + len(self._header_value) > PART_HEADER_BYTES_MAX:
            raise HTTPException(422, f"a part's header is over {PART_HEADER_BYTES_MAX} bytes")


async def receive_form(
    stream: AsyncIterator[bytes], content_type: str, directory: Path, file_bytes_max: int, offload: Offload
) -> Form:
    """Reads a multipart/form-data body; its files go to `directory`, which exists. `offload` runs blocking calls.

    Raises HTTPException 413 for a file over its cap and 422 for a body that is not well-formed or not as expected.
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise HTTPException(422, "multipart/form-data without a boundary; let your client set the Content-Type")
    parts = _Parts(directory, file_bytes_max)
    names = (
        "part_begin",
        "header_field",
        "header_value",
        "header_end",
        "headers_finished",
        "part_data",
        "part_end",
        "end",
    )
    parser = MultipartParser(boundary, {f"on_{name}": getattr(parts, f"on_{name}") for name in names})  # type: ignore[arg-type]
    try:
        async for piece in stream:
            parser.write(piece)
            if parts.waiting_bytes >= WRITE_BYTES:
                await offload(parts.write)
        parser.finalize()
        await offload(parts.write)
    except MultipartParseError as error:
        raise HTTPException(422, f"the body is not well-formed multipart/form-data: {error}") from error
    finally:
        parts.close()
    if not parts.ended:
        raise HTTPException(422, "the multipart body ends in the middle; send it whole")
    return parts.form


def check_matrices(a: Path, b: Path, dimension_max: int) -> tuple[int, int, int]:
    """(m, n, k) of C = A B. Raises HTTPException 422 where the files cannot be multiplied; blocks."""
    (m, k), (rows, n) = _shape("a", a), _shape("b", b)
    if rows != k:
        raise HTTPException(422, f"a is {m} x {k} and b is {rows} x {n}; a needs as many columns as b has rows")
    if max(m, n, k) > dimension_max:
        raise HTTPException(422, f"{m} x {k} by {k} x {n}: expected no side over {dimension_max}")
    return m, n, k


def _shape(field_name: str, path: Path) -> tuple[int, int]:
    try:
        dtype, shape = _npy_header(path) if path.suffix == ".npy" else _safetensors_header(path)
    except (ValueError, OSError, EOFError, SafetensorError, struct.error) as error:
        raise HTTPException(422, f"{field_name}: not a readable {path.suffix} file: {str(error)[:200]}") from error
    if dtype != "float32":
        raise HTTPException(
            422, f"{field_name}: got {dtype}, expected float32; convert it with array.astype('float32')"
        )
    if len(shape) != 2 or 0 in shape:
        raise HTTPException(422, f"{field_name}: got shape {shape}, expected two dimensions, neither 0")
    return shape[0], shape[1]


def _npy_header(path: Path) -> tuple[str, tuple[int, ...]]:
    array = np.load(path, mmap_mode="r", allow_pickle=False, max_header_size=NPY_HEADER_BYTES_MAX)
    if not isinstance(array, np.ndarray):
        raise ValueError("an .npz archive, expected one array")
    return array.dtype.name if array.dtype.isnative else f"byte-swapped {array.dtype.name}", array.shape


def _safetensors_header(path: Path) -> tuple[str, tuple[int, ...]]:
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
    if header_bytes > SAFETENSORS_HEADER_BYTES_MAX:
        raise ValueError(f"a header of {header_bytes} bytes, expected at most {SAFETENSORS_HEADER_BYTES_MAX}")
    with safe_open(path, framework="numpy") as tensors:
        names = list(tensors.keys())
        if len(names) != 1:
            raise ValueError(f"{len(names)} tensors, expected one")
        tensor = tensors.get_slice(names[0])
        return {"F32": "float32"}.get(tensor.get_dtype(), tensor.get_dtype()), tuple(tensor.get_shape())


def discard(directory: Path) -> None:
    """Removes an upload that led to nothing; blocks."""
    shutil.rmtree(directory, ignore_errors=True)
