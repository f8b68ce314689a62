"""One rank fails, all end: within seconds, with a code that is not 0, and with its reason as the last thing shown."""

import json
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed
from loguru import logger

from common import distributed
from common.base.errors import UserError, error_context
from common.distributed import Rank
from common.failure import hub
from common.failure.report import Failure, describe
from common.monitor.writer import Writer, WriterRun
from common.progress import Position
from common.trainer import Trainer
from parts.advice.explain import explain
from tests.conftest import ENVIRONMENT, PROJECT, Runs, run
from tests.ranks import SOON, Ended, failed, start_ranks

SMALL = ["--model", "{type: tests.small.Breaks}", "--batch_size", "16"]


def broken(runs: Runs, how: str, *words: str, world: int = 2) -> Ended:
    """Run on several ranks, with `how` as tests.small.Breaks understands it."""
    return failed(start_ranks(runs.root, world, runs.words(*SMALL, *words), environment={"BREAKS": how}))


def launched(runs: Runs, command: list[str], how: str) -> subprocess.CompletedProcess[str]:
    """Run something that starts the ranks, to an end that must come soon after one of them has gone wrong."""
    broke = runs.root / "broke"
    done = run(command, env={**ENVIRONMENT, "BREAKS": how, "BROKE": str(broke)})
    assert time.time() - broke.stat().st_mtime < SOON, done.stderr
    return done


def last_block(text: str) -> str:
    """Return the summary, which must be the last thing that is shown, but for the command that resumes the run."""
    text = re.sub(r"\nto resume:  \S.*\s*$", "", text)
    assert text.rstrip().endswith("=" * 80), text
    return text[text.rindex("==== rank ") :] if "==== rank " in text else text[text.rindex("==== failed") :]


@pytest.mark.slow
def test_exception_in_forward(runs: Runs) -> None:
    """With rank, host, step, samples, the user's line; everywhere one would look."""
    ended = broken(runs, "raise 1 train 5")
    folder = runs.root / "run"
    block = last_block(ended.texts[0])
    assert "rank 1 failed" in block and "RuntimeError: a mistake in the model" in block
    assert re.search(r"at +tests/small.py:\d+, in go_wrong", block)
    # Two calls are for nothing, so the fifth is in the third step. Its samples, of the 16 that rank 1 has.
    assert re.search(r"context +training step 3, epoch 1, of train samples (\d+, ){8}\.\.\. \(16 in all\)\n", block)
    assert re.search(r"process +rank 1 of 2, process \d+ on ", block)
    assert "Traceback" in ended.texts[0] and "Traceback" not in ended.texts[1]  # shown once
    for file in ("train.log", "train.rank1.log"):
        assert "a mistake in the model" in (folder / file).read_text()
    assert "Traceback" in (folder / "train.log").read_text()
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"].startswith("rank 1: RuntimeError: a mistake in the model (training step 3, epoch 1, of")
    assert not (folder / "run.lock").exists()
    assert ended.codes == [1, 1]


class Lingering(Writer):
    """Takes longer to close than a failed run waits."""

    def __init__(self, run: WriterRun) -> None: ...

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, tag: str, text: str) -> None: ...

    def close(self, state: str) -> None:
        time.sleep(30)


@pytest.mark.slow
def test_the_reason_is_logged_before_writers_close(runs: Runs) -> None:
    """Also in the first step, after which a run that was moved away would get its folder back."""
    words = ["--monitor.writers", f"[{__name__}.Lingering]", "--progress.init_eval", "true"]
    broken(runs, "raise 1 train 3", *words)
    assert "a mistake in the model" in (runs.root / "run" / "train.log").read_text()


@pytest.mark.slow
def test_exception_on_three_ranks(runs: Runs) -> None:
    """Those who were not involved end too."""
    assert "rank 2 failed" in last_block(broken(runs, "raise 2 train 4", world=3).texts[0])


@pytest.mark.slow
def test_exception_on_rank_0(runs: Runs) -> None:
    block = last_block(broken(runs, "raise 0 train 4").texts[0])
    assert "rank 0 failed" in block and "training step 2" in block


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["0", "1"])
def test_exception_in_a_loader(runs: Runs, worker: str) -> None:
    """From a worker too, with the number of the sample and the line of the dataset."""
    words = ["--dataset.train", "{type: tests.small.OneBadSample, index: 77}", "--num_workers", worker]
    block = last_block(broken(runs, "never 0 train 0", *words).texts[0])
    assert "sample 77 of OneBadSample cannot be read: OSError: no such picture" in block
    assert re.search(r"at +tests/small.py:\d+, in __getitem__", block)


