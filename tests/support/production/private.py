"""What must stay in a hospital, and a search for it, also in archives, hexadecimal digits and base64."""

from __future__ import annotations

import base64
import contextlib
import io
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from numpy.typing import NDArray

WINDOW = 32
"""Bytes: so much of a long value in a row is found, wherever it begins, if 31 more of it follow."""
HEAD = 5
"""Bytes by which a whole value is looked up; none is shorter."""
VARIETY = 12
"""Different bytes of a window that can be told from zeros and small counts."""
_HEX = re.compile(rb"(?:[0-9a-fA-F]{2}){32,}")
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{40,}")
_BREAKS = re.compile(rb"\\[rn]|[\r\n\s]")


class Search:
    """Private values, each with a name for people."""

    def __init__(self) -> None:
        self._windows: dict[bytes, str] = {}
        self._texts: dict[bytes, dict[bytes, str]] = {}
        self._known: tuple[int, tuple[NDArray[np.bool_], ...]] = (0, ())

    def parts(self, name: str, value: bytes, *, step: int = WINDOW) -> int:
        """Look for any part of a long value; returns how many windows of it are like nothing else."""
        found = 0
        for start in range(0, len(value) - WINDOW + 1, step):
            window = value[start : start + WINDOW]
            if len(set(window)) >= VARIETY:
                self._windows.setdefault(window, name)
                found += 1
        return found

    def text(self, name: str, *values: str | bytes) -> None:
        """Look for whole values."""
        for value in values:
            whole = value if isinstance(value, bytes) else value.encode()
            assert len(whole) >= HEAD, "so little can be anything"
            self._texts.setdefault(whole[:HEAD], {}).setdefault(whole, name)

    def key(self, name: str, path: Path) -> None:
        """Look for 32 bytes of a private key's numbers, which PEM and DER hold as they are, and for digits.

        Not for its modulus, which is public.
        """
        key = load_pem_private_key(path.read_bytes(), None)
        assert isinstance(key, RSAPrivateKey)
        numbers = key.private_numbers()
        for number in (numbers.d, numbers.p, numbers.q, numbers.dmp1, numbers.dmq1, numbers.iqmp):
            size = (number.bit_length() + 7) // 8
            self.parts(name, number.to_bytes(size, "big"), step=1)
            self.parts(name, number.to_bytes(size, "little"), step=1)
            self.text(name, str(number))

    def counts(self, name: str, counts: Iterable[int], classes: Iterable[str]) -> None:
        """Look for class counts as lists, tables and arrays; by name also without those that are zero."""
        values, names = list(counts), list(classes)
        pairs = list(zip(names, values, strict=True))
        for separator in (", ", ",", " ", "\n"):
            self.text(name, separator.join(map(str, values)))
        for form in ('"{}": {}', '"{}":{}', "'{}': {}", "{} {}", "{}={}"):
            for separator in (", ", ",", " "):
                for told in (pairs, [pair for pair in pairs if pair[1]]):
                    self.text(name, separator.join(form.format(*pair) for pair in told))
        for kind in ("<i4", "<i8", "<u4", "<f4", "<f8", ">i4", ">i8"):
            self.text(name, np.array(values, kind).tobytes())

    def numbers(self, name: str, values: NDArray[np.float32]) -> int:
        """Look for a vector in other number formats, and written out (``decimals``)."""
        for kind in ("<f8", "<f2", ">f4"):
            self.parts(name, values.astype(kind).tobytes())
        return self.decimals(name, values)

    def decimals(self, name: str, values: NDArray[np.float32], *, most: int = 40) -> int:
        """Look for numbers written out, as Python and numpy do; returns for how many.

        Nine digits at least, and none that a difference of clock readings can be (those are multiples of
        2^-22, as changes of a large weight may be): the engine writes hundreds of times down. Rounded to
        six places, three in a row of the first values.
        """
        flat = values.reshape(-1)
        told = [value for value in flat if 1e-3 < abs(value) < 1 and value * 2**22 % 1][:most]
        for value in told:
            digits = f"{abs(float(value)):.16f}"
            self.text(name, digits[: len(digits) - len(digits[2:].lstrip("0")) + 10])
            short = str(abs(value))
            if len(short.lstrip("0.")) >= 9:
                self.text(name, short)
        for start in range(0, min(len(flat), most) - 2, 3):
            three = [round(float(value), 6) for value in flat[start : start + 3]]
            if min(map(abs, three)) > 1e-3:
                for separator in (", ", ",", " "):
                    self.text(name, separator.join(map(str, three)))
        return len(told)

    def within(self, content: bytes, *, depth: int = 3) -> set[str]:
        """The names of what is in some bytes, or in what they hold in another form."""
        found = self._seen(content)
        if depth:
            for inner in _inner(content):
                found |= self.within(inner, depth=depth - 1)
        return found

    def _seen(self, content: bytes) -> set[str]:
        windows, texts = self._windows, self._texts
        in_windows, in_texts = self._starts()
        words = np.ndarray(len(content), "<u4", content + bytes(3), strides=(1,)) & 0xFFFFFF
        found = {
            windows[part]
            for place in np.flatnonzero(in_windows[words]).tolist()
            if (part := content[place : place + WINDOW]) in windows
        }
        # Thousands of texts: each place is looked up, instead of all the bytes for every text.
        for place in np.flatnonzero(in_texts[words]).tolist():
            if like := texts.get(content[place : place + HEAD]):
                found |= {name for text, name in like.items() if content.startswith(text, place)}
        return found

    def _starts(self) -> tuple[NDArray[np.bool_], ...]:
        """Which first three bytes, as a number, parts and whole values have."""
        size = len(self._windows) + len(self._texts)
        if self._known[0] != size:
            tables = []
            for values in (self._windows, self._texts):
                table = np.zeros(1 << 24, np.bool_)
                table[[int.from_bytes(value[:3], "little") for value in values]] = True
                tables.append(table)
            self._known = (size, tuple(tables))
        return self._known[1]

    def files(self, paths: Iterable[Path]) -> tuple[dict[str, set[str]], int]:
        """Names of private values -> files that hold them; how many files were searched."""
        found: dict[str, set[str]] = {}
        searched = 0
        for path in paths:
            searched += 1
            for name in self.within(path.read_bytes()):
                found.setdefault(name, set()).add(str(path))
        return found, searched


def _inner(content: bytes) -> Iterator[bytes]:
    """What is packed or written as text in some bytes."""
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield "\n".join(archive.namelist()).encode()
            yield from (archive.read(name) for name in archive.namelist())
    if content[:2] == b"\x1f\x8b":
        rest = content
        with contextlib.suppress(zlib.error):  # two bytes may well be these by chance
            while rest[:2] == b"\x1f\x8b":  # one file after the other is a file, too
                member = zlib.decompressobj(wbits=31)
                yield member.decompress(rest)
                rest = member.unused_data
    for run in _HEX.findall(content):
        yield bytes.fromhex(run.decode())
        yield bytes.fromhex(run[1:-1].decode())
    if b"\0" in content:
        return  # base64 is text
    for text in (content, _BREAKS.sub(b"", content)):
        for run in _BASE64.findall(text):
            plain = run.replace(b"-", b"+").replace(b"_", b"/")
            for skip in range(4):
                part = plain[skip:]
                # What stands for less than three bytes at the end is no whole group of four.
                yield base64.b64decode(part + b"A" * (-len(part) % 4))


def every_file(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted(folder.rglob("*")) if path.is_file())
