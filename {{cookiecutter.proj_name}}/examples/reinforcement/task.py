"""Proximal policy optimization (Schulman et al. 2017): play with the present weights, then a few updates on that."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.evaluation.loss import Losses, LossFactory
from common.evaluation.metric import GatheredMetric, MetricFactory, Results
from common.task import Task
from examples.reinforcement.model import STEPS, PolicyModel, has_fallen, push


class Moves(NamedTuple):
    """All N moves of some episodes.

    Attributes:
        state: (N, 4), before the move.
        right: (N,), int64: whether the cart was pushed to the right.
        chance: (N,), the log-probability that this move had.
        gain: (N,), discounted sum of what followed: 1 for each step until the pole fell.
        advantage: (N,), how much better that was than expected.
    """

    state: Tensor
    right: Tensor
    chance: Tensor
    gain: Tensor
    advantage: Tensor


class PolicyTask(Task):
    """A batch has `seed` (B,), int64: an episode follows from its seed and the weights.

    Args:
        rounds: updates with the same episodes.
        discount: of what comes a step later.
        trace: weight of a later step's surprise in the advantage (generalized advantage estimation).
        clip: how far the probability of a move may change in a step.
        curiosity: weight of the policy's entropy.
    """

    model: PolicyModel
    unit = "moves"

    def __init__(
        self,
        model: nn.Module,
        loss: LossFactory,
        metric: MetricFactory,
        rounds: int = 4,
        discount: float = 0.98,
        trace: float = 0.9,
        clip: float = 0.2,
        curiosity: float = 0.01,
    ) -> None:
        super().__init__(model, loss, metric)
        self.rounds, self.discount, self.trace, self.clip, self.curiosity = rounds, discount, trace, clip, curiosity
        self.played: dict[tuple[int, ...], Moves] = {}

    def updates(self) -> tuple[str, ...]:
        """As many optimizer steps as rounds."""
        return ("all",) * self.rounds

    def count(self, batch: dict[str, Tensor]) -> int:
        """Moves in training, over which the losses are means; in an evaluation episodes."""
        return len(self.moves(batch["seed"]).right) if self.training else len(batch["seed"])

    def update(self, name: str, batch: dict[str, Tensor]) -> Losses:
        """Return the clipped surrogate of the gain, the error of the value, and the entropy of the policy."""
        moves = self.moves(batch["seed"])
        chances, value = self.model(moves.state)
        ratio = (chances.gather(1, moves.right[:, None])[:, 0] - moves.chance).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        policy = -torch.minimum(ratio * moves.advantage, clipped * moves.advantage).mean()
        error = (value - moves.gain).square().mean()
        entropy = -(chances.exp() * chances).sum(1).mean()
        loss = policy + 0.5 * error - self.curiosity * entropy
        return {"loss": loss, "policy": policy, "error": error, "entropy": entropy}

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `length` (B,) of episodes in which the more probable move is made."""
        return {"length": self.play(batch["seed"], greedy=True)[-1].sum(0)}

    def losses(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Losses:
        """None in an evaluation."""
        return {}

    def moves(self, seed: Tensor) -> Moves:
        """Play a batch's episodes with the weights at the step's beginning, once in each step; return the moves."""
        key = (self.at.step, *seed.tolist())
        if key not in self.played:
            self.played = {key: moves for key, moves in self.played.items() if key[0] == self.at.step}
            self.played[key] = self.judge(*self.play(seed))
        return self.played[key]

    @torch.no_grad()
    def play(self, seed: Tensor, *, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Episodes from their seeds: states (T + 1, B, 4), moves (T, B), and whether these were made, not fallen yet.

        All randomness comes from the seeds, so an episode does not depend on the others that are played with it.
        """
        like = next(self.model.parameters())
        draws = [torch.rand(4 + STEPS, generator=torch.Generator().manual_seed(number)) for number in seed.tolist()]
        luck = torch.stack(draws).to(like)
        state, up = luck[:, :4] * 0.1 - 0.05, torch.ones(len(seed), dtype=torch.bool, device=like.device)
        states, moves, made = [state], [], []
        for step in range(STEPS):
            chance = self.model(state)[0][:, 1].exp()
            right = chance > (0.5 if greedy else luck[:, 4 + step])
            state = torch.where(up[:, None], push(state, right), state)
            moves.append(right)
            made.append(up)
            states.append(state)
            up = up & ~has_fallen(state)
        return torch.stack(states), torch.stack(moves), torch.stack(made)

    @torch.no_grad()
    def judge(self, states: Tensor, moves: Tensor, made: Tensor) -> Moves:
        """Return what the moves of `play` have led to."""
        chances, value = self.model(states)
        stands = ~has_fallen(states[1:].flatten(0, 1)).view_as(made)
        surprise = made * (1 + self.discount * stands * value[1:] - value[:-1])
        advantage = torch.zeros_like(surprise)
        later = torch.zeros_like(surprise[0])
        for step in reversed(range(STEPS)):
            later = advantage[step] = surprise[step] + self.discount * self.trace * stands[step] * later
        right = moves.long()
        chance = chances[:-1].gather(2, right[..., None])[..., 0]
        columns = (states[:-1], right, chance, advantage + value[:-1], advantage)
        return Moves(*(column[made] for column in columns))


class MeanLength(GatheredMetric):
    """Mean number of steps for which the pole stands, up to 200."""

    higher_is_better = True

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        return {"length": output["length"]}

    def compute(self, results: Results) -> float:
        return float(results["length"].double().mean())
