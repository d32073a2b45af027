"""Checks of ``tightframe site check``: everything that a site needs before its first job.

Each check yields findings and raises no user error, so that all problems are reported at once. The only
file written is a probe in the state folder, which is removed.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import ValidationError

from tightframe import data, methods
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.policy import Policy
from tightframe.config.site import ServerEntry, SiteEntry, parse_single, parse_site_file, read_object
from tightframe.data.base import check_form, class_counts, class_patients, count_table
from tightframe.errors import DataError, JobError, SiteConfigError, TightframeError, TrainingError
from tightframe.files import quoted
from tightframe.rounds.silo.contribute import choose_device
from tightframe_app.site.checks import accounts, engine, package
from tightframe_app.site.checks import job as site_job
from tightframe_app.site.checks import ledger as site_ledger
from tightframe_app.site.checks.findings import Finding, Scope, area_of
from tightframe_app.site.checks.job import Held, never_answered

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_site(scope: Scope) -> Iterator[Finding]:
    """Yield the findings, area by area.

    Raises:
        FileNotFoundError: if there is no such configuration.
    """
    if not scope.config.is_file():
        raise FileNotFoundError(
            f"Expected the site's configuration at {scope.config}, but there is no such file."
        )
    name, identity = engine.identity(scope)
    entries, server, findings = _configuration(scope)
    yield from findings
    job: JobConfig | None = None
    if scope.job is not None:
        try:
            job = parse_job(dict(scope.job))
        except JobError as error:
            yield from (Finding("job", "problem", problem, of_job=True) for problem in error.problems)
    held: dict[str, Held] = {}
    for label, entry in entries.items():
        policy = entry.policy.resolve(production=scope.real)
        yield from _policy(policy, label, scope.production)
        yield from _data(entry, label, job, scope, held, contracted=not policy.class_rules_off)
        if job is not None and label and label not in job.sites and scope.site is None:
            yield Finding(area_of("job", label), "note", f"it has no part in {job.job_name}")
        elif job is not None:
            yield from site_job.check_policy(job, label or name, entry, policy, scope)
            if label in job.sites:
                yield from site_job.check_own_records(job, label, entry, scope)
            if name is not None and scope.real:
                yield from site_job.signature(job, name, policy, scope)
        yield from device(entry, label)
    if job is not None:
        yield from site_job.would_leave(job)
    if job is not None and server is not None:
        yield from site_job.check_roster(job, entries)
        yield from site_job.check_start(job, server.initial_model)
        yield from _left_out(job, held)
        yield from site_job.check_sizes(job, entries, scope)
    yield from identity
    single = entries.get("")
    if single is not None:
        yield from disk(single)
        if scope.production:
            yield from accounts.check_accounts(single, scope)
        ledger = site_ledger.check_ledger(single, name, scope)
        yield from ledger.findings
        if job is not None and name is not None:
            yield from site_job.check_history(job, name, single, ledger.entries, scope)
    if job is not None and (single is None or name is None):
        spent = "privacy budget" if job.privacy is not None else "exact evaluations"
        many = "this file is for several sites, which remember no jobs"
        why = many if single is None else "name its site with --site"
        rows = "" if single is None else "; nor with this site's records"
        yield Finding("job", "note", f"not compared with earlier jobs (cohort, sums, {spent}){rows}: {why}")
    guarded = single is not None and single.policy.resolve(production=scope.real).egress_guard
    yield from engine.files(scope, guarded=guarded)
    yield from package.package()
    yield from clock()


def _configuration(scope: Scope) -> tuple[dict[str, SiteEntry], ServerEntry | None, list[Finding]]:
    """Return the entries by site, the server's entry of a simulation, and the findings.

    An empty name stands for the only site of its own file.
    """
    server: ServerEntry | None = None
    area = "configuration"
    mode = scope.config.stat().st_mode
    findings = []
    if mode & _OTHERS_WRITE:
        findings.append(
            Finding(
                area,
                "problem",
                f"others can change {scope.config} (mode {stat.S_IMODE(mode):04o}), and with it the "
                f"policy: chmod go-w {quoted(scope.config)}",
            )
        )
    try:
        values = read_object(scope.config)
        if "sites" in values:
            parsed = parse_site_file(values, str(scope.config))
            entries = dict(parsed.sites)
            server = parsed.server if scope.site is None else None
            if scope.site is not None and scope.site not in entries:
                text = (
                    f"TF-201: the file has no entry for {scope.site}; it has {', '.join(entries) or 'none'}"
                )
                return {}, None, [*findings, Finding(area, "problem", text)]
            if scope.site is not None:
                entries = {scope.site: entries[scope.site]}
        else:
            entries = {"": parse_single(values, str(scope.config))[0]}
    except SiteConfigError as error:
        listed = [f"TF-202: {line.strip(' -')}" for line in str(error).splitlines()[1:]]
        return {}, None, findings + [Finding(area, "problem", problem) for problem in listed or [str(error)]]
    if scope.production and "" not in entries:
        text = (
            "the file is for several sites, which only the simulator accepts; in production each site has "
            "its own file"
        )
        findings.append(Finding(area, "problem", text))
    if scope.production and (single := entries.get("")) is not None:
        if single.state_dir is None:
            findings.append(
                Finding(area, "problem", "TF-201: no `state_dir`, the folder for what must outlive a job")
            )
        if not single.data:
            findings.append(
                Finding(area, "problem", "TF-201: no `data`, without which this site can take part in no job")
            )
    findings.append(Finding(area, "ok", f"{scope.config} is valid"))
    return entries, server, findings


def _policy(policy: Policy, label: str, production: bool) -> Iterator[Finding]:
    area = area_of("policy", label)
    differences, changed = policy.differences(), policy.differences(policy.profile)
    yield Finding(area, "ok", f"profile {policy.profile}")
    if of_profile := [f"{rule} {value}" for rule, value in differences.items() if rule not in changed]:
        text = "\n".join(["rules of the profile that differ from standard's:", *of_profile])
        yield Finding(area, "note", text)
    for rule, value in differences.items():
        if rule in changed:
            yield Finding(area, "note", f"{rule}: {value} (differs from standard)")
    if policy.pinned_only and not policy.pins:
        yield Finding(
            area,
            "problem" if production else "note",
            "pinned_only without any pin refuses every peer: write each silo's pin into `pins`",
        )
    if production and policy.central_provisioning:
        text = "central_provisioning accepts certificates without a role, which only tests should need"
        yield Finding(area, "problem", text)
    if policy.required_privacy and policy.epsilon_cap is None:
        yield Finding(area, "note", "privacy is required, but no epsilon_cap limits what jobs spend together")


def _left_out(job: JobConfig, held: Mapping[str, Held]) -> Iterator[Finding]:
    """Note the classes that the job's model of one sum would never answer, if all its counts are known."""
    if job.privacy is not None or job.class_rules == "off" or not set(job.roster) <= held.keys():
        return
    try:
        spec = data.get(job.dataset)
        names = spec.of(spec.options.model_validate(dict(job.dataset_options))).class_names
        if job.statistics is not None or methods.get(job.method).one_sum is None:
            return
    except TightframeError:
        return  # reported by ``check_policy``
    if text := never_answered(job.method, {site: held[site] for site in job.roster}, names):
        yield Finding("job", "note", text)


