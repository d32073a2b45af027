"""Hashes by which a ledger recognises a site's records, independent of job, title and path.

A data set returns the content of each record in its source (``contents``, see ``data.base.SiloData``): a
table's row, a picture file's bytes, an array's values. Their hashes give one hash of all, and a sketch by
which two sets with many records in common are recognised: MinHash (Broder, On the resemblance and containment
of documents, SEQUENCES 1997), of which one byte per place is kept (Li and Koenig, b-Bit Minwise Hashing, WWW
2010). A place is equal in two sketches with the probability of the sets' Jaccard similarity, and by chance
once in 256. Torch-free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tightframe.data.base import SiloData
from tightframe.data.columns import Columns, Row
from tightframe.data.looks import Looks, Pictured

PLACES = 64  # as ledgers keep them
MOST_REPEATED = 0.1
_AT_ONCE = 4096


@dataclass(frozen=True)
class Content:
    """Identity of a site's records.

    Attributes:
        digest: SHA-256 of the records' hashes, independent of their order.
        sketch: a byte for each of ``PLACES``, hexadecimal; empty where more than ``MOST_REPEATED`` of the
            records repeat another: rows with few possible values are equal in different sets, too.
        combinations: sketches of a table's combinations of columns (``data.columns``), or of pictures' looks
            (``data.looks``).
    """

    digest: str
    sketch: str
    combinations: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, records: Iterable[bytes]) -> Content:
        """Read all records, one at a time."""
        hashes, columns, looks = list[bytes](), Columns(), Looks()
        for record in records:
            hashes.append(hashlib.sha256(record).digest())
            if isinstance(record, Row):
                columns.add(record.cells)
            elif isinstance(record, Pictured) and record.waves is not None:
                looks.add(record.waves)
        hashes.sort()
        distinct = sorted(set(hashes))
        repeated = len(hashes) - len(distinct) > MOST_REPEATED * len(hashes)
        sketch = "" if repeated or not distinct else _sketch(distinct)
        combinations = columns.sketches() + looks.sketches()
        return cls(hashlib.sha256(b"".join(hashes)).hexdigest(), sketch, combinations)


def content_of(data: SiloData) -> Content | None:
    """Return the identity of a data set's records; None if it is generated, or has no ``contents``."""
    own = getattr(data, "contents", None)
    records = None if own is None else own()
    return None if records is None else Content.of(records)


def _sketch(hashes: Sequence[bytes]) -> str:
    least = np.full(PLACES, np.iinfo(np.uint64).max, dtype=np.uint64)
    for start in range(0, len(hashes), _AT_ONCE):
        chunk = hashes[start : start + _AT_ONCE]
        drawn = b"".join(hashlib.shake_256(item).digest(8 * PLACES) for item in chunk)
        values = np.frombuffer(drawn, dtype="<u8").reshape(-1, PLACES)
        np.minimum(least, values.min(axis=0), out=least)
    return bytes((least % 256).tolist()).hex()
