"""Failures inside the sum, as a rider: a silo that cannot contribute sends what changes nothing, and a flag.

Whether training or reading fails can depend on a single record, so a server that saw which silo failed, and
with which code, could query records. So a failed silo's answer has the form and the size of any other; only
the number of failed silos is opened, and the reason stays in the silo's own log. Fields that hardly depend on
the training, class sums and evaluation, are in the sum as usual.

Sums of its records that it cannot compute would be the difference to the total of another job. So random
integers replace them, and its flag says so: from that sum no field of records alone is used.

With differential privacy there is no flag, because no noise covers it: there the failure stays at the silo,
except that a noisy update is over its bound, which says nothing that noise does not cover. A failed silo
still adds its share of the noise that silos make together.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tightframe.config.job import JobConfig
from tightframe.errors import REASONS, RunError, TightframeError, TooFewError
from tightframe.learning.halves import NORMALISER
from tightframe.learning.model_update import BROADCAST, BUFFER, TRAINING
from tightframe.learning.one_sum.feature_sums import RECORDS
from tightframe.learning.one_sum.temperature import LOSSES
from tightframe.phases import (
    Cohort,
    Contribution,
    Field,
    Group,
    Phase,
    Reading,
    Schema,
    ServerState,
    SiloView,
    Tensors,
    Totals,
    taken_out,
)
from tightframe.results.rows import FAILED_SILOS
from tightframe.results.words import plural
from tightframe.rounds import codec
from tightframe.rounds.codec import Term
from tightframe.rounds.moments import PREFIX as STATISTICS
from tightframe.rounds.moments import check_moments, note_moments
from tightframe.rounds.riders import class_rules, epsilon, update_norms
from tightframe.rounds.riders.view import RiderView, rider_view

if TYPE_CHECKING:
    from tightframe.privacy.releases.noise import NoisyRelease
    from tightframe.rounds.context import SiloContext
    from tightframe.rounds.privacy_plan import PrivacyPlan

FAILED = "failed"
LACKING = 1024
"""Added to the flag of a failed silo that lacks some of ``of_records``; more than a job has silos."""
TRAINED = (BUFFER, TRAINING, update_norms.SILOS, "personal/")
"""Prefixes of fields that follow from this silo's training, which no other run repeats."""
NOTE = FAILED_SILOS
"""Name of the note: number of silos in the sum that could not contribute."""
TOLD = ("TF-504", "TF-512", "TF-604", "TF-730")
"""Codes that do not depend on records: stopped, disk full, a malformed request, the site's guard."""


def attach(phase: Phase, job: JobConfig, *, needed: bool = True) -> Phase:
    """Return a phase with the flag of failed silos.

    Args:
        needed: whether the run ends if a phase has only counts, and a silo lacks them.
    """
    # With counts alone nothing is opened after a drop-out, so neither is the flag.
    alone = not phase.schema.group("update")
    flag = Field(FAILED, (), bound=1.0 + LACKING, bits=0, static=alone)
    static = {item.name for item in phase.schema.group("static")}

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        view = rider_view(silo)
        try:
            check_moments(view)
            contribution = phase.contribute(silo, received, state)
            note_moments(view, contribution.tensors)
        except Exception as error:
            if not hidden(error):
                raise
            note(view.context, error)
            # Caught here, so that the evaluation stays in the sum, as class sums do.
            return untrained(view, phase, received, state)
        return replace(
            contribution, tensors={**contribution.tensors, FAILED: torch.zeros((), dtype=torch.float64)}
        )

    def read(state: ServerState, totals: Totals, cohort: Cohort) -> Reading:
        own, others = taken_out(totals, FAILED.__eq__)
        failed, lacking = _counted(own)
        cohort.check_flags({FAILED: np.array([failed, lacking])}, [FAILED])
        if failed and cohort.size - failed < job.min_sites:
            raise TooFewError(
                f"{failed} of {cohort.size} silos in round {cohort.round} could not contribute, so that "
                f"fewer than {job.min_sites} did (`min_sites`). Which and why is in their own logs.",
                cohort.weights,
                {},
                code="TF-513",
            )
        if lacking and alone and needed:
            other = "make features fewer where a log has TF-625"
            if job.withdraw is not None:
                other = "withdraw more together where a log has TF-523"
            raise RunError(
                f"Expected all silos' numbers, but {plural(lacking, 'silo')} of {cohort.size} could not add "
                f"its own, which and why is in their own logs: mend it, or {other}, and start the job again.",
                code="TF-510",
            )
        if lacking:
            others = {name: total for name, total in others.items() if name not in static}
        reading = replace(phase.read(state, others, replace(cohort, failed=failed)), failed=failed)
        if not failed:
            return reading
        return reading.noting(NOTE, failed).warning(
            f"round {cohort.round}: {plural(failed, 'silo')} of {cohort.size} could not contribute, and "
            "counted as silos that change nothing; which and why is in their own logs"
        )

    return replace(phase, schema=phase.schema + Schema((flag,)), contribute=contribute, read=read)