class Slow:
    """Takes its time to become text, as a tensor on a busy device does."""

    def __str__(self) -> str:
        time.sleep(0.3)
        return "blah, slowly"


def talk(trainer: Trainer) -> None:
    """A plug-in: rank 0 has a lot to say, in every way, while rank 1 fails."""
    if trainer.rank.is_main:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            logger.info("blah")
            logging.getLogger("some.library").warning("blah")
            print("blah", file=sys.stderr)
            os.write(2, b"blah\n")  # as a library in C does
            logger.info("{}", Slow())
    raise RuntimeError("rank 1 is wrong")


@pytest.mark.slow
def test_nothing_is_said_after_the_reason(runs: Runs) -> None:
    """The first cause is the last thing shown, on the terminal and in the log, however busy rank 0 is."""
    ended = broken(runs, "never 0 train 0", "--plugins", "[engine.failure.test_fail_fast:talk]")
    for text in (ended.texts[0], (runs.root / "run" / "train.log").read_text()):
        assert "blah" in text
        assert "RuntimeError: rank 1 is wrong" in last_block(text)


def lag(trainer: Trainer) -> None:
    """A plug-in: rank 1 fails while rank 0 is still on its way to the first step."""
    if trainer.rank.rank == 1:
        raise RuntimeError("rank 1 is wrong")
    time.sleep(1)


@pytest.mark.slow
def test_a_failed_run_does_not_begin_to_train(runs: Runs) -> None:
    """What rank 0 does until it ends does not change what is on record."""
    broken(runs, "never 0 train 0", "--plugins", "[engine.failure.test_fail_fast:lag]")
    status = json.loads((runs.root / "run" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "rank 1: RuntimeError: rank 1 is wrong")


def stop_reading() -> None:
    """What rank 0 writes to its terminal is not read any more: it was paused, or what reads it is stuck."""
    if os.environ["RANK"] == "0":
        _, writer = os.pipe()
        os.dup2(writer, 2)


def fill(trainer: Trainer) -> None:
    """A plug-in: rank 0 writes more than an unread terminal takes; then rank 1 fails."""
    if trainer.rank.is_main:
        logger.info("blah" * 100_000)
    time.sleep(1 if trainer.rank.rank == 1 else 1000)
    raise RuntimeError("rank 1 is wrong")


@pytest.mark.slow
def test_a_terminal_without_a_reader(runs: Runs) -> None:
    """All end, also when the reason cannot be shown."""
    words = runs.words(*SMALL, "--plugins", "[engine.failure.test_fail_fast:fill]")
    ended = start_ranks(runs.root, 3, words, setup=stop_reading)
    assert ended.codes == [1, 1, 1]
    assert max(ended.seconds) - min(ended.seconds) < 10
    assert "rank 1 is wrong" in (runs.root / "run" / "train.log").read_text()


@pytest.mark.slow
def test_exception_in_one_ranks_validation(runs: Runs) -> None:
    """The others wait for its numbers."""
    block = last_block(broken(runs, "raise 1 eval 3", "--dataset.val.eval_batch_size", "32").texts[0])
    assert "rank 1 failed" in block and "after training step 5\n" in block
    assert "in the evaluation on val, samples 96 to 127" in block


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "report"),
    [
        ("exit", "without an error message"),
        ("kill", "without an error message"),
        ("sys.exit", "SystemExit: 0"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_goes(runs: Runs, how: str, report: str, rank: int) -> None:
    """os._exit, SIGKILL, sys.exit; rank 1 speaks where rank 0 cannot any more."""
    ended = start_ranks(runs.root, 2, runs.words(*SMALL), environment={"BREAKS": f"{how} {rank} train 5"})
    assert ended.codes[1 - rank] == 1
    assert max(ended.seconds) - min(ended.seconds) < SOON
    speaker = 1 if rank == 0 and how != "sys.exit" else 0
    block = last_block(ended.texts[speaker])
    assert f"rank {rank} failed" in block and report in block
    status = json.loads((runs.root / "run" / "status.json").read_text())
    assert (status["state"], status["reason"].startswith(f"rank {rank}: ")) == ("failed", True)
    assert report in (runs.root / "run" / "train.log").read_text()
    if rank == 1:
        assert (
            f"rank 1: {'SystemExit' if how == 'sys.exit' else 'the process'}"
            in (runs.root / "run/status.json").read_text()
        )


def die_at_the_end(trainer: Trainer) -> None:
    """A plug-in: rank 1 is killed when all is done but leaving."""
    if trainer.rank.rank == 1:

        def killed(rank: Rank) -> None:
            until = time.monotonic() + 60
            while '"finished"' not in trainer.paths.status_file.read_text() and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), 9)

        distributed.finish = killed


