"""Selection of the ledger, data sets and cap for ``tightframe ledger``, by options or the site's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from tightframe_app.screens import console, shown

WIDTH = 110
DELTA = 1e-5
"""Delta at which epsilon is computed if neither an option nor a policy gives one."""


@dataclass(frozen=True)
class Query:
    """Ledger, data sets and cap that a command is about.

    Attributes:
        path: of the ledger.
        delta: at which epsilon is computed.
        epsilon: cap to compare with; None if there is none.
        datasets: the data sets to show; None for all.
        named: whether an option names the data sets, so that they must be in the ledger.
    """

    path: Path
    delta: float = DELTA
    epsilon: float | None = None
    datasets: tuple[str, ...] | None = None
    named: bool = False


def query_of(
    config: Path | None,
    file: Path | None,
    state_dir: Path | None,
    site: str | None,
    delta: float | None,
    epsilon: float | None,
    dataset: str | None,
) -> Query:
    """Return the query from the options, with values from the site's file where no option gives them.

    Raises:
        SiteConfigError: TF-201 if neither the file nor an option names ``state_dir``; TF-202 if the file is
            wrong.
    """
    datasets: tuple[str, ...] | None = None if dataset is None else (dataset,)
    if config is None:
        path = ledger_of(file, state_dir, site)
        return Query(path, DELTA if delta is None else delta, epsilon, datasets, named=dataset is not None)
    from tightframe.config.site import parse_single, read_object
    from tightframe.errors import SiteConfigError

    entry, _ = parse_single(read_object(config), str(config))
    policy = entry.policy.resolve(production=True)  # a ledger that outlives its run is production's
    if file is None and state_dir is None:
        if entry.state_dir is None:
            raise SiteConfigError(
                f"Expected `state_dir` in {config}, which is where the ledger is, but it is missing: add it.",
                code="TF-201",
            )
        state_dir = Path(entry.state_dir)
    if datasets is None and (entry.data or entry.dataset_id is not None):
        datasets = tuple(dict.fromkeys(entry.records_id(name) for name in entry.data or ("",)))
    return Query(
        ledger_of(file, state_dir, site),
        (policy.delta_cap or DELTA) if delta is None else delta,
        policy.epsilon_cap if epsilon is None else epsilon,
        datasets,
        named=dataset is not None,
    )


def ledger_of(file: Path | None, state_dir: Path | None, site: str | None, *, needed: bool = False) -> Path:
    """Return the ledger's path; if there is none yet, end the command, with an error if it is ``needed``."""
    from tightframe.privacy.ledger.ledger import FILE, FOLDER, ledger_path
    from tightframe.results.files import TRANSCRIPT
    from tightframe.rounds.site_ledger import journal_folder

    if (file is None) == (state_dir is None):
        raise typer.BadParameter(
            "expected one of the ledger's file, --state-dir, and --config if the command has it",
            param_hint="FILE",
        )
    if file is not None:
        return file
    assert state_dir is not None  # noqa: S101 - for the type checker
    if site is not None:
        return ledger_path(state_dir, site)
    names = {item.parent.name for item in (state_dir / FOLDER).glob(f"*/{FILE}")}
    if needed and not names:  # a site that lost its ledger still has other records
        names = {item.name for item in journal_folder(state_dir, "").glob("*") if item.is_dir()}
        names |= {item.parent.name for item in state_dir.glob(f"*/*/{TRANSCRIPT}")}
    sites = sorted(names)
    if not sites and not needed and state_dir.is_dir():
        console(WIDTH).print(
            f"no ledger in {shown(str(state_dir))} yet: the first job with secure sums or differential "
            "privacy creates it",
            soft_wrap=True,
        )
        raise typer.Exit()
    if len(sites) != 1:
        got = f"those of {', '.join(map(shown, sites))}: choose one with --site" if sites else "none"
        raise typer.BadParameter(f"expected one ledger in {state_dir}, got {got}", param_hint="--state-dir")
    return ledger_path(state_dir, sites[0])
