"""Checks of ``tightframe site check``: everything that a site needs before its first job.

Each look is a function that gives findings and raises nothing that a user can meet, so that all
problems are told at once. Nothing is written but a probe of the state folder, which is removed.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tightframe_app.site import accounts, engine, machine, package
from tightframe_app.site import job as site_job
from tightframe_app.site import ledger as site_ledger
from tightframe_app.site.findings import Asked, Finding, area_of

if TYPE_CHECKING:
    from tightframe.config.job import JobConfig
    from tightframe.config.policy import Policy
    from tightframe.config.site import SiteEntry

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def look(asked: Asked) -> Iterator[Finding]:
    """Yield the findings, area by area.

    Raises:
        FileNotFoundError: if there is no such configuration.
    """
    from tightframe.errors import JobError

    if not asked.config.is_file():
        raise FileNotFoundError(
            f"Expected the site's configuration at {asked.config}: there is no such file."
        )
    name, identity = engine.identity(asked)
    entries, found = _configuration(asked)
    yield from found
    job: JobConfig | None = None
    if asked.job is not None:
        from tightframe.config.job import parse_job

        try:
            job = parse_job(dict(asked.job))
        except JobError as error:
            yield from (Finding("job", "problem", problem, of_job=True) for problem in error.problems)
    for label, entry in entries.items():
        policy = entry.policy.resolve(production=asked.production)
        yield from _policy(policy, label, asked.production)
        yield from _data(entry, label, job, asked)
        if job is not None:
            yield from site_job.look(job, label or name, entry, policy, asked)
            if name is not None and asked.production:
                yield from site_job.signature(job, name, policy, asked)
        yield from machine.device(entry, label)
    yield from identity
    single = entries.get("")
    if single is not None:
        yield from machine.disk(single)
        if asked.production:
            yield from accounts.look(single, asked)
        ledger = site_ledger.look(single, name, asked)
        yield from ledger.findings
        if job is not None and name is not None:
            yield from site_job.look_back(job, name, single, ledger.entries, asked)
    if job is not None and (single is None or name is None):
        what = "cohort and privacy budget" if job.privacy is not None else "cohort"
        why = "say with --site whose file this is" if single is not None else "this file is of several sites"
        yield Finding("job", "note", f"not held against {what}: {why}")
    guarded = single is not None and single.policy.resolve(production=asked.production).egress_guard
    yield from engine.files(asked, guarded=guarded)
    yield from package.package()
    yield from machine.clock()


def _configuration(asked: Asked) -> tuple[dict[str, SiteEntry], list[Finding]]:
    """Return the entries by site, by the empty name where the file is one site's own, and findings."""
    from tightframe.config.site import parse_single, parse_site_file, read_object
    from tightframe.errors import SiteConfigError

    area = "configuration"
    mode = asked.config.stat().st_mode
    found = []
    if mode & _OTHERS_WRITE:
        found.append(
            Finding(
                area,
                "problem",
                f"{asked.config} can be changed by others (mode {stat.S_IMODE(mode):04o}), and with it the "
                f"policy: chmod go-w {asked.config}",
            )
        )
    try:
        values = read_object(asked.config)
        if "sites" in values:
            entries = dict(parse_site_file(values, str(asked.config)).sites)
            if asked.site is not None and asked.site not in entries:
                text = f"TF-201: the file has no entry of {asked.site}; it has {', '.join(entries) or 'none'}"
                return {}, [*found, Finding(area, "problem", text)]
            if asked.site is not None:
                entries = {asked.site: entries[asked.site]}
        else:
            entries = {"": parse_single(values, str(asked.config))[0]}
    except SiteConfigError as error:
        listed = [f"TF-202: {line.strip(' -')}" for line in str(error).splitlines()[1:]]
        return {}, found + [Finding(area, "problem", problem) for problem in listed or [str(error)]]
    if asked.production and "" not in entries:
        text = (
            "the file maps several sites, which the simulator can; in production each has a file of its own"
        )
        found.append(Finding(area, "problem", text))
    if asked.production and (single := entries.get("")) is not None:
        if single.state_dir is None:
            found.append(
                Finding(area, "problem", "TF-201: no `state_dir`: what must outlive a job lies there")
            )
        if not single.data:
            found.append(Finding(area, "problem", "TF-201: no `data`: this site could take part in no job"))
    found.append(Finding(area, "ok", f"{asked.config} is valid"))
    return entries, found


def _policy(policy: Policy, label: str, production: bool) -> Iterator[Finding]:
    area = area_of("policy", label)
    differences = policy.differences()
    yield Finding(area, "ok", f"profile {policy.profile}")
    for rule, value in differences.items():
        yield Finding(area, "note", f"{rule}: {value} (differs from standard)")
    if policy.pinned_only and not policy.pins:
        yield Finding(
            area,
            "problem" if production else "note",
            "pinned_only without any pin refuses every peer: write each silo's pin into `pins`",
        )
    if production and policy.central_provisioning:
        text = "central_provisioning accepts certificates without a role, which only tests need"
        yield Finding(area, "problem", text)
    if policy.required_privacy and policy.epsilon_cap is None:
        yield Finding(area, "note", "privacy is required, but no epsilon_cap limits what jobs spend together")


def _data(entry: SiteEntry, label: str, job: JobConfig | None, asked: Asked) -> Iterator[Finding]:
    from pydantic import ValidationError

    from tightframe import data
    from tightframe.data.base import check_form, class_counts, count_table
    from tightframe.errors import DataError, TightframeError

    area = area_of("data", label)
    rehearses = entry.rehearses and not asked.production
    if job is not None and job.dataset not in entry.data and not rehearses:
        yield Finding(area, "problem", f"TF-201: the job asks for {job.dataset}, which `data` does not name")
    for name, values in entry.data.items():
        spec = data.get(name)
        asks = job is not None and job.dataset == name
        try:
            options = spec.options.model_validate(dict(job.dataset_options) if asks and job else {})
            records = spec.open(spec.site.model_validate(values), options)
            if asked.records:
                records.check(asked.progress)
            if asks:
                check_form(records, spec, options)
            sizes = {fold: len(records.labels(fold)) for fold in ("train", "validation", "test")}
            counts = class_counts(records.labels("train"), spec.num_classes)
        except ValidationError as error:
            yield Finding(area, "problem", f"{name}: the job's dataset_options: {error.error_count()} wrong")
        except DataError as error:
            # The default vocabulary has the paper's length; a site's own may have another.
            foreign = error.code == "TF-209" and not asks
            hint = " (with default options; give --job to look with a job's)" if foreign else ""
            yield Finding(area, "note" if foreign else "problem", f"{name}: {error}{hint}")
        except TightframeError as error:
            yield Finding(area, "problem", f"{name}: {error}")
        else:
            how = "all read" if asked.records else "not read"
            folds = ", ".join(f"{number} {fold}" for fold, number in sizes.items())
            table = count_table(dict(zip(spec.class_names, counts.tolist(), strict=True)))
            text = f"{name}: {records.source}: {folds} records, {how} (training: {table})"
            yield Finding(area, "ok", text)
    if rehearses:
        yield Finding(area, "note", "no records are configured: simulations try the policy on generated ones")
    elif not entry.data and not asked.production:
        yield Finding(area, "note", "no records are configured: simulations with this file are refused, too")
