"""Backbones of few blocks and channels: every kind of layer that they have, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tightframe.models.backbones import resnet, vgg11

NARROW = (8, 16, 16, 32)


@contextmanager
def few_blocks() -> Iterator[None]:
    """Build networks whose size has no option smaller: EfficientNet, ResNet18, VGG11 and MONAI's ResNets.

    EfficientNet keeps all seven stages with their widths, and the shortcuts of three of them; others all
    blocks.
    """
    from monai.networks.nets import efficientnet
    from monai.networks.nets import resnet as monai_resnet

    name = "efficientnet-b0"
    width, _, *others = efficientnet.efficientnet_params[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(efficientnet.efficientnet_params, name, (width, 0.5, *others))
        patch.setattr(monai_resnet, "get_inplanes", lambda: [*NARROW])
        patch.setattr(resnet, "WIDTHS_18", NARROW)
        patch.setattr(vgg11, "STAGES", tuple(tuple(width // 8 for width in one) for one in vgg11.STAGES))
        yield
