"""What must be refused while an epoch is set up, for `make_vectors`; no test runs this."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
from cryptography.hazmat.primitives.serialization import load_der_private_key
from tests.support.securesum import certificates, mlkem
from tests.support.securesum.bad_maker import Maker, repacked
from tests.support.securesum.protocol import FixedSigner
from tests.support.securesum.replay import Player

from tightframe.securesum import messages
from tightframe.securesum.checks import box_bound, box_key
from tightframe.securesum.messages import (
    Advertisement,
    Advertisements,
    Confirmation,
    FieldSpec,
    Setup,
    TermRequest,
)
from tightframe.securesum.primitives import ed25519_sign, seal, x25519

LOW_ORDER_POINT = bytes([1]) + bytes(31)


def _params(maker: Maker) -> None:
    place, one = ("enroll", "server", "clinic"), maker.at("enroll", "server", "clinic")
    wide = FieldSpec("wide", (2,), 32, 30, 1.0, "update")
    huge = FieldSpec("huge", (2,), 32, 960, 1e308, "update")

    def changed(**changes: Any) -> Callable[[Player, bytes], bytes]:
        return lambda player, raw: replace(player.params, **changes).to_bytes()

    for name, make, why in (
        ("lowered_threshold", changed(threshold=2), "two sites could be opened by two"),
        ("lowered_minimum", changed(min_sites=2), "below what the site's own policy says"),
        ("lowered_colluders", changed(colluders=0), "a site assumes at least one"),
        ("trusting_server", changed(trust="semi_honest"), "no trust that the site's policy does not give"),
        ("other_configuration", changed(config_sha256=bytes(32)), "other settings at one site"),
        ("other_job", changed(job="another"), "the parameters of another job"),
        ("other_version", changed(version="9.9.9"), "another release"),
        (
            "stranger_in_roster",
            changed(roster=("clinic", "clinic-2", "mallory", "z")),
            "a site that is none of the job's silos",
        ),
        ("two_sites", changed(roster=("clinic", "z"), threshold=2), "the sum minus one's own is the other's"),
        ("twice_in_roster", changed(roster=("clinic", "clinic", "z", "z")), "one site, two seats"),
        ("overflow", changed(schemas={"train": (wide,)}), "a ring that could wrap"),
        ("overflow_beyond_floats", changed(schemas={"train": (huge,)}), "wraps by more than a float can say"),
        ("infinite_bound", lambda p, raw: _first_bound(raw, float("inf")), "a bound that bounds nothing"),
        ("bound_not_a_number", lambda p, raw: _first_bound(raw, float("nan")), "the same"),
        ("trailing_byte", lambda p, raw: raw + b"\x00", "bytes after the message"),
        ("cut_off", lambda p, raw: raw[:-1], "a message that is not whole"),
        ("unknown_key", lambda p, raw: repacked(raw, note="x"), "a key that is not of the message"),
        (
            "duplicate_key",
            lambda p, raw: bytes([raw[0] + 1]) + msgpack.packb("job") + msgpack.packb("x") + raw[1:],
            "two values for one key, of which readers may see different ones",
        ),
    ):
        maker.add(name, one, place, make, why)
    maker.add(
        "replayed_epoch",
        maker.at("enroll", "server", "clinic-2"),
        place,
        lambda player, raw: player.params.to_bytes(),
        "an epoch is begun once, even with the same parameters",
    )
    fewer = {"roster": ("clinic", "klinikum-süd", "z"), "epoch": 3}
    maker.add(
        "static_for_another_cohort",
        maker.at("contribute", "server", "clinic", 1),
        place,
        changed(**fewer),
        "the static group was opened for all four",
    )


def _first_bound(raw: bytes, bound: float) -> bytes:
    value = msgpack.unpackb(raw)
    value["schemas"]["train"][0]["bound"] = bound
    return bytes(msgpack.packb(value))


def _resigned(player: Player, item: Advertisement, **changes: Any) -> Advertisement:
    """An advertisement that its site signed, with something else in it."""
    item = replace(item, **changes)
    signed = item.signed(player.params.digest())
    return replace(item, signature=player.sites[item.name].signer.sign(signed))


def _advertisements_up(maker: Maker) -> None:
    place, after = ("enroll", "clinic-2", "server"), maker.at("enroll", "clinic-2", "server")

    def changed(
        change: Callable[[Player, Advertisement, Advertisement], Advertisement],
    ) -> Callable[[Player, bytes], bytes]:
        def make(player: Player, raw: bytes) -> bytes:
            first = Advertisement.from_bytes(bytes.fromhex(maker.run["messages"][1]["bytes"]), slots=4)
            return change(player, Advertisement.from_bytes(raw, slots=4), first).to_bytes()

        return make

    def other_epoch(player: Player, item: Advertisement, first: Advertisement) -> Advertisement:
        signed = item.signed(replace(player.params, epoch=1).digest())
        return replace(item, signature=player.sites["clinic-2"].signer.sign(signed))

    for name, change, why in (
        ("bad_signature", lambda p, i, f: replace(i, application=b"another weight"), "not what was signed"),
        ("borrowed_signature", lambda p, i, f: replace(i, signature=f.signature), "another site's signature"),
        ("replayed_advertisement", other_epoch, "signed for an earlier epoch"),
        ("swapped_key", lambda p, i, f: _resigned(p, i, channel_key=f.channel_key), "another site's key"),
        (
            "swapped_key_other_encoding",
            lambda p, i, f: _resigned(
                p, i, channel_key=f.channel_key[:31] + bytes([f.channel_key[31] | 128])
            ),
            "the same with the bit that X25519 ignores",
        ),
        (
            "swapped_encapsulation_key",
            lambda p, i, f: _resigned(p, i, encapsulation_key=f.encapsulation_key),
            "another site's key of ML-KEM-768",
        ),
        (
            "encapsulation_key_not_reduced",
            lambda p, i, f: _resigned(p, i, encapsulation_key=b"\xff" * 3 + i.encapsulation_key[3:]),
            "coefficients that are not below the prime",
        ),
        (
            "low_order_point",
            lambda p, i, f: _resigned(p, i, channel_key=LOW_ORDER_POINT),
            "a shared secret of zeros",
        ),
        ("stolen_name", lambda p, i, f: f, "the advertisement of another site"),
    ):
        maker.add(name, after, place, changed(change), why)
    maker.add(
        "truncated_keys", after, place, lambda p, raw: repacked(raw, slots=b"\x01" * 511), "a slot short"
    )
    maker.add(
        "truncated_encapsulation_key",
        after,
        place,
        lambda p, raw: repacked(raw, encapsulation_key=b"\x01" * 1183),
        "a byte short",
    )
    maker.add(
        "second_advertisement",
        maker.at("enroll", "server", "klinikum-süd"),
        place,
        lambda player, raw: bytes.fromhex(maker.run["messages"][3]["bytes"]),
        "one of a kind from each site",
    )


def _advertisements_down(maker: Maker) -> None:
    place, after = ("confirm", "server", "clinic"), maker.at("confirm", "server", "clinic")
    issuers = {name: certificates.make_root(name) for name in ("other", "vectors")}
    root_key = certificates.issue(issuers["vectors"], "clinic-2")

    def shown(
        change: Callable[[Player, list[bytes], list[Advertisement]], list[Any]],
    ) -> Callable[[Player, bytes], bytes]:
        def make(player: Player, raw: bytes) -> bytes:
            items = list(Advertisements.from_bytes(raw).items)
            read = [Advertisement.from_bytes(item, slots=4) for item in items]
            made = change(player, items, read)
            return Advertisements(
                tuple(item if isinstance(item, bytes) else item.to_bytes() for item in made)
            ).to_bytes()

        return make

    def certified(
        issued: certificates.Issued,
    ) -> Callable[[Player, list[bytes], list[Advertisement]], list[Any]]:
        """The second site's, with this certificate and the signature of its key."""

        def change(player: Player, items: list[bytes], read: list[Advertisement]) -> list[Any]:
            item = replace(read[1], certificate=issued.certificate)
            signature = FixedSigner(issued.key, b"").sign(item.signed(player.params.digest()))
            return [items[0], replace(item, signature=signature), *items[2:]]

        return change

    site = maker.run["sites"]["z"]
    leaf = certificates.Issued(
        load_der_private_key(bytes.fromhex(site["private_key"]), None),
        bytes.fromhex(site["certificate"]),
    )
    for name, change, why in (
        ("missing_advertisement", lambda p, i, r: i[:3], "the roster is not whole"),
        ("doubled_advertisement", lambda p, i, r: [*i[:3], i[2]], "the roster is not whole"),
        ("other_order", lambda p, i, r: [i[0], i[2], i[1], i[3]], "each site has its place"),
        (
            "own_advertisement_replaced",
            lambda p, i, r: [_resigned(p, r[0], application=b"heavier"), *i[1:]],
            "not as this site sent it, though its key signed it",
        ),
        (
            "bad_signature_relayed",
            lambda p, i, r: [i[0], replace(r[1], application=b"lighter"), *i[2:]],
            "a site checks what the server relays",
        ),
        (
            "swapped_key_relayed",
            lambda p, i, r: [i[0], _resigned(p, r[1], session_key=r[2].session_key), *i[2:]],
            "two sites that are one",
        ),
        (
            "certificate_of_another_site",
            lambda p, i, r: [i[0], replace(r[1], certificate=r[2].certificate), *i[2:]],
            "it names another site",
        ),
        (
            "certificate_of_another_ca",
            certified(certificates.issue(issuers["other"], "clinic-2")),
            "not the root",
        ),
        ("certificate_of_a_ca_of_the_same_name", certified(root_key), "a root's name, another root's key"),
        ("certificate_issued_by_a_site", certified(certificates.issue(leaf, "clinic-2")), "depth two"),
    ):
        maker.add(name, after, place, shown(change), why)


