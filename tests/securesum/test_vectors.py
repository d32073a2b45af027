"""Known answers: recorded once by ``make_vectors``, and from then on only held against what is made.

A second implementation (``independent``), which shares no line with the package, makes the same run
from the same inputs; so the vectors are what the specification says and not only what our code does.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from tests.support.securesum import independent
from tests.support.securesum.certificates import AT
from tests.support.securesum.protocol import add_integers
from tests.support.securesum.replay import load, order, params_of, play

from tightframe.securesum import encoding, errors, masks, messages, primitives, shamir
from tightframe.securesum.checks import box_key, commitment, pair_secret
from tightframe.securesum.errors import ProtocolError
from tightframe.securesum.identity import Anchor, verify_certificate
from tightframe.securesum.proofs import combinations

RUN, REFUSED, PRIMITIVES = load("run"), load("refused"), load("primitives")
CLASSES = {
    "Params": messages.Params,
    "Advertisements": messages.Advertisements,
    "TermRequest": messages.TermRequest,
    "Masked": messages.Masked,
    "AgreementRequest": messages.AgreementRequest,
    "Agreement": messages.Agreement,
    "RevealRequest": messages.RevealRequest,
    "Reveal": messages.Reveal,
}


def raw(number: int) -> bytes:
    return bytes.fromhex(RUN["messages"][number]["bytes"])


def numbers(task: str, sender: str | None = None) -> list[int]:
    """The numbers of a task's messages, from the server or else from the sites."""
    return [
        number
        for number, item in enumerate(RUN["messages"])
        if item["task"] == task and (item["from"] == "server") == (sender == "server")
    ]


# The run -----------------------------------------------------------------------------------------


def test_an_independent_implementation_makes_every_byte_of_the_run() -> None:
    made = independent.Run(RUN)
    found = [
        {"task": task, "from": sender, "to": receiver, "bytes": data.hex()}
        for task, sender, receiver, data in made.messages()
    ]
    assert len(found) == 16 + 14 + 18 + 18 + 16
    assert found == RUN["messages"]
    assert made.values() == RUN["values"]


@pytest.mark.parametrize("stored", [False, True])
def test_our_machines_make_every_byte_of_the_run(stored: bool) -> None:
    player, seen = play(RUN, stored=stored)
    assert seen == RUN["messages"]
    totals = [
        {group: data.hex() for group, data in opened.evidence.total.groups.items()}
        for opened in player.opened
    ]
    assert totals == RUN["totals"]
    assert [total.proved for total in player.sums] == [(), ("clinic-2", "z"), ("z",), ()]
    assert not any(site.random.data for site in player.sites.values())  # type: ignore[attr-defined]


def test_the_totals_are_the_sums_of_the_terms_in_pythons_integers() -> None:
    assert RUN["totals"][3] == {"update": ""}, "a seal has no fields"
    fields = params_of(RUN["params"]).schemas["train"]
    for item, total in zip(RUN["sums"][:3], RUN["totals"][:3], strict=True):
        here = [name for name in RUN["params"]["roster"] if name not in item["missing"]]
        terms: Any = [
            {
                group: bytes.fromhex(data)
                for group, data in RUN["sites"][name]["terms"][str(item["slot"])].items()
            }
            for name in here
        ]
        assert set(total) == ({"update"} if item["missing"] else {"update", "static"})
        for group, data in total.items():
            assert add_integers(fields, group, terms).hex() == data


def test_every_message_of_the_run_is_read_and_written_back() -> None:
    kinds: set[str] = set()
    for number, item in enumerate(RUN["messages"]):
        down, task = item["from"] == "server", item["task"]
        read: Any
        if task == "enroll":
            read = (
                messages.Params.from_bytes(raw(number))
                if down
                else messages.Advertisement.from_bytes(raw(number), slots=4)
            )
        elif task == "confirm":
            read = (
                messages.Advertisements.from_bytes(raw(number))
                if down
                else messages.Confirmation.from_bytes(raw(number), slots=4)
            )
        else:
            down_kinds = {"contribute": "TermRequest", "agree": "AgreementRequest", "reveal": "RevealRequest"}
            up_kinds = {"contribute": "Masked", "agree": "Agreement", "reveal": "Reveal"}
            read = CLASSES[(down_kinds if down else up_kinds)[task]].from_bytes(raw(number))
            if told := getattr(read, "total", b""):
                assert messages.Total.from_bytes(told).to_bytes() == told
                kinds.add("Total")
            if setup := getattr(read, "setup", b""):
                parsed = messages.Setup.from_bytes(setup, sites=4, slots=4)
                assert parsed.to_bytes() == setup
                kinds.add("Setup")
        assert read.to_bytes() == raw(number)
        kinds.add(type(read).__name__)
    assert kinds == {*CLASSES, "Advertisement", "Confirmation", "Setup", "Total"}


