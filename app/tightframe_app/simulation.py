"""What a simulation is about to train on, said and looked at before the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tightframe import data
from tightframe.config.job import JobConfig
from tightframe.config.site import SiteEntry, open_data, site_entry
from tightframe.data.base import SiloData
from tightframe.errors import SiteConfigError, TightframeError


def records(local: Path, used: Path | None, job: JobConfig) -> str:
    """Say whose records a run will use, and look whether they can be opened.

    Args:
        local: the workspace's ``local/``.
        used: the site configuration that lies there, for messages; None if there is none.
        job: of the run.

    Raises:
        SiteConfigError: if the site configuration is wrong, does not name a site of the job, or names
            records that cannot be opened; all sites' problems together.
    """
    if used is None:
        return f"site configuration: none, every silo {unconfigured(job)}"
    entries: dict[str, SiteEntry] = {}
    problems: dict[str, list[str]] = {}
    for site in job.roster:
        try:
            entry = site_entry(local, site, production=False, alone=len(job.roster) == 1)
        except SiteConfigError as error:
            if error.code != "TF-201":
                raise  # of the file as a whole, with all its problems
            problems.setdefault(str(error), []).append(site)
        else:
            entries |= {} if entry is None else {site: entry}
    if not entries and not problems:
        return f"site configuration: {used}, for the server only; every silo {unconfigured(job)}"
    if problems := problems | unreadable(job, entries):
        lines = "\n".join(f"  - {', '.join(sites)}: {problem}" for problem, sites in problems.items())
        raise SiteConfigError(f"{used} names records that cannot be opened:\n{lines}")
    twins = [site for site, entry in entries.items() if entry.rehearses]
    said = f"; each of {', '.join(twins)} {unconfigured(job)}" if twins else ""
    return f"site configuration: {used}{said}"


def unconfigured(job: JobConfig) -> str:
    """What a silo without a configuration does: generated records, or real ones that need no files.

    Raises:
        TightframeError: if the data set has neither, or not for so many sites.
    """
    # The last site of the roster is the first to miss its share where a job has too many sites.
    stand_in = open_data(job, job.roster[-1], None)
    title = data.get(job.dataset).title
    if stand_in.synthetic:
        return (
            f"trains on the synthetic twin of {title}, generated records; for real ones, say "
            "where they lie with --site-config"
        )
    return f"trains on its share of {title}: real records, which need no configuration"


def unreadable(job: JobConfig, entries: Mapping[str, SiteEntry]) -> dict[str, list[str]]:
    """Why configured records cannot be opened, and at which sites; empty if all can.

    Opening is what each silo does first. The files of a folder that many sites share are looked into
    once; whether every single record can be read is for the silos, before any training.
    """
    problems: dict[str, list[str]] = {}
    folders: dict[tuple[Path, ...], str | None] = {}
    for site, entry in entries.items():
        if entry.rehearses:
            continue  # nothing is configured that could be looked into
        problem = None
        try:
            opened = open_data(job, site, entry)
            place = _paths(job, entry)
            if place not in folders:
                folders[place] = _problem_of_labels(opened)
            problem = folders[place]
        except TightframeError as error:
            problem = str(error)
        if problem is not None:
            problems.setdefault(problem, []).append(site)
    return problems


def _problem_of_labels(opened: SiloData) -> str | None:
    """Some data sets are opened without looking into their files; asking for labels does."""
    try:
        opened.labels("train")
    except TightframeError as error:
        return str(error)
    return None


def _paths(job: JobConfig, entry: SiteEntry) -> tuple[Path, ...]:
    """Every path by which a site says where its records lie."""
    place = data.get(job.dataset).site.model_validate(entry.data[job.dataset])
    return tuple(value for _, value in sorted(dict(place).items()) if isinstance(value, Path))
