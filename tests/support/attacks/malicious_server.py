"""A malicious server played against the project's own silos, unchanged, as they run in production.

Only the engine between the two is left out: silos have provisioned-style identities, a journal, a salt and
a policy. ``Federation`` plays the server, and each test changes what an honest one would say.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.securesum import certificates
from torch.utils.data import Subset

from tightframe import __version__
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.data.arrays import ArrayData
from tightframe.data.heart import HeartOptions
from tightframe.data.heart.twin import open_twin
from tightframe.rounds import codec
from tightframe.rounds.codec import integer_totals
from tightframe.rounds.context import NEEDS_STATE, SiloContext
from tightframe.rounds.declaration import Declaration, applied_weights
from tightframe.rounds.run_state import state_bytes
from tightframe.rounds.server.collecting import SharedState
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.followed_state import next_state
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.site_ledger import journal_folder
from tightframe.rounds.state_files import STATE
from tightframe.rounds.sums.parameters import epoch_params, schema_name
from tightframe.securesum import messages, server
from tightframe.securesum.identity import Anchor, KeySigner, Verifier
from tightframe.securesum.messages import Params

NOW = datetime.now(UTC)
ROOT = certificates.make_root("project", start=NOW - timedelta(days=10), end=NOW + timedelta(days=300))
HEART = {
    "job_name": "j",
    "dataset": "fed_heart_disease",
    "model": "mlp",
    "rounds": 1,
    "method": "fedavg",
    "update_norm": 100.0,
}


@functools.cache
def identity(name: str) -> tuple[KeySigner, Anchor]:
    """The certificate of one hospital under the project's root."""
    issued = certificates.issue(ROOT, name, start=NOW - timedelta(days=5), end=NOW + timedelta(days=200))
    return issued.signer(), Anchor(ROOT.certificate)


class Records:
    """Generated records that pass for a hospital's own, so that no rule is relaxed for them."""

    synthetic = False

    def __init__(self, data: Any) -> None:
        self._data, self.source = data, "records"

    def labels(self, fold: str) -> Any:
        return self._data.labels(fold)

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        return self._data.records(fold, augment_seed=augment_seed)

    def check(self, progress: Any = None) -> None:
        self._data.check(progress)

    def raw(self, fold: str) -> np.ndarray:
        """The records of a fold as one matrix: what an attack must not get."""
        items = self._data.records(fold)
        return np.stack([np.asarray(items[index][0]) for index in range(len(items))])


def in_folds(rows: np.ndarray, labels: np.ndarray, train: int, validation: int) -> Records:
    """Return a hospital's records of two classes: of its rows (n, p) those left over are the test fold."""
    ends = {"train": slice(train), "validation": slice(train, train + validation)}
    parts = {**ends, "test": slice(train + validation, None)}
    folds: Any = {fold: (rows[part], labels[part]) for fold, part in parts.items()}
    return Records(ArrayData(folds, source="wards", num_classes=2))


class Chosen(Records):
    """Some of a hospital's training records."""

    def __init__(self, data: Any, places: np.ndarray) -> None:
        super().__init__(data)
        self._places = places

    def labels(self, fold: str) -> Any:
        labels = np.asarray(self._data.labels(fold))
        return labels[self._places] if fold == "train" else labels

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        found = self._data.records(fold, augment_seed=augment_seed)
        return Subset(found, self._places.tolist()) if fold == "train" else found

    def raw(self, fold: str) -> np.ndarray:
        items = self.records(fold)
        return np.stack([np.asarray(items[index][0]) for index in range(len(items))])


STANDARD = PolicyBlock(profile="standard", evaluated_share=None, min_row_bits=0)
"""For several jobs over few records: what evaluations tell, and few possible rows, have their own tests."""
ANY_WIDTH = STANDARD.model_copy(update={"records_per_feature": 0})
"""The same, of layers that are wide for so few records."""


def hearts(sites: int) -> dict[str, Records]:
    """Heart disease records of so many hospitals, by name."""
    return {f"hospital-{i + 1}": Records(_heart(i)) for i in range(sites)}


@functools.cache
def _heart(place: int) -> Any:
    return open_twin(place, HeartOptions())