def _confirmations(maker: Maker) -> None:
    place, after = ("confirm", "clinic", "server"), maker.at("confirm", "clinic", "server")

    def changed(
        change: Callable[[Player, Confirmation], Confirmation],
    ) -> Callable[[Player, bytes], bytes]:
        return lambda player, raw: change(player, Confirmation.from_bytes(raw, slots=4)).to_bytes()

    def other_ready(player: Player, item: Confirmation) -> Confirmation:
        key = player.sites["clinic"].state.signing
        return replace(item, ready=ed25519_sign(key, messages.ready_signed(bytes(32), "clinic")))

    for name, change, why in (
        (
            "tampered_share_hashes",
            lambda p, i: replace(i, hashes={**i.hashes, "z": bytes(768)}),
            "not the hashes that were signed",
        ),
        (
            "swapped_share_hashes",
            lambda p, i: replace(i, hashes={**i.hashes, "z": i.hashes["clinic"], "clinic": i.hashes["z"]}),
            "each holder has its own",
        ),
        ("split_view_at_the_server", other_ready, "ready for another session"),
        (
            "missing_box",
            lambda p, i: replace(i, boxes={name: box for name, box in i.boxes.items() if name != "z"}),
            "every other site gets a box",
        ),
    ):
        maker.add(name, after, place, changed(change), why)
    maker.add(
        "truncated_box",
        after,
        place,
        lambda p, raw: repacked(
            raw, boxes={**msgpack.unpackb(raw)["boxes"], "z": msgpack.unpackb(raw)["boxes"]["z"][:-1]}
        ),
        "a box has one size",
    )


