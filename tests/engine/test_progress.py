"""What is due when."""

import random
from fractions import Fraction

import pytest

from common.data.order import EpochPlan
from common.progress import Interval, Position, ProgressConfig, Triggers
from tests.data.test_data import shuffled

INTERVALS = [-1, 1, 2, "2step", "7step", "0.3epoch", "0.5epoch", "1/3epoch", "1.5epoch"]


@pytest.mark.parametrize("seed", range(40))
def test_no_step_that_something_is_due_at_is_missed(seed: int) -> None:
    """Whole numbers find those after which a multiple of the interval is behind."""
    draw = random.Random(seed)
    validate, evaluate = draw.choice(INTERVALS), draw.choice(INTERVALS)
    config = ProgressConfig(epoch=4, max_steps=60, epoch_val=validate, epoch_eval=evaluate)
    plan = EpochPlan(draw.randint(9, 60), batch_size=draw.randint(1, 8), drop_last=draw.random() < 0.5)
    triggers = Triggers(config, None)
    at = Position(epoch_size=plan.size)
    while not triggers.is_over(at):
        for batch in plan.global_batches(shuffled(plan.size)(at.epoch), at):
            before, at = at, batch.after
            due, is_last = triggers.due(before, at), triggers.is_over(at)
            assert due.is_last == is_last
            for found, text in ((due.validate, validate), (due.evaluate, evaluate)):
                interval = Interval.parse(text, "epoch")
                done = [
                    Fraction(each.step)
                    if interval.unit == "step"
                    else each.epoch + Fraction(each.sample, each.epoch_size)
                    for each in (before, at)
                ]
                amount = Fraction(interval.numerator, interval.denominator)
                expected = bool(interval) and (is_last or done[0] // amount < done[1] // amount)
                assert found == expected, (text, at)
            if is_last:
                break
