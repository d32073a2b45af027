"""A head's training alone, against torch's own optimiser."""

from __future__ import annotations

import torch
from torch import nn

from tightframe.learning.losses import fit_head


def test_it_is_sgd_in_a_drawn_order() -> None:
    features, labels = torch.randn(13, 4), torch.tensor([0] * 9 + [1] * 4)
    head, other = nn.Linear(4, 2), nn.Linear(4, 2)
    other.load_state_dict(head.state_dict())
    fit_head(
        head,
        features,
        labels,
        epochs=3,
        learning_rate=0.1,
        momentum=0.9,
        batch_size=5,
        stream=torch.Generator().manual_seed(9),
    )
    stream = torch.Generator().manual_seed(9)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for chosen in torch.randperm(13, generator=stream).split(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(other(features[chosen]), labels[chosen]).backward()
            optimizer.step()
    torch.testing.assert_close(dict(head.state_dict()), dict(other.state_dict()))
    assert not head.training


def test_what_does_not_train_stays() -> None:
    head = nn.Linear(4, 2)
    head.weight.requires_grad_(False)
    before = head.weight.clone()
    bias = head.bias.detach().clone()
    stream = torch.Generator().manual_seed(1)
    options = {"epochs": 2, "learning_rate": 0.5, "momentum": 0.0, "batch_size": 2}
    fit_head(head, torch.randn(4, 4), torch.tensor([0, 1, 1, 1]), **options, stream=stream)  # type: ignore[arg-type]
    assert torch.equal(head.weight, before) and not torch.equal(head.bias.detach(), bias)
