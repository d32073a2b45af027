"""A site's own configuration, ``local/tightframe.json``: where its records lie, which centre it is.

Data comes from the site, never from the job. One file serves one site, or, in the simulator,
maps every site (``{"sites": {"site-1": {...}, ...}}``). Without a file the simulator uses the
synthetic twin, with a banner, and for a site whose entry has a policy and no records, too; production
refuses.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from tightframe import data
from tightframe.config.job import JobConfig, config_hash
from tightframe.config.policy import Policy, PolicyBlock
from tightframe.config.refusals import BelowPolicyError, Refusal
from tightframe.data.base import DatasetSpec, SiloData, absolute
from tightframe.errors import JobError, SiteConfigError
from tightframe.options import StrictModel, listed

FILE_NAME = "tightframe.json"
MARKER = FILE_NAME + ".lent"
"""Lies beside a file that ``tightframe simulate`` lent the workspace: its SHA-256, its origin, the lender's
process id."""

AbsolutePath = Annotated[str, AfterValidator(absolute)]
_NOT_OF_RECORDS = frozenset(("policy", "device", "loader_workers", "offer_prototypes"))


class SiteEntry(StrictModel):
    """What one site says about itself.

    Attributes:
        data: data set name -> where its records lie, as that data set defines it.
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        loader_workers: processes that read records; 0 reads in the training process.
        offer_prototypes: False keeps this site's class prototypes at home.
        state_dir: folder for what must outlive a job; required in production.
        ledger_roots: root certificates of this site's other projects, earlier ones or at the same time:
            entries of its privacy ledger may be signed under them, too. They prove nothing else.
        engine_account: the account of the engine's client where that is another one than the account that
            trains; then nothing is trained unless the two are apart (TF-742).
        dataset_id: the site's own name for its records, under which it remembers for which silos
            their counts were opened; data set and place by default.
        accepted_options: data set name -> options of a job that choose which of this site's records
            take part, and the one value of each that it accepts beside the default.
        policy: the site's rules; see ``config.policy``.
    """

    data: dict[str, dict[str, Any]] = {}
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    loader_workers: int = Field(default=0, ge=0, le=64)
    offer_prototypes: bool = True
    state_dir: AbsolutePath | None = None
    ledger_roots: list[AbsolutePath] = []
    engine_account: str | None = Field(default=None, pattern=r"^[a-z_][a-z0-9_-]{0,31}$")
    dataset_id: str | None = Field(default=None, min_length=1, max_length=200)
    accepted_options: dict[str, dict[str, Any]] = {}
    policy: PolicyBlock = PolicyBlock()

    @property
    def rehearses(self) -> bool:
        """Whether it is a policy to try on generated records: it has one, and says nothing of records.

        Never in production, where an entry must have a ``state_dir``.
        """
        return "policy" in self.model_fields_set <= _NOT_OF_RECORDS

    def records_id(self, dataset: str) -> str:
        """Under which name the site remembers what was told of its records of a data set."""
        if self.dataset_id is not None:
            return self.dataset_id
        return f"{dataset}:{config_hash(self.data.get(dataset, {}))[:16]}"


class StatsD(StrictModel):
    """Where a StatsD daemon listens, by UDP."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    port: int = Field(default=9125, ge=1, le=65535)


class ServerEntry(StrictModel):
    """What the server's site says.

    Attributes:
        initial_model: safetensors file of a pretrained start; its hash is recorded.
        central_provisioning: accept certificates without the role attribute, which only central
            provisioning makes; for tests.
        tensorboard: write the run's measures as TensorBoard events beside its results.
        statsd: the daemon that gets the run's measures while it runs; None sends nothing.
    """

    initial_model: AbsolutePath | None = None
    central_provisioning: bool = False
    tensorboard: bool = False
    statsd: StatsD | None = None


class SiteFile(StrictModel):
    """The simulator's file: one entry for each site, and one for the server."""

    sites: dict[str, SiteEntry] = {}
    server: ServerEntry = ServerEntry()


