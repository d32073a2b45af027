"""Silos that are the project's own, with a model of four numbers: a sum takes milliseconds.

Each has its journal, its state of the secure sum and its own copy of the run's state, and answers requests
for terms by ``Contributor``. Left out are the engine, the files of ledger and transcript, and training: a
term is a function of silo, round and state.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.support.attacks.malicious_server import identity

from tightframe import __version__
from tightframe.config.job import JobConfig
from tightframe.phases import Cohort, Contribution, Field, Group, Phase, Schema, ServerState, Totals
from tightframe.privacy.ledger.entries import Remembered
from tightframe.results.files import MODEL, PERSONAL
from tightframe.rounds import codec, unproven
from tightframe.rounds.context import NEEDS_STATE, Message
from tightframe.rounds.declaration import Declaration
from tightframe.rounds.notes import VERIFIED
from tightframe.rounds.order import Place, place_of
from tightframe.rounds.pace import Pace
from tightframe.rounds.plan import CLOSING, TRAIN, Exchange, RunPlan
from tightframe.rounds.plan import PERSONAL as PERSONAL_MODELS
from tightframe.rounds.run_state import state_sha256
from tightframe.rounds.silo.checks import requests
from tightframe.rounds.silo.contribute import Contributor
from tightframe.rounds.silo.followed_state import FollowedState, next_state
from tightframe.rounds.silo.own_state import SiloStateStore, begin, confirm_told
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.state_files import BEFORE_REQUEST, COMMITTED, FOLLOWED, PROPOSED, TOLD
from tightframe.rounds.sums.common import SEAL, SECURE, Encoded, Peers
from tightframe.rounds.sums.secure_silo import SecureSite
from tightframe.rounds.sums.vault import Vault
from tightframe.securesum import rules, shamir, site
from tightframe.securesum.checks import pair_secret
from tightframe.securesum.masks import Accumulator
from tightframe.securesum.messages import (
    Advertisement,
    Advertisements,
    FieldSpec,
    Masked,
    Params,
    SumId,
    TermRequest,
    Told,
    Total,
)
from tightframe.securesum.primitives import Secret, ed25519_sign, kem_encapsulate
from tightframe.securesum.proofs import Ground
from tightframe.securesum.rules import Expected, SiteRules
from tightframe.securesum.site import journal
from tightframe.securesum.site.setup import establish
from tightframe.securesum.site.state import Confirmed, Established, term_name
from tightframe.securesum.site.totals import KeptTerm

JOB, SLOTS = "job-a", 7
SCHEMA = Schema(
    (
        Field("update/weight", (3,), ring=32, bound=1.0),
        Field("counts", (2,), ring=64, bound=100.0, bits=0, static=True),
        Field("update/mean", (1,), ring=64, bound=10.0),
    )
)
"""Both rings and both groups."""
DECLARED = Declaration(
    weight=1.0, synthetic=True, profile="research", min_class_count=1, any_static_cohort=False, untold=()
)
LOG = logging.getLogger("small silos")


class CrashError(Exception):
    """A process that ends between the journal and the state."""


def _update(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
    model = {
        name: state.model[name] + torch.from_numpy(totals[f"update/{name}"] / cohort.size)
        for name in ("weight", "mean")
    }
    kept = {name: value for name, value in state.extra.items() if name != "counts"}
    if "counts" in totals:
        kept["counts"] = torch.from_numpy(totals["counts"].copy())
    return ServerState(model, kept)


def _nothing(*_: Any) -> Any:
    raise AssertionError("Expected no training.")


PHASE = Phase("train", SCHEMA, lambda state: state.model, _nothing, _update)
LAST_PHASE = Phase("last", SCHEMA, lambda state: state.model, _nothing, lambda state, *_: state)


@dataclass(frozen=True)
class Line:
    """A job's exchanges in one line: a *step* is the number of one, from 1 on.

    Attributes:
        rounds: of training.
        of: exchanges of each round.
        ends: how many there are behind them: the closing, personal models.
    """

    rounds: int = 200
    of: int = 1
    ends: int = 0

    @property
    def last(self) -> int:
        """The last step of training."""
        return self.rounds * self.of

    @property
    def end(self) -> int:
        """The last step."""
        return self.last + self.ends

    def place(self, step: int) -> Place:
        """Return what a step is in the plan; one that is past its end is of a round that it does not have."""
        if self.last < step <= self.end:
            return (CLOSING, PERSONAL_MODELS)[step - self.last - 1], self.rounds, 0
        return TRAIN, (step - 1) // self.of + 1, (step - 1) % self.of

    def sum_id(self, step: int, attempt: int) -> SumId:
        """Return the name of a step's sum."""
        kind, number, index = self.place(step)
        return SumId.of(kind, number, index, attempt)

    def step(self, sum_id: SumId) -> int:
        """Return the step that a sum is of."""
        kind, number, index = place_of(sum_id)
        if kind in (CLOSING, PERSONAL_MODELS):
            return self.last + (CLOSING, PERSONAL_MODELS).index(kind) + 1
        return (number - 1) * self.of + index + 1

    def after(self, step: int) -> tuple[int, ...]:
        """Return the steps that may come after one: the closing's sum may stay shut."""
        return (step + 1, step + 2) if step == self.last and self.ends == 2 else (step + 1,)


