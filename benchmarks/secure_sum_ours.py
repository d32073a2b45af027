"""Runs of the secure sum's own state machines, in one thread, with the CPU time of every part.

Messages travel as bytes, as between processes; the times include all work of a site or the server on
them: parsing, checks, computation, signatures, serialisation, the server's spool. They do not include
transport, the journal's fsync, and the generation of the vectors. Each sum but the first rests on the total
of the one before, which the sites verify. Used by ``secure_sum.py``.
"""

from __future__ import annotations

import hashlib
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from tightframe.rounds.sums.secure_server import FileSpool
from tightframe.rounds.sums.simulated_identity import simulated_identity
from tightframe.securesum import rules
from tightframe.securesum.encoding import decode, encode, fraction_bits
from tightframe.securesum.identity import Verifier
from tightframe.securesum.masks import Accumulator
from tightframe.securesum.messages import (
    Advertisements,
    AgreementRequest,
    FieldSpec,
    Params,
    RevealRequest,
    SumId,
    TermRequest,
)
from tightframe.securesum.proofs import Ground
from tightframe.securesum.rules import Expected, SiteRules
from tightframe.securesum.server import Enrolment, Evidence, Session, Sum
from tightframe.securesum.site import Confirmed, Step, advertise, agree, confirm, mask, reveal
from tightframe.securesum.site.journal import History
from tightframe.securesum.site.setup import establish

SLOTS = 16
AES_BLOCK = 256 * 1024
"""Bytes per call in ``aes_rate``; larger calls are not faster."""
BOUND = 8.0
"""Bound of a coordinate: Flower's default clip."""

_JOB, _VERSION, _SCHEMA = "benchmark", "0", "train"
_CONFIG, _BASIS = hashlib.sha256(b"configuration").digest(), hashlib.sha256(b"state").digest()

T = TypeVar("T")


def vector(seed: int, site: int, size: int) -> np.ndarray:
    """Return a site's vector, the same as in ``peers/flower/run.py``."""
    return np.random.default_rng((seed, site)).standard_normal(size, np.float32) / 4


def aes_rate(mebibytes: int = 16) -> float:
    """Return the bytes per second of AES-256-CTR by one encryptor, 256 KiB at a time into one buffer."""
    encryptor = Cipher(AES256(os.urandom(32)), CTR(bytes(16))).encryptor()
    zeros, buffer = bytes(AES_BLOCK), bytearray(AES_BLOCK)
    encryptor.update_into(zeros, buffer)
    blocks = mebibytes * 2**20 // AES_BLOCK
    start = time.process_time()
    for _ in range(blocks):
        encryptor.update_into(zeros, buffer)
    return blocks * AES_BLOCK / (time.process_time() - start)


def sha256_rate(mebibytes: int = 4) -> float:
    """Return the bytes per second of SHA-256; its site and the server each hash every upload once."""
    data = bytes(mebibytes * 2**20)
    start = time.process_time()
    hashlib.sha256(data).digest()
    return len(data) / (time.process_time() - start)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of ``work``, and its CPU time in ms."""
    start = time.process_time()
    result = work()
    return result, 1000 * (time.process_time() - start)


class Keystream:
    """Time and bytes of all masking since ``clear``.

    Attributes:
        skipped: masking is left out.
        apart: masks are made and added to zeros, not to the term or total. Where all parties do so or leave
            masking out, totals are right, and the others of many sites need no time.
    """

    def __init__(self) -> None:
        self.milliseconds, self.bytes, self.skipped, self.apart = 0.0, 0, False, False

    def clear(self) -> None:
        """Reset the counts."""
        self.milliseconds, self.bytes = 0.0, 0

    @contextmanager
    def watch(self) -> Iterator[Keystream]:
        """Measure the accumulators' mask streams inside the real handlers."""
        original = Accumulator.add_streams

        def add_streams(total: Accumulator, plus: list[bytes], minus: list[bytes]) -> None:
            if not self.skipped:
                target = Accumulator(total.layout) if self.apart else total
                _, taken = timed(lambda: original(target, plus, minus))
                self.milliseconds += taken
                self.bytes += total.layout.nbytes * (len(plus) + len(minus))

        Accumulator.add_streams = add_streams  # type: ignore[method-assign,assignment]
        try:
            yield self
        finally:
            Accumulator.add_streams = original  # type: ignore[method-assign]