def _setups(maker: Maker) -> None:
    place, after = ("contribute", "server", "clinic"), maker.at("contribute", "server", "clinic")

    def changed(**changes: Any) -> Callable[[Player, bytes], bytes]:
        return lambda player, raw: replace(TermRequest.from_bytes(raw), **changes).to_bytes()

    def dealt(
        change: Callable[[Player, dict[str, messages.Dealt]], dict[str, messages.Dealt]],
    ) -> Callable[[Player, bytes], bytes]:
        def make(player: Player, raw: bytes) -> bytes:
            request = TermRequest.from_bytes(raw)
            setup = Setup.from_bytes(request.setup, sites=4, slots=4)
            return replace(request, setup=Setup(change(player, dict(setup.dealt))).to_bytes()).to_bytes()

        return make

    def part(dealer: str, **changes: Callable[[Player, dict[str, messages.Dealt]], bytes]) -> Any:
        def change(player: Player, parts: dict[str, messages.Dealt]) -> dict[str, messages.Dealt]:
            values = {key: make(player, parts) for key, make in changes.items()}
            return {**parts, dealer: replace(parts[dealer], **values)}

        return dealt(change)

    def resealed(player: Player, parts: dict[str, messages.Dealt]) -> bytes:
        """A box with one bit of a share changed, sealed by its dealer itself."""
        dealer, session = player.sites["z"].state, player.session.session
        peer = player.session.peers["clinic"]
        encapsulated, ciphertext = mlkem.encapsulate(peer.encapsulation_key, bytes(32))
        agreed = x25519(dealer.channel, peer.channel_key, owner="clinic")
        key = box_key(encapsulated, agreed, session, "z", "clinic", ciphertext)
        return ciphertext + bytes(12) + seal(key, bytes(12), bytes(1024), box_bound(session, "z", "clinic"))

    def ready(player: Player, parts: dict[str, messages.Dealt]) -> bytes:
        other = hashlib.sha256(b"another session").digest()
        return ed25519_sign(player.sites["z"].state.signing, messages.ready_signed(other, "z"))

    for name, make, why in (
        ("no_setup", changed(setup=b""), "nothing is masked before everybody is known to be ready"),
        ("slot_of_no_epoch", changed(slot=4), "the epoch has four slots"),
        ("schema_of_no_epoch", changed(schema="other"), "the parameters have no such schema"),
        ("schema_of_another_phase", changed(schema="closing"), "not the fields that this site has now"),
        (
            "tampered_box",
            part("z", box=lambda p, d: d["z"].box[:-1] + bytes([d["z"].box[-1] ^ 1])),
            "the tag",
        ),
        ("swapped_box", part("z", box=lambda p, d: d["clinic-2"].box), "another dealer's box"),
        (
            "tampered_ciphertext",
            part("z", box=lambda p, d: bytes([d["z"].box[0] ^ 1]) + d["z"].box[1:]),
            "another shared secret, by which the box does not open",
        ),
        (
            "swapped_ciphertext",
            part("z", box=lambda p, d: d["clinic-2"].box[:1088] + d["z"].box[1088:]),
            "the ciphertext of another dealer",
        ),
        ("empty_box", part("z", box=lambda p, d: b""), "only one's own is left out"),
        ("box_in_ones_own_place", part("clinic", box=lambda p, d: d["z"].box), "one deals no box to oneself"),
        ("box_with_other_shares", part("z", box=resealed), "sealed by the dealer, but not what it signed"),
        ("split_view", part("z", ready=ready), "the dealer is ready for another session"),
        ("borrowed_ready", part("z", ready=lambda p, d: d["clinic-2"].ready), "another site's"),
        (
            "other_share_hashes",
            part("z", hashes=lambda p, d: d["clinic-2"].hashes),
            "not those that it signed",
        ),
        (
            "truncated_share_hashes",
            part("z", hashes=lambda p, d: d["z"].hashes[:-1]),
            "a list of hashes has one size",
        ),
        (
            "missing_dealer",
            dealt(lambda p, d: {k: v for k, v in d.items() if k != "z"}),
            "the whole roster deals",
        ),
        (
            "stranger_deals",
            dealt(lambda p, d: {**{k: v for k, v in d.items() if k != "z"}, "y": d["z"]}),
            "the roster and nobody else deals",
        ),
    ):
        maker.add(name, after, place, make, why)


PARTS = (_params, _advertisements_up, _advertisements_down, _confirmations, _setups)
