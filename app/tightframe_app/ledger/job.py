"""Which ledger, data sets and cap ``tightframe ledger`` is asked about: by options, or by the site's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from tightframe_app.screens import console, shown

WIDTH = 110
DELTA = 1e-5
"""At which epsilon is meant where neither an option nor a policy says it."""


@dataclass(frozen=True)
class Asked:
    """What of which ledger is asked for.

    Attributes:
        path: of the ledger.
        delta: at which epsilon is meant.
        epsilon: a cap; None if there is none to hold against.
        datasets: the only ones of interest; None for all.
        named: whether an option says which, so that they must be there.
    """

    path: Path
    delta: float = DELTA
    epsilon: float | None = None
    datasets: tuple[str, ...] | None = None
    named: bool = False


def asked_of(
    config: Path | None,
    file: Path | None,
    state_dir: Path | None,
    site: str | None,
    delta: float | None,
    epsilon: float | None,
    dataset: str | None,
) -> Asked:
    """What the options say, and the site's file where they do not.

    Raises:
        SiteConfigError: TF-201 if the file names no ``state_dir``, and no option does; TF-202 if it is wrong.
    """
    datasets: tuple[str, ...] | None = None if dataset is None else (dataset,)
    if config is None:
        path = ledger_of(file, state_dir, site)
        return Asked(path, DELTA if delta is None else delta, epsilon, datasets, named=dataset is not None)
    from tightframe.config.site import parse_single, read_object
    from tightframe.errors import SiteConfigError

    entry, _ = parse_single(read_object(config), str(config))
    policy = entry.policy.resolve(production=True)  # a ledger that outlives its run is production's
    if file is None and state_dir is None:
        if entry.state_dir is None:
            raise SiteConfigError(f"Expected `state_dir` in {config}: the ledger lies there.", code="TF-201")
        state_dir = Path(entry.state_dir)
    if datasets is None and (entry.data or entry.dataset_id is not None):
        datasets = tuple(dict.fromkeys(entry.records_id(name) for name in entry.data or ("",)))
    return Asked(
        ledger_of(file, state_dir, site),
        (policy.delta_cap or DELTA) if delta is None else delta,
        policy.epsilon_cap if epsilon is None else epsilon,
        datasets,
        named=dataset is not None,
    )


def ledger_of(file: Path | None, state_dir: Path | None, site: str | None, *, needed: bool = False) -> Path:
    """The ledger that is meant; where there is none yet the command ends, in an error if it is ``needed``."""
    from tightframe.privacy.ledger.ledger import FILE, FOLDER, ledger_path
    from tightframe.results.files import TRANSCRIPT
    from tightframe.rounds.lasting import lasting_journal

    if (file is None) == (state_dir is None):
        raise typer.BadParameter(
            "expected one of the ledger's file, --state-dir, and --config where the command takes it",
            param_hint="FILE",
        )
    if file is not None:
        return file
    assert state_dir is not None  # noqa: S101 - for the type checker
    if site is not None:
        return ledger_path(state_dir, site)
    names = {item.parent.name for item in (state_dir / FOLDER).glob(f"*/{FILE}")}
    if needed and not names:  # a site that has lost its ledger has left other things
        names = {item.name for item in lasting_journal(state_dir, "").glob("*") if item.is_dir()}
        names |= {item.parent.name for item in state_dir.glob(f"*/*/{TRANSCRIPT}")}
    sites = sorted(names)
    if not sites and not needed and state_dir.is_dir():
        console(WIDTH).print(
            f"no ledger in {shown(str(state_dir))} yet: the first job with secure sums or differential "
            "privacy makes it",
            soft_wrap=True,
        )
        raise typer.Exit()
    if len(sites) != 1:
        found = f"of {', '.join(map(shown, sites))}: name one with --site" if sites else "none"
        raise typer.BadParameter(f"expected one ledger in {state_dir}, got {found}", param_hint="--state-dir")
    return ledger_path(state_dir, sites[0])
