"""The class rules, by themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tightframe.config.job import parse_job
from tightframe.errors import ContributionError
from tightframe.learning.one_sum import temperature
from tightframe.learning.one_sum.temperature import KNOWN
from tightframe.phases import ADMITTED, Cohort, Contribution, Field, Phase, Schema
from tightframe.rounds.moments import COUNTS as POOLED_COUNTS
from tightframe.rounds.moments import SUMS
from tightframe.rounds.riders import class_rules
from tightframe.rounds.setup import prepare
from tightframe.rounds.sums.revealed import REVEALED

SCHEMA = Schema(
    (
        Field("update/w", (2,), ring=32, bound=1.0),
        Field("sums", (4, 2), static=True, per_class=True),
        Field("counts", (4,), static=True, per_class=True),
        Field("loss", (), static=True),
    )
)


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "update/w": torch.ones(2),
        "sums": torch.arange(1.0, 9.0).view(4, 2),
        "counts": torch.tensor([9.0, 4.0, 0.0, 7.0]),
        "loss": torch.tensor(2.0),
    }


def test_flags_only_where_a_method_has_per_class_fields() -> None:
    assert [item.name for item in class_rules.fields(SCHEMA, 4).fields] == [class_rules.HOLDERS]
    assert class_rules.fields(SCHEMA, 4)[class_rules.HOLDERS].static
    assert not class_rules.fields(Schema(SCHEMA.fields[:1]), 4).fields


def test_nothing_is_offered_before_the_first_sum_and_then_what_three_silos_hold() -> None:
    assert class_rules.offered(None, 4).tolist() == [0, 0, 0, 0]
    assert class_rules.offered(np.array([3.0, 2.0, 0.0, 6.0]), 4).tolist() == [1, 0, 0, 1]


def test_a_silo_withholds_what_is_rare_or_not_offered() -> None:
    counts = torch.tensor([9, 4, 0, 7])
    offer = torch.tensor([True, True, True, False])
    kept = class_rules.withhold(SCHEMA, _tensors(), offer=offer, counts=counts, min_count=5, active=True)
    assert kept["sums"].tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert kept["counts"].tolist() == [9.0, 0.0, 0.0, 0.0]
    assert kept[class_rules.HOLDERS].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert torch.equal(kept["update/w"], torch.ones(2)) and float(kept["loss"]) == 2.0


def test_a_silo_that_keeps_its_prototypes_holds_nothing() -> None:
    everything = torch.ones(4, dtype=torch.bool)
    counts = torch.tensor([9, 4, 0, 7])
    kept = class_rules.withhold(
        SCHEMA, _tensors(), offer=everything, counts=counts, min_count=1, active=False
    )
    assert not kept["sums"].any() and not kept["counts"].any() and not kept[class_rules.HOLDERS].any()


def test_the_server_uses_only_what_was_offered_and_has_three_holders_still() -> None:
    totals = {
        "update/w": np.ones(2),
        "sums": np.arange(1.0, 9.0).reshape(4, 2),
        "counts": np.array([9.0, 4.0, 5.0, 7.0]),
        "loss": np.array(2.0),
        class_rules.HOLDERS: np.array([3.0, 3.0, 2.0, 4.0]),
    }
    used, holders = class_rules.admit(SCHEMA, totals, torch.tensor([1, 0, 1, 1], dtype=torch.uint8))
    assert holders is not None and holders.tolist() == [3, 3, 2, 4]
    assert used["counts"].tolist() == [9.0, 0.0, 0.0, 7.0]
    assert used["sums"][:, 0].tolist() == [1.0, 0.0, 0.0, 7.0]
    assert class_rules.HOLDERS not in used and used["loss"] == 2.0


def test_without_the_static_group_the_rest_passes() -> None:
    used, holders = class_rules.admit(SCHEMA, {"update/w": np.ones(2)}, torch.zeros(4, dtype=torch.uint8))
    assert holders is None and list(used) == ["update/w"]


@pytest.mark.parametrize("offer", [None, torch.ones(4), torch.ones(3, dtype=torch.uint8)])
def test_a_broadcast_without_a_proper_offer_is_refused(offer: torch.Tensor | None) -> None:
    received = {} if offer is None else {class_rules.OFFERED: offer}
    with pytest.raises(ContributionError, match="TF-403"):
        class_rules.received_offer(received, 4)


def test_a_failed_silos_counts_are_under_the_rules_only_where_the_job_has_them() -> None:
    counts = torch.tensor([9, 4, 0, 7])
    silo: Any = SimpleNamespace(
        class_counts=lambda fold, distinct=False: counts,
        held_counts=lambda: counts,
        enough_of_class=lambda: torch.ones(4, dtype=torch.bool),
        min_class_count=5,
        offers_prototypes=True,
        setting=SimpleNamespace(findings=False),
    )
    off = class_rules.own_classes(silo, SCHEMA, {})
    assert off["counts"].tolist() == [9, 4, 0, 7], "as an honest term has them"
    on = class_rules.own_classes(silo, SCHEMA, {class_rules.OFFERED: torch.ones(4, dtype=torch.uint8)})
    assert on["counts"].tolist() == [9, 0, 0, 7]


@pytest.mark.parametrize(
    ("names", "expected"),
    [([POOLED_COUNTS], 9), (["moments/counts", "moments/rows"], 9), (["prototype/counts"], 18)],
    ids=str,
)
def test_a_failed_silos_counts_have_repeated_records_as_its_own_term_would_have_them(
    names: list[str], expected: int
) -> None:
    """The difference of both totals was how many one hospital repeats."""
    silo: Any = SimpleNamespace(
        class_counts=lambda fold, distinct=False: torch.tensor([9 if distinct else 18]),
        held_counts=lambda: torch.tensor([9]),
        offers_prototypes=True,
        setting=SimpleNamespace(findings=False),
    )
    schema = Schema(tuple(Field(name, (1,), static=True, per_class=True) for name in names))
    own = class_rules.own_classes(silo, schema, {})
    assert [own[name].tolist() for name in names] == [[expected]] * len(names)


def test_a_failed_silos_counts_of_findings_are_those_of_both_kinds_of_records() -> None:
    counts = torch.tensor([[9, 30], [35, 4]])
    silo: Any = SimpleNamespace(
        class_counts=lambda fold, distinct=False: counts[:, 0],
        finding_counts=lambda: counts,
        held_counts=lambda: counts.amin(1),
        enough_of_class=lambda: torch.ones(2, dtype=torch.bool),
        min_class_count=5,
        offers_prototypes=True,
        setting=SimpleNamespace(findings=True),
    )
    schema = Schema((Field("counts", (2, 2), static=True, per_class=True),))
    offer = {class_rules.OFFERED: torch.ones(2, dtype=torch.uint8)}
    assert class_rules.own_classes(silo, schema, {})["counts"].tolist() == counts.tolist()
    assert class_rules.own_classes(silo, schema, offer)["counts"].tolist() == [[9, 30], [0, 0]]


@pytest.mark.parametrize(
    ("received", "classes"),
    [
        ({}, [True, True, True]),
        ({class_rules.OFFERED: [1, 0, 1]}, [True, False, True]),
        ({class_rules.OFFERED: [1, 0, 1], "total/frozen/counts": [1, 1, 0]}, [True, False, False]),
        ({class_rules.OFFERED: [0, 0, 0]}, None),
    ],
    ids=["no rules", "offered", "withdrawal", "none"],
)
def test_products_over_classes_are_of_those_offered_and_in_a_withdrawal_of_those_that_stay(
    received: dict[str, list[int]], classes: list[bool] | None
) -> None:
    told = {name: torch.tensor(item, dtype=torch.uint8) for name, item in received.items()}
    of_all = Schema((Field("g", (3,), static=True, products=2),))
    found = {name: item.tolist() for name, item in class_rules.summed_classes(of_all, told, 3).items()}
    assert found == ({} if classes is None else {class_rules.IN_PRODUCTS: classes})
    by_class = Schema((Field("g", (3, 3), static=True, products=2, per_class=True), Field("n", (3,))))
    assert not class_rules.summed_classes(by_class, told, 3), "each class is told by itself"


def test_losses_are_of_the_classes_that_the_head_knows() -> None:
    told = {KNOWN: torch.tensor([1, 0, 1], dtype=torch.uint8)}
    found = class_rules.summed_classes(Schema((temperature.field(),)), told, 3)
    assert {name: item.tolist() for name, item in found.items()} == {
        class_rules.IN_LOSSES: [True, False, True]
    }
    assert {class_rules.IN_LOSSES, class_rules.IN_PRODUCTS, class_rules.IN_MOMENTS} <= set(REVEALED)


@pytest.mark.parametrize(
    ("offer", "active", "admitted"),
    [
        ([1, 1, 1, 0], True, [True, False, False, False]),
        ([1, 1, 1, 0], False, [False] * 4),
        ([0, 0, 0, 0], True, [True, False, False, True]),
        ([0, 0, 0, 0], False, [True, False, False, True]),
    ],
    ids=["offered", "withholds class sums", "no class sums", "no class sums, withheld"],
)
def test_a_sum_over_classes_is_of_those_with_class_sums_or_where_there_are_none_of_all(
    offer: list[int], active: bool, admitted: list[bool]
) -> None:
    """What a silo adds to such a sum and not to sums by class would be the difference of both."""
    silo: Any = SimpleNamespace(
        held_counts=lambda: torch.tensor([9, 4, 0, 7]),
        enough_of_class=lambda: torch.ones(4, dtype=torch.bool),
        min_class_count=5,
        offers_prototypes=active,
    )
    received = list[torch.Tensor]()

    def contribute(silo: Any, broadcast: Any, state: Any) -> Contribution:
        received.append(broadcast[ADMITTED])
        return Contribution({SUMS: torch.ones(2)})

    schema = Schema((Field(SUMS, (2,), static=True, over_classes=True),))
    phase = class_rules.attach(
        Phase("moments", schema, lambda state: {}, contribute, lambda state, totals, cohort: state), 4
    )
    offered = {class_rules.OFFERED: torch.tensor(offer, dtype=torch.uint8)}
    term = phase.contribute(silo, offered, {}).tensors
    assert received[0].tolist() == admitted
    assert term[class_rules.HOLDERS].tolist() == [1.0 * active, 0, 0, 1.0 * active]
    named = [bool(any(offer)) is False or bool(item) for item in offer]
    assert class_rules.summed_classes(phase.schema, offered, 4)[class_rules.IN_MOMENTS].tolist() == named


@pytest.mark.parametrize(("method", "warned"), [("fedavg", False), ("fedmr", True)])
def test_a_job_is_warned_of_missing_class_sums_only_if_it_has_any(method: str, warned: bool) -> None:
    model = {"model": "mlp", "model_options": {"widths": [4], "standardise": True}}
    names = ["a", "b", "c"]
    values = {"job_name": "j", "dataset": "fed_heart_disease", "sites": names, "min_sites": 3, "rounds": 1}
    setup = prepare(parse_job({**values, **model, "method": method}))
    first = next(iter(setup.plan))
    totals = {item.name: np.zeros(item.shape) for item in first.phase.schema.fields}
    cohort = Cohort(0, dict.fromkeys(names, 1.0), 1.0)
    warnings = first.phase.read(setup.initial_state(), totals, cohort).warnings
    assert [("class sums are never used" in item) for item in warnings] == [True] * warned