def test_what_is_computed_on_the_way() -> None:
    """Digest, T, keys and commitments, each by the package's own function."""
    params, values = params_of(RUN["params"]), RUN["values"]
    shown = [
        messages.Advertisement.from_bytes(raw(number), slots=4) for number in numbers("enroll") if number % 2
    ]
    session = messages.session_id(params, shown)
    made = independent.Run(RUN)
    list(made.messages())
    boxes = {}
    for number in numbers("confirm"):
        confirmed = messages.Confirmation.from_bytes(raw(number), slots=4)
        boxes[confirmed.name] = confirmed.boxes
    found = {"params digest": params.digest(), "session": session}
    for item in shown:
        found[f"advertisement signed/{item.name}"] = item.signed(params.digest())
        found[f"ready signed/{item.name}"] = messages.ready_signed(session, item.name)
        for other in shown:
            if other != item:
                channel = primitives.Secret(made.channel[item.name])
                agreed = primitives.x25519(channel, other.channel_key, owner=other.name)
                # The library decapsulates what the oracle encapsulated.
                seed, ciphertext = (
                    primitives.Secret(made.seeds[other.name]),
                    boxes[item.name][other.name][:1088],
                )
                encapsulated = primitives.kem_decapsulate(seed, ciphertext, owner=item.name)
                found[f"box key/{item.name}/{other.name}"] = box_key(
                    encapsulated, agreed, session, item.name, other.name, ciphertext
                )
        for slot in range(4):
            for group in messages.GROUPS:
                place = f"{slot}/{group}/{item.name}"
                b, a = (made._secret(item.name, slot, group, kind) for kind in (0, 1))
                for letter, kind, secret in (("b", "self", b), ("a", "pair", a)):
                    committed = commitment(item.name, slot, group, kind, secret)  # type: ignore[arg-type]
                    assert item.commitment(slot, group, kind) == committed  # type: ignore[arg-type]
                    found[f"commitment to {letter}/{place}"] = committed
                found[f"self key/{place}"] = masks.self_key(b, session, slot, group, item.name)
                for other in shown:
                    if item.name != other.name:
                        secret = pair_secret(a, session, slot, group, item.name, other.name)
                        found[f"pair secret/{place}/{other.name}"] = secret
                    if item.name < other.name:
                        found[f"pair key/{place}/{other.name}"] = masks.pair_key(
                            secret, session, slot, group, item.name, other.name
                        )
    assert {key: value.hex() for key, value in found.items()} == values
    keys = [value for key, value in values.items() if "key/" in key or "secret/" in key]
    assert len(set(keys)) == len(keys) == 12 + 8 * 4 + 8 * 6 + 8 * 12


def test_every_signature_of_the_run_holds_over_the_independent_strings() -> None:
    made, keys = independent.Run(RUN), {}
    list(made.messages())
    for number in numbers("enroll"):
        item = messages.Advertisement.from_bytes(raw(number), slots=4)
        keys[item.name] = Ed25519PublicKey.from_public_bytes(item.session_key)
        certified: Any = x509.load_der_x509_certificate(item.certificate).public_key()
        certified.verify(
            item.signature, made._advertised_string(made.advertised[item.name]), ec.ECDSA(hashes.SHA256())
        )
    for number in numbers("contribute"):
        masked = messages.Masked.from_bytes(raw(number))
        own = masked.receipt
        values = (own.name, own.slot, [own.sum_id.round, own.sum_id.phase, own.sum_id.attempt])
        rests = (own.basis, own.total, dict(own.combinations), own.follows)
        ends = [hashlib.sha256(masked.links + data).digest() for data in (masked.update, masked.static)]
        pairs = independent.sha("pair secrets of a term", made._key_hashes(own.name, own.slot))
        signed = independent.fields("receipt 3", made.session, *values, *rests, *ends, pairs)
        keys[own.name].verify(own.signature, signed)
    for request, answer in zip(numbers("agree", "server"), numbers("agree"), strict=True):
        agreed = messages.Agreement.from_bytes(raw(answer))
        receipts = messages.AgreementRequest.from_bytes(raw(request)).receipts
        first, survivors = receipts[0], [item.name for item in receipts]
        sum_id = [first.sum_id.round, first.sum_id.phase, first.sum_id.attempt]
        digest = independent.sha("receipts", [item.signed(made.session) for item in receipts])
        signed = independent.fields("agreement 3", made.session, first.slot, sum_id, survivors, digest)
        keys[agreed.name].verify(agreed.signature, signed)


