"""The silo's half of a run, independent of the transport: enrol, contribute, close.

Messages are plain values and bytes. Every failure has a code, which may leave the silo; the details stay in
the silo's own log. Only tasks that train import torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tightframe import __version__
from tightframe.config.site import check_given_model, check_record_options, check_training_loop, dataset_of
from tightframe.data.base import check_form, class_counts, count_table
from tightframe.data.withdrawn import find, read_file
from tightframe.errors import DataError, JobError, RunError
from tightframe.files import write_atomically
from tightframe.learning.few_records.products import Sizes
from tightframe.rounds import unproven
from tightframe.rounds.context import NEEDS_STATE, Message, SiloContext
from tightframe.rounds.declaration import Declaration, applied_weights, public_weight
from tightframe.rounds.silo import own_state
from tightframe.rounds.silo.checks import requests
from tightframe.rounds.silo.checks.summed_records import summed_sha256
from tightframe.rounds.silo.own_state import NeedsStateError
from tightframe.rounds.site_ledger.known_records import note_records
from tightframe.rounds.state_files import DECLARATION
from tightframe.rounds.sums.common import SEAL, SECURE, Check, Encoded, Peers
from tightframe.rounds.sums.secure_silo import SecureSite, Train
from tightframe.securesum.messages import Total

if TYPE_CHECKING:
    from tightframe.rounds.evaluation_bits import Evaluations
    from tightframe.rounds.few_records.across_jobs import Rounds
    from tightframe.rounds.silo.contribute import Contributor

TASKS = ("enroll", "confirm", "contribute", "agree", "reveal", "baseline")


class SiloSession:
    """One silo in one run, answering the server's tasks.

    Args:
        context: name, job, configuration, folders, records.

    Raises:
        JobError: if the job is not for this silo.
    """

    def __init__(self, context: SiloContext) -> None:
        if context.name not in context.job.sites:
            raise JobError([f"this silo is {context.name}, but the job is for {list(context.job.roster)}"])
        self.context = context
        self._contributor: Contributor | None = None
        secure = context.job.summation == "secure"
        confirm = partial(own_state.confirm_told, context.state_folder)
        summed = partial(summed_sha256, context)
        own = (self._check_sizes, self._evaluations, self._rounds, self._check_survivors, summed)
        self._secure = SecureSite(context, confirm, *own) if secure else None
        unproven.publish(context)  # an earlier process of the job may have been killed before it did so

    def handle(self, task: str, message: Message) -> Message:
        """Answer one task.

        Args:
            task: one of ``TASKS``.

        Raises:
            TightframeError: with a code; the server learns nothing but the code.
        """
        arrived = time.monotonic()
        try:
            return self._answer(task, message)
        finally:
            if task in ("contribute", "baseline"):
                self._wait(arrived)

    def end(self) -> None:
        """Delete what the site keeps for this run only; called when the run has ended for any reason.

        The site's log names what cannot be deleted, because it was computed from records, and a final model
        whose total was not proven.
        """
        unproven.end(self.context)
        self.context.delete_features()

    def _wait(self, arrived: float) -> None:
        """Wait until a whole multiple of the job's ``answer_grid`` has passed since a request came.

        Once the run is aborted, a whole second is enough: it hides whether the silo still trained.
        """
        if not (grid := self.context.answer_grid):
            return
        leave, stopped = _next_whole(arrived, grid), False
        while (left := leave - time.monotonic()) > 0:
            if not stopped and (stopped := self.context.stopped()):
                leave = min(leave, _next_whole(arrived, 1.0))
                continue
            time.sleep(min(left, 0.1))

    def _answer(self, task: str, message: Message) -> Message:
        # Before every task, not only at enrolment, which a server might skip.
        self.context.policy.check(self.context.job, submitter=self.context.submitter)
        check_record_options(self.context.job, self.context.site, self.context.policy)
        check_training_loop(self.context.job, self.context.site, self.context.policy)
        check_given_model(self.context.job, self.context.site, self.context.policy)
        requests.check(task, message, self.context.name, secure=self._secure is not None)
        if task == "enroll":
            return self._enroll(message)
        if task == "contribute":
            return self._contribute(message)
        if task == "baseline":
            return self._training().baseline()
        if self._secure is not None and task == "confirm":
            return {SECURE: self._secure.confirm(message.get(SECURE), lambda: self._training().setup)}
        if self._secure is not None and task in ("agree", "reveal"):
            answer = {SECURE: getattr(self._secure, task)(message.get(SECURE))}
            if task == "reveal":
                unproven.publish(self.context)
            return answer
        raise RunError(f"Expected a task of {list(TASKS)}, but got {task!r}.", code="TF-505")

    def _enroll(self, message: Message) -> Message:
        """Check job, policy, configuration and every record; declare the public weight."""
        self._check_job(message)
        if self.context.policy.asks_of_method(self.context.job):
            self._training()  # checks the method's sums; imports torch, once
        if self._secure is None:
            return {"declaration": self._declare(again=False).to_bytes()}
        # Enrolment is repeated within a run when the roster shrinks or all slots are used.
        # A process that does all tasks imports torch anyway, so it can plan the sums now.
        setup = (lambda: self._training().setup) if self.context.memory_only else None
        return {SECURE: self._secure.enroll(message.get(SECURE), self._declare, setup)}

    def _declare(self, *, again: bool) -> Declaration:
        """Return this silo's declaration; its records are read only once per run.

        Args:
            again: whether to return the stored declaration of this run, if there is one.
        """
        context = self.context
        stored = context.state_folder / DECLARATION
        if again and stored.is_file():
            return Declaration.from_bytes(stored.read_bytes(), context.name)
        own_state.begin(context)
        if context.job.withdraw is not None and context.job.resume is None:
            context.withdrawn.begin()
        declared = self._read_records()
        if context.job.privacy is not None:
            self._training().check_budget()
        else:
            policy = context.policy
            counts_needed = (policy.min_row_bits and context.has_rows) or (
                policy.records_per_feature and context.job.weights == "uniform"
            )
            if counts_needed and not context.data.synthetic:
                # Imported here, as in ``_training``, for torch.
                from tightframe.rounds.silo.checks.enrolment import check_rows

                check_rows(context, self._training().setup)
            if self._secure is not None:
                self._note_records()
                self._secure.check_evaluations()
                self._rehearse_evaluations()
        write_atomically(stored, declared.to_bytes(), mode=0o600)
        return declared

    def _note_records(self) -> None:
        """Note a production site's records in its ledger, which keeps earlier exact sums by data set name."""
        context = self.context
        if context.production and not context.data.synthetic:
            with context.site_ledger.open() as ledger:
                note_records(context, ledger)

    def _read_records(self) -> Declaration:
        context = self.context
        if context.site.device not in ("auto", "cpu"):
            # Only a site that asks for a specific GPU imports torch at enrolment.
            from tightframe.rounds.silo.contribute import choose_device

            choose_device(context.site.device)
        data, log, name = context.data, context.log, context.name
        log.info("%s: checking every record: %s", name, data.source)
        data.check(lambda text: log.info("%s: %s", name, text))
        spec, options = dataset_of(context.job)
        check_form(data, spec, options)
        self._tell_still_there()
        labels = data.labels("train")
        counts = class_counts(labels, spec.num_classes)
        policy = context.policy
        log.info(
            "%s: %d training, %d validation and %d test records of %s (training: %s)",
            name,
            len(labels),
            len(data.labels("validation")),
            len(data.labels("test")),
            data.source,
            count_table(dict(zip(spec.class_names, counts.tolist(), strict=True))),
        )
        log.info("%s: policy %s", name, policy.name())
        if (sha256 := context.job.initial_model_sha256) is not None:
            accepted = context.site.accepted_models.get(sha256, "not asked about here")
            log.info("%s: the model with SHA-256 %s was given: %s", name, sha256, accepted)
        if context.draws_batches:
            size = context.training.batch_size
            log.info(
                "%s: each batch of %d training records is drawn anew (`full_batches` is off)", name, size
            )
        return Declaration(
            # Repeated records count once: counted with repeats, the number would be twice the larger class, a
            # class count.
            weight=self._weight(context.public_records),
            synthetic=data.synthetic,
            profile=policy.profile,
            min_class_count=context.min_class_count,
            any_static_cohort=policy.static_cohort == "any",
            untold=context.untold(),
        )

    def _tell_still_there(self) -> None:
        """Warn in this silo's own log of records that its file withdraws but this job uses."""
        context = self.context
        path = context.site.withdrawn.get(context.job.dataset)
        if path is None or context.job.withdraw is not None:
            return
        try:
            names = read_file(Path(path))
            present = len(find(context.data, names, names.records))
        except DataError as error:
            context.log.warning("%s: %s", context.name, error)
            return
        if present:
            context.log.warning(
                "%s: %d records that `withdrawn` names are still among this site's records: this job uses "
                "them; remove them once no run is left to withdraw them from",
                context.name,
                present,
            )

    def _weight(self, records: int) -> float:
        """Return the public weight for a number of records; in a withdrawal that of the earlier run.

        A new exact weight would disclose how many records this silo withdraws.
        """
        context = self.context
        if context.job.withdraw is None or context.previous_state is None:
            return public_weight(records, context.job.weights)
        stored = context.previous_state / DECLARATION
        if not stored.is_file():
            raise own_state.damaged(stored, FileNotFoundError())
        return Declaration.from_bytes(stored.read_bytes(), context.name).weight

    def _contribute(self, message: Message) -> Message:
        try:
            if self._secure is None:
                weights, last = self._plain_weights(message.get("declared")), message["total"]
                peers = Peers(weights, sizes=Sizes(self._declare(again=True).weight, 0.0))
                total = Total.from_bytes(last) if last else None
                return {"term": dict(self._training().contribute(message, peers, total=total).term)}

            state, setup = message["state"], lambda: self._training().setup
            return {SECURE: self._secure.contribute(message.get(SECURE), state, self._term(message), setup)}
        except NeedsStateError:
            self.context.log.info("%s: asks the server for the state of the run", self.context.name)
            return {NEEDS_STATE: True}

    def _check_sizes(self, sizes: Sizes) -> None:
        """Check the silos' declared records against this site's rule, see ``few_records.rule``."""
        if self.context.policy.records_per_feature:
            self._training().check_sizes(sizes)

    def _check_survivors(self, sizes: Sizes) -> None:
        self._training().check_layers(sizes, "records of silos that are left")

    def _evaluations(self) -> Evaluations | None:
        """Return the job's exact evaluations here; imports torch only where they are limited."""
        return self._training().evaluations if self.context.limits_evaluations else None

    def _rounds(self, sizes: Sizes) -> Rounds | None:
        """Return the job's exact sums that add to other jobs'; None if there are none, or no limit."""
        return self._training().rounds(sizes) if self.context.limits_rounds else None

    def _rehearse_evaluations(self) -> None:
        """Warn in a simulation of evaluations that a site in production with this policy refuses."""
        context = self.context
        if context.production or not context.would_limit_evaluations:
            return
        from tightframe.rounds.silo.checks.enrolment import REHEARSED, refused_at_first

        if reason := refused_at_first(context, self._training().setup):
            context.log.warning("%s: %s%s", context.name, REHEARSED, reason)

    def _term(self, message: Message) -> Train:
        """Return the function that makes the term of a secure sum, for a process that trains."""

        def train(peers: Peers, *, total: Total | None, check: Check) -> Encoded:
            contributor = self._training()
            make = contributor.seal if message["kind"] == SEAL else contributor.contribute
            return make(message, peers, total=total, check=check)

        return train

    def _plain_weights(self, raw: object) -> Mapping[str, float]:
        """Return the weights of a plain sum, from the declarations that the server forwards.

        Raises:
            RunError: TF-505 if this silo's own declaration is missing or changed, or one is of an unknown
                silo.
            ContributionError: TF-403, TF-631; see ``Declaration``.
        """
        context = self.context
        mine = self._declare(again=True)
        if not isinstance(raw, dict) or raw.get(context.name) != mine.to_bytes():
            raise RunError(
                "Expected the declarations of all enrolled silos, this silo's own among them and unchanged, "
                "but got others.",
                code="TF-505",
            )
        if strangers := sorted(set(raw) - set(context.job.sites)):
            raise RunError(
                f"Expected declarations of the job's silos, but got {strangers[:3]}.", code="TF-505"
            )
        declared = {site: Declaration.from_bytes(data, site) for site, data in raw.items()}
        for site, item in sorted(declared.items()):
            item.check_weight(site, context.job.weights, context.policy.max_records)
        return applied_weights(declared, context.job.max_weight_share)

    def _training(self) -> Contributor:
        if self._contributor is None:
            # Imported here because torch takes seconds to import, and only tasks that train need it.
            from tightframe.rounds.silo.contribute import Contributor

            self._contributor = Contributor(self.context)
        return self._contributor

    def _check_job(self, message: Message) -> None:
        mine, theirs = self.context.job.sha256(), message.get("job_sha256")
        if mine != theirs:
            raise RunError(
                f"Expected the server to run this silo's job (SHA-256 {mine}), but it runs {theirs}: "
                "every site must get the same exported job folder.",
                code="TF-505",
            )
        if message.get("version") != __version__:
            raise RunError(
                f"Expected tightframe {__version__} at the server, but it has {message.get('version')}: "
                "install the same version everywhere.",
                code="TF-505",
            )


def _next_whole(arrived: float, grid: float) -> float:
    """Return the next time that is a whole multiple of ``grid`` seconds after a request came."""
    return arrived + grid * math.ceil((time.monotonic() - arrived) / grid)