class Federation:
    """The hospitals of one job, and a server that may lie to them.

    Args:
        values: of the job, beside ``HEART``.
        data: each hospital's records.
        state: folder of the hospitals' states; the same one for several jobs makes them the same hospitals.
        job_id: the engine's name of the job.
        policy: of every hospital.
        kits: folder with each hospital's kit, where its client works; None has none.
        previous: the engine's name of the job that this one continues; None if it continues none.
        withdrawn: hospital -> lines of its file of withdrawn records.
        entry: more values of each hospital's ``SiteEntry``.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        data: Mapping[str, Records],
        *,
        state: Path,
        job_id: str = "job-a",
        policy: PolicyBlock | None = None,
        kits: Path | None = None,
        previous: str | None = None,
        withdrawn: Mapping[str, Sequence[str]] | None = None,
        **entry: Any,
    ) -> None:
        self._kits, self._previous, self._withdrawn = kits, previous, withdrawn or {}
        self.job = self.job_of(values, sorted(data))
        self.setup, self.job_id, self.data, self.state = prepare(self.job), job_id, data, state
        self._entry = (policy, entry)
        self.start_again()
        self._slot, self._informed = 0, set[str]()
        self.evidence: server.Evidence | None = None  # of the last total opened
        self.shared = SharedState(self.setup.initial_state())  # the true state of the run

    def start_again(self) -> None:
        """Begin each hospital's process of the job; what earlier ones had in memory is lost."""
        self.sessions = {name: self._session(name, *self._entry) for name in sorted(self.data)}

    @staticmethod
    def job_of(values: Mapping[str, Any], names: list[str]) -> JobConfig:
        """A job of these hospitals, whose answers wait for no full second."""
        least = max(3, 2 * len(names) // 3 + 1)
        return parse_job({**HEART, "answer_grid": 0.0, "sites": names, "min_sites": least, **values})

    def _session(self, name: str, policy: PolicyBlock | None, more: Mapping[str, Any]) -> SiloSession:
        own, policy = self.state / name, policy or STANDARD
        if policy.min_answer_grid is None:
            policy = policy.model_copy(update={"min_answer_grid": 0.0})
        entry = SiteEntry(
            state_dir=str(own),
            data={"fed_heart_disease": {}},
            policy=policy,
            **{"dataset_id": "hearts", **more},
        )
        if name in self._withdrawn:
            file = self.state / f"{name}-{self.job_id}.csv"
            file.write_text("".join(f"{line}\n" for line in self._withdrawn[name]))
            entry = entry.model_copy(update={"withdrawn": {"fed_heart_disease": file}})
        return SiloSession(
            SiloContext(
                name,
                self.job,
                entry,
                run_dir=own / "run" / self.job_id,
                state_dir=own / self.job_id / name,
                previous_state=None if self._previous is None else own / self._previous / name / STATE,
                records=self.data[name],
                job_id=self.job_id,
                production=True,
                memory_only=True,
                journal_dir=journal_folder(own, name),
                ledger_dir=own,
                kit=None if self._kits is None else self._kits / name,
                identity=lambda: identity(name),
            )
        )

    def params(self, **changed: Any) -> Params:
        """What an honest server proposes, with what this one changes of it."""
        return replace(self.params_of(sorted(self.sessions)), **changed)

    def params_of(self, roster: Sequence[str]) -> Params:
        """What an honest server proposes for a roster."""
        return epoch_params(self.setup, self.job_id, roster, epoch=0, static_open=True)

    def ask_to_enroll(self, name: str, params: Params) -> bytes:
        """Send one hospital the enrolment; return its advertisement."""
        message = {
            "job_sha256": self.job.sha256(),
            "version": __version__,
            "roster": list(params.roster),
            "secure": params.to_bytes(),
        }
        return self.sessions[name].handle("enroll", message)["secure"]

    def enroll(self, **changed: Any) -> Federation:
        """Enrol and confirm every hospital, with parameters that an honest server would not have changed."""
        self.proposed = self.params(**changed)
        verifier = Verifier(Anchor(ROOT.certificate), {}, False, NOW)
        enrolment = server.Enrolment(self.proposed, verifier=verifier)
        for name in self.proposed.roster:
            enrolment.add(name, self.ask_to_enroll(name, self.proposed))
        relay = enrolment.relay()
        self.session = server.Session(self.proposed, relay)
        for name in self.proposed.roster:
            answer = self.sessions[name].handle("confirm", {"secure": relay.to_bytes()})
            self.session.add(name, answer["secure"])
        self._slot, self._informed, self.evidence = 0, set(), None
        self.shared = SharedState(self.setup.initial_state())
        return self

    def statistics(self, **how: Any) -> dict[str, np.ndarray]:
        """Run the sums of pooled statistics, flags first, and return the last one's totals.

        Args:
            how: arguments of ``sum`` for the last one.
        """
        *flags, last = self.setup.plan.at("statistics", 0)
        for exchange in flags:
            self.sum(*exchange.place)
        return self.sum(*last.place, **how)

    def sum(
        self,
        kind: str,
        number: int,
        index: int = 0,
        *,
        named: SharedState | None = None,
        dead: Collection[str] = (),
        mute: Collection[str] = (),
        unasked: Collection[str] = (),
        attempt: int = 0,
    ) -> dict[str, np.ndarray]:
        """Run one sum and return its decoded totals.

        Args:
            kind: of the exchange, with its round ``number`` and phase ``index``.
            named: the state of the run that the server names, and sends to hospitals that ask for it; by
                default the true one.
            dead: hospitals declared dead after their terms came in.
            mute: hospitals that are not asked to reveal.
            unasked: hospitals that are not asked at all.
            attempt: of the sum.
        """
        exchange = self.setup.plan.find(kind, number, index)
        shared = self.shared if named is None else named
        phase = exchange.phase_for(exchange.phase.broadcast(shared.state))
        sum_id = messages.SumId.of(kind, number, index, attempt)
        turn = server.Sum(
            self.session,
            slot=self._slot,
            sum_id=sum_id,
            schema=schema_name(sum_id.phase, codec.specs(phase.schema, len(self.proposed.roster))),
            basis=bytes.fromhex(shared.sha256),
            spool=server.MemorySpool(),
            rests_on=self.evidence,
        )
        self._slot += 1
        for name in (name for name in self.proposed.roster if name not in unasked):
            shown = b"" if name in self._informed else self.session.setup_for(name).to_bytes()
            message = {
                "kind": kind,
                "round": number,
                "phase": index,
                "attempt": attempt,
                "opened": {},
                **shared.named(),
                "secure": turn.term_request(shown).to_bytes(),
            }
            answer = self.sessions[name].handle("contribute", message)
            if NEEDS_STATE in answer:
                message["state_bytes"] = state_bytes(shared.state)
                answer = self.sessions[name].handle("contribute", message)
            self._informed.add(name)
            if name not in dead:
                turn.add(name, answer["secure"])
        alive = turn.close()
        for name in () if turn.full else alive:
            request = {"secure": turn.agreement_request().to_bytes()}
            turn.add_agreement(name, self.sessions[name].handle("agree", request)["secure"])
        for name in alive:
            if name not in mute:
                request = {"secure": turn.reveal_request().to_bytes()}
                turn.add_reveal(name, self.sessions[name].handle("reveal", request)["secure"])
        self.evidence = turn.open().evidence
        total = self.evidence.total
        self.shared = shared.after(next_state(self.setup, shared.state, total, self.applied()))
        integers = integer_totals(phase.schema, total.groups)
        return dict(codec.decode(phase.schema, integers, parties=len(self.proposed.roster)))

    def applied(self) -> dict[str, float]:
        """Each hospital's public weight, as sums apply it."""
        declared = {
            name: Declaration.from_bytes(peer.application, name) for name, peer in self.session.peers.items()
        }
        return applied_weights(declared, self.job.max_weight_share)

    def weights(self) -> dict[str, float]:
        """Each hospital's public weight, as it declared it."""
        return {
            name: Declaration.from_bytes(peer.application, name).weight
            for name, peer in self.session.peers.items()
        }
