"""Encoding and summing against plain numpy on the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tightframe.errors import ContributionError
from tightframe.phases import Field, Schema
from tightframe.rounds import codec
from tightframe.rounds.codec import unpack
from tightframe.rounds.sums.plain import PlainServer

SCHEMA = Schema(
    (
        Field("update/a", (3, 2), ring=32, bound=8.0, weighted=True),
        Field("counts", (4,), bound=2.0**28, static=True),
        Field("update/b", (), ring=32, bound=8.0, weighted=True),
        Field("buffer", (5,), bound=1e6, weighted=True),
    )
)


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "update/a": torch.randn(3, 2, generator=generator),
        "counts": torch.randint(0, 1000, (4,), generator=generator).double(),
        "update/b": torch.randn((), generator=generator),
        "buffer": 50 * torch.randn(5, generator=generator),
    }


def _sum(shares: list[float], order: list[int]) -> dict[str, np.ndarray]:
    server = PlainServer(SCHEMA)
    for k in order:
        server.add(f"s{k}", codec.encode(SCHEMA, _tensors(k), share=shares[k], parties=len(shares)))
    return dict(codec.decode(SCHEMA, server.open(), parties=len(shares)))


def test_sum_is_the_weighted_sum() -> None:
    shares = [1.0, 0.25, 0.5, 0.125]
    totals = _sum(shares, [0, 1, 2, 3])
    for item in SCHEMA.fields:
        expected = sum(
            _tensors(k)[item.name].double().numpy() * (shares[k] if item.weighted else 1.0) for k in range(4)
        )
        assert totals[item.name].shape == item.shape
        tolerance = 4 * 2.0 ** -(codec.bits_of(item, 4) + 1)
        np.testing.assert_allclose(totals[item.name], expected, rtol=0, atol=tolerance)


def test_order_of_arrival_does_not_change_a_bit() -> None:
    shares = [1.0, 0.3, 0.7]
    first, second = _sum(shares, [0, 1, 2]), _sum(shares, [2, 0, 1])
    for name in first:
        assert first[name].tobytes() == second[name].tobytes()


def test_norm_rescales_the_whole_group_and_never_refuses() -> None:
    schema = Schema(
        (
            *(Field(f"u{i}", (100,), ring=32, norm=1.5, weighted=True) for i in range(2)),
            Field("other", (1,)),
        )
    )
    big = {"u0": torch.full((100,), 1e20), "u1": torch.full((100,), -2e20), "other": torch.tensor([7.0])}
    server = PlainServer(schema)
    server.add("s", codec.encode(schema, big, share=1.0, parties=6))
    totals = codec.decode(schema, server.open(), parties=6)
    joint = np.concatenate([totals["u0"], totals["u1"]])
    assert np.linalg.norm(joint) == pytest.approx(1.5, rel=1e-6)
    np.testing.assert_allclose(totals["u1"], -2 * totals["u0"], rtol=1e-6)
    assert totals["other"][0] == 7.0


def test_norm_leaves_a_short_update_alone() -> None:
    schema = Schema((Field("u", (4,), ring=32, norm=10.0),))
    values = torch.tensor([1.0, -2.0, 0.5, 0.0])
    server = PlainServer(schema)
    server.add("s", codec.encode(schema, {"u": values}, share=1.0, parties=3))
    assert codec.decode(schema, server.open(), parties=3)["u"].tolist() == values.tolist()


@pytest.mark.parametrize("ring", [32, 64])
@pytest.mark.parametrize("norm", [8.0, 32.0, 1e6])
def test_a_norm_that_does_not_bind_changes_no_bit(norm: float, ring: Literal[32, 64]) -> None:
    field = Field("u", (1000,), ring=ring, bound=8.0, weighted=True)
    values = {"u": 0.1 * torch.randn(1000, generator=torch.Generator().manual_seed(1))}
    for parties in (3, 4, 6, 100):
        without, within = (
            codec.encode(Schema((item,)), values, share=0.3, parties=parties)
            for item in (field, replace(field, norm=norm))
        )
        assert within == without
        assert codec.bits_of(replace(field, norm=norm), parties) == codec.bits_of(field, parties)


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=20), st.floats(0.5, 200.0))
def test_with_a_norm_no_finite_value_is_refused_and_the_direction_stays(
    numbers: list[float], norm: float
) -> None:
    schema = Schema((Field("u", (len(numbers),), ring=64, bound=8.0, norm=norm),))
    given = torch.tensor(numbers)
    sent = codec.encode(schema, {"u": given}, share=1.0, parties=3)
    totals = unpack(schema, "update", sent["update"])
    summed = codec.decode(schema, totals, parties=3)["u"]
    exact = given.double().numpy()
    length, largest = np.linalg.norm(exact), np.abs(exact).max()
    factor = min([1.0, norm / length if length else 1.0, 8.0 / largest if largest else 1.0])
    np.testing.assert_allclose(summed, exact * factor, rtol=1e-9, atol=2.0**-25)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("update/a", float("nan"), "TF-401"),
        ("buffer", float("inf"), "TF-401"),
        ("update/b", 8.5, "TF-402"),
        ("buffer", 2e6, "TF-402"),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: float, code: str) -> None:
    tensors = _tensors(0)
    tensors[name] = torch.full(tensors[name].shape, value)
    with pytest.raises(ContributionError, match=rf"^{code}: [\s\S]*{name}"):
        codec.encode(SCHEMA, tensors, share=1.0, parties=4)


def test_undeclared_missing_and_misshapen_fields_are_refused() -> None:
    for change in ({"extra": torch.zeros(1)}, {"counts": torch.zeros(5)}):
        with pytest.raises(ContributionError, match=r"^TF-403: "):
            codec.encode(SCHEMA, _tensors(0) | change, share=1.0, parties=4)
    incomplete = _tensors(0)
    del incomplete["counts"]
    with pytest.raises(ContributionError):
        codec.encode(SCHEMA, incomplete, share=1.0, parties=4)


def test_a_term_of_the_wrong_size_changes_nothing() -> None:
    server = PlainServer(SCHEMA)
    good = codec.encode(SCHEMA, _tensors(0), share=1.0, parties=4)
    server.add("a", good)
    with pytest.raises(ContributionError):
        server.add("b", {"update": good["update"], "static": good["static"][:-8]})
    with pytest.raises(ContributionError, match="second"):
        server.add("a", good)
    alone = PlainServer(SCHEMA)
    alone.add("a", good)
    for name, total in server.open().items():
        np.testing.assert_array_equal(total, alone.open()[name])


def test_unpack_reads_fields_in_schema_order() -> None:
    term = codec.encode(SCHEMA, _tensors(0), share=1.0, parties=4)
    assert list(unpack(SCHEMA, "update", term["update"])) == ["update/a", "update/b", "buffer"]
    assert list(unpack(SCHEMA, "static", term["static"])) == ["counts"]


def test_a_sum_that_could_wrap_is_refused_before_it_starts() -> None:
    with pytest.raises(ContributionError, match=r"^TF-404: "):
        codec.check_schema(Schema((Field("huge", (1,), bound=1e12),)), parties=250)
