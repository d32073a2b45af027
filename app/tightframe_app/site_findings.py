"""What a site's check asks for and finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        area: what part of the site it is about.
        state: ``ok``, ``note`` (worth knowing, or not looked at), or ``problem``.
        text: what was found, and for a problem what to do.
        of_job: whether it is the job's, for the lead to mend, and not this site's.
    """

    area: str
    state: State
    text: str
    of_job: bool = False


@dataclass(frozen=True)
class Asked:
    """What to look at.

    Attributes:
        config: the site's own ``tightframe.json``.
        production: hold everything against what production needs.
        site: the site's name; from its certificate if not given.
        kit: the startup kit's folder (``startup``); the one beside the configuration's if not given.
        job: values of a job to hold against the site; None for none.
        submitter: who would submit that job.
        records: read every record, which can take minutes.
        progress: told while records are read.
    """

    config: Path
    production: bool = False
    site: str | None = None
    kit: Path | None = None
    job: Mapping[str, Any] | None = None
    submitter: str | None = None
    records: bool = True
    progress: Callable[[str], None] = field(default=lambda text: None)

    @property
    def local(self) -> Path:
        """The folder that the engine calls ``local``."""
        return self.config.resolve().parent

    @property
    def startup(self) -> Path | None:
        """The kit's folder, if there is one."""
        beside = self.local.parent / "startup"
        return self.kit or (beside if (beside / "fed_client.json").is_file() else None)


def area_of(name: str, label: str) -> str:
    """How an area is called where a file has several sites."""
    return f"{name} of {label}" if label else name
