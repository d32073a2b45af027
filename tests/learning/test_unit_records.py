"""Rows and columns of dense layers that few records move, in training and in gradients."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tightframe.errors import TrainingError
from tightframe.learning.few_records.unit_records import UnitRecords
from tightframe.learning.few_records.unit_sides import UnitSides
from tightframe.models.geometry_heads import NormalisedPrototypeHead
from tightframe.models.heads import Classifier, SingleLogit


def moved(sizes: list[list[float]], *, records: int | None = None, least: int = 3, **more: Any) -> list[bool]:
    """Return of which units few records move the rows, given each record's slope at each unit."""
    slopes = torch.tensor(sizes)
    layer = nn.Linear(2, slopes.shape[-1])
    with UnitRecords(layer, len(slopes) if records is None else records, least=least, **more) as units:
        torch.autograd.grad((layer(torch.ones(*slopes.shape[:-1], 2)) * slopes).sum(), layer.weight)
    few = units.few()
    assert bool((few["weight"] == few["bias"][:, None]).all())
    return few["bias"].tolist()


def cleared(model: nn.Module, rows: torch.Tensor, least: int) -> dict[str, torch.Tensor]:
    """Return a silo's gradients without what few of its records move; their slopes differ."""
    model.zero_grad()
    with UnitRecords(model, len(rows), least=least) as units:
        model(rows).sin().sum().backward()
    gradients = {name: item.grad.clone() for name, item in model.named_parameters()}
    units.clear(gradients)
    return gradients


def test_units_that_one_record_alone_or_mostly_moves_are_few_and_those_that_none_moves_are_not() -> None:
    all_alike, one, mostly_one, none = [1.0] * 8, [1.0, *[0.0] * 7], [1.0, *[0.05] * 7], [0.0] * 8
    each = torch.tensor([all_alike, one, mostly_one, none]).T.tolist()
    assert moved(each) == [False, True, True, False]


def test_of_sums_of_squares_squares_count() -> None:
    """(1 + ... + 9)^2 < 3 (1 + ... + 81), while (1 + ... + 3)^2 > 3 (1 + ... + 9)."""
    mostly, none = [[1.0, 0.0]] * 4 + [[3.0, 0.0]], [False, False]
    assert moved(mostly, least=3) == none and moved(mostly, least=3, squared=True) == [True, False]
    layer = nn.Linear(2, 1)  # a column's are of slope and input
    with UnitRecords(nn.Sequential(nn.Linear(2, 2), layer), 5, least=3, squared=True) as units:
        rows = torch.tensor([[1.0, 1.0]] * 4 + [[1.0, 3.0]]).requires_grad_()
        layer(rows).sum().backward()
    assert units.few()["1.weight"].tolist() == [[False, True]]


