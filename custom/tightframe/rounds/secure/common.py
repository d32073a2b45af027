"""What both ends of a secure sum share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tightframe.errors import SecureSumError
from tightframe.securesum.errors import ProtocolError

SECURE = "secure"
"""Key of a protocol message in what travels."""


@contextmanager
def named() -> Iterator[None]:
    """Turn the protocol's refusals into named errors of the package, with who is to blame."""
    try:
        yield
    except ProtocolError as error:
        blame = f" To blame: {error.blamed}." if error.blamed else ""
        raise SecureSumError(f"{error}{blame}", code=error.code, blamed=error.blamed) from None