ENDLESS = Line()
"""More rounds than any run gets to."""


class _Plan(RunPlan):
    """Training rounds of one exchange or two, and what the line has behind them."""

    def __init__(self, setup: Any, line: Line) -> None:
        super().__init__(setup)
        self._line = line

    def at(self, kind: str, number: int) -> tuple[Exchange, ...]:
        kinds = (TRAIN, CLOSING, PERSONAL_MODELS)[: 1 + self._line.ends]
        return super().at(kind, number) if kind in kinds else ()

    def _round(self, number: int) -> Sequence[Exchange]:
        of = self._line.of
        return [Exchange(TRAIN, number, PHASE, index=index, of=of) for index in range(of)]

    @property
    def _closing(self) -> Exchange:
        return Exchange(CLOSING, self._line.rounds, LAST_PHASE)

    @property
    def _personal(self) -> Exchange:
        return Exchange(PERSONAL_MODELS, self._line.rounds, LAST_PHASE)


def _start() -> ServerState:
    return ServerState(
        {"weight": torch.zeros(3, dtype=torch.float64), "mean": torch.zeros(1, dtype=torch.float64)}
    )


def job_of(names: Sequence[str], after: int | None = None, line: Line = ENDLESS) -> Any:
    """What the silos read of a job; of one that goes on after a round of a stopped one, if it says so."""
    job: Any = SimpleNamespace(
        dataset="small",
        summation="secure",
        weights="uniform",
        max_weight_share=1.0,
        whole_sums=None,
        server_trust="malicious",
        min_sites=3,
        sites=list(names),
        resume=None if after is None else SimpleNamespace(after_round=after),
        continues=None if after is None else SimpleNamespace(previous=JOB),
        origin=SimpleNamespace(sha256=lambda: "ab" * 32),
        rounds=line.rounds,
        statistics=None,
        personalise=True,
        done=after or 0,
        class_rules="off",
        local_baseline_epochs=0,
        privacy=None,
        withdraw=None,
        evaluate_only=None,
        initial_model_sha256=None,
        assumed_colluders=lambda sites: 1,
        lineage=lambda job_id: JOB,
        sha256=lambda: "ab" * 32,
    )
    job.smallest_sum = partial(JobConfig.smallest_sum, job)
    return job


def setup_of(names: Sequence[str], after: int | None = None, line: Line = ENDLESS) -> Any:
    """What silos and server read of a job's setup."""
    setup: Any = SimpleNamespace(
        job=job_of(names, after, line),
        initial_state=_start,
        rounded=False,
        setting=SimpleNamespace(build_model=_network, input_shape=(3,), num_classes=2),
        dataset=SimpleNamespace(class_names=("no", "yes")),
        training_phases=lambda number: (PHASE,) * line.of,
        method=SimpleNamespace(own_model=None, one_sum=None),
        privacy=None,
    )
    setup.plan = _Plan(setup, line)
    return setup


def _network() -> torch.nn.Module:
    return torch.nn.Linear(3, 1)  # of which nothing is frozen


def specs(parties: int) -> tuple[FieldSpec, ...]:
    """The schema of every sum but a seal."""
    return codec.specs(SCHEMA, parties)


