from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from tightframe.data.isic import transforms
from tightframe.data.isic.transforms import Ranges, evaluation, resize_shorter, training

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
STILL = Ranges(scale=0.0, rotate=0.0, shear=0.0, flip=0.0, brightness=0.0, contrast=0.0, holes=0)


def picture(height: int, width: int, seed: int = 0) -> torch.Tensor:
    """A smooth random image, so that interpolation has something to agree on."""
    rough = np.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    smooth = Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(smooth).copy()).permute(2, 0, 1).contiguous()


def pixels(view: torch.Tensor) -> torch.Tensor:
    """Undo the normalisation: [0, 255]."""
    return (view * STD + MEAN) * 255.0


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("height", "width"), [(224, 224), (224, 300), (261, 224)])
def test_evaluation_is_the_centre_crop_of_pil(height: int, width: int) -> None:
    image = picture(height, width)
    top, left = (height - 200) // 2, (width - 200) // 2
    whole = Image.fromarray(image.permute(1, 2, 0).numpy())
    crop = np.asarray(whole.crop((left, top, left + 200, top + 200)), dtype=np.float32) / 255.0
    expected = (torch.from_numpy(crop).permute(2, 0, 1) - MEAN) / STD
    view = evaluation(image, 200)
    assert view.dtype == torch.float32
    assert view.shape == (3, 200, 200)
    torch.testing.assert_close(view, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("side", [18, 54, 112, 300])
def test_resizing_agrees_with_pil(side: int) -> None:
    image = picture(224, 260)
    resized = resize_shorter(image, side)
    expected = Image.fromarray(image.permute(1, 2, 0).numpy()).resize(
        (round(260 * side / 224), side), Image.Resampling.BILINEAR
    )
    difference = resized.permute(1, 2, 0).numpy().astype(int) - np.asarray(expected).astype(int)
    assert np.abs(difference).max() <= 1


def test_a_small_view_shows_what_the_large_one_shows() -> None:
    image = picture(224, 224)
    small = pixels(evaluation(image, 48))
    large = pixels(evaluation(image, 200))
    reduced = torch.nn.functional.interpolate(large[None], size=(48, 48), mode="bilinear", antialias=True)[0]
    assert (small - reduced)[:, 2:-2, 2:-2].abs().mean() < 3.0


def test_without_ranges_training_is_a_crop() -> None:
    image = picture(224, 224)
    corners = set()
    for seed in range(40):
        view = pixels(training(image, 200, generator(seed), STILL)).round()
        found = [
            (top, left)
            for top in range(25)
            for left in range(25)
            if torch.equal(view[:, 0, :4], image[:, top, left : left + 4].float())
            and torch.equal(view, image[:, top : top + 200, left : left + 200].float())
        ]
        assert len(found) == 1
        corners.add(found[0])
    assert len(corners) > 20
    assert min(top for top, _ in corners) < 5
    assert max(left for _, left in corners) > 19


@pytest.mark.whole
def test_flips_are_flips() -> None:
    image = picture(200, 200)  # of the crop's size: every crop is the whole image
    seen = {"none": 0, "across": 0, "down": 0, "both": 0}
    ranges = Ranges(scale=0, rotate=0, shear=0, flip=0.5, brightness=0, contrast=0, holes=0)
    expected = {
        "none": image,
        "across": image.flip(2),
        "down": image.flip(1),
        "both": image.flip(1, 2),
    }
    for seed in range(120):
        view = pixels(transforms.training(resized(image), 200, generator(seed), ranges))
        near = {
            name: (view[:, 40:160, 40:160] - centre(resized(other))).abs().mean().item()
            for name, other in expected.items()
        }
        seen[min(near, key=lambda name: near[name])] += 1
    assert 40 <= seen["none"] <= 80
    assert all(seen[name] >= 8 for name in ("across", "down", "both"))


def resized(image: torch.Tensor) -> torch.Tensor:
    return resize_shorter(image, 224)


def centre(image: torch.Tensor) -> torch.Tensor:
    return image[:, 52:172, 52:172].float()


def test_the_affine_map_agrees_with_pil() -> None:
    """Zoom and turn by the drawn amounts, done by PIL about the image's centre."""
    image = picture(224, 224, seed=3)
    ranges = Ranges(scale=0.07, rotate=50, shear=0, flip=0, brightness=0, contrast=0, holes=0, chance=1.0)
    for seed in range(5):
        draws = torch.rand(15, generator=generator(seed), dtype=torch.float64).tolist()
        factor, angle = 1 + 0.07 * (2 * draws[3] - 1), math.radians(50 * (2 * draws[4] - 1))
        extent = round(224 * factor)
        left, top = (int(draw * (extent - 200 + 1)) for draw in draws[13:15])
        # PIL maps output pixel centres (x + 0.5, y + 0.5) to input positions.
        a, b = math.cos(angle) / factor, -math.sin(angle) / factor
        d, e = math.sin(angle) / factor, math.cos(angle) / factor
        sx, sy = left - extent / 2, top - extent / 2
        data = (a, b, a * sx + b * sy + 112, d, e, d * sx + e * sy + 112)
        whole = Image.fromarray(image.permute(1, 2, 0).numpy())
        expected = whole.transform((200, 200), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR)
        inside = np.asarray(
            Image.new("L", (224, 224), 255).transform((200, 200), Image.Transform.AFFINE, data)
        )
        assert (inside == 255).mean() > 0.8
        view = pixels(training(image, 200, generator(seed), ranges)).permute(1, 2, 0).numpy()
        difference = np.abs(view - np.asarray(expected, dtype=np.float32))[2:-2, 2:-2]
        assert difference[inside[2:-2, 2:-2] == 255].mean() < 0.6


def test_brightness_and_contrast_are_linear() -> None:
    image = torch.full((3, 224, 224), 100, dtype=torch.uint8)
    image[:, :, 112:] = 120
    ranges = Ranges(scale=0, rotate=0, shear=0, flip=0, brightness=0.15, contrast=0.1, holes=0, chance=1.0)
    lows, gains = [], []
    for seed in range(60):
        values = pixels(training(image, 200, generator(seed), ranges)).unique().sort().values
        low, high = values[0].item(), values[-1].item()
        lows.append(low)
        gains.append((high - low) / 20)
    assert all(0.9 - 1e-3 <= gain <= 1.1 + 1e-3 for gain in gains)
    assert max(gains) > 1.06
    assert min(gains) < 0.94
    assert min(lows) < 80
    assert max(lows) > 120
    assert all(100 * 0.9 - 38.25 <= low <= 100 * 1.1 + 38.25 for low in lows)


@pytest.mark.parametrize(("size", "hole"), [(200, 16), (48, 4)])
def test_holes_are_black_squares(size: int, hole: int) -> None:
    image = torch.full((3, 224, 224), 200, dtype=torch.uint8)
    ranges = Ranges(scale=0, rotate=0, shear=0, flip=0, brightness=0, contrast=0)
    areas = []
    for seed in range(60):
        black = pixels(training(image, size, generator(seed), ranges))[0] < 1
        areas.append(int(black.sum()))
        if areas[-1] == hole * hole:
            rows, columns = torch.where(black)
            assert rows.max() - rows.min() == hole - 1
            assert columns.max() - columns.min() == hole - 1
    assert 15 <= areas.count(0) <= 45, "about half the views have holes"
    assert hole * hole in areas
    assert 4 * hole * hole < max(areas) <= 8 * hole * hole


def test_randomness_comes_from_the_generator_only() -> None:
    image = picture(224, 224)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again = (training(image, 48, generator(7)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(first, training(image, 48, generator(8)))


@pytest.mark.parametrize("size", [16, 48, 200, 512])
def test_every_size_has_its_shape(size: int) -> None:
    image = picture(224, 250)
    for seed in range(12):
        view = training(image, size, generator(seed))
        assert view.shape == (3, size, size)
        assert torch.isfinite(view).all()
    assert evaluation(image, size).shape == (3, size, size)
