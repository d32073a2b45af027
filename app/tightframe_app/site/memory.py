"""Access to a site's lasting records of sums, budgets and jobs, for commands that show them or decide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightframe.errors import SiteConfigError
from tightframe_app.site.checks.findings import Scope

if TYPE_CHECKING:
    from tightframe.config.site import SiteEntry
    from tightframe.privacy.ledger.rows import Check
    from tightframe.rounds.site_ledger import LedgerPaths, SiteLedger
    from tightframe.securesum.identity import Anchor, Signer
    from tightframe.securesum.site.journal import Entry


@dataclass(frozen=True)
class Memory:
    """A site's lasting records, and the kit whose key signs them.

    Attributes:
        site: the site's name.
        entry: the configuration in the site's own file.
        places: paths of the records.
        startup: the kit's folder; None if there is none.
    """

    site: str
    entry: SiteEntry
    places: LedgerPaths
    startup: Path | None

    def read(self) -> list[Entry]:
        """Return all entries on the site's secure sums, oldest first, without writing.

        Raises:
            TightframeError: if the ledger is lost, altered or cannot be read.
        """
        from tightframe.rounds.sums.common import package_errors
        from tightframe.rounds.sums.vault import read_journal

        with package_errors():
            return read_journal(self.places, check=self.check())

    @cached_property
    def facts(self) -> list[tuple[datetime, Mapping[str, Any]]]:
        """Facts on the site's secure sums with their times, as plain values, oldest first; read once."""
        from tightframe.rounds.site_ledger import read_contents

        contents = read_contents(self.places, check=self.check())
        entries = () if contents is None else contents.entries
        return [(entry.time, fact) for entry in entries for fact in getattr(entry.content, "facts", ())]

    @cached_property
    def first_days(self) -> dict[str, date]:
        """Day (UTC) of each job's first fact, by the job's id."""
        days: dict[str, date] = {}
        for time, fact in self.facts:
            for job in {str(fact.get("job", "")), str(fact.get("lineage", ""))}:
                days.setdefault(job, time.date())
        return days

    def check(self) -> Check | None:
        """Return the check of signatures by this site's certificate; None without a kit.

        Raises:
            SiteConfigError: TF-615 if the kit cannot be used.
        """
        from tightframe.rounds.site_ledger.keys import signature_check, trusted_roots

        if self.startup is None:
            return None
        _, anchor = self._identity()
        return signature_check(trusted_roots(self.entry, anchor), name=self.site)

    def site_ledger(self) -> SiteLedger:
        """Return the ledger, opened for a decision that the site's key signs.

        Raises:
            SiteConfigError: TF-615 without a kit.
        """
        from tightframe.rounds.site_ledger import SiteLedger

        if self.startup is None:
            raise SiteConfigError(
                "Expected the site's startup kit beside its configuration, because its key signs the "
                "decision, but there is none: give the kit's folder `startup` with --kit.",
                code="TF-615",
            )
        return SiteLedger(self.places, self.entry, self._identity)

    def _identity(self) -> tuple[Signer, Anchor]:
        from tightframe.flare.identity import site_identity

        assert self.startup is not None  # noqa: S101 - for the type checker
        central = self.entry.policy.resolve(production=True).central_provisioning
        return site_identity(self.startup, self.site, production=True, missing_role=central)


def own_entry(config: Path) -> SiteEntry:
    """Return the configuration in a site's own file.

    Raises:
        SiteConfigError: TF-202 if it is wrong, or a simulation's, of several sites.
    """
    from tightframe.config.site import parse_single, read_object

    if "sites" in (values := read_object(config)):
        raise SiteConfigError(
            f"Expected one site's own file, but {config} is a simulation's, of several sites. There "
            "no site remembers other jobs, whatever `state_dir` it names; the ledger of one run is read by "
            "`tightframe ledger explain --state-dir simulator_workspace/SITE`."
        )
    return parse_single(values, str(config))[0]


def state_dir_of(entry: SiteEntry, config: Path) -> Path:
    """Return the folder of a site's lasting records.

    Raises:
        SiteConfigError: TF-201 if its file names none.
    """
    if entry.state_dir is None:
        raise SiteConfigError(
            f"Expected `state_dir` in {config}, which is where the ledger is, but it is missing: add it.",
            code="TF-201",
        )
    return Path(entry.state_dir)


def memory_of(config: Path, site: str | None, kit: Path | None) -> Memory:
    """Return the lasting records of a site.

    Args:
        config: the site's own file.
        site: its name; the one in the kit's certificate if not given.
        kit: the kit's folder ``startup``; the one beside the configuration if not given.

    Raises:
        FileNotFoundError: if there is no such configuration.
        SiteConfigError: TF-201 if it names no ``state_dir``; TF-202 if it is wrong; TF-615 without a
            name and a kit that has it.
    """
    from tightframe.flare.identity import SITE_FILE
    from tightframe.rounds.site_ledger import LedgerPaths
    from tightframe_app.federation.kits import common_name

    if not config.is_file():
        raise FileNotFoundError(f"Expected the site's configuration at {config}, but there is no such file.")
    entry = own_entry(config)
    state_dir = state_dir_of(entry, config)
    scope = Scope(config, kit=kit)
    if site is None:
        site = None if scope.startup is None else common_name(scope.startup / SITE_FILE)
    if site is None:
        raise SiteConfigError(
            f"Expected a startup kit beside {config}, whose certificate has the site's name, but there is "
            "none: give the kit's folder `startup` with --kit, or the name with --site.",
            code="TF-615",
        )
    paths = LedgerPaths.of_site(state_dir, site, scope.kit_root)
    return Memory(site, entry, paths, scope.startup)


LONGEST_NAME = 300
"""Most characters of a name."""


def job_name(folder: Path, site: str) -> str | None:
    """Return the name and method in a job's folder at a site, or that it withdraws; None without a job.

    A method that is part of the name is left out.
    """
    try:
        path = folder / f"app_{site}" / "config" / "config_fed_client.json"
        (executor,) = json.loads(path.read_bytes())["executors"]
        values = executor["executor"]["args"]
        name = str(values["job_name"])[:LONGEST_NAME]
        if values.get("withdraw"):
            return f"{name}, a withdrawal"
        method = str(values.get("method", ""))[:LONGEST_NAME]
        return name if method in name else f"{name}, {method}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def with_id(job: str, folder: Path | None, site: str) -> str:
    """Return ``name (id)`` of a job; the id alone if no folder has the name."""
    name = None if folder is None else job_name(folder, site)
    return f"{name} ({job})" if name else job