def params_of(
    names: Sequence[str], roster: Sequence[str], epoch: int, *, static_open: bool = True, job_id: str = JOB
) -> Params:
    """What an honest server proposes."""
    job, sites = job_of(names), len(roster)
    colluders = job.assumed_colluders(sites)
    return Params(
        job=job_id,
        lineage=JOB,
        epoch=epoch,
        roster=tuple(roster),
        threshold=rules.threshold(sites, colluders, job.server_trust),
        colluders=colluders,
        slots=SLOTS,
        schemas={"train": specs(sites), SEAL: ()},
        weights=job.weights,
        trust=job.server_trust,
        min_sites=max(3, rules.smallest_set(rules.threshold(sites, colluders), colluders, 3)),
        static_open=static_open,
        config_sha256=bytes.fromhex(job.sha256()),
        version=__version__,
    )


@lru_cache(1024)
def term_of(name: str, place: Place, state: str, parties: int, own: bytes = b"") -> Mapping[Group, bytes]:
    """A silo's term: a function of the silo, the exchange, the state (hex) that it rests on, and its own."""
    seed = hashlib.sha256(f"{name}/{place}/{state}/{own.hex()}".encode()).digest()
    random = np.random.default_rng(list(seed))
    tensors = {
        "update/weight": torch.from_numpy(random.uniform(-1, 1, 3)),
        "counts": torch.from_numpy(random.integers(0, 100, 2).astype(np.float64)),
        "update/mean": torch.from_numpy(random.uniform(-10, 10, 1)),
    }
    return MappingProxyType(codec.encode(SCHEMA, tensors, share=1.0, parties=parties))


def own_after(name: str, sum_id: SumId, state: str, own: bytes) -> bytes:
    """A silo's own state after it trained for a sum: it says of what."""
    return hashlib.sha256(f"{name}/{sum_id}/{state}/{own.hex()}".encode()).digest()


class _Contributor(Contributor):
    """A silo's own but for its records: it trains nothing, and its terms are made up.

    Attributes:
        used: its own state, with which it made its last term.
        trained: states (SHA-256) that it trained on, the sum, and the total told with each.
        dies: whether its process dies over the next request's records.
    """

    def __init__(self, context: Any, setup: Any, *, keeps: bool) -> None:
        self.trained: list[tuple[str, SumId, Total | None]] = []
        self.dies, self._keeps = False, keeps
        self._context, self.setup, self._setup = context, setup, setup
        self._store = SiloStateStore(context.state_folder, context.name, secure=True)
        self._followed = FollowedState(context.state_folder, setup, context.name, LOG)
        self.used = b""

    def contribute(
        self, message: Message, peers: Peers, *, total: Total | None = None, **more: Any
    ) -> Encoded:
        self._told = total
        return super().contribute(message, peers, total=total, **more)

    def _silo(
        self,
        exchange: Exchange,
        message: Message,
        peers: Peers,
        state: Any,
        needs: unproven.Needs = unproven.NO_NEEDS,
    ) -> Any:
        sum_id = exchange.sum_id(message["attempt"])
        return SimpleNamespace(
            name=self._context.name,
            sum_id=sum_id,
            state=message["state"],
            needs=needs,
            at_end=exchange.reported,
            place=exchange.place,
        )

    def _term(self, silo: Any, *others: Any) -> tuple[Contribution, dict[Group, bytes], bool]:
        self.trained.append((silo.state, silo.sum_id, self._told))
        if self.dies:
            raise CrashError
        kept = self._store.committed().get("own") if self._keeps else None
        self.used = b"" if kept is None else kept.numpy().tobytes()
        term = dict(term_of(silo.name, silo.place, silo.state, len(others[-1]), self.used))
        if silo.at_end:
            self._keep(silo)
        if silo.at_end or not self._keeps:
            return Contribution({}), term, True
        after = own_after(silo.name, silo.sum_id, silo.state, self.used)
        return Contribution({}, {"own": torch.tensor(list(after), dtype=torch.uint8)}), term, True

    def _keep(self, silo: Any) -> None:
        """Keep the final model, or the personal one, of which its file says what it was made from."""
        if silo.sum_id.phase.startswith(CLOSING):
            path = unproven.begin(self._context, silo.needs) / MODEL
        else:
            path = unproven.place(self._context, silo.needs) / PERSONAL
        path.write_text(f"{silo.state}:{self.used.hex()}")


def _entry(fact: Any) -> Any:
    """Read an entry of a journal; one that was read before is not read again."""
    return _read(json.dumps(fact, sort_keys=True))


@lru_cache(4096)
def _read(fact: str) -> Any:
    return journal.entry_from_value(json.loads(fact))


