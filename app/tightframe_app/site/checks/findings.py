"""Scope and findings of a site's check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "note", "problem"]
FILE = "tightframe.json"
CONFIG_HELP = "The site's own local/tightframe.json, or its kit's folder."


@dataclass(frozen=True)
class Finding:
    """One result of the check.

    Attributes:
        area: checked part of the site.
        state: ``ok``, ``note`` (worth knowing, or not checked), or ``problem``.
        text: the result, and for a problem the remedy.
        of_job: whether it is a problem of the job, for the lead to correct.
    """

    area: str
    state: State
    text: str
    of_job: bool = False

    @property
    def site(self) -> str:
        """Checked site of a file for several sites; empty for a single site's file."""
        return self.area.partition(" of ")[2]


@dataclass(frozen=True)
class Scope:
    """Scope of a check.

    Attributes:
        config: the site's own ``tightframe.json``.
        production: check all requirements of production.
        site: the site's name; from its certificate if not given.
        kit: the startup kit's folder ``startup``; the one beside the configuration's folder if not given.
        job: values of a job to check against the site; None for none.
        folder: of that job, to check its signature.
        submitter: of that job.
        records: read every record, which can take minutes.
        progress: called with a text while records are read.
        engine_kit: folder of the engine's own kit, at a site with two accounts.
    """

    config: Path
    production: bool = False
    site: str | None = None
    kit: Path | None = None
    job: Mapping[str, Any] | None = None
    folder: Path | None = None
    submitter: str | None = None
    records: bool = True
    progress: Callable[[str], None] = field(default=lambda text: None)
    engine_kit: Path | None = None

    @property
    def local(self) -> Path:
        """Folder that the engine calls ``local``."""
        return self.config.resolve().parent

    @property
    def real(self) -> bool:
        """True if it checks a site of production, as a file beside a kit is, even if not all is ready."""
        return self.production or self.startup is not None

    @property
    def startup(self) -> Path | None:
        """The kit's folder ``startup``, if there is one."""
        beside = self.local.parent / "startup"
        return self.kit or (beside if (beside / "fed_client.json").is_file() else None)

    @property
    def kit_root(self) -> Path | None:
        """Folder that contains the kit's ``startup``, in which the site's client works."""
        return None if self.startup is None else self.startup.resolve().parent


def file_of(config: Path | None) -> Path | None:
    """Return a site's own file for ``--config``, which may name the kit's folder."""
    return config / "local" / FILE if config is not None and config.is_dir() else config


def area_of(name: str, label: str) -> str:
    """Return an area's name, with its site if the file has several."""
    return f"{name} of {label}" if label else name
