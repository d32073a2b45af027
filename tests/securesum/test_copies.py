"""How often large terms are copied, and that what saves a copy or a product changes no byte."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from tests.securesum.test_combinations import CHALLENGE
from tests.support.securesum.protocol import BASIS, World, names

from tightframe.securesum import reading
from tightframe.securesum.errors import MessageError
from tightframe.securesum.masks import Accumulator, Layout
from tightframe.securesum.messages import FieldSpec, Masked, TermRequest
from tightframe.securesum.proofs import combinations
from tightframe.securesum.site import mask
from tightframe.securesum.site.totals import KeptTerm

SIZE = 500_000


def vectors_at_peak(work: Callable[[], Any], size: int) -> float:
    """What ``work`` allocates at its peak, in vectors of ``size`` 32-bit numbers."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / (4 * size)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, 255, 256, 2**16 - 1, 2**16, 2**16 + 1, 200_000])
def test_messages_are_packed_as_msgpack_does(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    value: dict[str, Any] = {"a": {"b": data, "c": {}}, "d": data, "e": [data, None], "f": 1.5, "g": "text"}
    assert reading.pack(value) == msgpack.packb(value, use_bin_type=True)


def test_a_message_is_one_copy_of_its_term() -> None:
    value = {"update": bytes(4 * SIZE), "groups": {"update": b""}}
    assert vectors_at_peak(lambda: reading.pack(value), SIZE) < 1.1


def masking(slots: int) -> tuple[float, Any, bytes]:
    """Peak of masking one large term in the last slot; the step, and the term."""
    fields = (FieldSpec("weight", (SIZE,), 32, 8, 1.0, "update"),)
    world = World(3, schemas={"train": fields, "seal": ()}, slots=slots)
    world.set_up()
    for slot in range(slots - 1):
        world.run(slot)
    site = world.sites[names(3)[0]]
    parsed = TermRequest.from_bytes(world.request(site.name, world.start(slots - 1)))
    term, steps = world.term(site.name), list[Any]()

    def work() -> None:
        state, history = site.state, site.history
        values: dict[str, Any] = {"basis": BASIS, "follows": True, "term": term, "kept": site.kept.get}
        steps.append(mask(state, parsed, fields=fields, history=history, **values))

    return vectors_at_peak(work, SIZE), steps[0], term["update"]


@pytest.fixture(scope="module")
def masked() -> tuple[float, Masked, KeptTerm, bytes]:
    """Peak of masking one large term; its message, what its site keeps, and the term."""
    peak, step, term = masking(1)
    return peak, step.reply, KeptTerm.from_bytes(step.kept["term-0"]), term


def test_masking_takes_two_vectors(masked: tuple[float, Masked, KeptTerm, bytes]) -> None:
    """The message and what the site keeps; its accumulator is gone before the second is made."""
    peak, *_ = masked
    assert 2 <= peak < 2.1


def test_a_term_is_combined_before_the_next_is_masked() -> None:
    """The total and the term in it are gone when the masked term and what the site keeps are made."""
    peak, step, _ = masking(2)
    assert 2 <= peak < 2.1
    assert step.reply.receipt.combinations


def test_what_a_site_keeps_are_the_masked_integers_and_all_their_keys(
    masked: tuple[float, Masked, KeptTerm, bytes],
) -> None:
    _, reply, kept, term = masked
    assert kept.integers["update"] == reply.update
    stream = Accumulator(Layout(((32, SIZE),)), reply.update)
    # The first site of the roster added all of its streams.
    stream.add_streams([], [kept.own_keys["update"], *kept.keys["update"].values()])
    assert stream.to_bytes() == term


@pytest.mark.parametrize("change", [lambda raw: raw + b"0", lambda raw: raw[:-1]])
def test_a_kept_term_of_another_length_is_refused(change: Callable[[bytes], bytes]) -> None:
    raw = KeptTerm({"update": b"abcd", "static": b""}, {}, {}).to_bytes()
    assert KeptTerm.from_bytes(raw).integers == {"update": b"abcd", "static": b""}
    with pytest.raises(MessageError):
        KeptTerm.from_bytes(change(raw))


@pytest.mark.parametrize("runs", [((32, 20_000),), ((64, 9_000),), ((32, 70), (64, 9), (32, 3))])
def test_combinations_of_several_terms_are_those_of_each(runs: tuple[tuple[int, int], ...]) -> None:
    layout = Layout(runs)
    terms = [np.random.default_rng(seed).bytes(layout.nbytes) for seed in range(3)]
    each = [combinations.combine(CHALLENGE, "update", layout, term) for term in terms]
    assert combinations.combine_all(CHALLENGE, "update", layout, terms) == each
    with pytest.raises(MessageError):
        combinations.combine_all(CHALLENGE, "update", layout, [terms[0], terms[1][:-1]])


def test_a_total_and_a_term_are_multiplied_in_pieces_that_blas_does_in_one_thread() -> None:
    most = combinations._TOGETHER * 2 * combinations._WIDTH * combinations._ROWS
    assert most <= 2**18 and (combinations._WIDTH + combinations.COUNT) % combinations._TOGETHER == 0


def test_a_spool_that_fails_leaves_the_total_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The static group is kept second; nothing of the term may be in the total then."""
    world = World(3, slots=1)
    world.set_up()
    total, (one, *others) = world.start(0), names(3)
    keep = world.spool.keep

    def full(slot: int, site: str, group: Any, data: bytes) -> None:
        if group == "static":
            raise OSError(28, "No space left on device")
        keep(slot, site, group, data)

    world.contribute(total, [one])
    before = total._totals["update"].to_bytes()
    monkeypatch.setattr(world.spool, "keep", full)
    with pytest.raises(OSError, match="No space"):
        world.contribute(total, others[:1])
    assert total._totals["update"].to_bytes() == before
    assert [item.name for item in total.receipts] == [one]
