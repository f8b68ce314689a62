"""Train two configs or commits for some steps, and compare what passed through them."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.base.errors import UserError
from common.config.overrides import read_options
from common.run.paths import PROJECT
from tools.record.run import Difference, Record, first_difference, train
from tools.same.folders import compare
from tools.same.sides import Side

Say = Callable[[str], None]
_OURS = ("--name", "--dir.runs_dir", "--resume")
_MEANING = {
    "random": "this random generator begins the step in another state: another seed, or more was drawn before",
    "input": "no module computed something else before: the data, their order, or what the task makes of them changed",
    "output": "weights, inputs and all outputs before it are equal: its computation changed, or what is passed to it",
    "loss": "the outputs of all modules are equal: the computation of the loss changed, or its targets",
    "gradient": "all outputs and the loss are equal: the backward pass changed, or what is done with gradients",
    "weight": "all gradients are equal: the update changed (optimizer, learning rate, weight decay)",
    "buffer": "all gradients and weights are equal: what a module keeps besides its weights is updated differently",
    "state": "all gradients and weights are equal: the optimizer changed",
}
_INITIAL = "the runs begin with different values: the initialisation, the seed or init_from changed"
_STRUCTURE = "the models are built differently; what both have is equal up to here"


@dataclass(frozen=True)
class Finding:
    """What was compared, and how it differs.

    Attributes:
        lines: further differences: of what was measured and saved.
        unstable: "A" or "B" if it differs from itself, and `difference` is this one; the comparison means nothing then.
    """

    what: str
    lines: Sequence[str] = ()
    difference: Difference | None = None
    unstable: str = ""

    @property
    def is_same(self) -> bool:
        return self.difference is None and not self.lines

    @property
    def meaning(self) -> str:
        """What the difference says about its cause, in a sentence."""
        if (found := self.difference) is None:
            return ""
        if found.a is None or found.b is None:
            return _STRUCTURE
        return _INITIAL if not found.step and found.kind in ("weight", "buffer") else _MEANING[found.kind]


def compare_trained(
    sides: Sequence[Side], config: str | None, steps: int, words: Sequence[str], folder: Path, say: Say
) -> Finding:
    """Train both sides in `folder`, and once more if they differ.

    Args:
        config: of both, if the sides are commits.
        words: settings of both.
        say: is called with what happens, before it does.

    Raises:
        UserError: a word is one that the tool sets, or a side cannot be trained.
    """
    options = read_options(words)[0]
    if ours := [name for name in _OURS if name in options]:
        raise UserError(f"{ours[0]} cannot be given: the runs are new ones, in a temporary folder")
    ready = {"--progress.max_steps": str(steps), "--dist.deterministic": "strict"}
    words = [*words, *(f"{name}={value}" for name, value in ready.items() if name not in options)]
    projects = [side.export(folder / letter) for side, letter in zip(sides, "AB", strict=True)]
    configs = [_config(side, project, config) for side, project in zip(sides, projects, strict=True)]
    say(f"A: {sides[0]}\nB: {sides[1]}\ntrains each with {shlex.join(words)}, and once more if they differ")
    if configs[0].read_bytes() != configs[1].read_bytes() and config:
        say(f"{config} differs between A and B; each is trained with its own")

    def trained(side: int, name: str, step: int | None = None) -> Record:
        return train(projects[side], [f"--config={configs[side]}", *words], folder / name, step=step)

    a = trained(0, "first_a")
    say(f"A took {a.seconds:.0f} s; about {a.seconds:.0f} s more for B, and {2 * a.seconds:.0f} s if they differ")
    b = trained(1, "first_b")
    last = min(a.steps, b.steps)
    tensors = sum(key in two and key[0] <= last for one, two in zip(a.ranks, b.ranks, strict=False) for key in one)
    what = f"{last} steps, {tensors:,} tensors"
    if (difference := first_difference(a, b)) is None:
        try:  # what the steps do not show: validation, averaged weights, schedules
            more, lines = compare(a.run, b.run)
        except UserError:
            more, lines = "no measurements, since none is due", []
        return Finding(f"{what}, {more}", lines)
    say(f"step {difference.step} differs; trains both again, to see each module in this step")
    again = trained(0, "second_a", difference.step), trained(1, "second_b", difference.step)
    for side, one, two in (("A", a, again[0]), ("B", b, again[1])):
        if other := first_difference(one, two):
            return Finding(what, difference=other, unstable=side)
    return Finding(what, difference=first_difference(*again))


def _config(side: Side, project: Path, config: str | None) -> Path:
    """The config file of a side; that of the commit itself if it has it."""
    if config is None:
        return side.path
    path = Path(config).resolve()
    if path.is_relative_to(PROJECT) and (own := project / path.relative_to(PROJECT)).is_file():
        return own
    if not path.is_file():
        raise UserError(f"--config {config}: {side} has no such file")
    return path
