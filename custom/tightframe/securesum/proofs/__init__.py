"""The proof that a total is the sum of its terms, as silos and the server check it.

Let z_j be a term with its masks between two sites, but without its site's own mask, and z'_j the same
without the masks between j and the sites that dropped out. Over the survivors the remaining masks cancel, so
that the z'_j add up to the total exactly; so do their combinations (``combinations``). A site sends those of
its own z'_j with its next term. For a site that sends none, the server shows z'_j itself: the masked term
with the receipt that the site signed for it, the seed b that the site's advertisement commits to, and the
dropped sites' pair seeds a, to which theirs commit. A dropped site may have dealt another pair secret than
its seed gives, and signed that one's hash, or several. So what its seed gives is held against the receipt, in
which the site whose term it is has named the secrets that it used.

The server knows z'_j of each survivor once it opened the sum, so no function of it tells the server anything.
From everybody else the masks among honest survivors hide all of them but their sum.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tightframe.securesum.checks import (
    commitment,
    dropped_masks,
    dropped_secrets,
    group_layout,
    key_hash,
    masked_hash,
    verify_receipt,
)
from tightframe.securesum.errors import VerificationError
from tightframe.securesum.masks import Accumulator, Layout, self_key
from tightframe.securesum.messages import (
    Advertisement,
    Group,
    Kind,
    Params,
    TermProof,
    Told,
    links_of,
    pairs_digest,
    pairs_of,
)
from tightframe.securesum.primitives import Secret
from tightframe.securesum.proofs import combinations


@dataclass(frozen=True)
class Ground:
    """Data against which a proof is checked: the session, and the total without its integers.

    Attributes:
        session: T.
        peers: site -> its advertisement.
    """

    session: bytes
    params: Params
    peers: Mapping[str, Advertisement]
    told: Told

    @property
    def dropped(self) -> tuple[str, ...]:
        """The sites that are not in the total, in roster order."""
        return tuple(name for name in self.params.roster if name not in self.told.survivors)

    def layout(self, group: Group) -> Layout:
        """Return the layout of one group of the total."""
        return group_layout(self.params.schemas[self.told.schema], group)

    def combine(self, challenge: bytes, integers: Mapping[Group, bytes | memoryview]) -> dict[Group, bytes]:
        """Return the combinations of each group of the total."""
        return self.combine_all(challenge, (integers,))[0]

    def combine_all(
        self, challenge: bytes, terms: Sequence[Mapping[Group, bytes | memoryview]]
    ) -> list[dict[Group, bytes]]:
        """Return the combinations of several terms, which takes less time than those of one after another."""
        made: list[dict[Group, bytes]] = [{} for _ in terms]
        for group in self.told.groups:
            parts = [term[group] for term in terms]
            of_group = combinations.combine_all(challenge, group, self.layout(group), parts)
            for own, data in zip(made, of_group, strict=True):
                own[group] = data
        return made

    def has_form(self, combined: Mapping[Group, bytes]) -> bool:
        """Return True if these are combinations of exactly the total's groups, each of the right size."""
        sizes = {group: len(data) for group, data in combined.items()}
        return sizes == {
            group: combinations.layout_of(self.layout(group)).nbytes for group in self.told.groups
        }

    def check_sum(self, expected: Mapping[Group, bytes], parts: Mapping[str, Mapping[Group, bytes]]) -> None:
        """Check that the combinations of all terms add up to those of the total.

        Args:
            expected: group -> combinations of the total.
            parts: site -> the combinations of its term; of every site in the total.

        Raises:
            VerificationError: TF-623.
        """
        absent = [name for name in self.told.survivors if name not in parts]
        if absent:
            raise VerificationError(
                f"the proof of the total of sum {self.told.sum_id}",
                expected=f"with a part of each of {list(self.told.survivors)}",
                found=f"none of {absent}",
            )
        for group in self.told.groups:
            added = combinations.add(self.layout(group), (parts[name][group] for name in self.told.survivors))
            if not hmac.compare_digest(added, expected[group]):
                raise VerificationError(
                    f"the {group} total of sum {self.told.sum_id}",
                    expected="the sum of its silos' terms",
                    found="a false one",
                )

    def check_dropped(self, seeds: Mapping[str, Mapping[Group, bytes]]) -> None:
        """Check the pair seeds of the sites that are not in the total.

        Raises:
            VerificationError: TF-623, unless they are those of exactly these sites.
        """
        if set(seeds) != set(self.dropped):
            raise VerificationError(
                f"the dropped sites' seeds in the proof of sum {self.told.sum_id}",
                expected=f"of {list(self.dropped)}",
                found=f"of {sorted(seeds)}",
            )
        for name, own in seeds.items():
            self._check_groups("the pair seeds", name, own)
            for group in self.told.groups:
                self._check_committed(name, group, "pair", own[group])

    def show(
        self, name: str, proof: TermProof, dropped: Mapping[str, Mapping[Group, bytes]]
    ) -> dict[Group, bytes]:
        """Check the proof of one term, and return z' of each group of the total.

        Args:
            dropped: checked by ``check_dropped``.

        Raises:
            VerificationError: TF-623, if a part is not what the site signed or committed to, or a dropped
                site's seed does not give the pair secret that the site used.
            MessageError: TF-604, if the site signed links, or hashes of pair secrets, of another number.
            SignatureError: TF-603, if the receipt is not signed by the site in this session.
        """
        told, receipt = self.told, proof.receipt
        if (receipt.name, receipt.slot, receipt.sum_id) != (name, told.slot, told.sum_id):
            raise self._other("the receipt", name, f"its own, of sum {told.sum_id} in slot {told.slot}")
        verify_receipt(receipt, self.session, self.peers[name].session_key)
        if not hmac.compare_digest(pairs_digest(proof.pairs), receipt.pairs):
            raise self._other("the hashes of the pair secrets", name, "those that its receipt names")
        self._check_groups("the masked term", name, proof.masked)
        self._check_groups("the seeds", name, proof.seeds)
        return {group: self._shown(name, group, proof, dropped) for group in told.groups}

    def _shown(
        self, name: str, group: Group, proof: TermProof, dropped: Mapping[str, Mapping[Group, bytes]]
    ) -> bytes:
        told, masked, seed = self.told, proof.masked[group], proof.seeds[group]
        slot = told.slot
        signed = proof.receipt.update if group == "update" else proof.receipt.static
        if not hmac.compare_digest(masked_hash(masked, proof.links), signed):
            raise self._other(f"the masked {group} term", name, "the one that its receipt names")
        self._check_committed(name, group, "self", seed)
        links = links_of(proof.links, group, self.params.roster, name)
        seeds = {site: Secret(own[group]) for site, own in dropped.items()}
        secrets = dropped_secrets(self.session, slot, group, name, seeds, links)
        named = pairs_of(proof.pairs, group, self.params.roster, name)
        # None of the two is blamed: one dealt another than its seed gives, or the other names another than it
        # used. A server that follows the protocol finds out which, and comes to show neither.
        for other, (_, keyed) in secrets.items():
            if not hmac.compare_digest(key_hash(self.session, slot, group, name, other, keyed), named[other]):
                raise VerificationError(
                    f"the {group} pair secret between {name} and {other} in the proof of sum {told.sum_id}",
                    expected=f"the one that the receipt of {name} names",
                    found=f"a different one from the pair seed of {other}",
                )
        plus, minus = dropped_masks(self.session, slot, group, name, secrets)
        term = Accumulator(self.layout(group), masked)
        term.add_streams(plus, [*minus, self_key(seed, self.session, slot, group, name)])
        return term.to_bytes()

    def _check_committed(self, name: str, group: Group, kind: Kind, seed: bytes) -> None:
        slot = self.told.slot
        committed = self.peers[name].commitment(slot, group, kind)
        if not hmac.compare_digest(commitment(name, slot, group, kind, seed), committed):
            raise self._other(f"the {group} {kind} seed", name, "the one that it committed to")

    def _check_groups(self, what: str, name: str, parts: Mapping[Group, object]) -> None:
        if set(parts) != set(self.told.groups):
            raise VerificationError(
                f"{what} of {name} in the proof of sum {self.told.sum_id}",
                expected=f"of the groups {list(self.told.groups)}",
                found=f"of {sorted(parts)}",
            )

    def _other(self, what: str, name: str, expected: str) -> VerificationError:
        return VerificationError(
            f"{what} of {name} in the proof of sum {self.told.sum_id}", expected=expected, found="another"
        )