def test_a_record_that_is_drawn_often_or_repeated_is_one() -> None:
    alone = [[1.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    assert moved(alone * 5) == [False, False]
    assert moved(alone * 5, records=4) == [True, False], "five epochs"
    assert moved(alone * 5, repeats=5) == [True, False]
    assert moved(alone, records=40) == [True, False], "of few drawn each counts once"


def test_records_with_hardly_a_loss_are_behind_no_row_of_a_head() -> None:
    for rest, few in ((0.03, False), (0.003, True), (0.0, True)):
        each = [[1.0, 1.0]] * 3 + [[rest, 1.0]] * 5
        assert moved(each, part=0.5, each=0.25) == [few, False]
        assert moved(each, part=0.375, each=0.25) == [False, False]
        assert moved(each, part=0.5, each=0.1) == [False, False], "on two inputs"
    assert moved([[0.0]] * 8, part=0.5, each=0.25) == [False], "it stays anyway"


@pytest.mark.parametrize("told", [False, True])
def test_copies_of_a_record_are_behind_a_layer_as_one(told: bool) -> None:
    """Two of six records, which a job repeats until they are half, alone have a loss."""
    layer, slopes = nn.Linear(2, 1), torch.tensor([1.0] * 4 + [0.0] * 4)[:, None]
    copies = np.array([2] * 4 + [1] * 4)
    with UnitRecords(layer, 8, least=1, part=0.5) as units:
        units.next_batch(copies, 8, copies if told else None)
        (layer(torch.ones(8, 2)) * slopes).sum().backward()
    assert bool(units.few()["weight"].all()) == told


def test_nor_behind_a_layer_with_another_after_it() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    for rest, few in ((0.05, False), (1e-4, True)):
        with UnitRecords(model, 8, least=1, part=0.5) as units:
            slopes = torch.tensor([[1.0]] * 3 + [[rest]] * 5)
            (model(torch.ones(8, 1)) * slopes).sum().backward()
        assert {bool(item.all()) for item in units.few().values()} == {few}
        assert units.unbacked() == (["0", "1"] if few else [])


def alike(model: nn.Module, rows: torch.Tensor, batch: int = 64, records: int | None = None) -> str:
    """Return the error of gradients of these records; "" if there is none."""
    with UnitRecords(model, len(rows) if records is None else records, least=5) as units:
        for part in rows.split(batch):
            units.next_batch(np.full(len(part), 2), len(rows))
            model(part).sum().backward()
    try:
        units.put_back()
    except TrainingError as error:
        return f"{error.code} {error}"
    return ""


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_features_that_are_alike_for_all_but_few_records_are_refused(batch: int) -> None:
    """Also those that are not zero: of units that are off, and of the next layer's biases."""
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(-9.0)
        model[2].bias.fill_(0.5)
    rows = torch.linspace(0, 8, 40)[:, None]
    assert "10 or more of 39 steps from a drawn record to the next, but they differ in 0." in alike(
        model, rows, batch
    )
    rows[[3, 9], 0] = 12.0  # two records are four differences
    assert "differ in 4." in alike(model, rows, batch)
    rows[12, 0] = 13.0
    assert (
        "differ in 20 or more of 79 steps from a drawn record to the next, but they differ in 12."
        in alike(model, rows.repeat(2, 1), batch, 40)
    ), "two epochs tell no more"
    rows[14, 0] = 13.0
    assert "differ in 8." in alike(model, rows, batch)
    rows[16, 0] = 14.0
    assert not alike(model, rows, batch)
    assert not alike(model, rows[8:14], batch), "of six records half are enough"


def test_a_unit_that_few_records_do_not_fire_stays_as_one_does_that_few_fire() -> None:
    """Its row and one's that all fire differ by these records."""
    model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.copy_(torch.tensor([9.0, -1.5, -2.5, -3.5]))  # fired by four, three, two and one
        model[2].weight.fill_(1.0)
    rows, told = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), []
    for weights in (torch.ones(4, 1), torch.tensor([[0.0], [1.0], [1.0], [1.0]])):
        with UnitRecords(model, 4, least=2) as units:
            (model(rows) * weights).sum().backward()
        told.append(units.few()["0.bias"].tolist())
    assert told == [[False, True, False, True], [False, False, True, True]], (
        "one without a slope is not there"
    )


def test_of_two_units_that_few_records_tell_apart_one_stays() -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[-1.0], [-1.0], [1.0]]))
        model[0].bias.copy_(torch.tensor([3.5, 4.5, -3.5]))  # fired by 1 to 3, 1 to 4, and 4 to 6
        model[2].weight.fill_(1.0)
    for least, alike in ((2, [False, True, False]), (1, None)):
        with UnitRecords(model, 6, least=least) as units:
            model(torch.arange(1.0, 7.0)[:, None]).sum().backward()
        few = units.few()
        assert alike == (few["0.bias"].tolist() if least > 1 else None)
        assert least == 1 or few["2.weight"].tolist() == [alike]


def test_of_two_units_that_one_record_mostly_tells_apart_one_stays() -> None:
    """As of a model that has learnt most records and not that one."""
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model[0].bias.copy_(torch.tensor([0.0, 6.5]))  # fired by all, and by half of them
        model[2].weight.fill_(1.0)
    rows, told = torch.arange(1.0, 13.0)[:, None], []
    for others in (1.0, 1e-3):
        weights = torch.ones(12, 1)
        weights[6:11] = others
        with UnitRecords(model, 12, least=5) as units:
            (model(rows) * weights).sum().backward()
        told.append(units.few()["0.bias"].tolist())
    assert told == [[False, False], [False, True]]


