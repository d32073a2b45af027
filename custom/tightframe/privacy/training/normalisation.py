"""Changes to a network before DP-SGD, so that its records are not coupled.

BatchNorm normalises a record by the others of its batch, so no gradient of a single record exists; in-place
activations overwrite values that per-sample engines still need. Server and silos must build the same network,
so ``make_private`` is deterministic, draws nothing, and is applied to the template on both sides, after
initial weights were loaded.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from tightframe.models.frozen import FrozenEncoder
from tightframe.privacy.training.per_sample import PrivacyError

Form = Literal["group", "frozen"]

NOT_PRIVATE = "TF-712"
JUDGED = (_BatchNorm, _InstanceNorm, nn.RNNBase, nn.MultiheadAttention)


class FrozenNorm(nn.Module):
    """BatchNorm of fixed statistics: ``(x - running_mean) / sqrt(running_var + eps) * weight + bias``.

    All four are frozen parameters: part of the model, so that they are broadcast and saved with it under
    BatchNorm's own names, but never trained and never sent up.

    Args:
        source: the BatchNorm layer whose statistics and scale are kept.
    """

    def __init__(self, source: _BatchNorm) -> None:
        super().__init__()
        mean, variance = source.running_mean, source.running_var
        assert mean is not None and variance is not None  # noqa: S101  (make_private refuses the others)
        scale = torch.ones_like(mean) if source.weight is None else source.weight
        shift = torch.zeros_like(mean) if source.bias is None else source.bias
        self.eps = source.eps
        self.weight = _frozen(scale)
        self.bias = _frozen(shift)
        self.running_mean = _frozen(mean)
        self.running_var = _frozen(variance)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise activations (B, width, ...)."""
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale.view(shape) + (self.bias - self.running_mean * scale).view(shape)


def _frozen(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(), requires_grad=False)


def make_private(model: nn.Module, form: Form = "group") -> nn.Module:
    """Change ``model`` in place so that its per-sample gradients exist.

    - BatchNorm becomes, for ``group``, GroupNorm of ``gcd(32, channels)`` groups (what Opacus'
      ``ModuleValidator.fix`` makes of it), which keeps the layer's scale, shift, names and whether
      they train; for ``frozen``, a fixed affine map by the layer's running statistics, scale and shift.
      ``frozen`` is for pretrained networks: the statistics of an untrained one normalise nothing.
    - Activations work out of place, and MONAI's EfficientNet uses the plain swish: the backward pass of
      its memory-efficient one fails under per-sample hooks.

    In a model with a frozen encoder only the head is changed: in evaluation mode its records are not coupled,
    and changed layers would give other features.

    Args:
        model: with its initial weights, if any, already loaded.
        form: replacement of BatchNorm.

    Returns:
        The same model. Calling it again changes nothing.

    Raises:
        ValueError: if ``form`` is neither.
        PrivacyError: TF-712 if a remaining layer has no gradients of single records, or would keep statistics
            of records, naming each and the reason.

    >>> model = make_private(nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(inplace=True)))
    >>> type(model[1]).__name__, model[1].num_groups, model[2]
    ('GroupNorm', 8, ReLU())
    """
    if form not in ("group", "frozen"):
        raise ValueError(f"Expected `form` to be 'group' or 'frozen', but got {form!r}.")
    whole = model
    if isinstance(model, FrozenEncoder):
        model = model.get_submodule("head")
    problems = _replace_batch_norm(model, form)
    for module in model.modules():
        if callable(set_swish := getattr(module, "set_swish", None)):
            set_swish(memory_efficient=False)
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    problems += _unsupported(model)
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise PrivacyError(
            "Expected a model in which the gradient of each record depends on that record alone, but\n"
            f"{listed}\nChoose another backbone or another normalisation for training under privacy.",
            code=NOT_PRIVATE,
        )
    return whole


def _replace_batch_norm(model: nn.Module, form: Form) -> list[str]:
    """Replace BatchNorm layers where possible; list those that cannot be replaced."""
    if isinstance(model, _BatchNorm):
        return ["the model is a BatchNorm layer itself, without a parent in which to replace it"]
    problems = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, _BatchNorm):
            continue
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            problems.append(f"{name} is a lazy layer that does not know its channels yet")
            continue
        if form == "frozen" and module.running_mean is None:
            problems.append(f"{name} keeps no running statistics that could be frozen (use 'group')")
            continue
        parent, _, own = name.rpartition(".")
        replacement = FrozenNorm(module) if form == "frozen" else _group_norm(module)
        replacement.train(module.training)
        setattr(model.get_submodule(parent), own, replacement)
    return problems


def _group_norm(module: _BatchNorm) -> nn.Module:
    """Return GroupNorm as Opacus makes it, with the layer's own epsilon, scale and shift."""
    norm = nn.GroupNorm(
        _groups(module.num_features), module.num_features, eps=module.eps, affine=module.affine
    )
    if module.affine:
        norm.weight, norm.bias = module.weight, module.bias
    return norm


@functools.lru_cache(maxsize=256)
def _groups(channels: int) -> int:
    """Return Opacus' number of groups for channels; its fixer writes and reads a model each time."""
    from opacus.validators import ModuleValidator

    layer = nn.BatchNorm1d(channels)  # accepted by the fixer, whatever is replaced
    fixed: nn.GroupNorm = ModuleValidator.fix(layer)
    return fixed.num_groups


def _unsupported(model: nn.Module) -> list[str]:
    """List layers that Opacus' validator refuses: recurrent and attention layers, running statistics.

    Opacus takes seconds to import, so it is used only for the kinds of layers that it judges.
    """
    judged = [(name, item) for name, item in model.named_modules() if isinstance(item, JUDGED)]
    if not judged:
        return []
    from opacus.validators import ModuleValidator

    return [
        f"{name or 'the model'} ({type(module).__name__}): {' '.join(str(reason).split())}"
        for name, module in judged
        for reason in ModuleValidator.VALIDATORS.get(type(module), lambda _: ())(module)
    ]
