"""A `python` for many short programs: torch is imported once, and each program runs in a fork of that process.

A program of two training steps spends most of its time on imports. Here it gets the packages that are loaded already,
and everything else of its own: arguments, folder, environment, files, exit code, and the project's modules.
"""

import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Nothing of the project, which each program imports for itself.
PACKAGES = (
    "torch.distributed.run", "torch.utils.tensorboard", "torch.utils.data", "torch.utils.flop_counter", "torch._dynamo",
    "pydantic", "loguru", "yaml", "PIL.Image", "numpy", "sympy",
)  # fmt: skip
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
# What `python` is on the PATH. It asks for the program, passes signals on, and ends as the program did.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
while words[:1] == ["-B"]:  # which a program passes on that was started so
    del words[0]
kind = words[0] if words else "-"
if kind == "-m":
    can_fork = words[1].split(".")[0] in ("tools", "common", "torch", "examples")
else:
    can_fork = kind == "-c" or kind[:1] not in ("", "-")
for place in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    if place and os.path.exists(f"{{place}}/sitecustomize.py"):  # it would come too late
        can_fork = False
if not can_fork or "LD_PRELOAD" in os.environ:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
if "TRAIN_SPAWNED" in os.environ:  # ends with its parent, which the program then finds in the parent's place
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(os.environ["TRAIN_SPAWNED"]):
        sys.exit(1)
turn = os.open({home!r} + "/turns", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(turn, b".")
server = socket.socket(socket.AF_UNIX)
server.connect(f"{home}/socket{{os.lseek(turn, 0, os.SEEK_CUR) % 2}}")
request = json.dumps([words, os.getcwd(), dict(os.environ), sys.argv[0]]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
answers = server.makefile()
pid = int(answers.readline())
for name in {forwarded!r}:
    signal.signal(getattr(signal, name), lambda number, frame: os.kill(pid, number))
code = int(answers.readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def warm_python() -> Iterator[Path]:
    """A folder for the front of the PATH, with `python` and `torchrun`; it works until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="warm_") as home:
        programs = Path(home, "bin")
        programs.mkdir()
        client = CLIENT.format(python=sys.executable, home=home, forwarded=FORWARDED)
        torchrun = f'#!/bin/sh\nexec "{programs}/python" -m torch.distributed.run "$@"\n'
        for name, text in (("python", client), ("torchrun", torchrun)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        for program in Path(sys.executable).parent.iterdir():  # those beside it are looked for there
            if not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # read when torch is imported: a program cannot ask for more
        # Two, in turn: Python hashes texts differently in each, and so orders sets, as in every new process.
        servers = {
            Path(home, f"socket{number}"): subprocess.Popen(
                [sys.executable, __file__, f"{home}/socket{number}"], env=alone, start_new_session=True
            )
            for number in range(2)
        }
        try:
            for address, server in servers.items():
                while not address.exists():
                    assert server.poll() is None, "a process that programs are forked from has ended"
                    time.sleep(0.05)
            yield programs
        finally:
            for server in servers.values():
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def serve(address: str) -> dict[str, Any] | None:
    """Fork for each request. Returns in the forks alone, with what their program is."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: tests may be killed
    for name in PACKAGES:
        __import__(name)
    gc.freeze()  # so that no fork copies what it never uses
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while True:
        asked, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return follow(asked)
        asked.close()


def follow(asked: socket.socket) -> dict[str, Any]:
    """Read a request and fork for its program; the parent tells the client how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(asked, 8, 3)
    with asked.makefile("rb") as stream:
        words, folder, environment, executable = json.loads(stream.read(int.from_bytes(size, "big")))
    if "TRAIN_SPAWNED" in environment:
        environment["TRAIN_SPAWNED"] = str(os.getpid())
    pid = os.fork()
    if pid:
        asked.sendall(f"{pid}\n".encode())
        ended = os.pidfd_open(pid)
        if ended not in select.select([asked.fileno(), ended], [], [])[0]:  # the client was killed
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):
            asked.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    asked.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    return {"words": words, "folder": folder, "environment": environment, "executable": executable}


def become(words: list[str], folder: str, environment: dict[str, str], executable: str) -> None:
    """Run a program as `python WORDS` would."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    kind, name = (words[0], words[1]) if words[0] in ("-c", "-m") else ("", words[0])
    sys.executable, sys.orig_argv = executable, [executable, *words]
    sys.argv = [kind, *words[2:]] if kind else list(words)
    there = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:1] = ["" if kind == "-c" else folder if kind else os.path.dirname(os.path.abspath(name)), *there]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for module in ("warm", "__main__"):
        sys.modules.pop(module, None)
    if kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind:
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(name, vars(main))
    else:
        main = type(sys)("__main__")
        main.__file__ = name
        sys.modules["__main__"] = main
        exec(compile(Path(name).read_bytes(), name, "exec"), vars(main))


if __name__ == "__main__":
    if program := serve(sys.argv[1]):
        become(**program)
