"""Names of a run's result files, and the format in which the JSON ones are written and read.

Each JSON file states its ``format``. One without that key is of a version before 0.1.0, and is read if its
values still fit; one of a later format is refused, and the message says what to do.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from tightframe.errors import TightframeError
from tightframe.files import write_json

OUTCOME, METRICS, CARD = "outcome.json", "metrics.jsonl", "model.json"
LOCAL = "local_report.json"
"""A silo's own report."""
MODEL, BEST = "model.safetensors", "best_model.safetensors"
PERSONAL = "personal_model.safetensors"
"""A silo's own model, in its run folder."""
UNPROVEN, NEEDS = "unproven", "needs.json"
"""Subfolder of a silo's results that rest on an unproven total, and its file of what would prove it."""
CHECKPOINT = "checkpoint.safetensors"
PAGE = "report.html"
TRANSCRIPT, SIMULATED_ROOT = "transcript.jsonl", "simulated_root.pem"
EVENTS = "tb_events"
"""Folder of the TensorBoard events."""
MAX_BYTES = 2**28
"""Largest size of a result file in bytes; a larger one is refused."""
_MOST_PROBLEMS = 5
_VERSION = re.compile(r"[0-9][\w.+-]{0,30}")

WritePage = Callable[[Path, logging.Logger], None]
"""Writes the page of a folder of results, and logs failures."""


class ResultsError(TightframeError):
    """Results cannot be read or shown.

    TF-801 no results, TF-802 a broken file or one of another version, TF-803 the page cannot be written,
    TF-804 a class that the results do not have, or runs that cannot be compared, TF-827 not proven.
    """

    code = "TF-802"


def not_proven(place: Path) -> str | None:
    """Describe results kept apart because their total was not proven; None if there are none.

    Args:
        place: a folder, or a file that exists or is expected.
    """
    folders = [place, place.parent, place / UNPROVEN]
    if not place.exists():
        folders.append(place.parent / UNPROVEN)
    apart = next((folder for folder in folders if (folder / NEEDS).is_file()), None)
    if apart is None:
        return None
    return (
        f"Expected results whose last total this silo has verified, but what is in {apart} was never proven: "
        "the server can have sent this silo a false total, or its process was killed as it was proven. "
        "Compare `model_sha256` in its report with other silos': if it is the same, move all files but "
        f"{NEEDS} out of the folder {UNPROVEN}, and delete it."
    )


class Values(BaseModel):
    """Base of all values in result files: frozen, finite, unknown keys ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)

    def as_json(self) -> dict[str, Any]:
        """Return plain values under the files' keys."""
        return self.model_dump(mode="json", by_alias=True)


class ResultFile(Values):
    """Base of a whole file, or of a line of one.

    Attributes:
        format: of the file; 1 in files older than the key.
    """

    NAME: ClassVar[str]
    FORMAT: ClassVar[int] = 1

    format: int = 1

    @field_validator("format")
    @classmethod
    def _is_known(cls, form: int) -> int:
        """Refuse a format that this version does not know."""
        if not 1 <= form <= cls.FORMAT:
            raise ValueError(f"Expected a format from 1 to {cls.FORMAT}, but got {form}")
        return form

    def write(self, folder: Path, *, mode: int = 0o644) -> None:
        """Write the file into a folder, atomically."""
        write_json(folder / self.NAME, self.as_json(), mode=mode)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file from a folder.

        Raises:
            ResultsError: TF-802, naming the file and what is wrong with it.
        """
        path = folder / cls.NAME
        return cls.checked(parsed(read_bytes(path), str(path)), str(path))

    @classmethod
    def checked(cls, values: Any, place: str) -> Self:
        """Validate a file's plain values.

        Args:
            values: parsed JSON.
            place: of the file, for messages.

        Raises:
            ResultsError: TF-802, naming values that do not fit, or the version that can read the file.
        """
        if isinstance(values, dict) and (wrong := _later(values, cls.FORMAT)) is not None:
            raise ResultsError(f"Expected {place} to be of format {cls.FORMAT} or earlier, but {wrong}")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            advice = _advice(values)
            raise ResultsError(
                f"Expected {place} as a run writes it, but got: {problems(error)}.{advice}"
            ) from None


def read_bytes(path: Path) -> bytes:
    """Return the content of a result file.

    Raises:
        ResultsError: TF-802 if it cannot be read or is too large.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ResultsError(
                f"Expected at most {MAX_BYTES} bytes in {path}, but it has more: it is no file of results."
            )
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> ResultsError:
    """Describe a file that cannot be read."""
    return ResultsError(f"Expected to read {path}, but got: {error.strerror or error}.")


def parsed(raw: bytes | str, place: str) -> Any:
    """Parse JSON.

    Raises:
        ResultsError: TF-802 if it is not JSON.
    """
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ResultsError(f"Expected JSON in {place}, but it is none: {reason}.") from None


def problems(error: ValidationError) -> str:
    """List the first invalid values in one line."""
    listed = [
        f"{'.'.join(str(part) for part in item['loc']) or 'the whole'}: {item['msg']}"
        for item in error.errors(include_url=False, include_input=False)
    ]
    more = f"; and {len(listed) - _MOST_PROBLEMS} more" if len(listed) > _MOST_PROBLEMS else ""
    return f"{'; '.join(listed[:_MOST_PROBLEMS])}{more}"


def _later(values: dict[str, Any], known: int) -> str | None:
    """Describe a format that this version does not know; None if it does."""
    form = values.get("format", known)
    if type(form) is int and 1 <= form <= known:
        return None
    if type(form) is int and form > known:
        by = _writer(values) or "a later version of Tightframe"
        return f"it is of format {form}: {by} wrote it. Read it with that version, or with a later one."
    return f"got {str(form)[:40]!r}: it is no file of results, or was edited."


def _advice(values: Any) -> str:
    """Name the version that wrote invalid values, and what to do."""
    if not isinstance(values, dict) or "format" in values:
        return ""
    by = _writer(values) or "a version before there were format numbers"
    return (
        f" There is no `format` in it: {by} wrote it, in a form that this version does not know. "
        "Read it with that one."
    )


def _writer(values: dict[str, Any]) -> str | None:
    """Name the version that a file declares."""
    versions = values.get("versions")
    version = versions.get("tightframe") if isinstance(versions, dict) else None
    known = isinstance(version, str) and _VERSION.fullmatch(version) is not None
    return f"Tightframe {version}" if known else None