class _Vault(Vault):
    """A vault whose ledger is a list; ``crash`` ends the next step after its journal entries."""

    def __init__(self) -> None:
        super().__init__(Path(), None, on_disk=False)  # type: ignore[arg-type]  # never opened
        self.facts: list[Any] = []
        self.crash = False

    @contextmanager
    def locked(self) -> Iterator[journal.History]:
        self._ledger = self  # type: ignore[assignment]  # `remember` is all of it that a step uses
        try:
            yield self._history
        finally:
            self._ledger = None

    def done(self) -> tuple[Any, int]:
        """What the silo has done: its state, and its journal but for requests that arrived."""
        return self._state, sum(fact["entry"] != journal.Requested.KIND for fact in self.facts)

    def remember(self, content: Remembered) -> None:
        self.facts += content.facts
        for fact in content.facts:
            self._history.append(_entry(fact))

    def commit(self, entries: Any, state: Any, replies: Any, kept: Any) -> None:
        if not self.crash:
            return super().commit(entries, state, replies, kept)
        self.crash = False
        there = {name: part for name, part in kept.items() if part is not None}
        super().commit(entries, self._state or state, {}, there)
        raise CrashError

    @property
    def known(self) -> Any:
        """The state, if there is one."""
        return self._state

    def forget(self) -> None:
        """Lose what is in memory only: the state and the replies."""
        self._state, self._stored = None, {}
        self.restart()

    def restart(self) -> None:
        """Read everything again, as another process does."""
        self._history = journal.History(map(_entry, self.facts))
        if self._state is not None:
            self._state = type(self._state).from_bytes(self._state.to_bytes())


class _Unwritten:
    """A transcript that nobody reads."""

    def session(self, *_: Any) -> None: ...

    def sum(self, *_: Any) -> None: ...