def test_any_t_shares_of_the_run_give_the_secrets_by_independent_arithmetic() -> None:
    made = independent.Run(RUN)
    list(made.messages())
    reveals = [messages.Reveal.from_bytes(raw(number)) for number in numbers("reveal")][-4:]
    for dealer in RUN["params"]["roster"]:
        for chosen in ((0, 1, 2), (1, 2, 3), (0, 2, 3)):
            shares = {place + 1: reveals[place].update[dealer][16:] for place in chosen}
            assert independent.secret_of(shares) == made._secret(dealer, 3, "update", 0)


# Single functions --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PRIMITIVES["strings"])
def test_strings(case: dict[str, Any]) -> None:
    expected = bytes.fromhex(case["encoded"])
    assert independent.fields(case["tag"], *case["values"]) == expected
    assert primitives.encode_fields(case["tag"], *case["values"]) == expected
    assert primitives.digest(case["tag"], *case["values"]).hex() == case["digest"]
    assert hashlib.sha256(expected).hexdigest() == case["digest"]


def test_keystream_and_mask_keys() -> None:
    case = PRIMITIVES["keystream"]
    key = bytes.fromhex(case["key"])
    assert masks.keystream(key, 100).hex() == case["bytes"] == independent.stream(key, 100).hex()
    pair, own = dict(PRIMITIVES["pair_key"]), dict(PRIMITIVES["self_key"])
    secret, seed, salt = (bytes.fromhex(v) for v in (pair["secret"], own["seed"], own["session"]))
    found = masks.pair_key(secret, salt, pair["slot"], pair["group"], pair["first"], pair["second"])
    info = independent.fields("pair mask", pair["slot"], pair["group"], pair["first"], pair["second"])
    assert found.hex() == pair["key"] == independent.hkdf(secret, salt, info).hex()
    info = independent.fields("self mask", own["slot"], own["group"], own["name"])
    found = masks.self_key(seed, salt, own["slot"], own["group"], own["name"])
    assert found.hex() == own["key"] == independent.hkdf(seed, salt, info).hex()


def test_shares_from_given_coefficients() -> None:
    case = PRIMITIVES["shamir"]
    secret, coefficients = bytes.fromhex(case["secret"]), bytes.fromhex(case["coefficients"])
    shares = shamir.split(secret, threshold=3, holders=5, random=lambda count: coefficients[:count])
    assert [item.hex() for item in shares] == case["shares"]
    rows = [secret, coefficients[:32], coefficients[32:]]
    assert [independent.share(rows, at).hex() for at in range(1, 6)] == case["shares"]


