"""Typed values of files and databases as the text that a contract reads."""

from __future__ import annotations

from decimal import Decimal

from tightframe.errors import DataError


def as_text(value: object) -> str | None:
    """Return a value as text: the same for the same value from any source; None for none.

    Dates have a form that is no number; what is neither text nor a number nor a truth value has only its
    type's name, which is no code of any contract.

    >>> [as_text(value) for value in (None, True, 3, 3.0, 0.1, Decimal("2.50"), " a ", b"x")]
    [None, 'true', '3', '3', '0.1', '2.50', 'a', '<bytes>']
    """
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, Decimal):
        return format(value, "f") if value.is_finite() else "nan"
    if isinstance(value, str):
        return value.strip()
    shown = getattr(value, "isoformat", None)
    return str(shown()) if shown is not None else f"<{type(value).__name__}>"


def missing_package(package: str, extra: str) -> DataError:
    """Return the error for a package that a kind of source needs."""
    return DataError(
        f"Expected the package {package}, which reads this kind of table, but it is not installed: "
        f"pip install 'tightframe[{extra}]' at this site.",
        code="TF-219",
    )
