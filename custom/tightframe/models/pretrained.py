"""Initial weights from a file: safetensors only, checked tensor by tensor.

Pickle is never read, so that a file of weights cannot run code.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from tightframe.errors import JobError, SiteConfigError
from tightframe.models.frozen import HEAD

STANDARDISE = "standardise."
"""Start of the names of pooled moments, which the model option ``standardise`` brings."""


@dataclass(frozen=True)
class InitialWeights:
    """The result of loading initial weights.

    Attributes:
        sha256: of the file, hex; part of the model card.
        loaded: names of the tensors taken from the file, sorted.
        fresh: names of tensors that kept the model's own values, because the file's head has another number
            of classes.
    """

    sha256: str
    loaded: tuple[str, ...]
    fresh: tuple[str, ...]


def read_weights(path: str | Path) -> bytes:
    """Read a file of weights.

    Raises:
        SiteConfigError: TF-202 if it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(f"at {path}", error) from error


def load_weights(model: nn.Module, content: bytes, where: str, *, private: bool = False) -> InitialWeights:
    """Load the content of a safetensors file into ``model``, strictly.

    The model and the file must have the same tensors, with equal shapes, and both floating point or
    neither. The one exception is a head for another number of classes (every tensor with the prefix
    ``head.`` differs in its first axis only): then the whole head keeps its own initial values, and the
    result lists it. If there is any other difference, nothing is loaded.

    Args:
        model: changed in place.
        where: the weights come from, for messages.
        private: whether they start a job with ``privacy``, whose model cannot standardise.

    Returns:
        The file's SHA-256, and the names of loaded and fresh tensors.

    Raises:
        SiteConfigError: TF-202 if it is not a safetensors file.
        JobError: TF-101 if it does not fit the model, listing every difference.
    """
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise _unreadable(where, error) from error
    state = model.state_dict()
    fresh = _fresh_head(state, tensors)
    own = {name: item for name, item in state.items() if name not in fresh}
    problems = _problems(own, tensors, fresh, private=private)
    if problems:
        raise JobError([f"initial weights {where}: {item}" for item in problems])
    loaded = tuple(sorted(set(state) - fresh))
    with torch.no_grad():
        for name in loaded:
            state[name].copy_(tensors[name])
    return InitialWeights(hashlib.sha256(content).hexdigest(), loaded, tuple(sorted(fresh)))


def _hint(name: str, *, wanted: bool, private: bool) -> str:
    """Name the option of the network that brings a tensor, which is there or missing."""
    if not name.startswith(STANDARDISE):
        return ""
    if private and not wanted:
        return (
            ": a model that standardises cannot start a job with `privacy`; train the start with "
            "--set model_options.standardise=false"
        )
    return f": --set model_options.standardise={'false' if wanted else 'true'}"


def _unreadable(where: str, error: Exception) -> SiteConfigError:
    return SiteConfigError(
        f"Expected initial weights in safetensors format {where}, but reading them failed: {error}. "
        "Write them with safetensors.torch.save_file."
    )


def _fresh_head(state: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> frozenset[str]:
    """Return the names of the head if it differs from the file's in the number of classes only, else none."""
    head = frozenset(name for name in state if name.startswith(HEAD))
    given = frozenset(name for name in tensors if name.startswith(HEAD))
    if head != given or any(state[name].ndim == 0 or tensors[name].ndim == 0 for name in head):
        return frozenset()
    same_widths = all(state[name].shape[1:] == tensors[name].shape[1:] for name in head)
    file_classes = {tensors[name].shape[0] for name in head}
    model_classes = {state[name].shape[0] for name in head}
    consistent = len(file_classes) == 1 and len(model_classes) == 1
    return head if same_widths and consistent and file_classes != model_classes else frozenset()


def _problems(
    state: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    fresh: frozenset[str],
    *,
    private: bool,
) -> list[str]:
    problems = [
        f"Expected a tensor {name!r}, but the file has none (shape {tuple(item.shape)})"
        + _hint(name, wanted=True, private=private)
        for name, item in state.items()
        if name not in tensors
    ]
    for name, tensor in tensors.items():
        if name in fresh:
            continue
        if name not in state:
            hint = _hint(name, wanted=False, private=private)
            problems.append(f"the file's tensor {name!r} is not in the model{hint}")
            continue
        expected = state[name]
        if tensor.shape != expected.shape:
            problems.append(
                f"Expected {name!r} to have shape {tuple(expected.shape)}, but got {tuple(tensor.shape)}"
            )
        elif tensor.is_floating_point() != expected.is_floating_point():
            problems.append(f"Expected {name!r} to be {expected.dtype}, but got {tensor.dtype}")
        elif not bool(torch.isfinite(tensor.to(expected.dtype)).all()):  # a larger type's numbers may not be
            problems.append(f"Expected {name!r} to be finite, but it has NaN or infinite entries")
    return problems
