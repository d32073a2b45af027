"""Checks of a simulation's records before the engine starts, and its results if it was interrupted."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tightframe import data
from tightframe.config.job import JobConfig
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import FILE_NAME, SiteEntry, dataset_of, open_data, server_entry, site_entry
from tightframe.data.base import SiloData, check_form
from tightframe.errors import RunError, SiteConfigError, TightframeError
from tightframe.flare.simulation import workspace as workspaces
from tightframe.flare.simulation.simulator import PREVIOUS_RUN
from tightframe.results.files import CHECKPOINT, OUTCOME, PAGE, ResultsError
from tightframe.results.outcome import Outcome

if TYPE_CHECKING:
    from tightframe.rounds.setup import JobSetup

INTERRUPTED = "TF-105"
"""Code of an interrupted run, which can be restarted unchanged."""
REFUSED = "TF-509"
"""Code of a run that sites refused, each with its own code."""
FAILED = "TF-513"
"""Code of a run in which silos failed, each with its own code in its log."""
NOTHING = re.compile(r"nothing can be contributed to this sum: (TF-\d{3})")
"""A silo's log line that has it."""


def records(local: Path, config: Path | None, job: JobConfig) -> str:
    """Describe the records of a run, after checking that they can be opened.

    Args:
        local: the workspace's ``local/``.
        config: path of the site configuration in use, for messages; None if there is none.

    Raises:
        SiteConfigError: if the site configuration is wrong, does not name a site of the job, or names
            records that cannot be opened; lists all sites' problems.
    """
    if config is None:
        return f"site configuration: none, every silo {unconfigured(job)}"
    entries: dict[str, SiteEntry] = {}
    problems: dict[str, list[str]] = {}
    for site in job.roster:
        try:
            entry = site_entry(local, site, production=False, alone=len(job.roster) == 1)
        except SiteConfigError as error:
            if error.code != "TF-201":
                raise  # the error covers the whole file, with all its problems
            # Name the user's own file, of which the workspace has a copy.
            problem = str(error).replace(str(local / FILE_NAME), str(config))
            problems.setdefault(problem, []).append(site)
        else:
            entries |= {} if entry is None else {site: entry}
    if not entries and not problems:
        return f"site configuration: {config}, for the server only; every silo {unconfigured(job)}"
    if problems := problems | unreadable(job, entries):
        lines = "\n".join(f"  - {', '.join(sites)}: {problem}" for problem, sites in problems.items())
        raise SiteConfigError(f"Expected {config} to say where each site's records lie, but:\n{lines}")
    twins = [site for site, entry in entries.items() if entry.rehearses]
    generated = f"; each of {', '.join(twins)} {unconfigured(job)}" if twins else ""
    return f"site configuration: {config}{generated}"


def check_start(local: Path, setup: JobSetup) -> None:
    """Refuse a run whose initial model is not the server's file (``rounds.run_state.check_start``).

    Args:
        local: the workspace's ``local/``.
    """
    from tightframe.rounds import run_state

    run_state.check_start(setup, server_entry(local).initial_model)


def unconfigured(job: JobConfig) -> str:
    """Describe an unconfigured silo's records: generated, or real without files.

    Raises:
        TightframeError: if the data set has neither, or not for so many sites.
    """
    # With too many sites, the roster's last is the first without a share.
    stand_in = open_data(job, job.roster[-1], None)
    title = dataset_of(job)[0].title
    if stand_in.synthetic:
        return (
            f"trains on the synthetic twin of {title}, generated records; for real ones, give "
            "their location with --site-config"
        )
    return f"trains on its share of {title}: real records, which need no configuration"


