"""Selection of ledger, data sets and cap for ``tightframe ledger``, by options or the site's file."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tightframe.config.profiles import DELTA
from tightframe_app.screens import console, shown
from tightframe_app.site.checks.findings import CONFIG_HELP, file_of
from tightframe_app.site.memory import own_entry, state_dir_of

WIDTH = 110

File = Annotated[
    Path | None,
    typer.Argument(exists=True, dir_okay=False, help="The ledger's file, or give --state-dir (or --config)."),
]
StateDir = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="`state_dir` of the site's local/tightframe.json."),
]
Site = Annotated[
    str | None, typer.Option("--site", "-s", help="Site whose ledger to use, if there are several.")
]
MissingRole = Annotated[
    bool, typer.Option("--missing-role", help="Accept certificates without a role, for tests.")
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        exists=True,
        callback=file_of,
        help=f"{CONFIG_HELP} It gives the state folder, the data sets, the policy's cap and, with the kit, "
        "the root unless other options do.",
    ),
]
ROOT_HELP = (
    "A project's root certificate (rootCA.pem of a startup kit), to check signatures. Repeat it if the site "
    "took part in several projects."
)


@dataclass(frozen=True)
class Query:
    """Ledger, data sets and cap of a command.

    Attributes:
        delta: of epsilon.
        epsilon: cap to compare with; None without one.
        datasets: the data sets to show; None for all.
        named: whether an option names the data sets, so that they must be in the ledger.
    """

    path: Path
    delta: float = DELTA
    epsilon: float | None = None
    datasets: tuple[str, ...] | None = None
    named: bool = False


@dataclass(frozen=True)
class Options:
    """Options of the commands that show spending: the ledger, how to check it, and the cap."""

    file: File = None
    state_dir: StateDir = None
    site: Site = None
    config: Config = None
    root: Annotated[list[Path] | None, typer.Option(exists=True, dir_okay=False, help=ROOT_HELP)] = None
    missing_role: MissingRole = False
    delta: Annotated[
        float | None,
        typer.Option(
            help=f"Delta at which to compute epsilon; the policy's, else {DELTA:g}.", show_default=False
        ),
    ] = None
    epsilon: Annotated[
        float | None, typer.Option(help="Cap on epsilon, to report what is left of it and what would fit.")
    ] = None
    dataset: Annotated[str | None, typer.Option(help="Show one `dataset_id` only.")] = None

    def query(self, *, needed: bool = False) -> Query:
        """Return the query, with defaults from the site's file.

        Args:
            needed: a missing ledger is an error, not the command's end.

        Raises:
            SiteConfigError: TF-201 if neither the file nor an option names ``state_dir``; TF-202 if the file
                is wrong, or a simulation's.
        """
        delta, epsilon, state_dir = self.delta, self.epsilon, self.state_dir
        datasets: tuple[str, ...] | None = None if self.dataset is None else (self.dataset,)
        if self.config is not None:
            entry = own_entry(self.config)
            policy = entry.policy.resolve(production=True)  # only production's ledger outlives a run
            delta = policy.delta_cap if delta is None else delta
            epsilon = policy.epsilon_cap if epsilon is None else epsilon
            if self.file is None and state_dir is None:
                state_dir = state_dir_of(entry, self.config)
            if datasets is None and (entry.data or entry.dataset_id is not None):
                datasets = tuple(dict.fromkeys(entry.records_id(name) for name in entry.data or ("",)))
        path = ledger_of(self.file, state_dir, self.site, needed=needed)
        delta = DELTA if delta is None else delta
        return Query(path, delta, epsilon, datasets, named=self.dataset is not None)


def taking_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the fields of ``Options``, a command's first parameter, to its command line."""
    shared = inspect.signature(Options, eval_str=True).parameters
    _, *specific = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def run(**values: Any) -> None:
        options = Options(**{name: values.pop(name) for name in shared})
        command(options, **values)

    parameters = [*shared.values(), *specific]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def ledger_of(file: Path | None, state_dir: Path | None, site: str | None, *, needed: bool = False) -> Path:
    """Return the ledger's path; without a ledger end the command, with an error if it is ``needed``."""
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
    if not sites and len(simulated := ledgers_below(state_dir)) == 1:
        return simulated[0]
    if not sites and simulated:
        raise typer.BadParameter(
            f"it has a simulation's ledgers: give one site's folder, such as {simulated[0].parent.name}",
            param_hint="--state-dir",
        )
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


def run_of(ledger: Path) -> Path | None:
    """Return a simulated run's folder at a site, given its ledger of secure sums or charges."""
    from tightframe.rounds.state_files import SECURE_FOLDER, STATE

    places = ledger.absolute().parents
    for depth, name in ((2, STATE), (3, SECURE_FOLDER)):
        if len(places) > depth + 1 and places[depth].name == name:
            return places[depth + 1]
    return None


def charges_beside(ledger: Path) -> Path | None:
    """Return the ledger of charges of a simulated run, given that of its secure sums."""
    from tightframe.privacy.ledger.ledger import ledger_path
    from tightframe.rounds.state_files import STATE

    run = run_of(ledger)
    path = None if run is None else ledger_path(run / STATE, ledger.parent.name)
    return path if path is not None and path.is_file() and not path.samefile(ledger) else None


def ledgers_below(folder: Path) -> list[Path]:
    """Return the ledgers of simulated runs in a site's or simulator's folder, preferably of charges."""
    from tightframe.privacy.ledger.ledger import FILE, FOLDER
    from tightframe.rounds.state_files import SECURE_FOLDER, STATE

    for kind in (STATE, f"{SECURE_FOLDER}/*"):
        for depth in ("", "*/", "*/*/"):
            if ledgers := sorted(folder.glob(f"{depth}{kind}/{FOLDER}/*/{FILE}")):
                return ledgers
    return []
