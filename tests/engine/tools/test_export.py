"""tools.export: how a program is compared with the model."""

import pytest
import torch
from torch import Tensor, nn

from common.base.errors import UserError
from tools.export import Model, compare


class Masked(nn.Module):
    """Some outputs are impossible."""

    def forward(self, image: Tensor) -> Tensor:
        return image.flatten(1).masked_fill(image.flatten(1) > 0.5, -torch.inf)


def test_infinite_outputs() -> None:
    model = Model(Masked(), {"image": torch.rand(4, 2, 2)})
    assert compare(model, model.outputs, 1e-4) == 0
    with pytest.raises(UserError, match="differs from the model by inf"):
        compare(model, lambda inputs: {"output": inputs["image"].flatten(1)}, 1e-4)
    with pytest.raises(UserError, match=r"differs from the model by 0\.1"):
        compare(model, lambda inputs: {"output": model.outputs(inputs)["output"] + 0.1}, 1e-4)