def unreadable(job: JobConfig, entries: Mapping[str, SiteEntry]) -> dict[str, list[str]]:
    """Return problem of opening configured records -> sites that have it.

    Records are opened as each silo will. A folder that many sites share is checked once; before training the
    silos check that every record can be read.
    """
    problems: dict[str, list[str]] = {}
    folders: dict[tuple[Path, ...], str | None] = {}
    for site, entry in entries.items():
        if entry.rehearses:
            continue  # nothing is configured
        problem = None
        try:
            opened = open_data(job, site, entry)
            place = _paths(job, entry)
            if place not in folders:
                folders[place] = _problem_of_labels(opened, job)
            problem = folders[place]
        except TightframeError as error:
            problem = str(error)
        if problem is not None:
            problems.setdefault(problem, []).append(site)
    return problems


def _problem_of_labels(opened: SiloData, job: JobConfig) -> str | None:
    """Return the error of reading the labels, as some data sets open without reading their files."""
    try:
        check_form(opened, *dataset_of(job))
    except TightframeError as error:
        return str(error)
    return None


def _paths(job: JobConfig, entry: SiteEntry) -> tuple[Path, ...]:
    """Return all paths in a site's configuration of its records."""
    place = data.get(job.dataset).site.model_validate(entry.data[job.dataset])
    return tuple(value for _, value in sorted(dict(place).items()) if isinstance(value, Path))


def keep(workspace: Path, most: int, say: Callable[[str], None]) -> Path | None:
    """Move an earlier run out of the workspace, which the engine wipes; return its new folder."""
    folder, removed = workspaces.keep_results(workspace, most=most)
    if folder is not None:
        say(f"kept the earlier run as {_short(folder)}; {most} runs are kept (--keep)")
    for path in removed:
        say(f"removed an earlier run, {_short(path)}")
    return folder


def set_previous(previous: Path | None, workspace: Path, moved: Path | None) -> Path | None:
    """Set the environment variable that names to silos the stopped simulation that this job continues.

    Args:
        previous: the user's folder, which may be this workspace.
        moved: folder to which the workspace's earlier run was moved.

    Returns:
        The stopped simulation's present folder; None without one.
    """
    if previous is None:
        return None
    if previous.resolve() == workspace.resolve():
        if moved is None:
            raise typer.BadParameter(
                "it is this run's own workspace, and its earlier run is not kept: choose another --workspace",
                param_hint="--previous-run",
            )
        previous = moved
    os.environ[PREVIOUS_RUN] = str(previous.resolve())
    return previous


def left_behind(
    setup: JobSetup,
    workspace: Path,
    job: Path,
    stopped: str | None,
    options: Sequence[str] = (),
    previous: Path | None = None,
) -> list[str]:
    """Write results and report of an interrupted run; return how to continue it.

    Args:
        stopped: cause of the interruption; None if the run failed by itself.
        options: command-line options that the next run also needs, mainly --site-config.
        previous: present folder of the simulation that this one continued.

    Returns:
        Lines to print.
    """
    results = workspace / workspaces.RESULTS
    outcome = results / OUTCOME
    if results.is_dir() and not outcome.is_file():
        why = (
            f"stopped by {stopped}"
            if stopped
            else "cut off: its processes ended without a message, see the log above"
        )
        _write_outcome(
            setup, results, str(RunError(f"interrupted: {why}.", code=INTERRUPTED)), workspace / "local"
        )
    if not outcome.is_file() or _trained(results):
        return []
    place, suffix = _quoted(workspace), "".join(f" {shlex.quote(word)}" for word in options)
    page = results / PAGE
    lines = [f"results so far: {_short(page if page.is_file() else outcome)}"]
    code = _cause(results)
    if (results / CHECKPOINT).is_file():
        name, resumed = setup.job.job_name, Path("exported", f"{setup.job.job_name}-resumed")
        first = "" if code in (None, INTERRUPTED) else f", the cause corrected (tightframe explain {code})"
        lines += [
            f"to continue after its last complete round{first}:",
            f"  tightframe jobs export {name} --resume {_quoted(results)} -o {_quoted(resumed)}",
            f"  tightframe simulate {_quoted(resumed)} -w {place} --previous-run {place}{suffix}",
        ]
    elif previous is not None:
        repeated = f"tightframe simulate {_quoted(job)} -w {place} --previous-run {_quoted(previous)}{suffix}"
        if code in (None, INTERRUPTED):
            lines.append(f"no new round was completed, so run it again:  {repeated}")
        else:
            first = f"no new round was completed: correct the cause first (tightframe explain {code})"
            lines.append(f"{first}, then run it again:  {repeated}")
    elif code not in (None, INTERRUPTED):
        lines.append(f"no round was completed: correct the cause first (tightframe explain {code})")
    else:
        command = f"tightframe simulate {_quoted(job)} -w {place}{suffix}"
        lines.append(f"no round was completed, so start again:  {command}")
    return lines


