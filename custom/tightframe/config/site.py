"""A site's own configuration, ``local/tightframe.json``: the paths of its records, its centre, its policy.

Data comes from the site, never from the job. A file configures one site or, in the simulator, every
site (``{"sites": {"site-1": {...}, ...}}``). Without a file, or for a site whose entry has a policy
but no records, the simulator uses the synthetic twin, with a banner; production refuses.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from tightframe import data
from tightframe.config.job import JobConfig, config_hash
from tightframe.config.policy import Policy, PolicyBlock
from tightframe.config.refusals import BelowPolicyError, Refusal
from tightframe.data.base import DatasetSpec, SiloData, absolute
from tightframe.errors import JobError, SiteConfigError
from tightframe.files import each_once
from tightframe.learning import own_loop
from tightframe.options import StrictModel, listed
from tightframe.registry import is_object

FILE_NAME = "tightframe.json"
MARKER = FILE_NAME + ".lent"
"""Companion of a configuration that ``tightframe simulate`` copied into the workspace for one run, with its
SHA-256, its origin and the id of the copying process."""

ACCEPT_MODEL = "tightframe site model accept"
AbsolutePath = Annotated[str, AfterValidator(absolute)]


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Accepted = Annotated[str, Field(min_length=1, max_length=500)]


def _tracking_uri(text: str) -> str:
    """Refuse a URI that is no tracking server or folder of MLflow, or contains a secret."""
    from urllib.parse import urlsplit

    parts = urlsplit(text)
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "Expected no user or password in it: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    if not (parts.scheme in ("http", "https") and parts.hostname) and not (
        parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
    ):
        raise ValueError("Expected http://HOST:PORT, https://HOST or file:///FOLDER")
    return text


TrackingUri = Annotated[str, AfterValidator(_tracking_uri)]
_KEYS_WITHOUT_RECORDS = frozenset(
    (
        *("policy", "device", "loader_workers", "feature_cache", "offer_prototypes", "withdrawn"),
        *("training_loops", "accepted_models"),
    )
)


class SiteEntry(StrictModel):
    """The configuration of one site.

    Attributes:
        data: data set name -> location of its records, in the format of that data set.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        loader_workers: processes that read records; 0 reads in the training process.
        feature_cache: where features of a frozen encoder are kept: in ``memory`` only, also on disk until the
            ``run`` ends, or ``kept`` in ``state_dir`` for later jobs, until
            ``tightframe site features -c FILE --delete``.
        offer_prototypes: False keeps this site's class prototypes local; with privacy it adds noise only.
        state_dir: folder on a local disk for what must outlive a job, such as the ledger; required in
            production.
        ledger_roots: root certificates of this site's other projects, past or current, under which entries
            of its privacy ledger may also be signed. They prove nothing else.
        engine_account: the account of the engine's client, if it differs from the account that trains; then
            no job trains unless the two are separated (TF-742).
        dataset_id: the site's own name for its records, under which its ledger keeps their budget and the
            cohorts for which their counts were opened; by default derived from the data set and its location,
            so that a moved folder is another data set.
        accepted_options: data set name -> options of a job that select which of this site's records take
            part (eICU: ``window``, ``silos``, ``train_hospitals``, ``equal_sizes``), each with the one value
            that it accepts in place of the default; others are refused where class rules are kept (TF-614).
        withdrawn: data set name -> file that names the records and patients that this site takes out of an
            ended run, when a job with ``withdraw`` asks for it.
        training_loops: names of the installed training loops that a job may ask for (``training.loop``); by
            default none, whatever is installed.
        accepted_models: SHA-256 -> who accepted it and where it is from, of each given model that jobs may
            start from or evaluate here; ``tightframe site model accept`` adds one.
        policy: the site's rules.
    """

    data: dict[str, dict[str, Any]] = {}
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    loader_workers: int = Field(default=0, ge=0, le=64)
    feature_cache: Literal["memory", "run", "kept"] = "memory"
    offer_prototypes: bool = True
    state_dir: AbsolutePath | None = None
    ledger_roots: list[AbsolutePath] = []
    engine_account: str | None = Field(default=None, pattern=r"^[a-z_][a-z0-9_-]{0,31}$")
    dataset_id: str | None = Field(default=None, min_length=1, max_length=200)
    accepted_options: dict[str, dict[str, Any]] = {}
    withdrawn: dict[str, AbsolutePath] = {}
    training_loops: list[str] = []
    accepted_models: dict[Sha256, Accepted] = {}
    policy: PolicyBlock = PolicyBlock()

    @model_validator(mode="after")
    def _check_cache(self) -> SiteEntry:
        if self.feature_cache == "kept" and self.state_dir is None:
            raise ValueError("Expected `state_dir` with feature_cache 'kept', which keeps features there")
        return self

    @property
    def rehearses(self) -> bool:
        """True if the entry only tries out a policy on generated records: it has a policy but no records.

        Never in production, where an entry must have a ``state_dir``.
        """
        return "policy" in self.model_fields_set <= _KEYS_WITHOUT_RECORDS

    def records_id(self, dataset: str) -> str:
        """Return the name under which this site's journal and ledger list its records of a data set."""
        if self.dataset_id is not None:
            return self.dataset_id
        return f"{dataset}:{config_hash(self.data.get(dataset, {}))[:16]}"


