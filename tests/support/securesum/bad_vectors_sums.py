"""What must be refused in a sum, for `make_vectors`; no test runs this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    Group,
    Masked,
    Reveal,
    RevealRequest,
    SumId,
    TermRequest,
    pairs_digest,
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
        ("combinations_of_no_total", receipt(combinations={"update": bytes(1536)}), "none was told yet"),
        ("other_model", receipt(basis=bytes(32)), "made from another state"),
        ("other_total", receipt(total=bytes(31) + b"1"), "resting on another total"),
        ("other_pair_secrets", receipt(pairs=bytes(32)), "not the pair secrets that were dealt"),
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
            lambda p, r: [*r[:3], _receipt(p, r[3], basis=bytes(32))],
            "one site was shown another model",
        ),
        (
            "total_inconsistency",
            lambda p, r: [*r[:3], _receipt(p, r[3], total=bytes(31) + b"1")],
            "one site was told another total",
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
            item = Agreement.from_bytes(raw)
            return _agreement(player, item, slot=slot, sum_id=sum_id, survivors=survivors).to_bytes()

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
    maker.add(
        "whole_roster_to_sign",
        maker.at("reveal", "server", "clinic"),
        place,
        lambda p, raw: AgreementRequest(0, full).to_bytes(),
        "nobody is missing",
    )


def _combinations(maker: Maker) -> None:
    """In receipts of the second sum, which rests on the first one's total."""
    place, after = ("contribute", "clinic", "server"), maker.at("contribute", "clinic", "server", 1)

    def changed(
        change: Callable[[Mapping[Group, bytes]], Mapping[Group, bytes]], *, signed: bool = True
    ) -> Callable[[Player, bytes], bytes]:
        def make(player: Player, raw: bytes) -> bytes:
            item = Masked.from_bytes(raw)
            made = change(item.receipt.combinations)
            other = _receipt(player, item.receipt, combinations=made)
            if not signed:
                other = replace(item.receipt, combinations=made)
            return replace(item, receipt=other).to_bytes()

        return make

    maker.add(
        "combinations_not_signed", after, place, changed(lambda own: {}, signed=False), "a receipt signs them"
    )
    one_group = changed(lambda own: {"update": own["update"]})
    maker.add("combinations_of_another_group", after, place, one_group, "of one group of two")
    short = changed(lambda own: {**own, "update": own["update"][:-4]})
    maker.add("short_combinations", after, place, short, "not of their size")


def _relayed_combinations(maker: Maker) -> None:
    """In receipts of the seal, in which everybody is; it rests on a total without z."""
    place, after = ("reveal", "server", "clinic"), maker.at("reveal", "server", "clinic", 3)

    def changed(
        site: int, change: Callable[[Mapping[Group, bytes]], Mapping[Group, bytes]]
    ) -> Callable[[Player, bytes], bytes]:
        def make(player: Player, raw: bytes) -> bytes:
            request = RevealRequest.from_bytes(raw)
            receipts = list(request.receipts)
            made = change(receipts[1].combinations)
            receipts[site] = _receipt(player, receipts[site], combinations=made)
            return replace(request, receipts=tuple(receipts)).to_bytes()

        return make

    forgeries: tuple[tuple[str, int, Callable[[Mapping[Group, bytes]], Mapping[Group, bytes]], str], ...] = (
        (
            "false_combinations",
            1,
            lambda own: {"update": bytes([own["update"][0] ^ 1]) + own["update"][1:]},
            "they do not add up to the total",
        ),
        ("combinations_left_out", 1, lambda own: {}, "one term of the total is not shown"),
        ("combinations_of_no_survivor", 3, lambda own: own, "its term is not in the total"),
        ("short_combinations_relayed", 1, lambda own: {"update": own["update"][:-4]}, "not of their size"),
    )
    for name, site, change, why in forgeries:
        maker.add(name, after, place, changed(site, change), why)

    def signed(player: Player, raw: bytes) -> bytes:
        request = RevealRequest.from_bytes(raw)
        given = tuple(_agreement(player, Agreement(item.name, 3, b"")) for item in request.receipts)
        return replace(request, agreements=given).to_bytes()

    maker.add("agreements_of_the_whole_roster", after, place, signed, "nobody signs it")