def read_site_file(folder: Path) -> dict[str, Any] | None:
    """The raw content of ``folder/tightframe.json``; None if there is no such file.

    Raises:
        SiteConfigError: TF-202 if it is not a JSON object.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    _refuse_forgotten(folder)
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a site configuration.

    Raises:
        SiteConfigError: TF-202 if it is anything else.
    """
    try:
        # Written back, so that a lone surrogate is refused here and not by whoever shows it.
        json.dumps(values := json.loads(path.read_text(encoding="utf-8")), ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise SiteConfigError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise SiteConfigError(f"Expected {path} to hold a JSON object, but got {type(values).__name__}.")
    return values


def _refuse_forgotten(folder: Path) -> None:
    """Refuse a file that was lent for a run that is over: nobody asked this run for those records."""
    try:
        lender = int((folder / MARKER).read_text(encoding="utf-8").split("\n")[2])
        os.kill(lender, 0)
    except FileNotFoundError:
        return  # the user's own file
    except PermissionError:
        return  # alive, of another user
    except (ValueError, IndexError, ProcessLookupError):
        raise SiteConfigError(
            f"{folder / FILE_NAME} was lent for a run that was cut off. Remove it and {MARKER} beside it, "
            "or let `tightframe simulate` do so: its next run begins with that."
        ) from None


def parse_site_file(values: dict[str, Any], where: str = FILE_NAME) -> SiteFile:
    """Validate a file that maps sites, listing every problem, those of the data sets included.

    Raises:
        SiteConfigError: TF-202.
    """
    problems: list[str] = []
    parsed = SiteFile()
    try:
        parsed = SiteFile.model_validate(values)
    except ValidationError as error:
        problems += listed(error, model=SiteFile)
    sites = values.get("sites")
    owners: dict[str, str] = {}
    for site, entry in (sites if isinstance(sites, dict) else {}).items():
        problems += _data_problems(entry, f"sites.{site}.")
        for records in _records_of(entry):
            if records in owners:
                problems.append(f"sites.{site}: has the very records of {owners[records]}: {records}")
            owners.setdefault(records, site)
    if problems:
        raise SiteConfigError(_problem_list(where, problems))
    return parsed


def parse_single(values: dict[str, Any], where: str = FILE_NAME) -> tuple[SiteEntry, ServerEntry]:
    """Validate the file of one site (or of the server), listing every problem.

    Raises:
        SiteConfigError: TF-202.
    """
    remaining = dict(values)
    server_values = remaining.pop("server", {})
    problems: list[str] = []
    entry, server = SiteEntry(), ServerEntry()
    try:
        entry = SiteEntry.model_validate(remaining)
    except ValidationError as error:
        problems += listed(error, model=SiteEntry)
    problems += _data_problems(remaining, "")
    try:
        server = ServerEntry.model_validate(server_values)
    except ValidationError as error:
        problems += listed(error, "server.", ServerEntry)
    if problems:
        raise SiteConfigError(_problem_list(where, problems))
    return entry, server


def site_entry(folder: Path, site: str, *, production: bool, alone: bool = False) -> SiteEntry | None:
    """The entry of one site; None where the simulator may use the synthetic twin.

    Args:
        folder: the site's ``local/``.
        site: its name.
        production: whether the engine runs in secure mode.
        alone: whether the job is for this site only.

    Raises:
        SiteConfigError: TF-201 in production without a file or without ``state_dir``, or where
            a simulator's file does not name the site; TF-202 if the file is wrong.
    """
    values = read_site_file(folder)
    path = folder / FILE_NAME
    if values is None:
        if production:
            raise SiteConfigError(
                f"{site} is not configured: expected {path} to say where its records lie, for example "
                '{"state_dir": "/var/lib/tightframe", "data": {"fed_isic2019": '
                '{"root": "/data/fed_isic2019", "center": 0}}}.',
                code="TF-201",
            )
        return None
    if "sites" in values:
        sites = parse_site_file(values, str(path)).sites
        if not sites and not production:
            return None  # a file for the server alone
        if site not in sites:
            raise SiteConfigError(
                f"{path} names {sorted(sites)}, but not {site}: add it, or export the job "
                "for the sites that are configured.",
                code="TF-201",
            )
        entry = sites[site]
    else:
        entry, _ = parse_single(values, str(path))
        if not production and not entry.data and set(values) <= {"server"}:
            return None
        if not production and not alone:
            raise SiteConfigError(
                f'{path} is the file of one site, but this simulation has several: write {{"sites": '
                f'{{"{site}": {{...}}, ...}}}}, so that each has records of its own.'
            )
    if production and entry.state_dir is None:
        raise SiteConfigError(
            f"Expected `state_dir` in {path}: what must outlive a job lies there.", code="TF-201"
        )
    return entry


def server_entry(folder: Path) -> ServerEntry:
    """The server's own entry; defaults if the file does not exist or says nothing of it."""
    values = read_site_file(folder)
    if values is None:
        return ServerEntry()
    where = str(folder / FILE_NAME)
    return parse_site_file(values, where).server if "sites" in values else parse_single(values, where)[1]


def open_data(job: JobConfig, site: str, entry: SiteEntry | None) -> SiloData:
    """The silo's records: the configured ones, or the synthetic twin of a simulation that has none.

    Args:
        job: validated.
        site: the silo's name.
        entry: what the site says; None, or an entry that only ``rehearses`` a policy, means the twin.

    Raises:
        SiteConfigError: TF-201 if the site is configured, but not for this data set.
        DataError: if what is configured is not there.
    """
    spec, options = dataset_of(job)
    if entry is None or entry.rehearses:
        if spec.twin is None:
            raise SiteConfigError(f"{spec.name} has no synthetic twin: configure its records.", code="TF-201")
        return spec.twin(job.roster.index(site), options)
    if spec.name not in entry.data:
        raise SiteConfigError(
            f"{site} is configured for {', '.join(sorted(entry.data)) or 'no data set'}, "
            f"but the job asks for {spec.name}: add it to `data` in the site's {FILE_NAME}.",
            code="TF-201",
        )
    return spec.open(spec.site.model_validate(entry.data[spec.name]), options)


def dataset_of(job: JobConfig) -> tuple[DatasetSpec, BaseModel]:
    """The data set that a job names, with its validated options."""
    spec = data.get(job.dataset)
    return spec, spec.options.model_validate(job.dataset_options)


def check_record_options(job: JobConfig, entry: SiteEntry, policy: Policy) -> None:
    """Refuse a job that chooses which of the site's records take part, unless the site accepts that.

    Counts are opened exactly. Two jobs over the same silos that differ by a few records of one silo
    would tell that silo's, so under a policy that keeps the class rules each such option has one
    value: the default, or what the site's ``accepted_options`` say. With differential privacy no
    record may be there more than once, whatever the site accepts.

    Raises:
        PolicyError: TF-614, naming the options.
    """
    spec, options = dataset_of(job)
    if policy.private(job) and getattr(options, "oversample_minority", False):
        refusal = Refusal(
            "required_privacy" if policy.required_privacy else "privacy",
            "oversample_minority",
            "each record at most once",
            "a record that is repeated weighs more than the noise is made for, and how often it is repeated "
            "depends on the others; leave the option out",
        )
        policy.refuse([refusal])
    if policy.class_rules_off:
        return
    accepted = entry.accepted_options.get(spec.name, {})
    refusals = [
        Refusal("accepted_options", f"{name} {asked!r} of {spec.name}", repr(wanted))
        for name in spec.choosing
        if (asked := getattr(options, name))
        != (wanted := accepted.get(name, spec.options.model_fields[name].default))
    ]
    if refusals:
        raise BelowPolicyError(
            refusals,
            told=policy.tell_refusals,
            before="the job chooses which of this site's records take part; if that is meant, write the "
            "value into `accepted_options` of the site's entry, and keep it:",
        )


def _records_of(entry: Any) -> list[str]:
    """Each data set of a raw entry with all that says which records it is, as text to compare."""
    return [json.dumps({name: values}, sort_keys=True) for name, values in _raw_data(entry).items()]


def _raw_data(entry: Any) -> dict[str, Any]:
    """The ``data`` of a raw entry; empty where that is no mapping, which the entry's model says."""
    found = entry.get("data") if isinstance(entry, dict) else None
    return found if isinstance(found, dict) else {}


def _data_problems(entry: Any, prefix: str) -> list[str]:
    """What is wrong with a raw entry's ``data``; told also while other parts are wrong."""
    problems: list[str] = []
    for name, values in _raw_data(entry).items():
        try:
            data.get(name).site.model_validate(values)
        except JobError as error:
            problems += [f"{prefix}data.{name}: {problem}" for problem in error.problems]
        except ValidationError as error:
            problems += listed(error, f"{prefix}data.{name}.", data.get(name).site)
    return problems + _accepted_problems(entry, prefix)


def _accepted_problems(entry: Any, prefix: str) -> list[str]:
    """What is wrong with a raw entry's ``accepted_options``: a rule with a wrong name would hold nothing."""
    found = entry.get("accepted_options") if isinstance(entry, dict) else None
    problems: list[str] = []
    for name, values in found.items() if isinstance(found, dict) else ():
        where = f"{prefix}accepted_options.{name}"
        try:
            spec = data.get(name)
        except JobError as error:
            problems += [f"{where}: {problem}" for problem in error.problems]
            continue
        chosen = values if isinstance(values, dict) else {}
        if strange := sorted(set(chosen) - set(spec.choosing)):
            problems.append(f"{where}: Expected options of {list(spec.choosing)}, but got {strange}")
            continue
        try:
            spec.options.model_validate(chosen)
        except ValidationError as error:
            problems += listed(error, f"{where}.", spec.options)
    return problems


def _problem_list(where: str, problems: list[str]) -> str:
    return f"{where} is not as expected:\n" + "\n".join(f"  - {problem}" for problem in problems)