@pytest.mark.slow
def test_a_rank_that_goes_when_all_is_done(runs: Runs) -> None:
    """Reported as what it is; the run has finished all the same, and its record says so."""
    words = ["--plugins", "[engine.failure.test_fail_fast:die_at_the_end]", "--progress.max_steps", "2"]
    ended = failed(start_ranks(runs.root, 2, runs.words(*SMALL, *words)))
    assert ended.codes == [1, -9]
    assert "rank 1 failed" in last_block(ended.texts[0])
    assert json.loads((runs.root / "run" / "status.json").read_text())["state"] == "finished"
    assert not (runs.root / "run" / "run.lock").exists()


def fork_a_worker(trainer: Trainer) -> None:
    """A plug-in: a worker keeps running while its rank is killed."""
    if not trainer.rank.is_main and os.fork() == 0:
        time.sleep(20)  # a worker in a slow read, with copies of all that its parent had open
        os._exit(0)


@pytest.mark.slow
def test_a_worker_does_not_hide_the_death_of_its_rank(runs: Runs) -> None:
    """Although it holds copies of the dead rank's connections."""
    ended = broken(runs, "kill 1 train 5", "--plugins", "[engine.failure.test_fail_fast:fork_a_worker]")
    assert "rank 1 failed" in last_block(ended.texts[0])


def listen_to_strangers() -> None:
    """Other programs find rank 0's port before the ranks do."""
    if os.environ["RANK"] != "0":
        return

    silent = list[socket.socket]()

    def found_by_others(*arguments: Any, **more: Any) -> socket.socket:
        server = socket.create_server(*arguments, **{**more, "backlog": 8})
        for text in (b"", b"\n"):  # as long as the run lives: they say nothing, or too little
            silent.append(socket.create_connection(server.getsockname()))
            silent[-1].sendall(text)
        for text in (b"[" * 200_000 + b"\n", b"GET / HTTP/1.1\r\n\r\n", b""):
            with suppress(OSError), socket.create_connection(server.getsockname(), timeout=1) as stranger:
                stranger.sendall(text[:10_000])
        return server

    names = {**vars(socket), "create_server": found_by_others}
    setattr(hub, "socket", SimpleNamespace(**names))  # noqa: B010 - to the type checker it is a module


@pytest.mark.slow
def test_strangers_do_not_deafen_it(runs: Runs) -> None:
    """A program without the key changes nothing."""
    ended = failed(
        start_ranks(
            runs.root, 2, runs.words(*SMALL), environment={"BREAKS": "kill 1 train 5"}, setup=listen_to_strangers
        )
    )
    assert "rank 1 failed" in last_block(ended.texts[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "report"),
    [("memory_of_CUDA", "CUDA out of memory"), ("memory", "DefaultCPUAllocator: can't allocate memory")],
    ids=["GPU", "CPU"],
)
def test_out_of_memory(runs: Runs, how: str, report: str) -> None:
    """With what helps against it. On the CPU it is real: a tensor that no machine has room for."""
    block = last_block(broken(runs, f"{how} 1 train 3").texts[0])
    assert report in block and "smaller batch_size" in block and "rank 1 failed" in block
    assert re.search(r"context +training step 1, epoch 1, of train samples", block)


@pytest.mark.slow
def test_not_a_number_on_one_rank(runs: Runs) -> None:
    """Which rank, which step, which samples; and no checkpoint of it."""
    words = ["--loss", "{$REPLACE: true, ce: {type: tests.small.NanOnRank1}}", "--batch_size", "16"]
    ended = failed(start_ranks(runs.root, 2, runs.words(*words)))
    assert 2 in ended.codes
    text = ended.texts[0]
    assert re.search(
        r"the loss of step 3 is not a finite number \(rank 1, of train samples (\d+, ){8}\.\.\. \(16 in all\)\)", text
    )
    assert text.count("is not a finite number") == 1
    assert not (runs.root / "run" / "checkpoints" / "latest.pt").exists()