class SmallSilo(SiloSession):
    """An honest silo, from the first check of a message on.

    Args:
        name: of the silo.
        names: of all silos of the job.
        folder: for its own files.
        keeps: whether its method keeps a state of the silo's own.
        line: the job's exchanges.
    """

    def __init__(
        self, name: str, names: Sequence[str], folder: Path, *, keeps: bool = True, line: Line = ENDLESS
    ) -> None:
        self.name, self._names, self._folder, self._keeps = name, names, folder, keeps
        self._line = line
        self._join(JOB, [])

    def resume(self, job_id: str, after: int, *, with_state: bool) -> None:
        """Go on in another job of the chain, with the state of the job before or without it.

        Raises:
            RunError: TF-521, TF-522, as ``own_state.begin``; then it stays in the job before.
        """
        self._join(job_id, self.vault.facts, after, self.context.state_folder if with_state else None)

    def _join(
        self, job_id: str, facts: Sequence[Any], after: int | None = None, previous: Path | None = None
    ) -> None:
        name, folder = self.name, self._folder / job_id
        context: Any = SimpleNamespace(
            ledger_dir=None,
            name=name,
            job=job_of(self._names, after, self._line),
            job_id=job_id,
            previous_state=previous,
            policy=SimpleNamespace(site_rules=SiteRules, max_records=None, records_per_feature=0),
            site=SimpleNamespace(records_id=lambda dataset: dataset),
            secure_folder=folder,
            state_folder=folder,
            run_dir=self._folder / f"{job_id}-results",
            write_page=None,
            transcript=folder / "transcript",
            site_ledger=None,
            memory_only=True,
            production=False,
            limits_evaluations=False,
            untold=lambda: (),
            identity=lambda: identity(name),
            pace=Pace(folder / "pace.json", on=False, limit=0.0, log=LOG),
            log=LOG,
        )
        entries = [*map(_entry, facts)]
        with mock.patch("tightframe.rounds.silo.own_state._journal", lambda context: entries):
            begin(context)
        context.run_dir.mkdir(parents=True, exist_ok=True)
        self.context, self._after = context, after
        secure = SecureSite(context, partial(confirm_told, folder))
        self.vault = secure._vault = _Vault()
        self.vault.facts = list(facts)
        self.vault.restart()
        secure._record = _Unwritten()  # type: ignore[assignment]
        self._secure: SecureSite = secure
        self._fresh()

    def _fresh(self) -> None:
        unproven.publish(self.context)
        setup = setup_of(self._names, self._after, self._line)
        self._contributor = _Contributor(self.context, setup, keeps=self._keeps)

    def _training(self) -> Contributor:
        assert self._contributor is not None
        return self._contributor

    def _answer(self, task: str, message: Message) -> Message:
        requests.check(task, message, self.name, secure=True)
        if task == "enroll":
            return {SECURE: self._secure.enroll(message.get(SECURE), lambda *, again: DECLARED)}
        if task == "contribute":
            return self._contribute(message)
        if task == "confirm":  # its sums have no release profile
            return {SECURE: self._secure.confirm(message.get(SECURE), None)}  # type: ignore[arg-type]
        answer = {SECURE: getattr(self._secure, task)(message.get(SECURE))}
        if task == "reveal":
            unproven.publish(self.context)
        return answer

    def handle(self, task: str, message: Message) -> Message:
        return self._answer(task, message)

    def restart(self) -> None:
        """Go on as another process: journal, states and files are read again."""
        self.vault.restart()
        self._fresh()

    def die(self) -> None:
        """End the process over the records of the next request."""
        self._training().dies = True  # type: ignore[attr-defined]

    @property
    def begun_elsewhere(self) -> bool:
        """Whether another process of this job took part, of which this one knows nothing."""
        begun = [item for item in self.vault.facts if item["entry"] == journal.Advertised.KIND]
        return self.vault.forgotten() and any(item["job"] == self.context.job_id for item in begun)

    @property
    def verified(self) -> str:
        """States and sums that it has noted as verified."""
        path = self.context.state_folder / VERIFIED
        return path.read_text() if path.is_file() else ""

    def start_again(self) -> None:
        """Go on as a process that knows nothing but journal and files, as in production."""
        self.vault.forget()
        self._fresh()

    def lose_followed(self) -> None:
        """Lose the file of the run's state, as after a damage to the disk."""
        (self.context.state_folder / FOLLOWED).unlink(missing_ok=True)
        self._fresh()

    @property
    def trained(self) -> list[tuple[str, SumId, Total | None]]:
        """States that it trained on since it began its last process, the sum, and the total told."""
        trained: list[tuple[str, SumId, Total | None]] = self._training().trained  # type: ignore[attr-defined]
        return trained

    @property
    def used(self) -> bytes:
        """Its own state, with which it made its last term."""
        used: bytes = self._training().used  # type: ignore[attr-defined]
        return used

    def own(self) -> dict[str, bytes]:
        """The files of its own state, as they are without a request whose term is not masked."""
        names, folder = (COMMITTED, PROPOSED, TOLD), self.context.state_folder
        before = folder / BEFORE_REQUEST
        paths = [(before if before.is_dir() else folder) / name for name in names]
        return {path.name: path.read_bytes() for path in paths if path.is_file()}

    @property
    def results(self) -> list[tuple[str, bytes]]:
        """The state that its final model was made from, and its personal one, each with its own state."""
        paths = [self.context.run_dir / name for name in (MODEL, PERSONAL)]
        made = [path.read_text().split(":") for path in paths if path.is_file()]
        return [(state, bytes.fromhex(own)) for state, own in made]

    @property
    def established(self) -> Established | None:
        """Its state, once its first term was masked."""
        return self.vault.established()


@dataclass(frozen=True)
class Deals:
    """What a colluding silo deals falsely at each setup, and signs.

    Attributes:
        pairs: sites to which it seals, for every other slot, pair secrets that its seeds do not give. It keys
            its own masks with them, so that the masks cancel while it is there.
        shares: whether the first site of the roster gets shares of other secrets.
        boxes: sites whose box is under another key than the one that it encapsulates.
    """

    pairs: frozenset[str] = frozenset()
    shares: bool = False
    boxes: frozenset[str] = frozenset()

    def pair_secret(
        self, seed: bytes, session: bytes, slot: int, group: Group, own: str, other: str
    ) -> bytes:
        """The pair secret that the silo deals."""
        right = pair_secret(seed, session, slot, group, own, other)
        false = other in self.pairs and slot % 2 == 0
        return hashlib.sha256(b"false" + right).digest() if false else right

    def split(self, *arguments: Any, **options: Any) -> Any:
        """The shares that the silo deals."""
        made = shamir.split_many(*arguments, **options)
        if self.shares:
            made = made.copy()
            made[0] ^= 1
        return made

    @contextmanager
    def dealing(self) -> Iterator[None]:
        """Make what is dealt, and how terms are masked, the silo's own."""
        with (
            mock.patch("tightframe.securesum.site.setup.pair_secret", self.pair_secret),
            mock.patch("tightframe.securesum.site.setup.split_many", self.split),
            mock.patch("tightframe.securesum.site.pair_secret", self.pair_secret),
        ):
            yield