def _agreement(player: Player, item: Agreement, **changes: Any) -> Agreement:
    """An agreement on something else, signed by its site."""
    total = player.total
    assert total
    session = player.session.session
    values = {
        "slot": item.slot,
        "sum_id": total.sum_id,
        "survivors": total.survivors,
        "receipts": messages.receipts_digest(session, total.receipts),
        **changes,
    }
    key = player.sites[item.name].state.signing
    signature = ed25519_sign(key, messages.agreement_signed(session, **values))
    return replace(item, signature=signature)


def _agreed_reveals(maker: Maker) -> None:
    place, after = ("reveal", "server", "clinic"), maker.at("reveal", "server", "clinic", 1)

    def changed(
        change: Callable[[Player, list[Agreement]], list[Agreement]],
    ) -> Callable[[Player, bytes], bytes]:
        def make(player: Player, raw: bytes) -> bytes:
            request = RevealRequest.from_bytes(raw)
            return replace(request, agreements=tuple(change(player, list(request.agreements)))).to_bytes()

        return make

    def fourth(player: Player, given: list[Agreement]) -> list[Agreement]:
        return [given[0], _agreement(player, Agreement("clinic-2", 1, b"")), *given[1:]]

    for name, change, why in (
        ("too_few_agreements", lambda p, g: g[:2], "fewer than t"),
        ("forged_agreement", lambda p, g: [*g[:2], replace(g[2], signature=bytes(64))], "nobody signed it"),
        ("borrowed_agreement", lambda p, g: [*g[:2], replace(g[0], name="z")], "one signature counted twice"),
        ("doubled_agreement", lambda p, g: [g[0], g[0], g[1]], "one site counted twice"),
        ("agreement_of_no_survivor", fourth, "a dropped site has no say"),
        (
            "agreement_on_other_receipts",
            lambda p, g: [*g[:2], _agreement(p, g[2], receipts=bytes(32))],
            "not those that this site signed",
        ),
    ):
        maker.add(name, after, place, changed(change), why)


def _totals(maker: Maker) -> None:
    place, after = ("contribute", "server", "clinic"), maker.at("contribute", "server", "clinic", 2)

    def changed(change: Callable[[messages.Total], messages.Total]) -> Callable[[Player, bytes], bytes]:
        def make(player: Player, raw: bytes) -> bytes:
            request = TermRequest.from_bytes(raw)
            total = change(messages.Total.from_bytes(request.total))
            return replace(request, total=total.to_bytes()).to_bytes()

        return make

    first = TermRequest.from_bytes(
        bytes.fromhex(maker.run["messages"][maker.at("contribute", "server", "clinic", 1)]["bytes"])
    )
    zero = messages.Total.from_bytes(first.total)
    here, everybody = ("clinic", "klinikum-süd", "z"), ("clinic", "clinic-2", "klinikum-süd", "z")
    for name, change, why in (
        ("total_of_no_slot_yet", lambda t: replace(t, slot=2), "of the slot that is asked for"),
        (
            "total_replaced",
            lambda t: replace(zero, groups={**zero.groups, "update": bytes(72)}),
            "told before",
        ),
        ("total_of_everybody", lambda t: replace(t, survivors=everybody), "another set than was signed"),
        ("total_of_too_few", lambda t: replace(t, survivors=here[:2]), "fewer than any site reveals for"),
        ("total_out_of_order", lambda t: replace(t, survivors=here[::-1]), "one form for a set"),
        ("total_of_a_stranger", lambda t: replace(t, survivors=("clinic", "y", "z")), "none of the roster"),
        ("total_of_another_sum", lambda t: replace(t, sum_id=SumId(1, "train-1", 0)), "another try"),
        ("total_of_another_schema", lambda t: replace(t, schema="closing"), "other fields"),
        ("total_of_no_schema", lambda t: replace(t, schema="none"), "unknown fields"),
        ("short_total", lambda t: replace(t, groups={"update": t.groups["update"][:-4]}), "not of its size"),
        ("total_of_other_receipts", lambda t: replace(t, receipts=bytes(32)), "not the terms it was made of"),
        ("total_without_update", lambda t: replace(t, groups={}), "no groups"),
        (
            "total_with_a_shut_group",
            lambda t: replace(t, groups={**t.groups, "static": zero.groups["static"]}),
            "this site gave no share for it",
        ),
    ):
        maker.add(name, after, place, changed(change), why)
    withheld = lambda p, raw: replace(TermRequest.from_bytes(raw), total=b"").to_bytes()  # noqa: E731
    maker.add("withheld_total", after, place, withheld, "a total that was told stays told")
    last = maker.at("contribute", "server", "clinic", 3)
    old = lambda p, raw: replace(TermRequest.from_bytes(raw), total=first.total).to_bytes()  # noqa: E731
    maker.add("older_total", last, place, old, "a later one was told")
    early = lambda p, raw: replace(TermRequest.from_bytes(raw), total=first.total).to_bytes()  # noqa: E731
    start = maker.at("contribute", "server", "clinic")
    maker.add("total_before_any_sum", start, place, early, "an epoch begins without one")