@pytest.mark.slow
def test_a_mistake_that_all_make_is_reported_once(runs: Runs) -> None:
    """A missing folder is missing on every rank."""
    ended = failed(start_ranks(runs.root, 2, runs.words("--dir.data_dir", str(runs.root / "nowhere"))))
    assert ended.codes[0] in (1, 2)
    assert sum(text.count("nowhere") > 0 for text in ended.texts) == 1


@pytest.mark.slow
def test_a_rank_that_never_arrives(runs: Runs) -> None:
    """The missing one is named."""
    ended = failed(start_ranks(runs.root, 3, runs.words(*SMALL, "--dist.timeout", "2"), only=[0, 2]))
    assert ended.codes == [2, 2]
    assert "rank 1 of 3 did not arrive" in ended.texts[0] and "(dist.timeout)" in ended.texts[0]
    assert "rank 0 ended while the processes were gathering" in ended.texts[1]


@pytest.mark.slow
def test_rank_0_never_arrives(runs: Runs) -> None:
    ended = start_ranks(runs.root, 2, runs.words(*SMALL, "--dist.timeout", "2"), only=[1])
    assert ended.codes == [2]
    assert "rank 1 could not reach rank 0 at 127.0.0.1:" in ended.texts[0]


def test_rank_0_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that lets only the first port through: the other one is named."""
    with socket.socket() as closed:  # bound, but it does not listen
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        monkeypatch.setattr(hub, "from_main", lambda *_: (None, port, b""))
        with pytest.raises(UserError, match=f"rank 1 cannot reach rank 0 at 127.0.0.1:{port}, .* refused"):
            hub.connect(Rank(rank=1, world_size=2, local_world=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "report"),
    [({"MASTER_ADDR": "no.such.host.invalid"}, "Name or service not known"), ({}, "address already in use")],
)
def test_nowhere_to_meet(runs: Runs, change: dict[str, str], report: str) -> None:
    """An unknown name, and a port in use, are distinguished from a rank that is late."""
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = {"MASTER_PORT": str(busy.getsockname()[1])}
        ended = start_ranks(
            runs.root, 2, runs.words(*SMALL, "--dist.timeout", "3"), only=[0], environment={**port, **change}
        )
    assert ended.codes == [2]
    assert report in ended.texts[0]


@pytest.mark.slow
def test_ranks_with_other_settings(runs: Runs) -> None:
    """Two nodes with two versions of a file, say; which key differs is reported before anything runs."""
    ended = failed(start_ranks(runs.root, 2, runs.words(*SMALL), more={1: ["--optim.lr", "0.5"]}))
    text = "".join(ended.texts)
    assert "rank 1 was started with a different configuration" in text and "'optim.lr': 0.001" not in text
    assert "optim.lr: 0.001 on rank 0, 0.5 on rank 1" in text


def refuse(trainer: Trainer) -> None:
    """A plug-in: rank 1 finds a mistake of the user's."""
    if trainer.rank.rank == 1:
        raise UserError("rank 1 has no table of weights")


