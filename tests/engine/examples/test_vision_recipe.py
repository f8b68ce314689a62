"""RandAugment: every operation is one, in bounds, and as strong as it is told; and what the recipe consists of."""

import pytest
import torch

from common.base.parts import AVERAGE
from examples.vision_recipe.augment import OPERATIONS, moved, rand_augment, rotate
from tests.conftest import Runs, load
from tests.examples.runs import trained


@pytest.fixture
def image() -> torch.Tensor:
    return torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_operations_stay_in_bounds(image: torch.Tensor) -> None:
    """In shape and in 0..1; all but the first and the last do nothing at strength 0 (posterize keeps 16 levels)."""
    for operation in OPERATIONS:
        for strength in (-1.0, -0.3, 0.3, 1.0):
            result = operation(image, strength)
            assert result.shape == image.shape and result.min() >= 0 and result.max() <= 1 + 1e-6
        if operation is not OPERATIONS[-1]:
            torch.testing.assert_close(operation(image, 0.0), image, atol=0.04, rtol=0)
    unlike = [operation(image, 0.9) for operation in OPERATIONS]
    assert all((first - second).abs().max() > 1e-3 for at, first in enumerate(unlike) for second in unlike[:at])


def test_places(image: torch.Tensor) -> None:
    """A quarter of the width is two pixels; three turns of 30 degrees to the same side are one of 90, about."""
    shifted = moved(image, [[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(shifted[..., :-2], image[..., 2:])
    assert shifted[..., -2:].abs().max() == 0
    blob = torch.zeros(1, 33, 33)
    blob[:, 2:9, 13:20] = 1
    turned = blob
    for _ in range(3):
        turned = rotate(turned, 1.0)
    side = [blob.rot90(times, (1, 2)) for times in (1, 3)]
    assert max(float((turned * other).sum() / other.sum()) for other in side) > 0.8


def test_strength_and_number(image: torch.Tensor) -> None:
    """No operation: the image itself. The strength is drawn around the magnitude, within 0..10."""
    assert rand_augment(image, operations=0) is image
    torch.manual_seed(0)
    changes = {m: sum(float((rand_augment(image, 2, m) - image).abs().mean()) for _ in range(100)) for m in (1.0, 9.0)}
    assert changes[9.0] > 1.5 * changes[1.0]
    drawn: list[float] = []
    before = OPERATIONS[:]
    OPERATIONS[:] = [lambda image, strength: drawn.append(strength) or image]  # type: ignore[func-returns-value]
    try:
        for _ in range(300):
            rand_augment(image, 1, 9.0, 2.0)
    finally:
        OPERATIONS[:] = before
    assert {strength > 0 for strength in drawn} == {True, False} and max(map(abs, drawn)) == 1.0
    assert sum(map(abs, drawn)) / 300 == pytest.approx(0.87, abs=0.04)


@pytest.mark.slow
def test_the_config_is_the_recipe(runs: Runs) -> None:
    """Each part arrives: no decay of norms, an average, mixed and smoothed labels."""
    folder = trained(runs, "vision_recipe/config", "--progress.epoch", "4", "--debug.max_samples", "64")
    state = load(folder)
    decays = {n: group["weight_decay"] for group in state["optimizer"]["param_groups"] for n in group["param_names"]}
    assert decays["features.0.0.weight"] == 0.05 and decays["features.0.1.weight"] == decays["head.2.bias"] == 0
    assert state[AVERAGE]["updates"] == state["position"]["step"] == 4
    config = state["about"]["config"]
    assert config["loader"]["collate"]["type"] == "mixup"
    assert config["loss"]["CrossEntropyLoss"]["label_smoothing"] == 0.1
