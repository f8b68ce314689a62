"""Names of losses and metrics, which share every record: one must not replace another's value without a word."""

import pytest

from common.base.errors import UserError
from common.config import resolve
from tests.conftest import CONFIG, Runs, metrics
from custom.config import Config

CROSS = "{type: CrossEntropyLoss}"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--loss", f"{{$REPLACE: true, Accuracy: {CROSS}}}", "--best.metric", "loss"], "metric.Accuracy"),
        (["--metric", "{CrossEntropyLoss: {type: Accuracy}}"], "metric.CrossEntropyLoss"),
        (["--metric", "{loss: {type: Accuracy}}"], "metric.loss"),
        (["--loss", f"{{$REPLACE: true, loss: {CROSS}}}"], "loss.loss"),
    ],
)
def test_clashes(words: list[str], key: str) -> None:
    """Refused with the rest of the config, before anything is built."""
    with pytest.raises(UserError) as error:
        resolve(Config, [CONFIG], words)
    assert "1 problem:" in str(error.value) and f"\n  {key}" in str(error.value), error.value


def test_names_that_only_begin_alike(runs: Runs) -> None:
    """Both values are in the record."""
    folder = runs.train("--metric", "{Cross: {type: Accuracy}}", "--best.metric", "Cross", "--progress.epoch", "1")
    assert {"loss", "CrossEntropyLoss", "Cross"} <= metrics(folder, "val")[0]["values"].keys()
