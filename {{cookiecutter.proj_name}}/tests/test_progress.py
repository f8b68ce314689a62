"""What is due when."""

import random

import pytest

from common.data.plan import EpochPlan
from common.progress import Interval, Position, ProgressConfig, Triggers
from tests.data.test_data import shuffled

INTERVALS = [-1, 1, 2, "2step", "7step", "0.3epoch", "0.5epoch", "1/3epoch", "1.5epoch"]


@pytest.mark.parametrize("seed", range(40))
def test_no_step_that_something_is_due_at_is_missed(seed: int) -> None:
    """Comparing one integer per step finds the same steps as asking every interval in every step."""
    draw = random.Random(seed)
    validate, evaluate = draw.choice(INTERVALS), draw.choice(INTERVALS)
    config = ProgressConfig(epoch=4, max_steps=60, epoch_val=validate, epoch_eval=evaluate)
    plan = EpochPlan(shuffled(draw.randint(9, 60)), batch_size=draw.randint(1, 8), drop_last=draw.random() < 0.5)
    triggers = Triggers(config, plan.samples_per_step)
    at = Position(epoch_size=plan.order.size)
    while not triggers.is_over(at):
        for batch in plan.global_batches(at):
            before, at = at, batch.after
            due, is_last = triggers.due(before, at), triggers.is_over(at)
            assert due.is_last == is_last
            for found, text in ((due.validate, validate), (due.evaluate, evaluate)):
                interval = Interval.parse(text, "epoch")
                assert found == (bool(interval) if is_last else interval.is_due(before, at)), (text, at)
            if is_last:
                break