def hidden(error: Exception) -> bool:
    """Return True if an error must be hidden from the server, because it can depend on records.

    Errors of the privacy ledger (TF-7xx) depend on what was charged, and not on records.
    """
    if not isinstance(error, TightframeError):
        return True
    return error.code not in TOLD and not error.code.startswith("TF-7")


def neutral(schema: Schema, received: Tensors) -> Contribution:
    """Return a contribution that changes nothing: zeros, and the buffers as they were received.

    Args:
        schema: of the phase, with its riders.
    """
    tensors = {}
    for item in schema.fields:
        buffer = received.get(BROADCAST + item.name.removeprefix(BUFFER))
        if item.name.startswith(BUFFER) and buffer is not None:
            tensors[item.name] = buffer.detach().to("cpu", torch.float64)
        else:
            tensors[item.name] = torch.zeros(item.shape, dtype=torch.float64)
    return Contribution(tensors, proposed_state=None)


def _counted(totals: Totals) -> tuple[int, int]:
    """Return the number of failed silos, and how many of them lack sums of their records."""
    lacking, failed = divmod(round(float(totals.get(FAILED, 0.0))), LACKING)
    return failed, lacking


def lacking(totals: Totals) -> bool:
    """Check whether a silo lacks sums of its records, so that those of this sum are not used."""
    return _counted(totals)[1] > 0


def of_records(schema: Schema) -> tuple[Field, ...]:
    """Return the fields that depend on a silo's records alone, or on a model that other totals share.

    Two totals of such fields, one without a silo's part, differ by that part. All static fields are such,
    except those in ``TRAINED``, and class sums where an exchange trains.
    """
    trains = _trains(schema)
    return tuple(
        item
        for item in schema.group("static")
        if item.name != FAILED
        and not (trains and class_rules.sums_by_class(item))
        and not item.name.startswith(TRAINED)
    )


def _trains(schema: Schema) -> bool:
    return any(not item.static and item.name != FAILED for item in schema.fields)


def _of_received(item: Field) -> bool:
    """Return True for a field that a silo's records and the received model give, without training."""
    by_name = item.name in (RECORDS, LOSSES, NORMALISER) or item.name.startswith(("evaluation/", STATISTICS))
    return item.per_class or by_name


def _kept_fields(schema: Schema) -> tuple[Field, ...]:
    """Return the fields that a failed silo's term keeps; all, if the phase trains nothing.

    Products are used from all silos or from none.
    """
    alone = () if _trains(schema) else of_records(schema)
    kept = (item for item in schema.fields if _of_received(item) or item in alone)
    return tuple(item for item in kept if not item.products)


def _lacks(schema: Schema, term: Term) -> bool:
    """Return True if a silo's encoded term flags that it lacks some of ``of_records``."""
    groups = [item.group for item in schema.fields if item.name == FAILED]
    return any(int(codec.unpack(schema, group, term[group])[FAILED][0]) >= LACKING for group in groups)


def untrained(silo: RiderView, phase: Phase, received: Tensors, state: Tensors) -> Contribution:
    """Return ``neutral`` with the flag, class sums by the received model, class counts and moments of inputs.

    None depends on the training. Without them the sum would amount to one of another cohort: the difference
    of two totals would be this silo's own part.

    Args:
        phase: the failed one, without the flag.
        state: the silo's committed state.
    """
    computed: Tensors = {}
    if any(map(_of_received, phase.schema.fields)):
        try:
            with silo.without_training():
                computed = phase.contribute(silo, received, state).tensors
        except Exception as error:
            if not hidden(error):
                raise
            # Even the received model gives no class sums, for example because its features are not finite.
            computed = class_rules.own_classes(silo, phase.schema, received)
    tensors, flag = _failed_term(phase.schema, received, computed)
    return Contribution({**tensors, **flag}, proposed_state=None)


