"""The silo's half of secure sums: it answers protocol messages by its own journal and state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from tightframe import __version__
from tightframe.errors import DataError, PolicyError, SecureSumError, SiteConfigError, TightframeError
from tightframe.learning.few_records.products import Sizes
from tightframe.rounds import unsent
from tightframe.rounds.context import SiloContext
from tightframe.rounds.declaration import EVALUATED, Declaration, applied_weights, tellers
from tightframe.rounds.notes import note_verified
from tightframe.rounds.order import place_of
from tightframe.rounds.sums.common import (
    OUT_OF_BUDGET,
    Check,
    Encoded,
    Formed,
    Peers,
    package_errors,
)
from tightframe.rounds.sums.transcripts import SiteRecord
from tightframe.rounds.sums.vault import Vault
from tightframe.securesum import messages, rules, site
from tightframe.securesum.errors import InconsistencyError, ReplayError, StateError
from tightframe.securesum.identity import Verifier
from tightframe.securesum.site import journal
from tightframe.securesum.site.state import Advertised, Agreed, Confirmed, Established, Masked

if TYPE_CHECKING:
    from tightframe.rounds.evaluation_bits import Evaluations
    from tightframe.rounds.few_records.across_jobs import Rounds
    from tightframe.rounds.setup import JobSetup

CHARGED = (OUT_OF_BUDGET, "TF-705")
"""Codes that the ledger raises in a process after another process has made the same charge.