class StatsD(StrictModel):
    """The UDP address of a StatsD daemon.

    Attributes:
        host: name or address.
        port: of UDP.
    """

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    port: int = Field(default=9125, ge=1, le=65535)


class ServerEntry(StrictModel):
    """The configuration of the server.

    Attributes:
        initial_model: safetensors file with pretrained initial weights, which silos get with the first
            request; its hash is recorded.
        central_provisioning: accept certificates without the role attribute, which only central
            provisioning issues; for tests.
        tensorboard: write the run's measures as TensorBoard events next to its results.
        statsd: the daemon, ``{"host": "127.0.0.1", "port": 9125}``, that receives the measures during a run;
            None sends nothing.
        mlflow: tracking server (http, https) or folder (file) of MLflow that receives the measures, without
            a user or password, which MLflow takes from its own environment variables.
    """

    initial_model: AbsolutePath | None = None
    central_provisioning: bool = False
    tensorboard: bool = False
    statsd: StatsD | None = None
    mlflow: TrackingUri | None = None


class SiteFile(StrictModel):
    """The simulator's configuration file: one entry for each site, and one for the server."""

    sites: dict[str, SiteEntry] = {}
    server: ServerEntry = ServerEntry()


def read_site_file(folder: Path) -> dict[str, Any] | None:
    """Read the raw content of ``folder/tightframe.json``; None without that file.

    Raises:
        SiteConfigError: TF-202 if it is not a JSON object.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    _refuse_leftover(folder)
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object of a site configuration.

    Raises:
        SiteConfigError: TF-202 if the file is not readable, or has other content.
    """
    try:
        # Re-encoded to refuse a lone surrogate here rather than when it is printed.
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=each_once)
        json.dumps(values, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise SiteConfigError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise SiteConfigError(f"Expected {path} to hold a JSON object, but got {type(values).__name__}.")
    return values


def _refuse_leftover(folder: Path) -> None:
    """Refuse a file copied here for an ended run, whose records this run must not use."""
    try:
        process = int((folder / MARKER).read_text(encoding="utf-8").split("\n")[2])
        os.kill(process, 0)
    except FileNotFoundError:
        return  # the user's own file
    except PermissionError:
        return  # the process runs, under another account
    except (ValueError, IndexError, ProcessLookupError):
        raise SiteConfigError(
            f"{folder / FILE_NAME} was copied here for a run that was interrupted. Remove it and {MARKER}, "
            "or start `tightframe simulate` again, which removes both."
        ) from None


def parse_site_file(values: dict[str, Any], where: str = FILE_NAME) -> SiteFile:
    """Validate a file with entries for several sites, listing every problem, also of the data sets.

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
                problems.append(f"sites.{site}: has the same records as {owners[records]}: {records}")
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
    """Return a site's entry; None if the simulator may use the synthetic twin.

    Args:
        folder: the site's ``local/``.
        production: whether the engine runs in secure mode.
        alone: whether the job is for this site only.

    Raises:
        SiteConfigError: TF-201 in production without a file or without ``state_dir``, or if a
            simulator's file does not name the site; TF-202 if the file is invalid.
    """
    values = read_site_file(folder)
    path = folder / FILE_NAME
    if values is None:
        if production:
            raise SiteConfigError(
                f"{site} is not configured: expected {path} to name the location of its records, for example "
                '{"state_dir": "/var/lib/tightframe", "data": {"fed_isic2019": '
                '{"root": "/data/fed_isic2019", "center": 0}}}.',
                code="TF-201",
            )
        return None
    if "sites" in values:
        sites = parse_site_file(values, str(path)).sites
        if not sites and not production:
            return None  # only the server is configured
        if site not in sites:
            raise SiteConfigError(
                f"{path} names {', '.join(sorted(sites)) or 'no site'}, but not {site}: add it, or export "
                "the job for the sites that are configured (--sites).",
                code="TF-201",
            )
        entry = sites[site]
    else:
        entry, _ = parse_single(values, str(path))
        if not production and not entry.data and set(values) <= {"server"}:
            return None
        if not production and not alone:
            raise SiteConfigError(
                f'{path} configures one site, but this simulation has several: write {{"sites": '
                f'{{"{site}": {{...}}, ...}}}}, so that each has records of its own.'
            )
    if production and entry.state_dir is None:
        raise SiteConfigError(
            f"Expected `state_dir` in {path}, but it is not set: name a folder for state that must outlive a "
            "job.",
            code="TF-201",
        )
    return entry


def server_entry(folder: Path) -> ServerEntry:
    """Return the server's entry; defaults without a file or an entry in it."""
    values = read_site_file(folder)
    if values is None:
        return ServerEntry()
    where = str(folder / FILE_NAME)
    return parse_site_file(values, where).server if "sites" in values else parse_single(values, where)[1]


def open_data(job: JobConfig, site: str, entry: SiteEntry | None) -> SiloData:
    """Open the silo's records: the configured ones, or the synthetic twin in a simulation without any.

    Args:
        site: the silo's name.
        entry: the site's entry; None, or an entry that only ``rehearses`` a policy, opens the twin.

    Raises:
        SiteConfigError: TF-201 if the site is configured, but not for this data set; TF-202 if its entry
            for this one is invalid.
        DataError: if the configured records are missing or damaged.
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
    # A file's entries were checked on reading; one made in Python may be anything.
    if problems := _data_problems({"data": {spec.name: entry.data[spec.name]}}, ""):
        raise SiteConfigError(_problem_list(f"the entry of {site}", problems))
    return spec.open(spec.site.model_validate(entry.data[spec.name]), options)


def dataset_of(job: JobConfig) -> tuple[DatasetSpec, BaseModel]:
    """Return a job's data set, specialised by its options, with the validated options."""
    spec = data.get(job.dataset)
    options = spec.options.model_validate(job.dataset_options)
    return spec.of(options), options


def check_record_options(job: JobConfig, entry: SiteEntry, policy: Policy) -> None:
    """Refuse a job that selects among the site's records, unless the site accepts that.

    Counts are opened exactly. Two jobs over the same silos that differ by a few records of one silo would
    disclose these records, so under a policy that keeps the class rules each such option has one accepted
    value: the default, or the one in the site's ``accepted_options``. With differential privacy no record
    may be used more than once, whatever the site accepts.

    A contract selects records by its limits, codes and folds, and a site's refusal discloses whether all its
    records fit: at one hospital six enrolments disclosed the oldest patient's age, and two whether a named
    patient is there, before any sum. So only the contract in the site's entry is accepted.

    Raises:
        PolicyError: TF-614, naming the options.
    """
    spec, options = dataset_of(job)
    if policy.private(job) and getattr(options, "oversample_minority", False):
        refusal = Refusal(
            "required_privacy" if policy.required_privacy else "privacy",
            "oversample_minority",
            "each record at most once",
            "a repeated record has more influence than the noise is calibrated for, and how often it is "
            "repeated depends on the other records; leave the option out",
        )
        policy.refuse([refusal])
    if policy.class_rules_off:
        return
    contract, values = getattr(options, "contract", None), entry.data.get(spec.name)
    if (
        contract is not None
        and values is not None
        and values.get("contract") != (digest := contract.sha256())
    ):
        refusal = Refusal(
            "contract",
            digest,
            f"the one that this site's entry names{'' if values.get('contract') else ' (none yet)'}",
            "how many records keep a contract, and whether all do, discloses single ones; if `tightframe "
            "data check` finds nothing, whoever answers for the records may write "
            f'"contract": "{digest}" into {spec.name!r}',
        )
        policy.refuse([refusal])
    accepted = entry.accepted_options.get(spec.name, {})
    refusals = [
        Refusal("accepted_options", f"{name} {value!r} of {spec.name}", repr(required))
        for name in spec.choosing
        if (value := getattr(options, name))
        != (required := accepted.get(name, spec.options.model_fields[name].default))
    ]
    if refusals:
        raise BelowPolicyError(
            refusals,
            shown_to_lead=policy.tell_refusals,
            before="the job selects which of this site's records take part; if that is intended, add the "
            "value to `accepted_options` in the site's entry, and keep it there:",
        )


def check_training_loop(job: JobConfig, entry: SiteEntry, policy: Policy) -> None:
    """Refuse a job with a custom training loop that this site does not allow, or has not installed.

    An object in a run of this process is its caller's choice.

    Raises:
        PolicyError: TF-614 if the site's ``training_loops`` does not name it.
        JobError: TF-101 if it is not installed here.
    """
    name = job.training.loop
    if name is None:
        return
    if not is_object(name) and name not in entry.training_loops:
        refusal = Refusal(
            "training_loops",
            f"training.loop {name!r}",
            "one that this site allows",
            "it is code that sees the records; once it is reviewed and installed, add its name to "
            "`training_loops` in the site's entry",
        )
        policy.refuse([refusal])
    try:
        own_loop.get(name)
    except JobError as error:
        raise JobError([f"training.loop: {problem}" for problem in error.problems]) from None


def check_given_model(job: JobConfig, entry: SiteEntry, policy: Policy) -> None:
    """Refuse a job with a given model that this site has not accepted, before a record is read.

    The maker of its weights chooses the features: those that vanish for all patients but one disclose this
    one's record in a sum over any number. Rules that count records cannot detect that.

    Raises:
        PolicyError: TF-626.
    """
    sha256, rule = job.initial_model_sha256, policy.given_models
    if sha256 is None or rule == "any" or (rule == "accepted" and sha256 in entry.accepted_models):
        return
    wanted, why = (
        "a start that the job's seed draws",
        "its weights can be made to show single records in totals",
    )
    if rule == "accepted":
        wanted += ", or one that this site accepted"
        why += f"; once its origin is known, a person here accepts it: {ACCEPT_MODEL}"
    refusal = Refusal("given_models", f"the given model {sha256}", wanted, why)
    raise BelowPolicyError([refusal], shown_to_lead=policy.tell_refusals, code="TF-626")


def _records_of(entry: Any) -> list[str]:
    """Return each data set of a raw entry with its location as text, for comparison between sites."""
    return [json.dumps({name: values}, sort_keys=True) for name, values in _raw_data(entry).items()]


def _raw_data(entry: Any) -> dict[str, Any]:
    """Return the ``data`` of a raw entry; empty if it is not a mapping, which the entry's model reports."""
    values = entry.get("data") if isinstance(entry, dict) else None
    return values if isinstance(values, dict) else {}


def _data_problems(entry: Any, prefix: str) -> list[str]:
    """List the problems of a raw entry's ``data``, even if other parts are also invalid."""
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
    """List the problems of a raw entry's ``accepted_options``, as a misspelt name would have no effect."""
    accepted = entry.get("accepted_options") if isinstance(entry, dict) else None
    problems: list[str] = []
    for name, values in accepted.items() if isinstance(accepted, dict) else ():
        where = f"{prefix}accepted_options.{name}"
        try:
            spec = data.get(name)
        except JobError as error:
            problems += [f"{where}: {problem}" for problem in error.problems]
            continue
        options = values if isinstance(values, dict) else {}
        if unknown := sorted(set(options) - set(spec.choosing)):
            problems.append(f"{where}: Expected options of {list(spec.choosing)}, but got {unknown}")
            continue
        try:
            spec.options.model_validate(options)
        except ValidationError as error:
            problems += listed(error, f"{where}.", spec.options)
    return problems


def _problem_list(where: str, problems: list[str]) -> str:
    return f"{where} is not as expected:\n" + "\n".join(f"  - {problem}" for problem in problems)