def without_update(schema: Schema, received: Tensors, made: Tensors) -> Contribution:
    """Return ``neutral`` with the ``_kept_fields`` of the tensors made, and the flag if the schema has it."""
    tensors, flag = _failed_term(schema, received, made)
    return Contribution({**tensors, **(flag if FAILED in schema else {})}, proposed_state=None)


def _failed_term(
    schema: Schema, received: Tensors, values: Tensors
) -> tuple[dict[str, torch.Tensor], Tensors]:
    """Return a failed silo's tensors, within their bounds, and its flag.

    Args:
        values: tensors that the silo could still compute.
    """
    kept = {
        item.name: values[item.name]
        .to("cpu", torch.float64)
        .nan_to_num(nan=0.0)
        .clamp(-item.bound, item.bound)
        for item in _kept_fields(schema)
        if item.name in values
    }
    needed = (item.name for item in of_records(schema) if not item.products)
    lacks = float(values.get(FAILED, 0.0)) >= LACKING or any(name not in kept for name in needed)
    flag = torch.tensor(1.0 + LACKING * lacks, dtype=torch.float64)
    return {**neutral(schema, received).tensors, **kept}, {FAILED: flag}


def blinded(schema: Schema, term: Term) -> dict[Group, bytes]:
    """Return a failed silo's term with random integers in lacking sums of features and ``of_records``.

    Such a sum is used only if no silo lacks it. Without this silo's part its total would differ from the next
    job's by this silo's own records alone; random integers make it meaningless.

    Args:
        schema: of the phase, with its riders; without noise.
        term: as encoded.
    """
    groups, beside = dict(term), any(item.products for item in schema.fields)
    alone = of_records(schema) if _lacks(schema, term) else ()
    for group, data in term.items():
        arrays = codec.unpack(schema, group, data)
        lacking = [
            item
            for item in schema.group(group)
            if (
                item.products
                or item.features
                or (beside and class_rules.sums_by_class(item))
                or item in alone
            )
            and not arrays[item.name].any()
        ]
        if lacking:
            random = {
                item.name: np.frombuffer(secrets.token_bytes(item.bytes), arrays[item.name].dtype)
                for item in lacking
            }
            groups[group] = codec.pack(schema, group, {**arrays, **random})
    return groups


def with_noise(made: Contribution, schema: Schema, plan: PrivacyPlan, silo: RiderView) -> Contribution:
    """Return a neutral contribution with this silo's share of the noise of noisy totals.

    Its spent epsilon is reported as usual: its absence would identify this silo.

    The noise of s - c honest silos protects the others' records, whichever of them fail. Noise alone
    discloses nothing about this silo's records, so nothing is charged.

    Args:
        made: of ``neutral``.
        schema: of the phase, with its riders.
        plan: of the job's releases.
        silo: which fails; with its s - c, see ``privacy.releases.noise``.
    """
    noise, honest = {}, silo.honest
    for item in schema.fields:
        config: NoisyRelease | None = None
        shares = honest
        if item.mechanism == "class_sums":
            config = plan.class_sums
        elif item.mechanism == "frozen_sums" and plan.frozen is not None:
            config = plan.frozen.config.part(item.name)
        elif item.mechanism == "evaluation" and plan.evaluation is not None:
            config = plan.evaluation.config
        elif item.mechanism == "statistics" and plan.statistics is not None:
            config = plan.statistics.config
        elif item.mechanism == "gradient_sum":
            config, shares = plan.gradients, plan.training_shares(honest)
        if config is not None:
            noise[item.name] = torch.as_tensor(config.as_numbers(config.share(item.shape, shares)))
    shown = epsilon.told(silo) if epsilon.BINS in schema else {}
    return replace(made, tensors={**made.tensors, **noise, **shown})


def note(context: SiloContext, error: Exception) -> None:
    """Log at the silo why it cannot contribute."""
    unexpected = None if isinstance(error, TightframeError) else error
    context.log.error(
        "%s: nothing can be contributed to this sum: %s",
        context.name,
        reason(error),
        exc_info=unexpected,
    )


def reason(error: Exception) -> str:
    """Return an error's code, the code in words, and the message, for the silo's own log."""
    code = error.code if isinstance(error, TightframeError) else "TF-503"
    message = str(error).removeprefix(f"{code}: ")
    return f"{code} ({REASONS.get(code, 'see tightframe explain')}): {message}"