@pytest.mark.parametrize("case", PRIMITIVES["combinations"], ids=lambda case: str(case["runs"]))
def test_combinations(case: dict[str, Any]) -> None:
    challenge, data = bytes.fromhex(case["challenge"]), bytes.fromhex(case["integers"])
    layout = masks.Layout(tuple((ring, count) for ring, count in case["runs"]))
    assert combinations.combine(challenge, "update", layout, data).hex() == case["combinations"]
    specs = [{"ring": ring, "shape": [count], "group": "update"} for ring, count in case["runs"]]
    assert independent.combined(specs, "update", challenge, data).hex() == case["combinations"]
    # One bit more or less in one element is seen, whichever it is.
    for place in (0, len(data) // 2, len(data) - 1):
        other = data[:place] + bytes([data[place] ^ 0x80]) + data[place + 1 :]
        assert combinations.combine(challenge, "update", layout, other).hex() != case["combinations"]


@pytest.mark.parametrize("case", PRIMITIVES["encoding"], ids=lambda case: f"{case['ring']}-{case['bits']}")
def test_encoding(case: dict[str, Any]) -> None:
    ring, bits = case["ring"], case["bits"]
    found = encoding.encode(np.array(case["values"]), ring=ring, bits=bits, bound=case["bound"], name="x")
    # Python's round() takes halves to even as well.
    assert [round(value * 2**bits) % 2**ring for value in case["values"]] == case["integers"]
    assert found.tolist() == case["integers"]


# What must be refused ----------------------------------------------------------------------------


@pytest.mark.many
@pytest.mark.parametrize("after", sorted({item["after"] for item in REFUSED["messages"]}))
def test_messages_that_must_be_refused(after: int) -> None:
    """Each is refused by its receiver with exactly its error, and the run goes on as recorded."""
    player, _ = play(RUN, after)
    for item in REFUSED["messages"]:
        if item["after"] != after:
            continue
        state = {name: (site.state, list(site.entries)) for name, site in player.sites.items()}
        with pytest.raises(ProtocolError) as caught:
            player.deliver(item["task"], item["from"], item["to"], bytes.fromhex(item["bytes"]))
        error = caught.value
        assert type(error) is getattr(errors, item["error"]), (item["name"], error)
        assert (error.code, error.blamed) == (item["code"], item["blamed"]), item["name"]
        assert state == {name: (site.state, site.entries) for name, site in player.sites.items()}
    if after < len(RUN["messages"]):
        task, site = order(RUN)[after // 2]
        up = after % 2
        good = player.deliver(task, site if up else "server", "server" if up else site, raw(after))
        assert good is None or good == raw(after + 1)


@pytest.mark.parametrize("case", REFUSED["steps"], ids=lambda case: case["name"])
def test_steps_that_must_refuse(case: dict[str, Any]) -> None:
    steps = {
        "certificate": _certificate,
        "box": _box,
        "x25519": _x25519,
        "encode": _encode,
        "ring": _ring,
        "agreement": lambda case: messages.Agreement.from_bytes(bytes.fromhex(case["bytes"])),
    }
    with pytest.raises((ProtocolError, encoding.EncodingError)) as caught:
        steps[case["step"]](case)
    assert type(caught.value).__name__ == case["error"]


def _certificate(case: dict[str, Any]) -> None:
    at: datetime = AT
    anchor = Anchor(bytes.fromhex(case["root"]))
    certificate = bytes.fromhex(case["certificate"])
    verify_certificate(certificate, case["site"], anchor, pins=None, pinned_only=False, at=at)


def _box(case: dict[str, Any]) -> None:
    key, nonce, sealed, bound = (bytes.fromhex(case[part]) for part in ("key", "nonce", "sealed", "bound"))
    primitives.open_sealed(key, nonce, sealed, bound, owner="z")


def _x25519(case: dict[str, Any]) -> None:
    private = primitives.Secret(bytes.fromhex(case["private"]))
    primitives.x25519(private, bytes.fromhex(case["public"]), owner="z")


def _encode(case: dict[str, Any]) -> None:
    values = np.array([0.0, float(case["value"])])
    encoding.encode(values, ring=case["ring"], bits=case["bits"], bound=case["bound"], name="x")


def _ring(case: dict[str, Any]) -> None:
    encoding.check_no_wrap(case["ring"], case["bits"], case["bound"], case["sites"])


def test_the_vectors_hold_what_the_specification_names() -> None:
    names = [item["name"] for item in (*REFUSED["messages"], *REFUSED["steps"])]
    assert len(set(names)) == len(names) == 197
    assert all(item["why"] for item in REFUSED["messages"])
    for name in (
        *("bad_signature", "replayed_round", "split_view", "swapped_key", "truncated_share"),
        *("low_order_point", "overflow", "wrong_tag", "trailing_byte", "unknown_key", "duplicate_key"),
        *("swapped_encapsulation_key", "encapsulation_key_not_reduced", "tampered_ciphertext"),
        *("swapped_ciphertext", "tampered_links", "short_links"),
        *("tampered_box", "tampered_receipt", "below_threshold", "second_survivor_set"),
        *("both_share_kinds", "static_for_another_cohort", "slot_reuse", "model_inconsistency"),
        *("false_combinations", "withheld_total", "older_total", "total_inconsistency", "no_proof"),
        *("other_pair_secrets", "proof_with_other_pair_secrets", "proof_of_another_pair_secret"),
    ):
        assert name in names
    assert {item["error"] for item in REFUSED["messages"]} == {
        *("ParametersError", "IdentityError", "SignatureError", "MessageError", "RosterError"),
        *("KeyAgreementError", "ShareError", "ReplayError", "StateError", "InconsistencyError"),
        *("SurvivorsError", "StaticCohortError", "TotalError", "VerificationError"),
    }
