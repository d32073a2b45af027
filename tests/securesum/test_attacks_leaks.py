"""Leaks: nothing that can be printed shows a secret, and nothing that is sent looks like data."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_der_private_key
from tests.support.securesum.hostile import custom, names, own_secrets, verifier
from tests.support.securesum.protocol import FixedSigner, World
from tests.support.securesum.replay import load, play

from tightframe.securesum import masks
from tightframe.securesum.errors import ProtocolError
from tightframe.securesum.identity import Anchor
from tightframe.securesum.masks import Accumulator
from tightframe.securesum.messages import (
    GROUPS,
    KINDS,
    SALT_BYTES,
    Agreement,
    AgreementRequest,
    FieldSpec,
    Masked,
    Params,
    Reveal,
    RevealRequest,
    SumId,
    TermRequest,
)
from tightframe.securesum.primitives import Secret, derive
from tightframe.securesum.server import Enrolment
from tightframe.securesum.site.state import slot_share

RUN, REFUSED = load("run"), load("refused")
PIECE = 8
"""Bytes of a secret that must not be seen anywhere; by chance they are not in a megabyte of text."""


class Collected:
    """Everything of a run that could be printed, and every secret in it."""

    def __init__(self) -> None:
        self.shown: set[str] = set()
        self.secrets: set[bytes] = set()

    def show(self, *values: object) -> None:
        for value in values:
            self.shown |= {repr(value), str(value), f"{value}", ascii(value)}

    def keep(self, value: Any) -> None:
        """All that is secret in an object, to any depth."""
        if isinstance(value, Secret):
            data = value.expose()
            self.secrets |= {data[at : at + 16] for at in range(0, len(data) - 15, 16)}
        elif dataclasses.is_dataclass(value):
            for item in dataclasses.fields(value):
                self.keep(getattr(value, item.name))
        elif isinstance(value, tuple | list):
            for item in value:
                self.keep(item)

    def leaks(self) -> Iterator[str]:
        """Secrets of which a piece stands in what was shown, in any usual writing."""
        text = "\n".join(self.shown)
        for secret in self.secrets:
            piece = secret[:PIECE]
            for written in (
                piece.hex(),
                repr(piece)[2:-1],
                str(list(piece))[1:-1],
                base64.b64encode(secret[:9]).decode()[:11],
                str(int.from_bytes(piece, "little")),
                str(int.from_bytes(piece, "big")),
            ):
                if written in text:
                    yield written


def test_the_search_finds_a_secret_in_every_writing() -> None:
    secret = bytes(range(101, 117))
    for shown in (
        secret.hex(),
        repr({"x": secret}),
        str(list(secret)),
        base64.b64encode(secret).decode(),
        str(int.from_bytes(secret[:8], "little")),
    ):
        found = Collected()
        found.keep((Secret(secret),))
        found.shown.add(shown)
        assert list(found.leaks()), shown


@pytest.mark.whole
def test_no_state_message_or_error_of_a_run_shows_a_secret() -> None:
    """Every state after every step, every message, and every refusal of the vectors with its traceback."""
    found = Collected()
    terms: list[bytes] = []
    stops = sorted({item["after"] for item in REFUSED["messages"]} | {len(RUN["messages"])})
    for after in stops:
        player, _ = play(RUN, after)
        for name, site in player.sites.items():
            found.keep(site.state)
            found.show(site.state, site.entries, site.history, *site.entries)
            terms += [data for slot in (0, 1) for data in player.given(name, slot).values()]
        found.show(player.enrolment, player.total, getattr(player, "session", None), player.shown)
        found.show(*(item._totals["update"] for item in player.sums))
        for item in REFUSED["messages"]:
            if item["after"] == after:
                found.shown |= set(refusal(player, item))
    player, _ = play(RUN)
    found.show(*player.opened)
    for item in RUN["messages"]:
        read = parsed(item)
        found.show(read)
        if isinstance(read, Reveal):
            found.keep([Secret(share) for share in read.update.values()])
    found.secrets |= {data[:16] for data in terms}
    assert len(found.secrets) > 500
    assert len("".join(found.shown)) > 100_000
    assert list(found.leaks()) == []


def refusal(player: Any, item: Any) -> list[str]:
    """All that a log could hold of a refusal."""
    with pytest.raises(ProtocolError) as caught:
        player.deliver(item["task"], item["from"], item["to"], bytes.fromhex(item["bytes"]))
    error = caught.value
    chain = [error, error.__cause__, error.__context__]
    return [
        str(error),
        repr(error),
        str(error.args),
        repr(vars(error)),
        *(repr(part) for part in chain),
        "".join(traceback.format_exception(error)),
    ]


def parsed(item: Any) -> Any:
    kinds = {
        ("enroll", True): Params,
        ("contribute", True): TermRequest,
        ("contribute", False): Masked,
        ("agree", True): AgreementRequest,
        ("agree", False): Agreement,
        ("reveal", True): RevealRequest,
        ("reveal", False): Reveal,
    }
    kind: Any = kinds.get((item["task"], item["from"] == "server"))
    return kind.from_bytes(bytes.fromhex(item["bytes"])) if kind else None


def test_no_secret_leaves_a_site_but_the_shares_that_it_reveals() -> None:
    """Of all bytes on the wire: no key, seed, term or share in clear, but in reveals, as it should be.

    With the first sum's total the sites see b of its terms, to which they have no masked bytes. The fourth
    site drops out of the second sum. Its term in the first one's total is shown to the others: its masked
    bytes, and b of a sum that is open, by which they see no more than the server does.
    """
    sent: dict[str, list[bytes]] = {}

    def keep(stage: str, site: str, raw: bytes) -> bytes:
        sent.setdefault(stage, []).append(raw)
        return raw

    world = World(4, tamper=keep)
    shown = world.enroll()
    secrets = [secret for slot in range(3) for secret in own_secrets(world, slot).values()]
    first = own_secrets(world, 0)
    opened = {first[name, group, "self"] for name in names(4) for group in GROUPS}
    seeds_of_fourth = {first[names(4)[3], group, "self"] for group in GROUPS}
    for site in world.sites.values():
        secrets += [site.state.channel.expose(), site.state.signing.expose()]
        secrets += [site.state.decapsulation.expose()[:32], site.state.decapsulation.expose()[32:]]
    world.confirm(shown)
    boxes = [site.state.own_box.expose() for site in world.sites.values()]
    world.run(0)
    shares = [
        slot_share(world.sites[holder].state.slots[slot].shares, place, group, kind)[SALT_BYTES:]
        for slot in (1, 2)
        for holder in names(4)
        for place in range(4)
        for group in GROUPS
        for kind in KINDS
    ]
    for slot in (1, 2):
        for site in world.sites.values():
            pairs = site.state.slots[slot].pair_secrets.expose()
            secrets += [pairs[at : at + 32] for at in range(0, len(pairs), 32)]
    world.run(1, drop_term=[names(4)[3]])
    terms = [data[:8] for name in names(4) for data in world.term(name).values()]
    wire = {stage: b"\x00".join(parts) for stage, parts in sent.items()}
    assert len(wire) == 10
    assert len(shares) == 2 * 4 * 4 * 4
    for stage, data in wire.items():
        shown = {secret for secret in secrets if secret[:16] in data}
        assert shown == {"reveal_request": seeds_of_fourth, "request": opened}.get(stage, set()), stage
        assert not any(term in data for term in terms), stage
        if stage != "reveal":
            assert not any(box[at : at + 16] in data for box in boxes for at in range(0, len(box) - 15, 16))
    revealed = [share for share in shares if share in wire["reveal"]]
    # Slot 1: three sites, one group, one kind of share of each of four dealers; slot 2: none.
    assert len(revealed) == 3 * 4
    assert not any(share in wire["reveal"] for share in shares[len(shares) // 2 :])


# Masked terms look uniform -----------------------------------------------------------------------

WIDE = (
    FieldSpec("weight", (3001,), 32, 8, 1.0, "update"),
    FieldSpec("mean", (2000,), 64, 24, 1e3, "update"),
    FieldSpec("bias", (999,), 32, 8, 1.0, "update"),
    FieldSpec("counts", (3000,), 64, 0, 1e6, "static"),
    FieldSpec("flags", (6000,), 32, 0, 1.0, "static"),
)


def uploads(seed: int, slots: int = 1) -> list[Masked]:
    """What the first of three sites sends of zeros: whatever is seen comes from the masks.

    Certificates are the vectors', so that the masks are the same whenever this is run.
    """
    world = custom(("clinic", "clinic-2", "z"), seed=seed, schemas={"train": WIDE}, slots=2)
    checked = verifier(anchor=Anchor(bytes.fromhex(RUN["root"])))
    for name, site in world.sites.items():
        given = RUN["sites"][name]
        key = load_der_private_key(bytes.fromhex(given["private_key"]), None)
        site.signer, site.verifier = FixedSigner(key, bytes.fromhex(given["certificate"])), checked
    world.enrolment = Enrolment(world.params, verifier=checked)
    world.set_up()
    zeros = {
        group: bytes(sum(item.size * item.ring // 8 for item in WIDE if item.group == group))
        for group in GROUPS
    }
    found = []
    for slot in range(slots):
        total = world.start(slot, sum_id=SumId(slot, "x"))
        name = world.params.roster[0]
        found.append(Masked.from_bytes(world.sites[name].mask(world.request(name, total), WIDE, zeros)))
    return found


def chi_square(data: bytes) -> float:
    """The chance that uniform bytes deviate as much as these (Wilson and Hilferty's approximation)."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    statistic = float(((counts - len(data) / 256) ** 2).sum() / (len(data) / 256))
    spread = 2 / (9 * 255)
    return 0.5 * math.erfc(((statistic / 255) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))


@pytest.mark.parametrize("seed", range(3))
def test_masked_terms_of_zeros_look_uniform(seed: int) -> None:
    item = uploads(seed)[0]
    for data in (item.update, item.static):
        assert 1e-4 < chi_square(data) < 1 - 1e-4
        for part in range(8):  # and byte by byte of the elements, and as pairs of neighbours
            assert chi_square(data[part::8]) > 1e-4
        assert chi_square(bytes(a ^ b for a, b in itertools.pairwise(data))) > 1e-4
    assert chi_square(bytes(48_000)) < 1e-4
    assert chi_square(b"masked term " * 4000) < 1e-4


def test_two_slots_of_one_vector_differ_in_every_block() -> None:
    one, two = uploads(0, slots=2)
    for group in GROUPS:
        first, second = getattr(one, group), getattr(two, group)
        blocks = range(0, len(first) - 15, 16)
        assert len(blocks) > 1000
        assert not any(first[at : at + 16] == second[at : at + 16] for at in blocks)
        seen = {data[at : at + 16] for data in (first, second) for at in blocks}
        assert len(seen) == 2 * len(blocks)


def test_mixed_rings_and_groups_share_no_keystream() -> None:
    """A stream started anew for a ring or a group would show itself: masks of zeros would repeat."""
    item = uploads(1)[0]
    joined = item.update + item.static
    blocks = {joined[at : at + 8] for at in range(0, len(joined) - 7, 4)}
    assert len(blocks) == len(range(0, len(joined) - 7, 4))
    # The two runs of 32-bit fields, before and behind the 64-bit one.
    first, last = item.update[: 4 * 999], item.update[-4 * 999 :]
    same = sum(a == b for a, b in zip(first, last, strict=True))
    assert same < 3996 / 256 * 3


def test_a_stream_that_is_started_anew_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with one stream for each run, the same blocks come back."""
    plain = Accumulator.add_streams

    def anew(self: Accumulator, plus: Any, minus: Any) -> None:
        runs = self._runs
        for run in runs:
            self._runs = [run]
            plain(self, plus, minus)
        self._runs = runs

    monkeypatch.setattr(masks.Accumulator, "add_streams", anew)
    with pytest.raises(AssertionError):
        test_mixed_rings_and_groups_share_no_keystream()


def test_every_key_of_an_epoch_is_its_own() -> None:
    """Site, slot, group, pair, purpose, session: each of them alone makes another key."""
    keys = set()
    secret, sessions = bytes(32), (bytes(32), bytes(31) + b"\x01")
    for session in sessions:
        for slot in (0, 1, 255):
            for group in GROUPS:
                for first, second in (("a", "b"), ("a", "ab"), ("aa", "b"), ("a", "c")):
                    keys.add(masks.pair_key(secret, session, slot, group, first, second))
                for name in ("a", "b", "ab"):
                    keys.add(masks.self_key(secret, session, slot, group, name))
        keys.add(derive(secret, salt=session, tag="box", fields=("a", "b")))
    assert len(keys) == 2 * (3 * 2 * (4 + 3) + 1)
    assert all(len(key) == 32 for key in keys)