def _data(
    entry: SiteEntry,
    label: str,
    job: JobConfig | None,
    scope: Scope,
    held: dict[str, Held],
    *,
    contracted: bool,
) -> Iterator[Finding]:
    """Open the records, or say that a job is needed; with ``contracted`` the entry must name a contract."""
    area = area_of("data", label)
    rehearses = entry.rehearses and not scope.production
    if job is not None and job.dataset not in entry.data and not rehearses:
        yield Finding(area, "problem", f"TF-201: the job asks for {job.dataset}, which `data` does not name")
    for name, values in entry.data.items():
        spec = data.get(name)
        asks = job is not None and job.dataset == name
        if not asks and any(item.is_required() for item in spec.options.model_fields.values()):
            text = f"{name}: not opened: what its records are, a job says (--job)"
            if contracted and "contract" in spec.options.model_fields and values.get("contract") is None:
                text += (
                    "; no job is taken (TF-614) until this entry names its `contract`, by the line that "
                    "`tightframe data check` prints"
                )
            yield Finding(area, "note", text)
            continue
        try:
            options = spec.options.model_validate(dict(job.dataset_options) if asks and job else {})
            spec = spec.of(options)
            records = spec.open(spec.site.model_validate(values), options)
            if scope.records:
                records.check(lambda text: scope.progress(f"{label}: {text}" if label else text))
            if asks:
                check_form(records, spec, options)
            sizes = {fold: len(records.labels(fold)) for fold in ("train", "validation", "test")}
            counts = class_counts(records.labels("train"), spec.num_classes)
        except ValidationError as error:
            yield Finding(area, "problem", f"{name}: the job's dataset_options: {error.error_count()} wrong")
        except DataError as error:
            # The default vocabulary has the paper's length; a site's may have another.
            foreign = error.code == "TF-209" and not asks
            hint = " (with default options; give --job to check with a job's)" if foreign else ""
            yield Finding(area, "note" if foreign else "problem", f"{name}: {error}{hint}")
        except TightframeError as error:
            yield Finding(area, "problem", f"{name}: {error}")
        else:
            how = "all read" if scope.records else "not read"
            folds = ", ".join(f"{number} {fold}" for fold, number in sizes.items())
            table = count_table(dict(zip(spec.class_names, counts.tolist(), strict=True)))
            text = f"{name}: {records.source}: {folds} records, {how} (training: {table})"
            if not asks and "silos" in spec.options.model_fields:
                number = options.model_dump()["silos"]
                text += f"; {number} silos are the default, and a job may divide otherwise (--job)"
            yield Finding(area, "ok", text)
            if asks:
                policy = entry.policy.resolve(production=scope.real)
                patients = class_patients(records, records.labels("train"), spec.num_classes).tolist()
                held[label] = Held(patients, policy.class_count(synthetic=records.synthetic))
    if rehearses:
        yield Finding(area, "note", "no records are configured: simulations use generated ones")
    elif not entry.data and not scope.production:
        yield Finding(area, "note", "no records are configured: simulations with this file are also refused")


