"""The settings of your runs: the default data, model and losses, and keys of your own.

To add keys, write a class with `@section` and add a field for it to `Config`. They are then checked, listed in
`--help`, and can be set in YAML and on the command line like all others, which common/settings.py defines.
"""

from dataclasses import field

from common.config import section
from common.data.sections import SplitsConfig, TrainSection, ValSection
from common.settings import LossSection, MetricSection, ModelSection, RunConfig, TaskSection, default


@section
class Data(SplitsConfig):
    """The data. `type` names a dataset (see --list); other keys are its arguments, except `eval_batch_size`
    and `transforms`.

    `val` and `eval` may hold several named datasets: `{clean: {type: ...}, shifted: {type: ...}}`.
    """

    train: TrainSection = default(type="DigitsDataset", shift=1)
    val: ValSection = default(type="DigitsDataset", eval_batch_size=256)
    eval: ValSection = default(type="DigitsDataset", eval_batch_size=256)


@section
class Config(RunConfig):
    """All settings of a training run."""

    dataset: Data = field(default_factory=Data)
    task: TaskSection = default(type="ClassificationTask")
    model: ModelSection = default(type="ConvModel", in_channels=1, classes=10, width=32, dropout=0.1)
    loss: LossSection = default(CrossEntropyLoss={"weight": 1.0, "label_smoothing": 0.0})
    metric: MetricSection = default(Accuracy={"k": 1})