class Checks:
    """CPU time of combining totals and terms and of comparing them, at all sites and the server."""

    def __init__(self) -> None:
        self.milliseconds = 0.0

    @contextmanager
    def watch(self) -> Iterator[Checks]:
        """Measure the checks of totals inside the real handlers."""
        originals = {name: getattr(Ground, name) for name in ("combine_all", "check_sum")}

        def watched(original: Callable[..., Any]) -> Callable[..., Any]:
            def check(*arguments: Any) -> Any:
                result, taken = timed(lambda: original(*arguments))
                self.milliseconds += taken
                return result

            return check

        for name, original in originals.items():
            setattr(Ground, name, watched(original))
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(Ground, name, original)


class PeakMemory:
    """Peak of what one party allocates in its steps, with what earlier steps left, in bytes.

    Messages count while a step makes or reads them, but not between steps, where they are the transport's.
    Python's and numpy's allocations are counted, as ``tracemalloc`` sees them.
    """

    def __init__(self) -> None:
        self.bytes, self.kept = 0, 0

    def call(self, work: Callable[[], T]) -> T:
        """Run one step."""
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = work()
        after, peak = tracemalloc.get_traced_memory()
        self.bytes = max(self.bytes, self.kept + peak - before)
        self.kept += after - before - (len(result) if isinstance(result, bytes) else 0)
        return result


@dataclass
class Site:
    """A site and its state."""

    name: str
    number: int
    signer: Any
    state: Any = None
    history: History = field(default_factory=History)
    kept: dict[str, bytes] = field(default_factory=dict)

    def take(self, step: Step[Any, Any]) -> bytes:
        """Apply a step, and return its reply as bytes."""
        for entry in step.entries:
            self.history.append(entry)
        self.state = step.state
        self.kept |= {name: data for name, data in step.kept.items() if data is not None}
        for name in [name for name, data in step.kept.items() if data is None]:
            self.kept.pop(name, None)
        return step.reply.to_bytes()


@dataclass(frozen=True)
class SetUp:
    """Milliseconds and bytes of one epoch's setup; a site's are medians over the sites."""

    sites: int
    slots: int
    site_ms: float
    server_ms: float
    up_bytes: int
    down_bytes: int
    parts_ms: dict[str, float]


@dataclass
class Round:
    """One sum. Lists hold one value for each site that was timed.

    ``mask_ms`` is without the combinations of the total told, which ``reveal_ms`` has.
    """

    drops: int
    encode_ms: list[float] = field(default_factory=list)
    mask_ms: list[float] = field(default_factory=list)
    keystream_ms: list[float] = field(default_factory=list)
    keystream_share: list[float] = field(default_factory=list)
    mask_share: list[float] = field(default_factory=list)
    reveal_ms: list[float] = field(default_factory=list)
    ask_ms: float = 0.0
    receive_ms: float = 0.0
    checks_ms: float = 0.0
    answers_ms: float = 0.0
    open_ms: float = 0.0
    open_keystream_ms: float = 0.0
    open_share: float = 0.0
    open_keystream_share: float = 0.0
    decode_ms: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0
    error: float | None = None
    exchanges: int = 2

    @property
    def server_ms(self) -> float:
        """CPU time of all the server's work."""
        return self.ask_ms + self.receive_ms + self.answers_ms + self.open_ms + self.decode_ms


