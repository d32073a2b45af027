"""A network that a caller hands over as a module, in place of a registered backbone's name.

It starts from its own values. With ``features(x) -> (B, d)``, ``head`` and ``forward(x) = head(features(x))``
it is a network like any other; one that returns logits only works where a method asks for no more.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tightframe.errors import JobError
from tightframe.models.base import BackboneSpec, Options
from tightframe.models.heads import feature_width, gives_features

PROTOCOL = "`features(x) -> (B, d)` and a module `head`, with forward(x) = head(features(x))"
"""Parts that a network for any method has."""
TO_CPU = "call `.to('cpu')` first: each silo takes its copy to its own device"


def from_module(module: nn.Module, name: str) -> BackboneSpec:
    """Make a backbone of a module, whose values are copied now and are the start of a run.

    Args:
        module: returns logits (B, C) of inputs (B, ...); it is left as it is.
        name: of the backbone in the job.

    Raises:
        JobError: TF-101, listing what cannot be summed: lazy, tied or non-float parameters, none that trains,
            tensors that are not on the CPU, state that is no tensor; or if it cannot be copied.
    """
    problems = _problems(module)
    if problems:
        raise JobError([f"model: {problem}" for problem in problems])
    try:
        start = copy.deepcopy(module)
    except Exception as error:  # whatever the module's own attributes raise
        raise JobError([f"model: Expected a module that can be copied, but got {error!r}"]) from None
    for parameter in start.parameters():
        parameter.grad = None
    return BackboneSpec(
        name=name,
        title=f"{type(module).__name__}, handed over as an object of the process",
        options=Options,
        build=lambda options, input_shape, num_classes: copy.deepcopy(start),
        logits_only=not gives_features(module),
    )


def check_output(module: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Refuse a module whose output does not fit the records, by one pass over two records of zeros.

    Args:
        module: a copy that may be used up.

    Raises:
        JobError: TF-101.
    """
    inputs = torch.zeros(2, *input_shape)
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = module(inputs)
            features = module.features(inputs) if gives_features(module) else None  # type: ignore[operator]
            again = output if features is None else module.head(features)  # type: ignore[operator]
    except Exception as error:  # whatever the module's own code raises
        raise JobError(
            [f"model: Expected it to take inputs of shape (B, {_sizes(input_shape)}), but got {error!r}"]
        ) from None
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if shape != (2, num_classes) or not output.is_floating_point():
        raise JobError(
            [f"model: Expected logits of shape (2, {num_classes}) of two records, but got {shape}"]
        )
    if features is None:
        return
    try:
        width = feature_width(module)
    except TypeError as error:
        raise JobError([f"model: {error}"]) from None
    fits = isinstance(features, torch.Tensor) and tuple(features.shape) == (2, width)
    if not fits or not torch.allclose(output, again, equal_nan=True):
        raise JobError(
            [
                f"model: {type(module).__name__} has `features` and `head`, but not as "
                f"Expected: {PROTOCOL}, d = {width}. If they mean"
                " something else, wrap it in a module without them"
            ]
        )


def _problems(module: nn.Module) -> list[str]:
    """List what of a module's state cannot be summed."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers())
    if lazy := [name for name, item in {**parameters, **buffers}.items() if is_lazy(item)]:
        return [f"{_listed(lazy)} is lazy: Expected known shapes; call it on a batch first"]
    problems = []
    if not any(item.requires_grad for item in parameters.values()):
        problems.append("Expected a parameter that trains (`requires_grad`), but there is none")
    if wrong := [
        f"{name} ({item.dtype})" for name, item in parameters.items() if item.dtype != torch.float32
    ]:
        problems.append(
            f"Expected parameters of torch.float32, but got {_listed(wrong)}: call `.float()` first"
        )
    away = [
        f"{name} ({item.device})"
        for name, item in {**parameters, **buffers}.items()
        if item.device.type != "cpu"
    ]
    if away:
        problems.append(f"Expected all tensors on the CPU, but got {_listed(away)}: {TO_CPU}")
    state = module.state_dict(keep_vars=True)
    if odd := [name for name, item in state.items() if not isinstance(item, torch.Tensor)]:
        problems.append(f"Expected a state of tensors alone, but got {_listed(odd)} (`get_extra_state`)")
    first: dict[int, str] = {}
    for name, item in state.items():
        if isinstance(item, torch.Tensor) and (other := first.setdefault(id(item), name)) != name:
            problems.append(
                f"{name} and {other} are one tensor (tied): Expected each name to have its own, because "
                "a sum moves each by itself; untie them, or let one name hold the tensor for both"
            )
    return problems


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _sizes(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