Codes instead of error classes, so that a task that charges nothing need not import the ledger.
"""


class _Declare(Protocol):
    def __call__(self, *, again: bool) -> Declaration: ...


class Train(Protocol):
    """Computes a term."""

    def __call__(self, peers: Peers, *, total: messages.Total | None, check: Check) -> Encoded:
        """Return the term; the arguments are those of ``Contributor.contribute``."""


class SecureSite:
    """One silo's side of a run's secure sums.

    Args:
        confirm: called with the digest (hex) of the named total once this silo has verified it, and given its
            shares; with None if the server named none.
        check_sizes: called with the numbers of records that silos declare, before anything is masked.
        evaluations: returns the job's exact evaluations here; None if there are none, or no limit.
        rounds: the same for sums in training that add up with those of other jobs.
        check_survivors: as ``check_sizes``, with the silos left in such a sum.
        summed: returns the hash of the records in a job's exact sums.
    """

    def __init__(
        self,
        context: SiloContext,
        confirm: Callable[[str | None], None] = lambda _: None,
        check_sizes: Callable[[Sizes], None] = lambda _: None,
        evaluations: Callable[[], Evaluations | None] = lambda: None,
        rounds: Callable[[Sizes], Rounds | None] = lambda _: None,
        check_survivors: Callable[[Sizes], None] = lambda _: None,
        summed: Callable[[JobSetup], str] | None = None,
    ) -> None:
        self._context, self._confirm, self._check_sizes = context, confirm, check_sizes
        self._evaluations, self._rounds, self._check_survivors = evaluations, rounds, check_survivors
        self._summed = summed
        self._vault = Vault(context.secure_folder, context.site_ledger, on_disk=not context.memory_only)
        self._record = SiteRecord(context)
        self._cached_profile: tuple[journal.Profile | None] | None = None
        self._unrecorded = False  # a session was checked but not yet written to the transcript

    def enroll(self, raw: Any, declare: _Declare, setup: Callable[[], JobSetup] | None = None) -> bytes:
        """Check the server's parameters against this site's rules and job; advertise keys.

        Args:
            raw: bytes of ``Params``.
            declare: returns this silo's declaration: from the records, or with ``again`` the stored one.
            setup: plans the job's sums, to compare them with the server's plan; None where this process
                does not train: then each sum is compared only when it is requested.
        """

        def make(key: bytes) -> bytes:
            params = messages.Params.from_bytes(raw)
            # `advertise` repeats all of these checks; here they precede reading records and replacing state.
            rules.check(params, self._rules, self._expected(params))
            expected = self._expected(params, None if setup is None else setup())
            rules.check(params, self._rules, expected)
            with self._vault.locked() as history:
                history.check_epoch(params)
                if self._vault.forgotten():
                    # It cannot know for which sum it last gave its shares. So it takes no part in a job that
                    # began in another process and was restarted.
                    try:
                        history.check_epoch(replace(params, epoch=0))
                    except ReplayError:
                        raise ReplayError(
                            f"job {params.job} in a new process of this silo",
                            expected="the process that it was begun in, whose sums are forgotten",
                            found="another one: submit a new job",
                        ) from None
            application = declare(again=params.epoch > 0).to_bytes()
            signer, profile = self._identity()[0], self._profile(setup)
            with self._vault.locked() as history:
                step = site.advertise(
                    params,
                    rules=self._rules,
                    expected=expected,
                    signer=signer,
                    history=history,
                    dataset=self._context.site.records_id(self._context.job.dataset),
                    application=application,
                    profile=profile,
                    previous=self._vault.established(),
                )
                return self._commit("enroll", key, step)

        return self._once("enroll", raw, b"", make)

    def check_evaluations(self) -> None:
        """Refuse a job whose exact evaluations, with earlier jobs', disclose more than this site allows.

        Raises:
            SecureSumError: TF-627.
        """
        if (planned := self._evaluations()) is not None:
            with package_errors(), self._vault.locked() as history:
                planned.check(self._dataset, self._context.job_id, history)

    def _opened(
        self, sum_id: messages.SumId, sizes: Sizes, history: journal.History
    ) -> tuple[journal.Entry, ...]:
        """Return the journal entries of a sum's disclosure about evaluated and training records, if any.

        A concurrent job may have used up what remained when this one was enrolled.

        Raises:
            EvaluationsError: TF-627.
            PolicyError: TF-625.
        """
        place, entries = place_of(sum_id), list[journal.Entry]()
        job, policy = (self._dataset, self._context.job_id), self._context.policy
        if (planned := self._evaluations()) is not None and place in planned.told:
            evaluated = planned.entry(*job, place)
            history.check_evaluations(evaluated, planned.most)
            entries.append(evaluated)
        if (rounds := self._rounds(sizes)) is not None and place in rounds.places:
            entries += rounds.check_next(policy, *job, place, history)
        return tuple(entries)

    def _opened_of(
        self, state: Established, slot: int, left: Sequence[str], history: journal.History
    ) -> tuple[journal.Entry, ...]:
        """Return the entry of a sum of fewer silos than requested; refuse it if these have too few records.

        A server chooses who drops out.

        Raises:
            PolicyError: TF-625.
        """
        masked = state.slots[slot]
        assert isinstance(masked, Masked | Agreed)  # noqa: S101 - nothing else is agreed on
        declared = {name: item for name, item in _declared(state).items() if name in left}
        sizes, place = _sizes(declared, state.epoch.params.colluders), place_of(masked.receipt.sum_id)
        if (rounds := self._rounds(sizes)) is None or place not in rounds.layers:
            return ()
        self._check_survivors(sizes)
        return rounds.check_next(self._context.policy, self._dataset, self._context.job_id, place, history)

    @property
    def _dataset(self) -> str:
        return self._context.site.records_id(self._context.job.dataset)

    def check_proposal(
        self, params: messages.Params, setup: JobSetup, entries: Sequence[journal.Entry]
    ) -> None:
        """Refuse parameters that ``enroll`` would refuse; nothing is stored, signed or sent.

        Args:
            params: as a server would propose them.
            entries: this site's journal of production jobs.

        Raises:
            SecureSumError: TF-601 if they are below this site's rules; TF-612 if counts would be opened for
                another cohort than before; TF-617 if terms would be formed in another way.
        """
        from tightframe.rounds.sums.release import release_profile

        try:
            profile = self._own_profile(setup)
        except (DataError, SiteConfigError):  # others report it
            profile = release_profile(setup, self._context.site)
        with package_errors():
            site.advertise(
                params,
                rules=self._rules,
                expected=self._expected(params, setup),
                signer=_NullSigner(),
                history=journal.History(entries),
                dataset=self._context.site.records_id(self._context.job.dataset),
                application=b"",
                profile=profile,
            )

    def confirm(self, raw: Any, setup: Callable[[], JobSetup]) -> bytes:
        """Verify every silo's advertisement, deal shares, and report that this silo is ready.

        Args:
            raw: bytes of ``Advertisements``.
            setup: plans the job's sums.
        """

        def make(key: bytes) -> bytes:
            with self._vault.locked() as history:
                _, anchor = self._identity()
                verifier = Verifier(anchor, self._rules.pins, self._rules.pinned_only, datetime.now(UTC))
                state = self._vault.state()
                if not isinstance(state, Advertised):
                    raise _out_of_order("advertised")
                step = site.confirm(state, messages.Advertisements.from_bytes(raw), verifier=verifier)
                self._check_peers(step.state, history)
                profile = self._profile(setup, _declared(step.state))
                if profile is not None:  # all weights, and so this silo's own, are known now
                    history.check_profile(step.state.epoch.dataset, profile)
                return self._commit("confirm", key, step)

        return self._once("confirm", raw, b"", make)

    def contribute(
        self,
        raw: Any,
        state: str,
        train: Train,
        setup: Callable[[], JobSetup],
    ) -> bytes:
        """Train, mask and sign this silo's term.

        Args:
            raw: bytes of ``TermRequest``.
            state: SHA-256 (hex) of the run's state that the server names; a repeated request names the same.
            train: makes the term from what all silos declare, and from the total that the request rests on,
                not yet verified.
            setup: plans the job's sums.
        """
        named = bytes.fromhex(state)

        def make(key: bytes) -> bytes:
            request = messages.TermRequest.from_bytes(raw)
            with self._vault.locked() as history:  # like `mask`, but before the training
                params = self._ready().epoch.params
                history.check_slot(params.job, params.epoch, request.slot, request.sum_id)
                total = site.check_told(self._ready(), request, history)
                # A seal sums nothing, and belongs to no round of the plan.
                resumed = self._context.job.resume is not None and params.schemas.get(request.schema) != ()
                if resumed:
                    history.check_resumed(params, request.sum_id, named, first=total is None)
                arrived = journal.Requested(params.job, params.epoch, request.slot, key)
                history.check_request(arrived)
                self._vault.note(arrived)
                self._undo_unsent(key)
                unsent.keep(self._context.state_folder, request.sum_id, key)
            declared = _declared(self._ready())
            profile = self._profile(setup, declared)
            self._check_profile(profile)
            peers = Peers(
                applied_weights(declared, self._context.job.max_weight_share),
                # By the job's own parameters: this silo gives no share for a smaller sum.
                rules.honest_sites(rules.minimum_survivors(params), params.colluders),
                tellers(declared.values()),
                _sizes(declared, params.colluders),
            )
            checked: list[tuple[Confirmed | Established, Established]] = []

            def check(sum_id: messages.SumId, fields: tuple[messages.FieldSpec, ...], formed: Formed) -> None:
                if sum_id != request.sum_id:
                    raise InconsistencyError(
                        "the sum of the request", expected=str(sum_id), found=str(request.sum_id)
                    )
                before = self._ready()
                checked.append((before, site.check_request(before, request, fields)))
                if formed:
                    self._check_profile(_with_formed(profile, formed))

            encoded = train(peers, total=total, check=check)
            first = total is None
            del total  # as large as a model, and in the request
            with self._vault.locked() as history:
                if resumed:  # again: concurrent jobs may have come first
                    history.check_resumed(params, request.sum_id, named, first=first)
                state = self._ready()
                # A setup that was checked before the training is not verified again.
                ready = next((after for before, after in checked if before is state), state)
                step = site.mask(
                    ready,
                    request,
                    fields=encoded.fields,
                    basis=encoded.basis,
                    follows=encoded.follows,
                    term=encoded.term,
                    history=history,
                    kept=self._vault.recall,
                    profile=_with_formed(profile, encoded.formed),
                )
                unsent.check(self._context.state_folder, request.sum_id, key)
                opened = self._opened(request.sum_id, peers.sizes, history)
                reply = self._commit("contribute", key, replace(step, entries=(*step.entries, *opened)))
                unsent.sent(self._context.state_folder)
            self._unrecorded |= isinstance(state, Confirmed)
            if self._unrecorded and request.setup:
                self._record.session(step.state, request)
                self._unrecorded = False
            return reply

        return self._once("contribute", raw, named, make)

    def agree(self, raw: Any) -> bytes:
        """Sign a sum's survivors, fewer than the roster, only once."""

        def make(key: bytes) -> bytes:
            request = messages.AgreementRequest.from_bytes(raw)
            with self._vault.locked() as history:
                state = self._established()
                step = site.agree(state, request, history=history)
                left = [receipt.name for receipt in request.receipts]
                opened = self._opened_of(state, request.slot, left, history)
                return self._commit("agree", key, replace(step, entries=(*step.entries, *opened)))

        return self._once("agree", raw, b"", make)

    def reveal(self, raw: Any) -> bytes:
        """Verify the last total; reveal this site's shares of the masks in the survivors' sum."""

        def make(key: bytes) -> bytes:
            request = messages.RevealRequest.from_bytes(raw)
            with self._vault.locked() as history:
                state = self._established()
                self._undo_unsent()
                step = site.reveal(state, request, history=history, kept=self._vault.recall)
                reply = self._commit("reveal", key, step)
            slot = state.slots[request.slot]
            assert isinstance(slot, Masked | Agreed)  # noqa: S101 - nothing else is revealed
            note_verified(self._context.state_folder, slot.receipt.basis, slot.receipt.sum_id, state.told)
            self._confirm(None if state.told is None else state.told.digest().hex())
            self._context.pace.verified(str(slot.receipt.sum_id))
            self._record.sum(state.epoch.params, slot, state.told, request, step.reply)
            return reply

        return self._once("reveal", raw, b"", make)

    def _check_peers(self, state: Confirmed, history: journal.History) -> None:
        """Check every silo's declaration against the job and this site's policy, before anything is masked.

        Raises:
            ContributionError: TF-631; see ``Declaration.check_weight``.
            PolicyError: TF-625 if too few records are declared for the job's products of features, or for its
                rounds with those of earlier jobs; TF-614 if
                other silos open counts for any cohort and this site does not: enough of
                them could open this silo's counts as well.
        """
        declared = _declared(state)
        for name, item in sorted(declared.items()):
            item.check_weight(name, self._context.job.weights, self._context.policy.max_records)
        sizes = _sizes(declared, state.epoch.params.colluders)
        self._check_sizes(sizes)
        if (rounds := self._rounds(sizes)) is not None:
            rounds.check(self._context.policy, self._dataset, self._context.job_id, history)
        lax = sorted(name for name, item in declared.items() if item.any_static_cohort)
        if lax and not self._rules.any_static_cohort:
            raise PolicyError(
                f"static_cohort: {', '.join(lax)} would open counts for any cohort, and with enough of them "
                "this site's; this site's policy is `enrolled`, so theirs must be too."
            )

    def _ready(self) -> Confirmed | Established:
        state = self._vault.state()
        if isinstance(state, Advertised):
            raise _out_of_order("confirmed")
        return state

    def _undo_unsent(self, request: bytes = b"") -> None:
        """Undo another request's changes to this silo's own state if its term was never masked."""
        state = self._vault.established()
        unsent.undo(self._context.state_folder, () if state is None else state.sums, request)

    def _established(self) -> Established:
        state = self._vault.state()
        if not isinstance(state, Established):
            raise _out_of_order("established by a first term")
        return state

    @property
    def _rules(self) -> rules.SiteRules:
        return self._context.policy.site_rules()

    def _expected(self, proposed: messages.Params, setup: JobSetup | None = None) -> rules.Expected:
        """Derive the expected parameters from this silo's own copy of the job.

        Args:
            proposed: by the server; only its roster and epoch are used.
            setup: of the job, to compare the plan of its sums as well.
        """
        job, sites = self._context.job, len(proposed.roster)
        colluders = job.assumed_colluders(sites)
        planned = None
        if setup is not None:
            from tightframe.rounds.sums.parameters import epoch_params

            planned = epoch_params(
                setup, self._context.job_id, proposed.roster, epoch=proposed.epoch, static_open=True
            )
        return rules.Expected(
            name=self._context.name,
            job=self._context.job_id,
            lineage=job.lineage(self._context.job_id),
            sites=frozenset(job.sites),
            colluders=colluders,
            trust=job.server_trust,
            threshold=rules.threshold(sites, colluders, job.server_trust),
            min_sites=job.smallest_sum(sites),
            weights=job.weights,
            config_sha256=bytes.fromhex(job.sha256()),
            version=__version__,
            slots=None if planned is None else planned.slots,
            schemas=None if planned is None else planned.schemas,
        )

    def _profile(
        self, setup: Callable[[], JobSetup] | None, declared: Mapping[str, Declaration] | None = None
    ) -> journal.Profile | None:
        """Return the release profile of this silo's terms; None with noise, and outside production.

        Args:
            declared: by every silo; None before all are known: then it lacks this silo's own weight.
        """
        if setup is None or not self._context.production:
            return None
        if self._cached_profile is None:
            self._cached_profile = (self._own_profile(setup()),)
        if declared is None:
            return self._cached_profile[0]
        from tightframe.rounds.sums.release import with_weight

        own = self._context.name
        applied = applied_weights(declared, self._context.job.max_weight_share)[own]
        return with_weight(self._cached_profile[0], declared[own].weight, applied)

    def _own_profile(self, setup: JobSetup) -> journal.Profile | None:
        """Return the release profile of a job, in production with the identity of the records if that counts.

        Raises:
            DataError, SiteConfigError: if the records cannot be read.
        """
        from tightframe.rounds.sums.release import (
            COLUMNS,
            columns_summed,
            records_name,
            release_profile,
            with_formed,
        )

        context, profile = self._context, release_profile(setup, self._context.site)
        if self._summed is None or not context.production or (name := records_name(setup)) is None:
            return profile
        if context.data.synthetic:
            return profile
        formed = {name: (self._summed(setup),)}
        columns = columns_summed(setup)
        if columns is not None and context.patients(EVALUATED) < context.policy.min_test_count:
            formed[COLUMNS] = (columns,)
        return with_formed(profile, formed)

    def _check_profile(self, profile: journal.Profile | None) -> None:
        """Refuse terms of another profile than before, like `mask`, but before the training."""
        if profile is not None:
            dataset = self._context.site.records_id(self._context.job.dataset)
            with self._vault.locked() as history:
                history.check_profile(dataset, profile)

    def _identity(self) -> Any:
        if self._context.identity is None:
            raise SecureSumError("this silo has no identity to sign with.", code="TF-615")
        return self._context.identity()

    def _once(self, task: str, raw: Any, also: bytes, make: Callable[[bytes], bytes]) -> bytes:
        """Answer a request; a repeated one is answered with the identical bytes.

        Args:
            also: more bytes that identify the request: the hash of its broadcast.
            make: returns the answer to a new request, given its key.
        """
        if not isinstance(raw, bytes):
            raise SecureSumError(
                f"Expected a protocol message with the task {task}, but got none.", code="TF-604"
            )
        hashed = hashlib.sha256(raw)  # as large as a model: not copied to be hashed
        hashed.update(also)
        key = hashed.digest()
        with package_errors():
            reply = self._recall(task, key)
            if reply is not None:
                return reply
            try:
                return make(key)
            except (ReplayError, TightframeError) as error:
                # The engine may run one task in two processes at once, and the other one was first.
                preceded = isinstance(error, ReplayError) or error.code in CHARGED
                reply = self._recall(task, key) if preceded else None
                if reply is None:
                    raise
                return reply

    def _recall(self, task: str, key: bytes) -> bytes | None:
        """Return the stored reply to the request of this key; None unless it was the task's last request."""
        stored = self._vault.recall(f"reply-{task}")
        if stored is None or stored[: len(key)] != key:
            return None
        self._context.log.info(
            "%s: the task %s was repeated; answered with the same bytes", self._context.name, task
        )
        return stored[len(key) :]

    def _commit(self, task: str, key: bytes, step: Any) -> bytes:
        reply: bytes = step.reply.to_bytes()
        self._vault.commit(step.entries, step.state, {f"reply-{task}": key + reply}, step.kept)
        return reply


class _NullSigner:
    """Signer for advertisements that are never sent."""

    certificate = b""

    def sign(self, message: bytes) -> bytes:
        return b""


def _with_formed(profile: journal.Profile | None, formed: Formed) -> journal.Profile | None:
    from tightframe.rounds.sums.release import with_formed

    return with_formed(profile, formed)


def _declared(state: Confirmed | Established) -> dict[str, Declaration]:
    return {name: Declaration.from_bytes(data, name) for name, data in state.applications.items()}


def _sizes(declared: Mapping[str, Declaration], colluders: int) -> Sizes:
    return Sizes.of({name: item.weight for name, item in declared.items()}, colluders)


def _out_of_order(expected: str) -> StateError:
    """Return the error for a task that the session's state does not allow yet."""
    return StateError("this site's session", expected=expected, found="in another state")