class Federation:
    """n sites and a server, set up for sums of vectors of ``size`` coordinates.

    Args:
        sites: n.
        size: m.
        light: number of sites that make masks; the others send the last of these sites' term without. 0: all
            sites mask.
        seed: of the vectors.
    """

    def __init__(self, sites: int, size: int, *, light: int = 0, seed: int = 0) -> None:
        self.size, self.light, self.seed = size, light, seed
        self.bits = fraction_bits(32, BOUND, sites)
        self.fields = (FieldSpec("model", (size,), 32, self.bits, BOUND, "update"),)
        names = tuple(f"site-{number:03}" for number in range(1, sites + 1))
        colluders = rules.default_colluders(sites)
        self.params = Params(
            job=_JOB,
            lineage=_JOB,
            epoch=0,
            roster=names,
            threshold=rules.threshold(sites, colluders),
            colluders=colluders,
            slots=SLOTS,
            schemas={_SCHEMA: self.fields},
            weights="uniform",
            trust="malicious",
            min_sites=3,
            static_open=True,
            config_sha256=_CONFIG,
            version=_VERSION,
        )
        self.sites, self.slot = [], 0
        self.spool = FileSpool()
        self.evidence: Evidence | None = None
        for number, name in enumerate(names):
            signer, self._anchor = simulated_identity(_JOB, name, production=False)
            self.sites.append(Site(name, number, signer))
        self.session: Session

    def set_up(self) -> SetUp:
        """Run both exchanges of the setup, and the checks before the first term."""
        verifier = Verifier(anchor=self._anchor, pins={}, pinned_only=False, at=datetime.now(UTC))
        names, parts, server = self.params.roster, {}, {}
        expected = {
            name: Expected(
                name=name,
                job=_JOB,
                lineage=_JOB,
                sites=frozenset(names),
                colluders=self.params.colluders,
                trust=self.params.trust,
                threshold=self.params.threshold,
                min_sites=self.params.min_sites,
                weights="uniform",
                config_sha256=_CONFIG,
                version=_VERSION,
            )
            for name in names
        }
        proposed = self.params.to_bytes()

        def enroll(site: Site) -> bytes:
            return site.take(
                advertise(
                    Params.from_bytes(proposed),
                    rules=SiteRules(),
                    expected=expected[site.name],
                    signer=site.signer,
                    history=site.history,
                    dataset="data",
                    application=b"",
                )
            )

        up, parts["advertise"] = self._each(enroll)
        enrolment, server["enrolment"] = timed(lambda: Enrolment(self.params, verifier=verifier))
        for site in self.sites:
            server["enrolment"] += timed(lambda: enrolment.add(site.name, up[site.number]))[1]  # noqa: B023
        shown, server["relay"] = timed(lambda: enrolment.relay().to_bytes())

        def confirmed(site: Site) -> bytes:
            return site.take(confirm(site.state, Advertisements.from_bytes(shown), verifier=verifier))

        dealt, parts["confirm"] = self._each(confirmed)
        advertised = Advertisements.from_bytes(shown)
        self.session, server["session"] = timed(lambda: Session(self.params, advertised))
        for site in self.sites:
            server["session"] += timed(lambda: self.session.add(site.name, dealt[site.number]))[1]  # noqa: B023
        setups, server["setups"] = timed(lambda: [self.session.setup_for(name).to_bytes() for name in names])
        states, parts["establish"] = self._each(lambda site: establish(site.state, setups[site.number]))
        for site, state in zip(self.sites, states, strict=True):
            assert isinstance(site.state, Confirmed)
            site.state = state
        medians = {name: float(np.median(values)) for name, values in parts.items()}
        return SetUp(
            sites=len(names),
            slots=SLOTS,
            site_ms=sum(medians.values()),
            server_ms=sum(server.values()),
            up_bytes=len(up[0]) + len(dealt[0]),
            down_bytes=len(proposed) + len(shown) + len(setups[0]),
            parts_ms=medians | {f"server {name}": value for name, value in server.items()},
        )

    def run(self, drops: int, keystream: Keystream) -> Round:
        """Run one sum in which the last ``drops`` sites do not answer the request for a term."""
        result, sites = Round(drops), self.sites[: len(self.sites) - drops]
        total, result.receive_ms = timed(self._start)
        request, result.ask_ms = timed(lambda: total.term_request().to_bytes())
        plain, mean = np.zeros(self.size, np.uint32), np.zeros(self.size)
        term, values = b"", np.zeros(self.size, np.float32)
        keystream.apart = bool(self.light)
        combined, checks = [0.0] * len(sites), Checks()
        for place, site in enumerate(sites):
            keystream.skipped = bool(self.light) and site.number >= self.light
            if not keystream.skipped:
                values = vector(self.seed, site.number + 1, self.size)
                term, taken = timed(lambda: self._encoded(values))  # noqa: B023
                result.encode_ms.append(taken)
                rate = aes_rate()
                keystream.clear()
            earlier = checks.milliseconds
            with checks.watch():
                raw, taken = timed(lambda: self._mask(site, request, term))  # noqa: B023
            combined[place] = checks.milliseconds - earlier
            taken -= combined[place]
            if not keystream.skipped:
                result.mask_ms.append(taken)
                result.keystream_ms.append(keystream.milliseconds)
                least = 1000 * keystream.bytes / rate
                result.mask_share.append(least / taken)
                result.keystream_share.append(least / keystream.milliseconds)
            plain += np.frombuffer(term, "<u4")
            mean += values
            result.up_bytes = len(raw)
            result.receive_ms += timed(lambda: total.add(site.name, raw))[1]  # noqa: B023
        keystream.skipped = False
        result.down_bytes = len(request)
        _, result.answers_ms = timed(total.close)
        self._answers(total, sites, result, combined, checks)
        rate = aes_rate()
        keystream.clear()
        opened, result.open_ms = timed(total.open)
        rate = (rate + aes_rate()) / 2
        result.open_keystream_ms = keystream.milliseconds
        least = 1000 * keystream.bytes / rate
        result.open_share, result.open_keystream_share = (
            least / result.open_ms,
            least / keystream.milliseconds,
        )
        sums = opened.groups["update"]
        decoded, result.decode_ms = timed(
            lambda: decode(np.frombuffer(sums, np.uint32), ring=32, bits=self.bits) / len(sites)
        )
        assert sums == plain.astype("<u4").tobytes(), "the opened sum is not the plaintext sum"
        result.error = float(np.abs(decoded - mean / len(sites)).max())
        self._next(opened.evidence)
        return result

    def weigh(self) -> dict[str, float]:
        """Return peaks of memory in vectors of m numbers, in the second of two sums without drop-outs.

        ``masking``: at a site, of ``mask`` alone, beyond its term, its request and what it keeps of the sum
        before. ``site`` and ``server``: of all steps, with what they keep. Masks are left out everywhere, so
        that the sums are right, since they change no size.
        """
        term, keystream = self._encoded(vector(self.seed, 1, self.size)), Keystream()
        keystream.skipped = True
        tracemalloc.start()
        try:
            with keystream.watch():
                one, server, masking = PeakMemory(), PeakMemory(), PeakMemory()
                for _ in range(2):
                    masking = self._weigh(term, one, server)
        finally:
            tracemalloc.stop()
        peaks = {"masking": masking, "site": one, "server": server}
        return {name: peak.bytes / (4 * self.size) for name, peak in peaks.items()}

    def _weigh(self, term: bytes, one: PeakMemory, server: PeakMemory) -> PeakMemory:
        """Run a sum, and weigh the steps of the first site and of the server; return the masking's peak."""
        masking, first = PeakMemory(), self.sites[0]
        sums = [server.call(self._start)]
        request = server.call(lambda: sums[0].term_request().to_bytes())
        for site in self.sites:
            call = one.call if site is first else _call
            if site is first:
                parsed = TermRequest.from_bytes(request)
                masking.call(lambda: self._masked(first, parsed, term))  # noqa: B023
                del parsed
            raw = call(lambda: self._mask(site, request, term))  # noqa: B023
            server.call(lambda: sums[0].add(site.name, raw))  # noqa: B023
        sums[0].close()
        shown = server.call(lambda: sums[0].reveal_request().to_bytes())
        for site in self.sites:
            call = one.call if site is first else _call
            raw = call(lambda: self._reveal(site, shown))  # noqa: B023
            server.call(lambda: sums[0].add_reveal(site.name, raw))  # noqa: B023
        server.call(lambda: self._next(sums.pop().open().evidence))
        return masking

    def _each(self, work: Callable[[Site], T]) -> tuple[list[T], list[float]]:
        pairs = [timed(lambda: work(site)) for site in self.sites]  # noqa: B023
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def _start(self) -> Sum:
        return Sum(
            self.session,
            slot=self.slot,
            sum_id=SumId(self.slot, "train-0"),
            schema=_SCHEMA,
            basis=_BASIS,
            spool=self.spool,
            rests_on=self.evidence,
        )

    def _next(self, evidence: Evidence) -> None:
        """Go to the next sum, which rests on the total that was opened."""
        if self.evidence is not None:
            self.spool.erase(self.evidence.total.slot)
        self.evidence = evidence
        self.slot += 1

    def _encoded(self, values: np.ndarray) -> bytes:
        wide = values.astype(np.float64)
        return encode(wide, ring=32, bits=self.bits, bound=BOUND, name="model").astype("<u4").tobytes()

    def _masked(self, site: Site, request: TermRequest, term: bytes) -> Step[Any, Any]:
        return mask(
            site.state,
            request,
            fields=self.fields,
            basis=_BASIS,
            follows=True,
            term={"update": term},
            history=site.history,
            kept=site.kept.get,
        )

    def _mask(self, site: Site, request: bytes, term: bytes) -> bytes:
        return site.take(self._masked(site, TermRequest.from_bytes(request), term))

    def _agreement(self, site: Site, request: bytes) -> bytes:
        asked = AgreementRequest.from_bytes(request)
        return site.take(agree(site.state, asked, history=site.history))

    def _reveal(self, site: Site, request: bytes) -> bytes:
        asked = RevealRequest.from_bytes(request)
        return site.take(reveal(site.state, asked, history=site.history, kept=site.kept.get))

    def _answers(
        self, total: Sum, sites: list[Site], result: Round, combined: list[float], checks: Checks
    ) -> None:
        """Run the exchanges after the terms: agreement after a drop-out, and reveal.

        Args:
            total: the sum.
            sites: its survivors.
            result: of the sum.
            combined: what each site took to combine the total told and its term of it.
            checks: of the sum.
        """
        answered = list(combined)
        with checks.watch():
            if not total.full:
                result.exchanges = 3
                request, taken = timed(lambda: total.agreement_request().to_bytes())
                result.answers_ms += taken
                for place, site in enumerate(sites):
                    raw, taken = timed(lambda: self._agreement(site, request))  # noqa: B023
                    answered[place] += taken
                    result.answers_ms += timed(lambda: total.add_agreement(site.name, raw))[1]  # noqa: B023
                result.up_bytes += len(raw)
                result.down_bytes += len(request)
            shown, taken = timed(lambda: total.reveal_request().to_bytes())
            result.answers_ms += taken
            for place, site in enumerate(sites):
                raw, taken = timed(lambda: self._reveal(site, shown))  # noqa: B023
                result.reveal_ms.append(taken + answered[place])
                result.answers_ms += timed(lambda: total.add_reveal(site.name, raw))[1]  # noqa: B023
            result.up_bytes += len(raw)
            result.down_bytes += len(shown)
        result.checks_ms = checks.milliseconds


def _call(work: Callable[[], T]) -> T:
    return work()
