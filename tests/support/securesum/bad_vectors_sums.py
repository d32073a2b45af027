"""What must be refused in a sum, for `make_vectors`; no test runs this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
from tests.support.securesum.bad_maker import Maker, repacked
from tests.support.securesum.replay import Player, play

from tightframe.securesum import messages
from tightframe.securesum.checks import masked_hash
from tightframe.securesum.messages import (
    Agreement,
    AgreementRequest,
    Masked,
    Reveal,
    RevealRequest,
    SumId,
    TermRequest,
)
from tightframe.securesum.primitives import ed25519_sign
from tightframe.securesum.site.state import slot_share


def _terms(maker: Maker) -> None:
    place, after = ("contribute", "clinic", "server"), maker.at("contribute", "clinic", "server")

    def changed(change: Callable[[Player, Masked], Masked]) -> Callable[[Player, bytes], bytes]:
        return lambda player, raw: change(player, Masked.from_bytes(raw)).to_bytes()

    def receipt(**changes: Any) -> Callable[[Player, Masked], Masked]:
        return lambda player, item: replace(item, receipt=_receipt(player, item.receipt, **changes))

    for name, change, why in (
        ("tampered_term", lambda p, i: replace(i, update=i.update[::-1]), "not the bytes of the receipt"),
        ("tampered_links", lambda p, i: replace(i, links=i.links[::-1]), "not the links of the receipt"),
        (
            "short_links",
            lambda p, i: replace(
                i,
                links=i.links[:-32],
                receipt=_receipt(
                    p,
                    i.receipt,
                    update=masked_hash(i.update, i.links[:-32]),
                    static=masked_hash(i.static, i.links[:-32]),
                ),
            ),
            "signed, but not a link for every later site and group",
        ),
        ("tampered_receipt", lambda p, i: replace(i, receipt=replace(i.receipt, slot=1)), "not signed"),
        ("receipt_of_another_round", receipt(sum_id=SumId(7, "train-0")), "signed, for another sum"),
        ("receipt_of_another_slot", receipt(slot=1), "signed, for another slot"),
        ("other_model", receipt(broadcast=bytes(32)), "made from another broadcast"),
        (
            "short_term",
            lambda p, i: replace(
                i,
                static=i.static[:-4],
                receipt=_receipt(p, i.receipt, static=masked_hash(i.static[:-4], i.links)),
            ),
            "signed, but not the size of the schema",
        ),
    ):
        maker.add(name, after, place, changed(change), why)
    maker.add(
        "masked_term_of_another_site",
        maker.at("contribute", "clinic-2", "server"),
        ("contribute", "clinic-2", "server"),
        lambda player, raw: bytes.fromhex(maker.run["messages"][after]["bytes"]),
        "a stolen term",
    )
    later, asked = maker.at("contribute", "server", "clinic-2"), ("contribute", "server", "clinic")
    for name, request, why in (
        ("slot_reuse", TermRequest(0, SumId(0, "train-0", 1), "train"), "two terms under one mask"),
        ("replayed_round", TermRequest(1, SumId(0, "train-0", 0), "train"), "a sum is masked once"),
    ):
        maker.add(name, later, asked, lambda p, raw, request=request: request.to_bytes(), why)  # type: ignore[misc]
    other = TermRequest(1, SumId(1, "train-1", 1), "train", b"\x80")
    maker.add("second_setup", later, asked, lambda p, raw: other.to_bytes(), "one setup an epoch")


def _receipt(player: Player, item: messages.Receipt, **changes: Any) -> messages.Receipt:
    """A receipt with something else in it, signed by its site."""
    item = replace(item, **changes)
    key = player.sites[item.name].state.signing
    return replace(item, signature=ed25519_sign(key, item.signed(player.session.session)))


def _reveal_requests(maker: Maker) -> None:
    place, after = ("reveal", "server", "clinic"), maker.at("reveal", "server", "clinic")

    def changed(
        change: Callable[[Player, list[messages.Receipt]], list[messages.Receipt]],
    ) -> Callable[[Player, bytes], bytes]:
        def make(player: Player, raw: bytes) -> bytes:
            request = RevealRequest.from_bytes(raw)
            return replace(request, receipts=tuple(change(player, list(request.receipts)))).to_bytes()

        return make

    for name, change, why in (
        ("forged_receipt", lambda p, r: [*r[:3], replace(r[3], update=bytes(32))], "nobody signed it"),
        ("borrowed_receipt", lambda p, r: [*r[:3], replace(r[2], name="z")], "another site's, renamed"),
        ("strangers_receipt", lambda p, r: [*r[:3], replace(r[3], name="y")], "of no site of the roster"),
        (
            "receipt_of_other_round_relayed",
            lambda p, r: [*r[:3], _receipt(p, r[3], sum_id=SumId(9, "train-0"))],
            "signed, for another sum",
        ),
        (
            "model_inconsistency",
            lambda p, r: [*r[:3], _receipt(p, r[3], broadcast=bytes(32))],
            "one site was shown another model",
        ),
        ("own_receipt_replaced", lambda p, r: [_receipt(p, r[0], update=bytes(32)), *r[1:]], "not as sent"),
        ("other_order_of_survivors", lambda p, r: r[::-1], "one form for a set"),
        ("doubled_receipt", lambda p, r: [r[0], r[1], r[2], r[2]], "three survivors are not four"),
        ("below_threshold", lambda p, r: r[:2], "fewer than any site reveals for"),
        ("without_this_site", lambda p, r: r[1:], "a site answers for sets that it is in"),
        ("unsigned_survivor_set", lambda p, r: r[:3], "fewer than the roster needs signatures"),
    ):
        maker.add(name, after, place, changed(change), why)
    maker.add(
        "reveal_of_an_unused_slot",
        after,
        place,
        lambda player, raw: replace(RevealRequest.from_bytes(raw), slot=2).to_bytes(),
        "nothing was masked with it",
    )
    later = maker.at("reveal", "server", "clinic-2")
    sent = bytes.fromhex(maker.run["messages"][after]["bytes"])
    maker.add("second_reveal", later, place, lambda player, raw: sent, "the shares are gone")
    receipts = RevealRequest.from_bytes(sent).receipts
    maker.add(
        "second_survivor_set_after_a_reveal",
        later,
        ("agree", "server", "clinic"),
        lambda player, raw: AgreementRequest(0, receipts[:3]).to_bytes(),
        "a site answers for one set, for ever",
    )


def _reveals(maker: Maker) -> None:
    place, after = ("reveal", "clinic", "server"), maker.at("reveal", "clinic", "server")
    before = maker.at("reveal", "server", "clinic")

    def changed(change: Callable[[Player, Reveal], Reveal]) -> Callable[[Player, bytes], bytes]:
        def make(player: Player, raw: bytes) -> bytes:
            item = change(player, Reveal.from_bytes(raw))
            signed = item.signed(player.session.session)
            return replace(
                item, signature=ed25519_sign(player.sites["clinic"].state.signing, signed)
            ).to_bytes()

        return make

    def other_kind(player: Player, item: Reveal) -> Reveal:
        earlier, _ = play(maker.run, before)
        held = earlier.sites["clinic"].state.slots[0].shares
        return replace(item, update={**item.update, "z": slot_share(held, 3, "update", "pair")})

    for name, change, why in (
        (
            "tampered_share",
            lambda p, i: replace(i, update={**i.update, "z": bytes(48)}),
            "not the signed hash",
        ),
        (
            "swapped_shares",
            lambda p, i: replace(i, update={**i.update, "z": i.update["clinic"], "clinic": i.update["z"]}),
            "another dealer's",
        ),
        ("share_of_the_other_group", lambda p, i: replace(i, static=dict(i.update)), "static is not update"),
        ("both_share_kinds", other_kind, "a share of s where one of b was asked for"),
        (
            "missing_share",
            lambda p, i: replace(i, update={k: v for k, v in i.update.items() if k != "z"}),
            "one of every dealer",
        ),
    ):
        maker.add(name, after, place, changed(change), why)
    maker.add(
        "truncated_share",
        after,
        place,
        lambda p, raw: repacked(raw, update={**msgpack.unpackb(raw)["update"], "z": bytes(47)}),
        "a share has one size",
    )
    maker.add(
        "unsigned_reveal",
        after,
        place,
        lambda p, raw: repacked(raw, signature=bytes(64)),
        "not the revealer's signature",
    )


def _after_a_drop_out(maker: Maker) -> None:
    place, after = ("agree", "server", "clinic"), maker.at("agree", "server", "clinic")
    full = RevealRequest.from_bytes(
        bytes.fromhex(maker.run["messages"][maker.at("reveal", "server", "clinic")]["bytes"])
    ).receipts

    def changed(
        change: Callable[[list[messages.Receipt]], list[messages.Receipt]],
    ) -> Callable[[Player, bytes], bytes]:
        def make(player: Player, raw: bytes) -> bytes:
            request = AgreementRequest.from_bytes(raw)
            return replace(request, receipts=tuple(change(list(request.receipts)))).to_bytes()

        return make

    for name, change, why in (
        ("below_threshold_to_sign", lambda r: r[:2], "fewer than any site signs"),
        ("receipts_of_the_round_before", lambda r: [r[0], full[2], full[3]], "replayed"),
        ("everybody_to_sign", lambda r: [r[0], full[1], *r[1:]], "the dropped site's receipt is replayed"),
    ):
        maker.add(name, after, place, changed(change), why)
    later = maker.at("agree", "server", "klinikum-süd")
    first = bytes.fromhex(maker.run["messages"][after]["bytes"])
    maker.add(
        "second_survivor_set",
        later,
        place,
        lambda p, raw: AgreementRequest(
            1, (AgreementRequest.from_bytes(first).receipts[0], full[1], full[2])
        ).to_bytes(),
        "a site signs one set a slot, for ever",
    )
    up, number = ("agree", "clinic", "server"), maker.at("agree", "clinic", "server")

    def signed(slot: int, sum_id: SumId, survivors: tuple[str, ...]) -> Callable[[Player, bytes], bytes]:
        def make(player: Player, raw: bytes) -> bytes:
            message = messages.survivors_signed(player.session.session, slot, sum_id, survivors)
            key = player.sites["clinic"].state.signing
            return Agreement("clinic", 1, ed25519_sign(key, message)).to_bytes()

        return make

    here, sum_id = ("clinic", "klinikum-süd", "z"), SumId(1, "train-1", 1)
    for name, make, why in (
        ("agreement_on_another_set", signed(1, sum_id, ("clinic", "clinic-2", "z")), "not this set"),
        ("agreement_for_another_slot", signed(0, sum_id, here), "not this slot"),
        ("agreement_for_another_sum", signed(1, SumId(1, "train-1", 0), here), "not this try"),
    ):
        maker.add(name, number, up, make, why)
    maker.add(
        "agreement_of_a_dropped_site",
        number,
        ("agree", "clinic-2", "server"),
        lambda p, raw: Agreement("clinic-2", 1, bytes(64)).to_bytes(),
        "it is no survivor",
    )


def _agreed_reveals(maker: Maker) -> None:
    place, after = ("reveal", "server", "clinic"), maker.at("reveal", "server", "clinic", 1)

    def changed(
        change: Callable[[Player, dict[str, bytes]], dict[str, bytes]],
    ) -> Callable[[Player, bytes], bytes]:
        def make(player: Player, raw: bytes) -> bytes:
            request = RevealRequest.from_bytes(raw)
            return replace(request, agreements=change(player, dict(request.agreements))).to_bytes()

        return make

    def fourth(player: Player, given: dict[str, bytes]) -> dict[str, bytes]:
        here = ("clinic", "klinikum-süd", "z")
        message = messages.survivors_signed(player.session.session, 1, SumId(1, "train-1", 1), here)
        return {**given, "clinic-2": ed25519_sign(player.sites["clinic-2"].state.signing, message)}

    for name, change, why in (
        ("too_few_agreements", lambda p, g: {k: v for k, v in g.items() if k != "z"}, "fewer than t"),
        ("forged_agreement", lambda p, g: {**g, "z": bytes(64)}, "nobody signed it"),
        ("borrowed_agreement", lambda p, g: {**g, "z": g["clinic"]}, "one signature counted twice"),
        ("agreement_of_no_survivor", fourth, "a dropped site has no say"),
    ):
        maker.add(name, after, place, changed(change), why)


PARTS = (_terms, _reveal_requests, _reveals, _after_a_drop_out, _agreed_reveals)
