"""A GAN: two updates per step, and metrics of what is generated."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from common.evaluation.loss import Losses
from common.evaluation.metric import GatheredMetric, Results
from common.task import Picture, Task
from examples.gan.model import ConditionalGan


class GanTask(Task):
    """Trains `model.discriminator` and `model.generator` in turn, with the loss of Goodfellow et al. (2014).

    A batch is a dict with `image` (B, 1, H, W), float in 0..1, `label` (B,), int64, and `noise` (B, noise), float.
    """

    model: ConditionalGan

    def updates(self) -> tuple[str, str]:
        """Return the two updates of each step; each trains the part of the model that it is named after."""
        return "discriminator", "generator"

    def update(self, name: str, batch: dict[str, Tensor]) -> Losses:
        """Return the loss of one of the two, with the non-saturating one for the generator."""
        label = batch["label"]
        if name == "generator":
            loss = softplus(-self.model.discriminator(self.output(batch)["image"], label)).mean()
        else:
            with torch.no_grad():
                generated = self.output(batch)["image"]
            real, fake = (self.model.discriminator(image, label) for image in (batch["image"], generated))
            loss = (softplus(-real) + softplus(fake)).mean()
        return {"loss": loss}

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `image` (B, 1, H, W), generated, 0..1."""
        return {"image": self.model(batch["noise"], batch["label"])}

    def losses(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Losses:
        """None in evaluation: neither loss says how good the images are."""
        return {}

    def pictures(self, output: dict[str, Tensor], batch: dict[str, Tensor], limit: int) -> list[Picture]:
        """Generated images, with the class asked for."""
        rows = zip(output["image"][:limit, 0].cpu().float(), batch["label"].tolist(), strict=False)
        return [Picture(image.numpy(), str(label)) for image, label in rows]


class NearestReal(GatheredMetric):
    """Compares as many generated images with the real ones of a dataset, by distance of pixels.

    - `recognised`: share of generated images whose nearest real image is of the class that was asked for, 0..1.
    - `coverage`: share of real images that have a generated image of their class within the distance of their fifth
      nearest real one of that class, 0..1 (Naeem et al. 2020). Low if the generator repeats itself. Not covered are
      images of a class with fewer than six.
    """

    higher_is_better = True

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        """Reads `image` of both, (B, 1, H, W), and `label` (B,)."""
        generated, real = output["image"].flatten(1).float(), batch["image"].flatten(1).float()
        return {"generated": generated, "real": real, "label": batch["label"]}

    def compute(self, results: Results) -> dict[str, float]:
        generated, real, label = results["generated"].double(), results["real"].double(), results["label"]
        recognised = label[torch.cdist(generated, real).argmin(dim=1)] == label
        other_class = torch.where(label[:, None] == label, 0.0, torch.inf)
        neighbours = (torch.cdist(real, real) + other_class).sort(dim=1).values  # the first is the image itself
        radius = neighbours[:, :6].amax(dim=1)
        covered = ((torch.cdist(real, generated) + other_class).amin(dim=1) <= radius) & radius.isfinite()
        return {"recognised": float(recognised.double().mean()), "coverage": float(covered.double().mean())}
