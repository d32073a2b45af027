"""Rows of a query of the site's own, by SQLAlchemy, from PostgreSQL or SQLite: read, and nothing else.

The address of a database has its password in it: it comes from the site's environment or a file, and is in no
message, nor is what the database says, which may hold values. Imported only where a site names a database.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightframe.data.table import Database
from tightframe.data.table.sources.cells import as_text, missing_package
from tightframe.errors import DataError
from tightframe.files import quoted

_SECONDS = 30


def open_query(database: Database) -> tuple[list[str], Iterator[tuple[int, list[str | None]]]]:
    """Return the columns of a site's query, and its rows as text, in the order in which they come.

    PostgreSQL runs it in a session whose transactions are read-only, prepared, so that it is one statement;
    SQLite opens the file for reading.

    Raises:
        DataError: TF-217 if the database cannot be asked, TF-219 without SQLAlchemy or a driver.
    """
    try:
        from sqlalchemy import create_engine, exc, pool
    except ImportError:
        raise missing_package("sqlalchemy", "sql") from None
    address = _address(database)
    if address.get_backend_name() == "sqlite":
        arguments: dict[str, Any] = {"creator": _sqlite(address.database)}
    else:
        address = address.set(drivername="postgresql+psycopg")
        options = "-c default_transaction_read_only=on -c client_encoding=UTF8"
        arguments = {
            "connect_args": {"prepare_threshold": 0, "connect_timeout": _SECONDS, "options": options}
        }
    problem: DataError | None = None
    try:
        engine = create_engine(address, poolclass=pool.NullPool, hide_parameters=True, **arguments)
        with engine.connect() as connection:
            # No parameters: a % of the query stays one.
            asked = connection.execution_options(no_parameters=True)
            result = asked.exec_driver_sql(database.query)
            if not result.returns_rows:
                raise _failed("the query returns no rows: write a SELECT")
            header, rows = list(result.keys()), [list(row) for row in result]
            connection.rollback()
    except ImportError:
        problem = missing_package("psycopg", "sql")
    except (exc.SQLAlchemyError, sqlite3.Error, OSError, UnicodeError) as error:
        problem = _failed(_kind(error))
    if problem is not None:
        raise problem  # out of the handler, so that no traceback shows the database's own words
    return header, ((place, [as_text(value) for value in row]) for place, row in enumerate(rows, start=1))


def _address(database: Database) -> Any:
    """Return the address, which must not be printed.

    Raises:
        DataError: TF-217 if there is none, or it is of another kind.
    """
    from sqlalchemy.engine import make_url

    if database.url_env is not None:
        source, text = f"the environment variable {database.url_env}", os.environ.get(database.url_env, "")
    else:
        assert database.url_file is not None  # noqa: S101 - the entry has checked
        source, text = str(database.url_file), _secret(database.url_file)
    address = None
    if text.strip():
        try:
            address = make_url(text.strip())
        except Exception:  # whatever it says, it says it with the address
            address = None
    if address is None or address.get_backend_name() not in ("postgresql", "sqlite"):
        what = "is empty or not set" if not text.strip() else "is another text"
        raise DataError(
            f"Expected {source} to hold the address of a database, postgresql://USER:PASSWORD@HOST/NAME or "
            f"sqlite:////PATH, but it {what}. The engine's client must have it.",
            code="TF-217",
        )
    return address


def _secret(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise DataError(
                f"Expected {path}, which holds a password, to be closed to others, but its mode is "
                f"{stat.S_IMODE(mode):04o}: chmod 600 {quoted(path)}",
                code="TF-217",
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DataError(f"Expected to read {path}, but got {type(error).__name__}.", code="TF-217") from None


def _sqlite(path: str | None) -> Any:
    """Return a function that opens a SQLite file for reading only."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(f"{Path(path or '').absolute().as_uri()}?mode=ro", uri=True)

    return connect


def _kind(error: Exception) -> str:
    """Describe an error of a database without its words."""
    cause = getattr(error, "orig", None) or error
    state = getattr(cause, "sqlstate", None)
    name = getattr(cause, "sqlite_errorname", None)
    return f"{type(cause).__name__}" + (f", {state or name}" if state or name else "")


def _failed(what: str) -> DataError:
    return DataError(
        f"Expected the site's query to give rows, but got: {what}. Try the query with the database's own "
        "program, in the same account; it must be one SELECT, which changes nothing.",
        code="TF-217",
    )
