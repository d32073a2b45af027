"""The silo's half of secure sums: answers protocol messages from a journal and a state of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from tightframe import __version__
from tightframe.errors import PolicyError, SecureSumError, TightframeError
from tightframe.rounds.context import SiloContext
from tightframe.rounds.declaration import Declaration, tellers
from tightframe.rounds.secure.common import SECURE, named
from tightframe.rounds.secure.record import SiteRecord
from tightframe.rounds.secure.vault import Vault
from tightframe.rounds.summation import OUT_OF_BUDGET, Encoded
from tightframe.securesum import journal, messages, rules, site
from tightframe.securesum.errors import InconsistencyError, ReplayError, StateError
from tightframe.securesum.identity import Verifier
from tightframe.securesum.site_state import Advertised, Agreed, Confirmed, Established, Masked

__all__ = ["SECURE", "SecureSite"]

CHARGED = (OUT_OF_BUDGET, "TF-705")
"""What the ledger answers to a process whose charge another one has made. By code: a task that charges
nothing need not import the ledger."""


class _Declare(Protocol):
    def __call__(self, *, again: bool) -> Declaration: ...


class SecureSite:
    """One silo's side of a run's secure sums.

    Args:
        context: of the silo.
    """

    def __init__(self, context: SiloContext) -> None:
        self._context = context
        self._vault = Vault(context.secure_folder, context.journal, on_disk=not context.memory_only)
        self._record = SiteRecord(context)
        self._unrecorded = False  # a session was checked, and could not be put on record

    def enroll(self, raw: Any, declare: _Declare) -> bytes:
        """Hold the server's parameters against this site's rules; advertise keys.

        Args:
            raw: ``Params``.
            declare: gives what this silo makes public, from the records, or again without them.
        """

        def make(key: bytes) -> bytes:
            params = messages.Params.from_bytes(raw)
            expected = self._expected()
            # Both are checked again in `advertise`; here, before records are read and state is begun anew.
            rules.check(params, self._rules, expected)
            with self._vault.locked() as history:
                history.check_epoch(params)
            application = declare(again=params.epoch > 0).to_bytes()
            signer, _ = self._identity()
            with self._vault.locked() as history:
                step = site.advertise(
                    params,
                    rules=self._rules,
                    expected=expected,
                    signer=signer,
                    history=history,
                    dataset=self._context.site.records_id(self._context.job.dataset),
                    application=application,
                )
                return self._commit("enroll", key, step)

        return self._once("enroll", raw, b"", make)

    def foresee(self, params: messages.Params, entries: Sequence[journal.Entry]) -> None:
        """Refuse parameters that ``enroll`` would refuse; nothing is kept, signed or sent.

        Args:
            params: as a server would propose them.
            entries: all that this site's journal has.

        Raises:
            SecureSumError: TF-601 if they are below this site's rules; TF-612 if counts would be opened for
                another cohort than before.
        """
        with named():
            site.advertise(
                params,
                rules=self._rules,
                expected=self._expected(),
                signer=_Nobody(),
                history=journal.History(entries),
                dataset=self._context.site.records_id(self._context.job.dataset),
                application=b"",
            )

    def confirm(self, raw: Any) -> bytes:
        """Verify every silo's advertisement; deal shares; say that this silo is ready."""

        def make(key: bytes) -> bytes:
            with self._vault.locked():
                _, anchor = self._identity()
                verifier = Verifier(anchor, self._rules.pins, self._rules.pinned_only, datetime.now(UTC))
                state = self._vault.state()
                if not isinstance(state, Advertised):
                    raise _out_of_order("advertised")
                step = site.confirm(state, messages.Advertisements.from_bytes(raw), verifier=verifier)
                self._check_peers(step.state)
                return self._commit("confirm", key, step)

        return self._once("confirm", raw, b"", make)

    def contribute(
        self,
        raw: Any,
        broadcast: bytes,
        train: Callable[[Mapping[str, float], int, Mapping[str, int]], Encoded],
    ) -> bytes:
        """Train, mask, sign.

        Args:
            raw: ``TermRequest``.
            broadcast: the canonical tensor bytes that were received.
            train: makes the term from the public weights of all silos, from t - c, the least number of
                honest silos in a sum that can be opened, and from how many silos tell of each fold.
        """
        received = hashlib.sha256(broadcast).digest()

        def make(key: bytes) -> bytes:
            request = messages.TermRequest.from_bytes(raw)
            with self._vault.locked() as history:  # as `mask` does, but before the training
                params = self._ready().epoch.params
                history.check_slot(params.job, params.epoch, request.slot, request.sum_id)
            declared = {
                name: Declaration.from_bytes(data, name) for name, data in self._ready().applications.items()
            }
            weights = {name: item.weight for name, item in declared.items()}
            # The server names the colluders; this silo assumes as many as the job says at least.
            colluders = max(params.colluders, self._context.job.assumed_colluders(len(weights)))
            honest = rules.honest_sites(params.threshold, colluders)
            encoded = train(weights, honest, tellers(declared.values()))
            if encoded.sum_id != request.sum_id:
                raise InconsistencyError(
                    "the sum of the request", expected=str(encoded.sum_id), found=str(request.sum_id)
                )
            with self._vault.locked() as history:
                before = self._ready()
                step = site.mask(
                    before,
                    request,
                    fields=encoded.fields,
                    broadcast=received,
                    term=encoded.term,
                    history=history,
                )
                reply = self._commit("contribute", key, step)
            self._unrecorded |= isinstance(before, Confirmed)
            if self._unrecorded and request.setup:
                self._record.session(step.state, request)
                self._unrecorded = False
            return reply

        return self._once("contribute", raw, received, make)

    def agree(self, raw: Any) -> bytes:
        """Sign the survivors of a sum, once for ever."""

        def make(key: bytes) -> bytes:
            request = messages.AgreementRequest.from_bytes(raw)
            with self._vault.locked() as history:
                step = site.agree(self._established(), request, history=history)
                return self._commit("agree", key, step)

        return self._once("agree", raw, b"", make)

    def reveal(self, raw: Any) -> bytes:
        """Reveal shares of what masks the survivors' sum, and forget the slot."""

        def make(key: bytes) -> bytes:
            request = messages.RevealRequest.from_bytes(raw)
            with self._vault.locked() as history:
                state = self._established()
                step = site.reveal(state, request, history=history)
                reply = self._commit("reveal", key, step)
            slot = state.slots[request.slot]
            assert isinstance(slot, Masked | Agreed)  # noqa: S101 - nothing else is revealed
            self._record.sum(state.epoch.params, slot, request, step.reply)
            return reply

        return self._once("reveal", raw, b"", make)

    def _check_peers(self, state: Confirmed) -> None:
        """Refuse silos that open counts for any cohort: enough of them could open this silo's as well."""
        lax = sorted(
            name
            for name, data in state.applications.items()
            if name != self._context.name and Declaration.from_bytes(data, name).any_static_cohort
        )
        if lax and not self._rules.any_static_cohort:
            raise PolicyError(
                f"static_cohort: {', '.join(lax)} would open counts for any cohort, and with enough of them "
                "this site's; this site's policy is `enrolled`, so theirs must be, too."
            )

    def _ready(self) -> Confirmed | Established:
        state = self._vault.state()
        if isinstance(state, Advertised):
            raise _out_of_order("confirmed")
        return state

    def _established(self) -> Established:
        state = self._vault.state()
        if not isinstance(state, Established):
            raise _out_of_order("established by a first term")
        return state

    @property
    def _rules(self) -> rules.SiteRules:
        return self._context.policy.site_rules()

    def _expected(self) -> rules.Expected:
        job = self._context.job
        return rules.Expected(
            name=self._context.name,
            job=self._context.job_id,
            lineage=job.lineage(self._context.job_id),
            sites=frozenset(job.sites),
            min_sites=job.min_sites,
            weights=job.weights,
            config_sha256=bytes.fromhex(job.sha256()),
            version=__version__,
        )

    def _identity(self) -> Any:
        if self._context.identity is None:
            raise SecureSumError("this silo was given no identity to sign with.", code="TF-615")
        return self._context.identity()

    def _once(self, task: str, raw: Any, also: bytes, make: Callable[[bytes], bytes]) -> bytes:
        """Answer a request that was answered before with the identical bytes."""
        if not isinstance(raw, bytes):
            raise SecureSumError(
                f"Expected a protocol message with the task {task}, but got none.", code="TF-604"
            )
        key = hashlib.sha256(raw + also).digest()
        with named():
            kept = self._recall(task, key)
            if kept is not None:
                return kept
            try:
                return make(key)
            except (ReplayError, TightframeError) as error:
                # The engine may run one task in two processes at once; the other one was first.
                first = isinstance(error, ReplayError) or error.code in CHARGED
                kept = self._recall(task, key) if first else None
                if kept is None:
                    raise
                return kept

    def _recall(self, task: str, key: bytes) -> bytes | None:
        """What the request of this key was answered with, if it was the last one of its task."""
        kept = self._vault.recall(f"reply-{task}")
        if kept is None or kept[: len(key)] != key:
            return None
        self._context.log.info(
            "%s: %s was asked again; answered with the same bytes", self._context.name, task
        )
        return kept[len(key) :]

    def _commit(self, task: str, key: bytes, step: Any) -> bytes:
        reply: bytes = step.reply.to_bytes()
        self._vault.commit(step.entries, step.state, {f"reply-{task}": key + reply})
        return reply


class _Nobody:
    """A signer for keys that are thrown away."""

    certificate = b""

    def sign(self, message: bytes) -> bytes:
        return b""


def _out_of_order(expected: str) -> StateError:
    return StateError("this site's session", expected=expected, found="in another state")
