"""Train two configs or commits for some steps, and compare what passed through them."""

from collections.abc import Sequence
from pathlib import Path

from common.base.errors import UserError
from common.config.overrides import read_options
from common.run.paths import PROJECT
from tools.record.run import Difference, Record, first_difference, say, train
from tools.same.folders import compare
from tools.same.sides import Side


def compare_trained(
    sides: Sequence[Side], config: str | None, steps: int, words: Sequence[str], folder: Path
) -> tuple[str, str, list[str]]:
    """Train both sides in `folder`, and once more if they differ.

    Args:
        config: of both, if the sides are commits.
        words: settings of both.

    Returns:
        "same", "different", or "cannot be compared" if a side differs from itself; what was compared; how it differs.

    Raises:
        UserError: a side cannot be trained.
    """
    defaults = {"--progress.max_steps": str(steps), "--dist.deterministic": "strict"}
    words = [*words, *(f"{name}={value}" for name, value in defaults.items() if name not in read_options(words)[0])]
    projects = [side.export(folder / letter) for side, letter in zip(sides, "AB", strict=True)]
    configs = [_config_of(side, project, config) for side, project in zip(sides, projects, strict=True)]
    say(f"A: {sides[0]}\nB: {sides[1]}\ntrains each with {' '.join(words)}, and once more if they differ")
    if config and configs[0].read_bytes() != configs[1].read_bytes():
        say(f"{config} differs between A and B; each is trained with its own")

    def trained(side: int, record: str, step: int | None = None) -> Record:
        place = [f"--config={configs[side]}", f"--dir.runs_dir={folder / record}", "--name=run", "--resume=null"]
        return train(projects[side], [*place, *words], folder / record, step=step)

    a = trained(0, "first_a")
    b = trained(1, "first_b")
    tensors = sum(key in after for before, after in zip(a.ranks, b.ranks, strict=False) for key in before)
    compared = f"{min(a.steps, b.steps)} steps, {tensors:,} tensors"
    if (difference := first_difference(a, b)) is None:
        measured, lines = compare(a.run, b.run)  # what the steps do not show: validation, averaged weights, schedules
        return "different" if lines else "same", f"{compared}, {measured}", lines
    say(f"step {difference.step} differs; trains both again, to see each module in this step")
    again = trained(0, "second_a", difference.step), trained(1, "second_b", difference.step)
    for side, first, second in (("A", a, again[0]), ("B", b, again[1])):
        if itself := first_difference(first, second):
            why = "it draws random numbers without a seed, or has an operation that is not deterministic"
            return "cannot be compared", compared, [f"{side} differs from itself: {_place(itself)}", f"  {why}"]
    difference = first_difference(*again) or difference
    return "different", compared, [_place(difference), "  trained twice, A is equal to A, and B to B"]


def _place(difference: Difference) -> str:
    where = f"step {difference.step}" if difference.step else "what the runs begin with"
    return f"first in {where}: {difference}"


def _config_of(side: Side, project: Path, config: str | None) -> Path:
    """Return the config file of a side; that of the commit itself if it has it."""
    if config is None:
        return side.path
    path = Path(config).resolve()
    if path.is_relative_to(PROJECT) and (file := project / path.relative_to(PROJECT)).is_file():
        return file
    if not path.is_file():
        raise UserError(f"--config {config}: {side} has no such file")
    return path