NAN = ["--loss", "{$REPLACE: true, ce: {type: tests.small.NanOnRank1}}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words", "rank", "shown"),
    [
        ("raise 1 train 5", [], "1", r"Traceback.*= rank 1 failed =.*a mistake in the model.*context +training"),
        pytest.param(
            "never 0 train 0",
            ["--plugins", f"[{__name__}:refuse]"],
            "1",
            r"traceback : rank 1 has no table of",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "never 0 train 0",
            NAN,
            "1",
            r"the loss of step 3 is not a finite number \(rank 1, of train samples",
            marks=pytest.mark.full,
        ),
        ("hang 1 train 4", ["--dist.timeout", "3"], "1", r"rank 1 failed =.*did not reach a collective"),
        ("kill 1 train 5", [], "1", r"Signal 9 \(SIGKILL\) received"),
        pytest.param(
            "exit 1 train 5", [], "0", r"rank 1: the process exited without an error message", marks=pytest.mark.full
        ),
        ("never 0 train 0", ["--optim.lrr", "3"], "[01]", r"unknown key; did you mean optim.lr\?"),
    ],
    ids=["exception", "user", "nan", "hang", "kill", "exit", "config"],
)
def test_the_culprit_under_torchrun(runs: Runs, how: str, words: list[str], rank: str, shown: str) -> None:
    """Torchrun's own summary, which comes after ours, has the reason, and the rank where it lies."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    command = [*launcher, *runs.words(*SMALL, *words)]
    done = run(command, env={**ENVIRONMENT, "BREAKS": how}) if words else launched(runs, command, how)
    assert done.returncode == 1
    others, cause = done.stderr[done.stderr.index("Failures:") :].split("Root Cause")
    assert re.search(rf"rank +: {rank} ", cause), cause
    assert re.search(shown, cause, re.DOTALL), cause
    assert "To enable traceback" not in others + cause


@pytest.mark.slow
def test_one_process_under_torchrun(runs: Runs) -> None:
    """The same box for a run that has no other processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "train.py"]
    done = run([*launcher, *runs.words(*SMALL)], env={**ENVIRONMENT, "BREAKS": "raise 0 train 5"})
    assert done.returncode == 1
    assert re.search(r"=== failed =.*a mistake in the model", done.stderr.split("Root Cause")[1], re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "report"),
    [
        ("exit", "with exit code 0"),
        pytest.param("exit3", "with exit code 3", marks=pytest.mark.full),
        pytest.param("abort", "killed by SIGABRT", marks=pytest.mark.full),
        ("kill", "killed by SIGKILL"),
    ],
)
def test_how_a_process_ended(runs: Runs, how: str, report: str) -> None:
    """Without a word: its exit code or signal, on the terminal and in the log, also if it is the main process."""
    rank = "0" if how == "kill" else "1"
    words = [sys.executable, "train.py", *runs.words(*SMALL, "--dist.processes", "2")]
    done = launched(runs, words, f"{how} {rank} train 5")
    for text in (done.stderr, (runs.root / "run" / "train.log").read_text()):
        assert f"rank {rank} failed" in text and f"without an error message, {report}\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_does_not_come(runs: Runs, rank: str) -> None:
    """It is named, with its line, although it knows of no error; not the others, which waited for it."""
    ended = broken(runs, f"hang {rank} train 4", "--dist.timeout", "3", world=3)
    block = last_block(ended.texts[0])
    assert f"rank {rank} failed" in block and "did not reach a collective in which other processes waited" in block
    assert re.search(r"at +tests/small.py:\d+, in go_wrong:  time.sleep", block)
    assert re.search(r"context +rank [012] waited in vain: .*[Tt]imed out", block)
    assert "time.sleep(1000)" in (runs.root / "run" / "train.log").read_text()


@pytest.mark.slow
def test_ranks_in_different_exchanges(runs: Runs) -> None:
    """The stack of the one in an exchange that only it has called, and no advice to wait longer."""
    text = broken(runs, "barrier 1 eval 3", "--dist.timeout", "3", "--dataset.val.eval_batch_size", "32").texts[0]
    block = last_block(text)
    assert re.search(r"tests/small.py:\d+, in go_wrong:  torch.distributed.barrier()", block)
    assert "the processes wait in different collectives" in block and "increase dist.timeout" not in text


@pytest.mark.slow
def test_spawned_processes_end(runs: Runs) -> None:
    """The process that started the others ends with the culprit's code, and says what ended it."""
    words = [sys.executable, "train.py", *runs.words(*SMALL, "--dist.processes", "2")]
    done = launched(runs, words, "kill 0 train 5")
    assert done.returncode == 128 + 9
    assert done.stderr.rstrip().splitlines()[-1].startswith("error: rank 0 was ended by SIGKILL")