def one_answer_hint(setup: JobSetup, workspace: Path) -> str | None:
    """Warn of stricter sites, which may end the run of a model with one answer; None for any other model.

    A silo asks for records that a network tells apart only without privacy and with ``records_per_feature``,
    which a simulation leaves out unless its site configuration has it.
    """
    try:
        outcome = Outcome.read(workspace / workspaces.RESULTS)
    except ResultsError:
        return None
    answer = None if outcome.evaluation is None else outcome.evaluation.test.one_answer
    if answer is None or not answer.certain or setup.privacy is not None or setup.method.one_sum is not None:
        return None
    for site in setup.job.roster:
        entry = site_entry(workspace / "local", site, production=False, alone=len(setup.job.roster) == 1)
        block = PolicyBlock() if entry is None else entry.policy
        if not block.resolve(production=False).records_per_feature:
            return (
                "one answer: if the network gives all records one answer, profile `standard` ends such a run "
                "(tightframe explain TF-305)"
            )
    return None


def _write_outcome(setup: JobSetup, results: Path, reason: str, local: Path) -> None:
    """Write ``outcome.json`` and the report from the run's checkpoint."""
    from tightframe.report import writing
    from tightframe.rounds.server import resume
    from tightframe.rounds.server.record import RunRecord

    quiet = logging.getLogger("tightframe.interrupted")
    quiet.setLevel(logging.CRITICAL)
    record = RunRecord(results, setup, quiet, writing.leave)
    site = setup.job.roster[0]
    try:
        if (results / CHECKPOINT).is_file():
            stored, saved = resume.read(results / CHECKPOINT)
            record.rows, record.absent, record.best = list(saved.rows), dict(saved.absent), saved.best
            record.weights, record.rounds_done = dict(saved.weights), int(stored.described["after_round"])
        entry = site_entry(local, site, production=False, alone=len(setup.job.roster) == 1)
        record.synthetic = open_data(setup.job, site, entry).synthetic
    except TightframeError as error:
        reason = f"{reason}\nits rounds or its records could not be read: {error}"
    record.finish(reason)


def _trained(results: Path) -> bool:
    try:
        return Outcome.read(results).trained
    except ResultsError:
        return False


def _cause(results: Path) -> str | None:
    """Return the code of why a run stopped, or the refusing sites' codes; None without one."""
    outcome = Outcome.read(results)
    code = (outcome.reason or "").partition(":")[0]
    if code == REFUSED and outcome.not_enrolled:
        return " ".join(sorted({*outcome.not_enrolled.values()}))
    if code == FAILED and (codes := _silos_codes(results.parents[1], outcome.roster)):
        return " ".join(sorted(codes))
    return code if code.startswith("TF-") else None


def _silos_codes(workspace: Path, sites: Sequence[str]) -> set[str]:
    """Return the codes for which silos contributed nothing, from their own logs."""
    codes = set[str]()
    for site in sites:
        with suppress(OSError), (workspace / site / "log.txt").open(errors="replace") as lines:
            codes.update(match[1] for line in lines if (match := NOTHING.search(line)))
    return codes


def _short(path: Path) -> str:
    """Return a path relative to the current folder if that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _quoted(path: Path) -> str:
    return shlex.quote(_short(path))