def _proofs(maker: Maker) -> None:
    """The third sum rests on the second one's total: z's term in it is shown, clinic-2 had dropped out."""
    place, after = ("reveal", "server", "clinic"), maker.at("reveal", "server", "clinic", 2)
    zero = maker.run["messages"][maker.at("reveal", "server", "clinic")]["bytes"]
    first = RevealRequest.from_bytes(bytes.fromhex(zero)).receipts

    def changed(change: Callable[[RevealRequest], RevealRequest]) -> Callable[[Player, bytes], bytes]:
        return lambda player, raw: change(RevealRequest.from_bytes(raw)).to_bytes()

    def proof(**changes: Any) -> Callable[[RevealRequest], RevealRequest]:
        return lambda r: replace(r, missing={"z": replace(r.missing["z"], **changes)})

    def signed_twice(player: Player, raw: bytes) -> bytes:
        """The site plays along, and names another pair secret than it used."""
        request = RevealRequest.from_bytes(raw)
        pairs = bytes(len(request.missing["z"].pairs))
        receipt = _receipt(player, request.missing["z"].receipt, pairs=pairs_digest(pairs))
        return proof(pairs=pairs, receipt=receipt)(request).to_bytes()

    def flipped(part: str) -> Callable[[RevealRequest], RevealRequest]:
        def change(request: RevealRequest) -> RevealRequest:
            data = getattr(request.missing["z"], part)["update"]
            return proof(**{part: {"update": bytes([data[0] ^ 8]) + data[1:]}})(request)

        return change

    def key(request: RevealRequest) -> RevealRequest:
        data = request.dropped["clinic-2"]["update"]
        return replace(request, dropped={"clinic-2": {"update": bytes([data[0] ^ 8]) + data[1:]}})

    for name, change, why in (
        ("no_proof", lambda r: replace(r, missing={}, dropped={}), "one term of the total is not shown"),
        ("proof_with_another_term", flipped("masked"), "not what the receipt names"),
        ("proof_with_another_seed", flipped("seeds"), "not what was committed to"),
        (
            "proof_with_other_pair_secrets",
            lambda r: proof(pairs=r.missing["z"].pairs[::-1])(r),
            "not those of the receipt",
        ),
        ("proof_without_a_group", proof(seeds={}), "one seed a group"),
        (
            "proof_with_a_shut_group",
            lambda r: proof(masked={**r.missing["z"].masked, "static": b""})(r),
            "of a group that was not opened",
        ),
        (
            "proof_by_a_forged_receipt",
            lambda r: proof(receipt=replace(r.missing["z"].receipt, update=bytes(32)))(r),
            "nobody signed it",
        ),
        (
            "proof_by_another_receipt",
            lambda r: proof(receipt=first[3])(r),
            "of another sum",
        ),
        (
            "proof_for_another_site",
            lambda r: replace(r, missing={"klinikum-süd": r.missing["z"]}),
            "not its own receipt",
        ),
        (
            "proof_of_no_survivor",
            lambda r: replace(r, missing={**r.missing, "clinic-2": r.missing["z"]}),
            "its term is not in the total",
        ),
        ("another_key_of_a_dropped_site", key, "not what it advertised"),
        ("no_key_of_a_dropped_site", lambda r: replace(r, dropped={}), "its masks cannot be taken off"),
    ):
        maker.add(name, after, place, changed(change), why)
    maker.add(
        "proof_of_another_pair_secret", after, place, signed_twice, "not what a dropped site's seed gives"
    )


PARTS = (
    *(_terms, _reveal_requests, _reveals, _after_a_drop_out, _agreed_reveals, _combinations),
    *(_relayed_combinations, _totals, _proofs),
)
