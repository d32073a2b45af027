"""The state of a run, which each silo computes by itself: at the start from the job, then from totals.

What follows from a sum (``plan.Exchange.advance``) is a pure function of (state, totals, cohort), so the
server sends totals, and no model. Both sides name a state by its SHA-256: a term states which one it rests
on.

Between machines with other processors the last bits may differ (matrix products, exponentials). Then a silo
takes over the server's state, if it is as close to its own as two machines can be.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError

from tightframe.errors import JobError, RunError
from tightframe.models.pretrained import InitialWeights, load_weights
from tightframe.phases import ServerState
from tightframe.rounds.checkpoint import EXTRA, MODEL, flattened, tensor_bytes

if TYPE_CHECKING:
    from tightframe.rounds.setup import JobSetup

RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""Largest difference between two machines' results of one update: relative to a tensor's largest value, and
absolute."""


def check_start(setup: JobSetup, path: str | None) -> None:
    """Refuse to begin a job whose named model is not the server's file.

    Args:
        path: of the safetensors file that the server's configuration names; None if it names none.

    Raises:
        RunError: TF-505 if it is missing, or another model.
        SiteConfigError, JobError: see ``start_state``.
    """
    from tightframe.models.pretrained import read_weights

    job = setup.job
    if job.continues is None and (path is not None or job.initial_model_sha256 is not None):
        start_state(setup, None if path is None else read_weights(path))


def start_state(setup: JobSetup, weights: bytes | None) -> tuple[ServerState, InitialWeights | None]:
    """Return the state before the first exchange: from the job's seed, and from the weights that it names.

    Args:
        weights: content of the safetensors file of a pretrained start; None if there is none.

    Returns:
        The state, and the tensors that came from the file; None without a file.

    Raises:
        RunError: TF-505 if these are not the weights that the job names.
        SiteConfigError, JobError: see ``load_weights``.
    """
    wanted = setup.job.initial_model_sha256
    digest = None if weights is None else hashlib.sha256(weights).hexdigest()
    what = "pretrained start" if setup.job.evaluate_only is None else "model to evaluate"
    if digest != wanted:
        raise RunError(
            f"Expected {_model(wanted, what)}, but got {_model(digest, what)}: the job names it for all "
            "silos in `initial_model_sha256`. Name its file in the server's site configuration: "
            '{"server": {"initial_model": "/path/to/model.safetensors"}}.',
            code="TF-505",
        )
    state = setup.initial_state()
    if weights is None:
        return state, None
    if setup.method.own_model is not None:
        raise RunError(
            f"Expected no pretrained start with {setup.method.name}, which has no global model: remove "
            "`initial_model` from the server's site configuration, and `initial_model_sha256` from the job.",
            code="TF-505",
        )
    model = setup.setting.build_model()
    model.load_state_dict(dict(state.model))
    private = setup.job.privacy is not None and setup.job.evaluate_only is None
    loaded = load_weights(model, weights, "of the pretrained start", private=private)
    if loaded.fresh and setup.job.evaluate_only is not None:
        raise JobError(
            [
                f"evaluate_only: Expected a model for the {setup.dataset.num_classes} classes of "
                f"{setup.dataset.title}, but the head of the file has another number"
            ]
        )
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    return state.evolve(model=tensors), loaded


def state_bytes(state: ServerState) -> bytes:
    """Return a state as canonical safetensors bytes."""
    return tensor_bytes(flattened(state))


def state_sha256(state: ServerState) -> str:
    """Return the SHA-256 (hex) of a state, by which both sides name it."""
    return hashlib.sha256(state_bytes(state)).hexdigest()


def read_state(data: bytes) -> ServerState:
    """Read a state from its bytes.

    Raises:
        RunError: TF-604 if they are not a state.
    """
    try:
        flat = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise RunError(
            f"Expected the state of a run as safetensors, but got {type(error).__name__}.", code="TF-604"
        ) from None
    parts: dict[str, dict[str, torch.Tensor]] = {MODEL: {}, EXTRA: {}}
    for name, value in flat.items():
        part = next((prefix for prefix in parts if name.startswith(prefix)), None)
        if part is None:
            raise RunError(
                "Expected the state of a run, but it has tensors that are neither of its model nor of the "
                "method.",
                code="TF-604",
            )
        parts[part][name.removeprefix(part)] = value
    return ServerState(parts[MODEL], parts[EXTRA])


def differences(own: ServerState, other: ServerState) -> list[str]:
    """List the tensors in which two machines' results of one update differ by more than rounding explains."""
    one, two = flattened(own), flattened(other)
    problems = [f"{name} is missing" for name in sorted(set(one) ^ set(two))]
    for name in sorted(set(one) & set(two)):
        first, second = one[name].detach().cpu(), two[name].detach().cpu()
        if first.shape != second.shape or first.dtype != second.dtype:
            problems.append(f"{name} has another shape or type")
        elif not _close(first, second):
            problems.append(f"{name} has other values")
    return problems


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    if torch.equal(first, second):
        return True
    if not first.is_floating_point():
        return False
    one, two = first.double(), second.double()
    if not bool((torch.isfinite(one) & torch.isfinite(two)).all()):
        return False  # any value would be close to an infinite one of this silo
    largest = float(one.abs().max())
    return float((one - two).abs().max()) <= RELATIVE * largest + ABSOLUTE


def _model(sha256: str | None, what: str) -> str:
    return f"no {what}" if sha256 is None else f"a {what} with SHA-256 {sha256}"
