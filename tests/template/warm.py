"""A `python` for many short programs: torch is imported once, and each program runs in a fork of that process.

A program of two training steps spends most of its time on imports. Here it gets the packages that are loaded already,
and everything else of its own: arguments, folder, environment, files, exit code, and the project's modules.
"""

import atexit
import ctypes
import functools
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
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

# Nothing of the project, which each program imports for itself.
PACKAGES = (
    "torch.distributed.run", "torch.utils.tensorboard", "torch.utils.data", "torch.utils.flop_counter", "torch._dynamo",
    "pydantic.dataclasses", "pydantic.type_adapter", "pydantic.types", "loguru", "yaml", "numpy", "sympy",
    "PIL.BmpImagePlugin", "PIL.GifImagePlugin", "PIL.ImageDraw", "PIL.ImageOps", "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin", "multiprocessing.queues", "html", "resource",
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
server.connect(f"{home}/socket{{os.lseek(turn, 0, os.SEEK_CUR) % {servers}}}")
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
def warm_python(python: str = sys.executable, *also: str, servers: int = 2, **variables: str) -> Iterator[Path]:
    """A folder for the front of the PATH, with `python` and `torchrun`; it works until the end of the block.

    Args:
        python: what they are; further packages that programs find imported are `also`.
        variables: environment of the processes that programs are forked from.
    """
    with tempfile.TemporaryDirectory(prefix="warm_") as home:
        programs = Path(home, "bin")
        programs.mkdir()
        client = CLIENT.format(python=python, home=home, servers=servers, forwarded=FORWARDED)
        torchrun = f'#!/bin/sh\nexec "{programs}/python" -m torch.distributed.run "$@"\n'
        for name, text in (("python", client), ("torchrun", torchrun)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        for program in Path(python).parent.iterdir():  # those beside it are looked for there
            if not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
        # Read when torch is imported: a program cannot ask for more threads.
        alone = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        # Two, in turn: Python hashes texts differently in each, and so orders sets, as in every new process.
        processes = {
            Path(home, f"socket{number}"): subprocess.Popen(
                [python, __file__, f"{home}/socket{number}", *also], env=alone, start_new_session=True
            )
            for number in range(servers)
        }
        try:
            for address, server in processes.items():
                while not address.exists():
                    assert server.poll() is None, "a process that programs are forked from has ended"
                    time.sleep(0.05)
            yield programs
        finally:
            for server in processes.values():
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def remember_packages() -> None:
    """Cache which packages are missing, and the library folders that loguru looks up for every sink."""
    from loguru._better_exceptions import ExceptionFormatter

    ExceptionFormatter._get_lib_dirs = staticmethod(functools.cache(ExceptionFormatter._get_lib_dirs))  # type: ignore[method-assign]
    look_up = metadata.Distribution.from_name.__func__  # type: ignore[attr-defined]
    missing: set[str] = set()

    def from_name(cls: type[metadata.Distribution], name: str) -> Any:
        if name in missing:
            raise metadata.PackageNotFoundError(name)
        try:
            return look_up(cls, name)
        except metadata.PackageNotFoundError:
            missing.add(name)
            raise

    metadata.Distribution.from_name = classmethod(from_name)  # type: ignore[assignment,method-assign]


def remember_versions() -> None:
    """Cache the versions of all imported packages: every run records them."""
    metadata.version = functools.cache(metadata.version)
    for name in {module.partition(".")[0] for module in sys.modules}:
        with suppress(metadata.PackageNotFoundError, ValueError):
            metadata.version(name)


def serve(address: str, *also: str) -> dict[str, Any] | None:
    """Fork for each request. Returns in the forks alone, with what their program is."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: tests may be killed
    for name in (*PACKAGES, *also):
        __import__(name)
    remember_packages()
    remember_versions()
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


def compile_once(folder: str) -> None:
    """Keep bytecode in `folder` for the next process: compiling it is a quarter of a short program's time."""
    sys.dont_write_bytecode, sys.pycache_prefix = False, folder

    # Python looks at whole seconds. Tests edit a file and run it again within one.
    def in_milliseconds(loader: SourceFileLoader, path: str) -> dict[str, int]:
        found = os.stat(path)
        return {"mtime": found.st_mtime_ns // 1_000_000, "size": found.st_size}

    SourceFileLoader.path_stats = in_milliseconds  # type: ignore[method-assign,assignment]


def become(words: list[str], folder: str, environment: dict[str, str], executable: str, compiled: str) -> None:
    """Run a program as `python WORDS` would."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    kind, name = (words[0], words[1]) if words[0] in ("-c", "-m") else ("", words[0])
    sys.executable, sys.orig_argv = executable, [executable, *words]
    sys.argv = [kind, *words[2:]] if kind else list(words)
    there = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:1] = ["" if kind == "-c" else folder if kind else os.path.dirname(os.path.abspath(name)), *there]
    compile_once(compiled)
    if "EMU_MODE" in environment:  # torch looks for devices of other packages when it is imported
        sys.modules["torch"]._import_device_backends()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for module in ("warm", "__main__"):
        sys.modules.pop(module, None)
    code: object = 0
    try:
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
    except SystemExit as asked:
        code = asked.code or 0
    end(code)


def end(code: object) -> None:
    """Exit as Python does, but without tearing down every module, which takes 0.2 s with torch."""
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # the reader is gone
        code = 120
    os._exit(code)


if __name__ == "__main__":
    if program := serve(*sys.argv[1:]):
        become(**program, compiled=str(Path(sys.argv[1]).with_name("compiled")))