def test_neighbours_of_a_ladder_of_units_tell_no_record_between_them() -> None:
    """As by a hospital that steers the model: 19 to 21 of 216 records were between two of 72 units alone."""
    stream = torch.Generator().manual_seed(0)
    rows, along = (
        torch.randn(3, 72, 13, generator=stream).double(),
        torch.randn(13, generator=stream).double(),
    )
    steps = torch.quantile((rows @ along).flatten(), torch.rand(48, generator=stream).double())
    model = nn.Sequential(nn.Linear(13, 48), nn.ReLU(), nn.Linear(48, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(along.expand(48, 13))
        model[0].bias.copy_(-steps)
        model[2].weight.fill_(1.0)
    found = []
    for least in (0, 5):
        total = torch.zeros(48, 14).double()
        for own in rows:
            gradients = cleared(model, own, least)
            total += torch.cat([gradients["0.weight"], gradients["0.bias"][:, None]], 1)
        one, other = torch.triu_indices(48, 48, 1)
        apart = total[one] - total[other]
        apart = apart[apart[:, -1].abs() > 1e-9]
        near = torch.cdist(apart[:, :-1] / apart[:, -1:], rows.flatten(0, 1)).amin(0)
        found.append(int((near < 1e-3).sum()))
    assert found[0] >= 5 and not found[1]


def test_columns_of_units_on_two_numbers_tell_no_record_between_their_borders() -> None:
    """Between three borders in a row a combination of the units' columns is not zero, elsewhere it is."""
    stream = torch.Generator().manual_seed(0)
    silos = torch.rand(3, 16, 2, generator=stream).double()
    model = nn.Sequential(nn.Linear(2, 72), nn.ReLU(), nn.Linear(72, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(72, 2, generator=stream))
        model[0].bias.zero_()
        model[2].weight.fill_(1.0)
        model[2].bias.zero_()
    weight = model[0].weight.detach()
    borders = torch.atan2(-weight[:, 0], weight[:, 1]) % torch.pi
    borders = borders[borders < torch.pi / 2].sort().values
    grid = torch.cat([torch.linspace(0, torch.pi / 2, 500), borders]).double()
    made = torch.relu(torch.stack([grid.cos(), grid.sin()], 1) @ weight.T)
    rows = silos.flatten(0, 1)
    places, found = torch.atan2(rows[:, 1], rows[:, 0]), []
    for least in (0, 5):
        total = torch.zeros(72).double()
        for own in silos:
            gradients = cleared(model, own, least)
            total += gradients["2.weight"][0]
        told = 0
        for low, high in zip(borders[:-2], borders[2:], strict=True):
            outside, alone = (grid <= low + 1e-9) | (grid >= high - 1e-9), (places > low) & (places < high)
            sizes, vectors = torch.linalg.eigh(made[outside].T @ made[outside])
            none = vectors[:, sizes < 1e-13 * sizes[-1]]
            between = none @ torch.linalg.svd(made[~outside] @ none, full_matrices=False)[2][0]
            own = torch.relu(rows[alone] @ weight.T)
            term = own.sum(1).cos() * (own @ between)
            told += len(term) == 1 and bool((total @ between - term).abs() < 0.01 * term.abs())
        found.append(told)
    assert found == [8, 0]


def test_few_are_on_no_side_of_a_layers_units_alone_nor_of_a_later_ones() -> None:
    """A patient's three records are one."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(inplace=True), nn.Linear(1, 1), nn.ReLU())
    with torch.no_grad():
        for place, (weight, bias) in {0: (1.0, -1.0), 2: (1.0, 0.5)}.items():
            model[place].weight.fill_(weight)
            model[place].bias.fill_(bias)
        rows = torch.tensor([[0.0], [0.2], [0.4], [2.0], [4.0], [4.0]])
        one, two = torch.zeros(6, dtype=torch.int64), torch.tensor([0, 0, 0, 0, 1, 1])
        for times, labels, found in (
            (torch.ones(6), one, model(rows)),
            (torch.tensor([1, 1, 1, 3, 3, 3]), one, rows * 0 + 0.5),
            # Alone of its class the fourth fires the unit, though not of all.
            (torch.ones(6), two, torch.tensor([[0.5], [0.5], [0.5], [0.5], [3.5], [3.5]])),
        ):
            with UnitSides(model, times, labels, least=2) as sides:
                made = torch.cat(list(sides.passes(lambda: rows.split(4), model)))
            assert torch.equal(made, found)
    assert model[1].inplace and not model[1]._forward_hooks


def test_slopes_that_are_no_number_count_as_none_and_tiny_ones_as_they_are() -> None:
    assert moved([[torch.inf, 1e-38], [1.0, 1e-38], [0.0, 1e-38]]) == [True, False]


def test_values_between_record_and_unit_are_one_records() -> None:
    assert moved([[[1.0, 1.0]] * 4, [[0.0, 1.0]] * 4, [[0.0, 1.0]] * 4]) == [True, False]


def test_what_few_move_is_put_back_and_in_gradients_zero_and_a_units_column_in_the_next_layer_too() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.ones(2, 1))
        model[0].bias.copy_(torch.tensor([-3.5, 0.0]))  # the first unit fires for the largest alone
        model[2].weight.fill_(1.0)
    before = {name: item.detach().clone() for name, item in model.named_parameters()}
    with UnitRecords(model, 4, least=2) as units:
        model(torch.tensor([[1.0], [2.0], [3.0], [4.0]])).sum().backward()
    gradients = {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}
    with torch.no_grad():
        for item in model.parameters():
            item -= 0.1 * item.grad  # type: ignore[operator]
    units.put_back()
    units.clear(gradients)
    kept = {
        "0.weight": [[True], [False]],
        "0.bias": [True, False],
        "2.weight": [[True, False]],
        "2.bias": [False],
    }
    for name, item in model.named_parameters():
        assert (item == before[name]).tolist() == kept[name]
        assert (gradients[name] == 0).tolist() == kept[name]


def test_a_convolutions_channels_are_units_and_one_in_groups_has_its_groups_columns() -> None:
    pictures = torch.ones(4, 2, 3, 3, requires_grad=True)
    pictures.data[1:, 1] = 0  # the first record alone has the second channel
    slopes = torch.ones(4, 4, 2, 2)
    slopes[1:, 0] = 0  # and it alone moves the first
    for groups, columns in ((1, [[1, 1], [0, 1], [0, 1], [0, 1]]), (2, [[1], [0], [1], [1]])):
        layer = nn.Conv2d(2, 4, 2, groups=groups)
        with UnitRecords(layer, 4, least=2) as units:
            torch.autograd.grad((layer(pictures) * slopes).sum(), layer.weight)
        few = units.few()
        assert few["weight"].shape == layer.weight.shape
        assert few["weight"].flatten(2).all(2).int().tolist() == columns
        assert few["bias"].tolist() == [True, False, False, False]


@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.LayerNorm(4)])
def test_a_normalisations_channels_are_units(layer: Any) -> None:
    slopes = torch.ones(6, 4, 3, 3)
    slopes[1:, 0] = 0  # the first record alone moves the first channel
    slopes[:, 3] = 0
    values = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    if isinstance(layer, nn.LayerNorm):
        values, slopes = values.movedim(1, -1), slopes.movedim(1, -1)
    with UnitRecords(layer, 6, least=2) as units:
        made = nn.functional.relu(layer(values) + 9, inplace=True)
        found = torch.autograd.grad((made * slopes).sum(), list(layer.parameters()))
    gradients = dict(zip(("weight", "bias"), found, strict=True))
    assert all(gradients["bias"][:3])
    units.clear(gradients)
    for name in ("weight", "bias"):
        assert units.few()[name].tolist() == [True, False, False, False]
        assert not gradients[name][0]
    assert gradients["bias"][1]


@pytest.mark.parametrize("moving", [1, 2])
def test_of_two_logits_that_one_unit_makes_only_its_own_counts(moving: int) -> None:
    head, slopes = SingleLogit(2), torch.tensor([[1.0, 1.0]] * moving + [[1.0, 0.0]] * (4 - moving))
    with UnitRecords(head, 4, least=2) as units:
        (head(torch.ones(4, 2)) * slopes).sum().backward()
    assert units.few()["bias"].tolist() == [moving < 2]


def test_what_is_of_no_records_own_values_is_not_looked_at() -> None:
    layer = nn.Linear(2, 1)
    with UnitRecords(layer, 4, least=2) as units:
        layer(torch.ones(2)).sum().backward()
    assert not units.few()["weight"].any()


def test_what_does_not_train_and_what_follows_is_not_looked_at() -> None:
    model = nn.Sequential(nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1))
    with UnitRecords(model, 1, least=2) as units:
        model(torch.ones(1, 1)).sum().backward()
    assert {name: item.all().item() for name, item in units.few().items()} == {
        "1.weight": True,
        "1.bias": True,
    }
    model(torch.ones(9, 1)).sum().backward()
    assert units.few()["1.bias"].item(), "after the block nothing is counted"


@pytest.mark.parametrize("least", [0, 1])
def test_nothing_is_counted_where_one_record_is_enough(least: int) -> None:
    layer = nn.Linear(1, 1)
    with UnitRecords(layer, 1, least=least) as units:
        layer(torch.ones(1, 1)).sum().backward()
    assert units.few() == {}


def test_a_record_that_an_epochs_batches_have_five_times_is_one() -> None:
    """Batches drawn anew have some records often and others never, and some layers train in some epochs."""
    often = np.array([5, 2, 1, 1, 1])
    slopes = torch.tensor([[1.0, 1], [0, 1], [0, 1], [0, 1], [0, 1]])
    for size, (epochs, told, few) in itertools.product(
        (1, 4, 10), ((1, False, [False, False]), (1, True, [True, False]), (2, True, [True, False]))
    ):
        layer = nn.Linear(1, 2)
        places = np.concatenate([np.repeat(np.arange(5), often)] * epochs)
        with UnitRecords(layer, 10, least=3) as units:
            for batch in np.array_split(places, len(places) / size):
                if told:
                    units.next_batch(often[batch] * epochs, 10 * epochs)
                (layer(torch.ones(len(batch), 1)) * slopes[batch]).sum().backward()
        assert units.few()["bias"].tolist() == few


@pytest.mark.parametrize(
    ("slopes", "alike", "few"),
    [
        ([1.0] * 8, 8, False),
        ([1.0] * 2 + [0.0] * 6, 8, True),  # two records have a loss
        ([1.0] * 8, 2, True),  # two records have features
        ([1.0] * 4 + [1e-4] * 4, 8, False),
    ],
)
@pytest.mark.parametrize("often", [1, 4])
def test_a_temperature_that_few_records_move_stays(
    slopes: list[float], alike: int, few: bool, often: int
) -> None:
    head = NormalisedPrototypeHead(2, 2, init="orthonormal", scale=3.0, learn_scale=True)
    model, rows = Classifier(nn.Identity(), 2, 2, head=head), torch.zeros(8, 2)
    rows[:alike, 0] = 1
    with UnitRecords(model, 8 * often, least=3) as units:
        for _ in range(often):
            units.next_batch(np.full(8, often), 8 * often)
            logits = head(rows)
            (logits * torch.tensor(slopes)[:, None] * torch.tensor([1.0, 0.5])).sum().backward()
    with torch.no_grad():
        head.scale += 1
    units.put_back()
    assert head.scale.item() == (3.0 if few else 4.0)
    gradients = {"head.scale": torch.ones(())}
    units.clear(gradients)
    assert float(gradients["head.scale"]) == (0.0 if few else 1.0)


def test_a_temperature_stays_with_a_layer_that_too_few_records_are_behind() -> None:
    head = NormalisedPrototypeHead(2, 2, init="orthonormal", scale=3.0, learn_scale=True)
    for rest, few in ((0.05, False), (1e-4, True)):
        with UnitRecords(Classifier(nn.Identity(), 2, 2, head=head), 8, least=1, part=0.5) as units:
            slopes = torch.tensor([1.0] * 3 + [rest] * 5)
            (head(torch.ones(8, 2))[:, 0] * slopes).sum().backward()
        assert bool(units.few()["head.scale"]) == few