LEAST_FREE, LITTLE_FREE = 2**30, 10 * 2**30
"""Free bytes on the state folder's disk below which there is a problem, or a note."""
JUMP_SECONDS = 0.05
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def disk(entry: SiteEntry) -> Iterator[Finding]:
    """Check that the state folder exists, is private to this account and writable, and has free space."""
    area = "disk"
    if entry.state_dir is None:
        return
    folder = Path(entry.state_dir)
    if not folder.is_dir():
        new = f"install -d -m 0700 {quoted(folder)}"
        text = f"{folder} does not exist: restore its backup; if new, run  {new}  as the client's account"
        yield Finding(area, "problem", text)
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & _OTHERS:
        text = f"{folder} is open to others (mode {mode:04o}): chmod 0700 {quoted(folder)}"
        yield Finding(area, "problem", text)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as probe:
            probe.write(b"x")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        yield Finding(area, "problem", f"{folder} cannot be written: {error.strerror}")
        return
    free = shutil.disk_usage(folder).free
    shown = f"{folder}: {free / 2**30:.1f} GiB free"
    if free < LITTLE_FREE:
        yield Finding(area, "problem" if free < LEAST_FREE else "note", f"{shown}, which is little")
    else:
        yield Finding(area, "ok", f"{shown}, writable, mode {mode:04o}")


def device(entry: SiteEntry, label: str) -> Iterator[Finding]:
    """Check that the configured device exists."""
    area = area_of("device", label)
    try:
        actual = choose_device(entry.device)
    except TrainingError as error:
        yield Finding(area, "problem", str(error))
        return
    if actual.type == "cuda":
        properties = torch.cuda.get_device_properties(actual)
        yield Finding(area, "ok", f"{actual}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        yield Finding(area, "ok", f"{entry.device}: trains on the CPU, {os.cpu_count()} cores")


def clock() -> Iterator[Finding]:
    """Check that wall clock and monotonic clock agree; report the date for a person to check."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(2 * JUMP_SECONDS)
    drift = abs((time.time() - wall) - (time.monotonic() - steady))
    now = datetime.now(UTC)
    if drift > JUMP_SECONDS:
        text = f"the clock jumped by {drift:.2f} s during the check: check its synchronisation (NTP)"
        yield Finding("clock", "problem", text)
    else:
        yield Finding("clock", "ok", f"{now:%Y-%m-%d %H:%M:%S} UTC; is that right?")