def test_one_process(runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same words without any ranks."""
    monkeypatch.setenv("BREAKS", "raise 0 train 5")
    assert runs.fail(*SMALL) == 1
    block = last_block(capsys.readouterr().err)
    assert "==== failed" in block and "training step 5" in block and "rank 0" not in block
    assert "Traceback" in (runs.root / "run" / "train.log").read_text()


def test_a_model_that_does_not_fit_its_data(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """The line of the model, and the shapes."""
    assert runs.fail("--model.in_channels", "3") == 1
    block = last_block(capsys.readouterr().err)
    assert re.search(r"at +custom/models/conv_model.py:\d+, in forward", block)
    assert "to have 3 channels, but got 1 channels" in block


def failure(error: BaseException) -> Failure:
    try:
        with error_context("here"), error_context("and there"):
            raise error
    except BaseException as raised:  # noqa: BLE001
        return describe(raised, Rank())


def test_where_an_error_happened() -> None:
    """Notes, from the inside out, and not twice."""
    text = failure(ValueError("wrong")).text()
    assert re.search(r"context +and there\n +context +here\n", text)
    assert text.count("and there") == 1


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "--num_workers 0"),
        (RuntimeError("DataLoader timed out after 5 seconds"), "loader.timeout"),
        (RuntimeError("Timed out waiting 600000ms for recv operation to complete"), "dist.timeout"),
        (IndexError("Target 11 is out of bounds."), "number of classes"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "out of memory: a smaller batch_size; or, after"),
    ],
)
def test_hints(error: Exception, helps: str) -> None:
    """What helps against errors whose own text does not name the cause or the setting."""
    with pytest.raises(type(error)) as raised, explain():
        raise error
    assert helps in describe(raised.value, Rank(world_size=2)).text()


def test_advice_follows_the_message_alone() -> None:
    """Not the line of code; and a single process waits for no other."""
    with pytest.raises(ValueError, match="wrong") as raised, explain():
        raise ValueError("wrong")  # out of memory
    assert "batch_size" not in describe(raised.value, Rank()).text()
    assert "dist.timeout" not in describe(TimeoutError("timed out"), Rank()).text()


def stop_here(trainer: Trainer) -> None:
    """A plug-in: the debugger in rank 1, between two steps."""
    stepped = trainer.monitor.step_done

    def tell(position: Position, samples: int) -> None:
        stepped(position, samples)
        if position.step == 2:
            torch.distributed.breakpoint(rank=1)

    trainer.monitor.step_done = tell  # type: ignore[assignment, method-assign]


@pytest.mark.slow
def test_breakpoint_in_training(runs: Runs) -> None:
    """Torch's, in the second of the two processes that train.py starts; the other waits beyond dist.timeout."""
    plugins = ["--plugins", f"[{__name__}:stop_here]", "--dist.processes", "2", "--dist.timeout", "3"]
    command = shlex.join([sys.executable, "train.py", *runs.words(*plugins)])
    output = shlex.quote(str(runs.root / "output"))
    wait = f"until grep -qs ATTENTION {output}; do sleep 0.1; done; sleep 4"
    typed = "up\\np position.step, 40 + position.step\\ncontinue\\n"
    done = run(["sh", "-c", f"({wait}; printf '{typed}') | {command} 2>&1 | tee {output}"])
    assert "(2, 42)" in done.stdout
    state = json.loads((runs.root / "run" / "status.json").read_text())
    assert state["state"] == "finished"


@pytest.mark.slow
def test_torchrun_is_killed(runs: Runs) -> None:
    """No process is left to look after its processes, and they end too."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    words = [*SMALL, "--plugins", "[engine.failure.test_fail_fast:tell_pid]", "--progress.epoch", "100000"]
    words = [*launcher, *runs.words(*words, "--progress.epoch_val", "-1")]
    child = subprocess.Popen(words, cwd=PROJECT, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        running = [runs.root / "run" / f"pid{rank}" for rank in (0, 1)]
        until(lambda: all(file.exists() and file.read_text() for file in running), seconds=60)
        processes = [int(file.read_text()) for file in running]
    finally:
        child.kill()
        child.wait()
    until(lambda: not any(alive(process) for process in processes), seconds=SOON)


def tell_pid(trainer: Trainer) -> None:
    """A plug-in that tells who it is."""
    (trainer.paths.root / f"pid{trainer.rank.rank}").write_text(str(os.getpid()))


def alive(process: int) -> bool:
    """Return whether it runs: a process that has ended may be in the table until its code is read."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen in {seconds:.0f} s"
        time.sleep(0.05)


def test_a_file_that_is_late_is_no_rank_that_is_late() -> None:
    """The process that reads it is the one that failed."""
    error = RuntimeError("sample 3 of Images cannot be read: ReadTimeoutError: The read operation timed out")
    assert not describe(error, Rank(world_size=2)).is_timeout
    assert describe(RuntimeError("Timed out waiting 1000ms for recv"), Rank(world_size=2)).is_timeout
