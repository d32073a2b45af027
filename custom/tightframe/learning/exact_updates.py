"""Updates that a silo knows to the last bit as they are summed.

Some methods keep at a silo what they add up at the server (FedDyn's and FedDC's drifts, FedCurv's own part of
a sum). Both must count the same numbers, or their difference grows from round to round. So the silo does
what would happen to its update on the way, the job's norm and the rounding of the encoding, beforehand;
what is left of the way then changes nothing. Such updates are not weighted, and take the 64-bit ring, whose
grid is the same for any number of silos.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from tightframe.learning import model_update
from tightframe.learning.halves import Trained, trained_parameters
from tightframe.learning.model_update import UPDATE
from tightframe.phases import Cohort, Field, ServerState, Setting, Tensors

GRID = 2.0**24
"""Steps of the 64-bit ring's encoding in 1: sums of its multiples are exact in float64 below 2**29."""


def exact_update_fields(setting: Setting) -> tuple[Field, ...]:
    """Return the fields of the model's update and buffers, each silo counting once.

    Raises:
        ValueError: if the job's ``update_norm`` is below what rounding alone can amount to.
    """
    fields = tuple(replace(item, ring=64, weighted=False) for item in model_update.model_fields(setting))
    if setting.update_norm is not None:
        _longest(setting.update_norm, sum(item.size for item in fields if item.name.startswith(UPDATE)))
    return fields


def change_fields(setting: Setting, prefix: str, bound: float) -> tuple[Field, ...]:
    """Return ``prefix + <parameter>``: exact changes of what a silo keeps beside the model, not weighted."""
    return tuple(
        Field(prefix + name, tuple(item.shape), ring=64, bound=bound)
        for name, item in trained_parameters(setting).items()
    )


def on_grid(values: torch.Tensor) -> torch.Tensor:
    """Round values as the 64-bit ring encodes them, float64.

    >>> float(on_grid(torch.tensor(2.0**-24 * 2.25))) * 2**24
    2.0
    """
    return (values.double() * GRID).round() / GRID


def as_summed(terms: Tensors, *, norm: float | None, bound: float) -> dict[str, torch.Tensor]:
    """Return a silo's terms with its update as the sum will hold it.

    Args:
        terms: ``learning.model_update.model_terms`` of the silo.
        norm: the job's ``update_norm``: the update is shortened to it, and by as much more as rounding could
            add, so that nobody shortens it again.
        bound: the job's ``update_bound``, within which an update with a norm is shortened, too.

    Returns:
        The same terms; those of the update are float64 and multiples of 2**-24.

    Raises:
        ValueError: if the norm is below what rounding alone can amount to.
    """
    updates = {name: item.double() for name, item in terms.items() if name.startswith(UPDATE)}
    if norm is not None and updates:
        limit = _longest(norm, sum(item.numel() for item in updates.values()))
        length = float(torch.stack([torch.linalg.vector_norm(item) for item in updates.values()]).norm())
        largest = max((float(item.abs().max()) for item in updates.values() if item.numel()), default=0.0)
        inside = max(0.0, bound * (1 - 2.0**-30) - 1 / (2 * GRID))
        factor = min(1.0, limit / length, inside / largest) if length and largest else 1.0
        if factor < 1.0:
            updates = {name: item * factor for name, item in updates.items()}
    return {**terms, **{name: on_grid(item) for name, item in updates.items()}}


def summed_terms(trained: Trained) -> dict[str, torch.Tensor]:
    """Return the update and buffers of a silo that has trained, the update as the sum will hold it."""
    setting = trained.silo.setting
    return as_summed(trained.terms, norm=setting.update_norm, bound=setting.update_bound)


def _longest(norm: float, size: int) -> float:
    """Return the norm to which an update of so many numbers is shortened, so that rounding keeps within."""
    rounding = math.sqrt(size) / (2 * GRID)
    limit = norm * (1 - 2.0**-30) - rounding
    if limit <= 0:
        raise ValueError(
            f"Expected `update_norm` to be above {rounding:.3g}, which rounding of {size} numbers can amount "
            f"to, but got {norm:g}."
        )
    return limit


def silos_ever(known: torch.Tensor, cohort: Cohort) -> torch.Tensor:
    """Return K, all silos ever enrolled: one that is lost for good keeps its place, as its term stays.

    Args:
        known: K as the server kept it, int64.
        cohort: of an opened sum.

    Raises:
        ValueError: if the cohort does not tell how many silos are enrolled.
    """
    if cohort.enrolled < cohort.size:
        raise ValueError(
            f"Expected `cohort.enrolled` to be at least the {cohort.size} silos of the sum, but got "
            f"{cohort.enrolled}."
        )
    return torch.tensor(max(int(known), cohort.enrolled), dtype=torch.int64)


def nothing_summed(setting: Setting, kinds: Sequence[str], silos: str) -> dict[str, torch.Tensor]:
    """Return the server's state before any sum: zeros ``kind + <parameter>``, float64, and K = 0.

    Args:
        kinds: beginnings of the names.
        silos: name of K.
    """
    zeros = {
        kind + name: torch.zeros(item.shape, dtype=torch.float64)
        for kind in kinds
        for name, item in trained_parameters(setting).items()
    }
    return {**zeros, silos: torch.zeros((), dtype=torch.int64)}


def mean_of_all(state: ServerState, kind: str, silos: str) -> dict[str, torch.Tensor]:
    """Return the mean over all silos of what is summed as ``kind + <parameter>``, by these names, float32."""
    divisor = max(int(state.extra[silos]), 1)  # nobody has been summed before round 1, so the sum is zero
    return {name: (item / divisor).float() for name, item in state.extra.items() if name.startswith(kind)}
