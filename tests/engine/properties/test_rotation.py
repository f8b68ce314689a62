"""The files of a run's checkpoints against a model of them: any saves, kills, damage and resumes, in any order."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.checkpoint.file import CheckpointError, read_checkpoint
from common.checkpoint.folder import CheckpointFolder, LoadedCheckpoint
from tests.checkpoint.test_checkpoint import state

OPERATIONS = ("os.link", "os.fsync", "shutil.copyfile", "pathlib.Path.replace", "pathlib.Path.unlink")
JUNK = (b"", b"junk", bytes(2000))


ASIDE = ("abandoned", "damaged")


class Rotation(RuleBasedStateMachine):
    """The newest N and the best are kept; the newest whole one is found, after a kill at any operation too.

    `files` is what each file of the folder should hold: a step, or None where it was damaged.
    """

    @initialize(keep=st.integers(0, 3), links=st.booleans())
    def begin(self, keep: int, links: bool) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.keep, self.links = keep, links
        self.folder = CheckpointFolder(self.path, keep)
        self.files: dict[str, int | None] = {}
        self.step = 0

    def teardown(self) -> None:
        if hasattr(self, "path"):
            shutil.rmtree(self.path)

    # --- what should happen

    def numbered(self) -> list[int]:
        return sorted(int(name[5:13]) for name in self.files if name.startswith("step_"))

    def newest(self) -> int | None:
        """Return the step to resume from: that of latest.pt, else the highest that is whole; None without any."""
        whole = [step for name, step in self.files.items() if step is not None and not name.startswith(ASIDE)]
        latest = self.files.get("latest.pt")
        return latest if latest is not None else max(whole, default=None)

    def saved(self, numbered: bool, best: bool) -> None:
        if "latest.pt" in self.files:
            self.files["previous.pt"] = self.files["latest.pt"]
        self.files["latest.pt"] = self.step
        if best:
            self.files["best.pt"] = self.step
        if numbered:
            self.files[f"step_{self.step:08}.pt"] = self.step
            for step in self.numbered()[: -self.keep or None] if self.keep else ():
                del self.files[f"step_{step:08}.pt"]

    # --- what happens

    def operate(self, action: Callable[[], Any], before: Callable[[int], None]) -> None:
        """Run `action`, and call `before` with the number of each operation on a file."""
        real: dict[str, Callable[..., Any]] = {"os.link": os.link, "shutil.copyfile": shutil.copyfile}
        real |= {"pathlib.Path.replace": Path.replace, "pathlib.Path.unlink": Path.unlink}
        count = 0

        def watched(name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal count
                count += 1
                before(count)
                if name == "os.link" and not self.links:
                    raise OSError(errno.EPERM, "no hard links here")
                return real[name](*arguments, **named) if name in real else None  # no time for the disk

            return call

        patches = [patch(name, watched(name)) for name in OPERATIONS]
        for replaced in patches:
            replaced.start()
        try:
            action()
        finally:
            for replaced in patches:
                replaced.stop()

    def save_now(self, numbered: bool, best: bool, before: Callable[[int], None] = lambda count: None) -> None:
        self.operate(lambda: self.folder.save(state(self.step), numbered=numbered, best=best), before)

    @rule(steps=st.integers(1, 4), numbered=st.booleans(), best=st.booleans())
    def save(self, steps: int, numbered: bool, best: bool) -> None:
        self.step += steps
        self.save_now(numbered, best)
        self.saved(numbered, best)

    @rule(steps=st.integers(1, 4), numbered=st.booleans(), best=st.booleans(), at=st.integers(1, 25))
    def save_and_be_killed(self, steps: int, numbered: bool, best: bool, at: int) -> None:
        """Stop before operation `at`, with the folder as it is then: nothing cleans up after a kill."""
        self.step += steps
        old, before = self.newest(), dict(self.files)
        copy = self.path.with_name(f"{self.path.name}.killed")

        def keep_what_is_there(count: int) -> None:
            if count == at:
                shutil.copytree(self.path, copy)

        self.save_now(numbered, best, keep_what_is_there)
        self.saved(numbered, best)
        if not copy.exists():
            return
        shutil.rmtree(self.path)
        copy.rename(self.path)
        left = {path.name: read(path) for path in self.path.glob("[!.]*.pt")}
        for name in left.keys() | before.keys() | self.files.keys():
            assert left.get(name, "none") in (before.get(name, "none"), self.files.get(name, "none")), name
        usable = [name for name, step in left.items() if step is not None and not name.startswith(ASIDE)]
        loaded = self.folder.newest() if usable else None
        assert (loaded.step if loaded else None) in (old, self.step)
        assert old is None or loaded is not None
        self.files = left
        self.folder.clean()
        if loaded:
            self.go_on_from(loaded)

    @precondition(lambda self: self.files)
    @rule(data=st.data(), junk=st.sampled_from(JUNK))
    def damage(self, data: st.DataObject, junk: bytes) -> None:
        name = data.draw(st.sampled_from(sorted(self.files)))
        (self.path / name).unlink()  # its other names stay whole
        (self.path / name).write_bytes(junk)
        self.files[name] = None

    @precondition(lambda self: self.newest() is not None)
    @rule()
    def resume(self) -> None:
        loaded = self.folder.newest()
        assert loaded
        self.go_on_from(loaded)

    @precondition(lambda self: any(step is not None for step in self.files.values()))
    @rule(data=st.data())
    def resume_from_an_earlier_one(self, data: st.DataObject) -> None:
        whole = sorted(name for name, step in self.files.items() if step is not None and not name.startswith(ASIDE))
        if whole:
            path = self.path / data.draw(st.sampled_from(whole))
            self.go_on_from(LoadedCheckpoint(path, read_checkpoint(path)))

    def go_on_from(self, checkpoint: LoadedCheckpoint) -> None:
        self.folder.rewind_to(checkpoint.path, checkpoint.step)
        self.step = checkpoint.step
        after = {path.name: read(path) for path in self.path.glob("*.pt")}
        assert after["latest.pt"] == self.step
        usable = {name: step for name, step in after.items() if not name.startswith(ASIDE) and step is not None}
        assert max(usable.values()) == self.step, "nothing newer is left that a later resume could take"
        kept = [step for step in self.files.values() if step is not None]
        assert set(kept) <= set(after.values()), "nothing is deleted"
        for name, step in self.files.items():
            if step is not None and step <= self.step and name not in ("latest.pt", "previous.pt"):
                assert after[name] == step, "what is not newer stays where it is"
        self.files = after

    # --- what always holds

    @invariant()
    def one_damaged_block_leaves_another_file(self) -> None:
        if hasattr(self, "path") and {"latest.pt", "previous.pt"} <= self.files.keys():
            assert not self.folder.latest.samefile(self.folder.previous)

    @invariant()
    def files_are_those_of_the_model(self) -> None:
        if hasattr(self, "path"):
            assert {path.name: read(path) for path in self.path.iterdir()} == self.files

    @invariant()
    def the_newest_is_found(self) -> None:
        if hasattr(self, "path"):
            usable = [name for name in self.files if not name.startswith(ASIDE)]
            try:
                loaded = self.folder.newest()
            except CheckpointError:
                assert usable and self.newest() is None
                return
            assert (loaded.step if loaded else None) == self.newest()
            assert loaded is not None or not usable
            assert loaded is None or (loaded.state["model"]["weight"] == loaded.step).all()


def read(path: Path) -> int | None:
    """Return the step that a file holds, if it is whole."""
    try:
        loaded = read_checkpoint(path)
    except CheckpointError:
        return None
    step = int(loaded["position"]["step"])
    return step if torch.equal(loaded["model"]["weight"], torch.full((1,), float(step))) else None


TestRotation = Rotation.TestCase
TestRotation.settings = settings(max_examples=max(10, settings.default.max_examples // 2), stateful_step_count=15)
