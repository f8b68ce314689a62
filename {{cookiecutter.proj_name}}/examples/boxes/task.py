"""Detection: the task and its two losses."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import l1_loss, logsigmoid, max_pool2d

from common.evaluation.loss import Losses
from common.task import Picture, Task
from examples.boxes.model import STRIDE


class DetectionTask(Task):
    """Finds boxes by their centres (Zhou et al. 2019).

    A batch is a dict with `image` (B, 1, H, W), float in 0..1; `boxes`, a list of B tensors (n, 4), float: x0, y0, x1,
    y1 in pixels; and `label`, a list of B tensors (n,), int64.
    """

    unit = "boxes"
    most = 8  # boxes found in an image, at most

    def output(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Returns `heat`, logits (B, classes, H / 2, W / 2), and `box` (B, H / 2, W / 2, 4), see the model."""
        heat, box = self.model(batch["image"])
        exact = batch["image"].dtype  # also under autocast
        return {"heat": heat.to(exact), "box": box.to(exact)}

    def count(self, batch: dict[str, Any]) -> int:
        """Count the boxes: the mean loss is over them."""
        return sum(map(len, batch["boxes"]))

    def losses(self, output: dict[str, Tensor], batch: dict[str, Any]) -> Losses:
        """`heat`: focal loss of the heat map; `box`: error of centre and size, in cells. Both are means over boxes."""
        heat, boxes = output["heat"], torch.cat(batch["boxes"]) / STRIDE
        image = torch.cat([torch.full_like(label, number) for number, label in enumerate(batch["label"])])
        centre, size = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
        x, y = centre.long().unbind(dim=1)
        peaks = _peaks(x, y, size, heat)
        plane = (image * heat.shape[1] + torch.cat(batch["label"]))[:, None, None].expand_as(peaks)
        wanted = torch.zeros_like(heat).flatten(0, 1).scatter_reduce(0, plane, peaks, "amax").view_as(heat)
        hit, miss = heat.sigmoid(), (-heat).sigmoid()
        at_centre, elsewhere = miss**2 * logsigmoid(heat), hit**2 * logsigmoid(-heat) * (1 - wanted) ** 4
        of_heat = -torch.where(wanted == 1, at_centre, elsewhere).sum() / len(boxes)
        target = torch.cat([centre - torch.stack([x, y], dim=1), size], dim=1)
        of_box = l1_loss(output["box"][image, y, x], target, reduction="sum") / len(boxes)
        return {"loss": of_heat + 0.2 * of_box, "heat": of_heat, "box": of_box}

    def post_process(self, output: dict[str, Tensor], batch: dict[str, Any]) -> dict[str, Tensor]:
        """Returns `found` (B, most, 6): x0, y0, x1, y1 in pixels, probability, class; the most probable first."""
        probability = output["heat"].sigmoid()
        peak = probability * (probability == max_pool2d(probability, 3, stride=1, padding=1))
        score, at = peak.flatten(1).topk(self.most)
        width, cells = peak.shape[3], peak.shape[2] * peak.shape[3]
        x, y = at % width, at % cells // width
        box = output["box"][torch.arange(len(at), device=at.device)[:, None], y, x]
        centre, half = box[..., :2] + torch.stack([x, y], dim=2), box[..., 2:] / 2
        corners = torch.cat([centre - half, centre + half], dim=2) * STRIDE
        return {"found": torch.cat([corners, score[..., None], (at // cells)[..., None]], dim=2)}

    def pictures(self, output: dict[str, Tensor], batch: dict[str, Any], limit: int) -> list[Picture]:
        """Return the image with the boxes found with a probability above 0.3 in red, and the classes below it."""
        drawn = []
        for image, predicted in zip(batch["image"][:limit].float().cpu(), output["found"].cpu(), strict=False):
            pixels, sure = image.expand(3, -1, -1).clone(), predicted[predicted[:, 4] > 0.3]
            for x0, y0, x1, y1 in sure[:, :4].round().long().clamp(0, image.shape[-1] - 1).tolist():
                pixels[0, [y0, y1], x0 : x1 + 1] = 1.0
                pixels[0, y0 : y1 + 1, [x0, x1]] = 1.0
            text = " ".join(str(int(number)) for number in sure[:, 5])
            drawn.append(Picture(pixels.permute(1, 2, 0).numpy(), text))
        return drawn


def _peaks(x: Tensor, y: Tensor, size: Tensor, heat: Tensor) -> Tensor:
    """For each box, a Gaussian of the height 1 around its cell, as wide as a sixth of it (n, H / 2, W / 2)."""
    rows, columns = (torch.arange(length, device=heat.device) for length in heat.shape[2:])
    distance = (rows - y[:, None])[:, :, None] ** 2 + (columns - x[:, None])[:, None, :] ** 2
    return (-distance / (2 * (size.mean(dim=1)[:, None, None] / 6) ** 2)).exp().to(heat)