class Colluder:
    """A silo that shows the server everything, signs what it likes, and may deal falsely."""

    def __init__(self, name: str, names: Sequence[str], deals: Deals | None = None) -> None:
        self.name, self._names, self.deals = name, names, deals or Deals()
        self._state: Any = None

    def advertise(self, params: Params, application: bytes = DECLARED.to_bytes()) -> bytes:
        job = job_of(self._names)
        step = site.advertise(
            params,
            rules=SiteRules(),
            expected=Expected(
                name=self.name,
                job=params.job,
                lineage=JOB,
                sites=frozenset(self._names),
                colluders=params.colluders,
                trust=job.server_trust,
                threshold=params.threshold,
                min_sites=params.min_sites,
                weights=job.weights,
                config_sha256=params.config_sha256,
                version=__version__,
            ),
            signer=identity(self.name)[0],
            history=journal.History(),
            dataset="small",
            application=application,
        )
        self._state = step.state
        return step.reply.to_bytes()

    def confirm(self, shown: Advertisements, verifier: Any) -> bytes:
        names = self._state.epoch.params.roster
        items = [Advertisement.from_bytes(item, slots=SLOTS) for item in shown.items]
        keys = {
            item.encapsulation_key
            for item, name in zip(items, names, strict=True)
            if name in self.deals.boxes
        }

        def encapsulate(key: bytes) -> tuple[bytes, bytes]:
            secret, ciphertext = kem_encapsulate(key)
            return bytes(32) if key in keys else secret, ciphertext

        with self.deals.dealing():
            step = site.confirm(self._state, shown, verifier=verifier, encapsulate=encapsulate)
        self._state = step.state
        return step.reply.to_bytes()

    def copy(self) -> Colluder:
        """The same silo in another run."""
        other = Colluder(self.name, self._names, self.deals)
        other._state = self._state
        return other

    def establish(self, setup: bytes) -> Established:
        """Its state with every slot unused; it stays so."""
        if isinstance(self._state, Confirmed):
            self._state = establish(self._state, setup)
        made: Established = self._state
        return made

    def mask(
        self, slot: int, sum_id: SumId, schema: str, term: Mapping[Group, bytes], **receipt: Any
    ) -> tuple[Masked, KeptTerm]:
        """Mask a term; ``receipt`` holds what its receipt says."""
        state: Established = self._state
        with self.deals.dealing():
            step = site.mask(
                state,
                TermRequest(slot, sum_id, schema),
                fields=state.epoch.params.schemas[schema],
                basis=bytes(32),
                follows=True,
                term=term,
                history=journal.History(),
                kept=lambda name: None,
            )
        signed = self.sign(step.reply.receipt, **receipt)
        kept = step.kept[term_name(slot)]
        assert kept is not None
        masked = Masked(step.reply.update, step.reply.static, signed, step.reply.links)
        return masked, KeptTerm.from_bytes(kept)

    def sign(self, receipt: Any, **changes: Any) -> Any:
        """A receipt with something else in it."""
        state: Established = self._state
        changed = replace(receipt, **changes)
        return replace(changed, signature=ed25519_sign(state.signing, changed.signed(state.session)))

    def combine(
        self, ground: Ground, kept: KeptTerm, challenge: bytes, added: Mapping[Group, bytes]
    ) -> dict[Group, bytes]:
        """Its combinations of a total, as if its term had been ``added`` more."""
        told: Told = ground.told
        rest = kept.revealed(self._state, told.schema, told.survivors, told.groups).integers
        terms = {}
        for group in told.groups:
            vector = Accumulator(ground.layout(group), rest[group])
            vector.add(added.get(group, bytes(ground.layout(group).nbytes)))
            terms[group] = vector.to_bytes()
        return ground.combine(challenge, terms)

    @property
    def signing(self) -> Secret:
        """Its key of this epoch."""
        key: Secret = self._state.signing
        return key


__all__ = [
    "ENDLESS",
    "JOB",
    "NEEDS_STATE",
    "SCHEMA",
    "SECURE",
    "SLOTS",
    "Colluder",
    "CrashError",
    "Deals",
    "Line",
    "SmallSilo",
    "next_state",
    "own_after",
    "params_of",
    "setup_of",
    "specs",
    "state_sha256",
    "term_of",
]
