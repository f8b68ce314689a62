"""Memory of a long list in loader workers: a plain list against `SharedList`, by the kernel's count.

Every worker reads every record. The proportional set size counts a page that n processes share as 1/n of it for each,
so its sum over all processes, less the same sum with a short list, is the memory that the list really takes. Pages of
files do not count: those of libraries are shared with other programs, which come and go.
Run:  python bench/shared_list.py [--records N] [--workers N]
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.proj_name}}"
sys.path.insert(0, str(PROJECT))

from library.data.shared_list import SharedList  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

METHODS = ("fork", "spawn", "forkserver")


def record(number: int) -> tuple[str, int]:
    """Return a path and a label, as a folder of images has them."""
    return f"/data/images/train/n{number % 1000:08d}/n{number % 1000:08d}_{number}.JPEG", number % 1000


class Records:
    """Item `worker` reads the whole list, and says in which process."""

    def __init__(self, records: Any, workers: int, ready: Any, measured: Any) -> None:
        self.records, self.workers, self.ready, self.measured = records, workers, ready, measured

    def __len__(self) -> int:
        return self.workers

    def __getitem__(self, index: int) -> int:
        for each in self.records:
            assert each[1] >= 0
        self.ready.release()  # everybody is measured after everybody has read
        self.measured.acquire()
        return index


def pss(pid: int) -> int:
    """Proportional set size of a process, without pages of files, bytes."""
    rows = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(rows[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))


def measure(kind: str, method: str, count: int, workers: int) -> None:
    """Print the sum over this process and its workers, and the size of a shared list, bytes, as JSON."""
    context = multiprocessing.get_context(method)
    ready, measured = context.Semaphore(0), context.Semaphore(0)
    records = (record(number) for number in range(count))
    held: Any = list(records) if kind == "list" else SharedList(records)
    data = Records(held, workers, ready, measured)
    loader = DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=context)  # type: ignore[arg-type, var-annotated]
    batches = iter(loader)
    for _ in range(workers):
        ready.acquire()
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]
    total = sum(map(pss, pids))
    for _ in range(workers):
        measured.release()
    list(batches)
    size = held._data.nbytes + held._ends.nbytes if isinstance(held, SharedList) else 0
    print(json.dumps({"total": total, "size": size, "processes": len(pids)}))


def main() -> None:
    """Measure each combination in a fresh process and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "METHOD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(*options.one, options.records, options.workers)
        return

    def run(kind: str, method: str, records: int) -> dict[str, int]:
        words = ["--one", kind, method, "--records", str(records), "--workers", str(options.workers)]
        done = subprocess.run([sys.executable, __file__, *words], check=True, capture_output=True, text=True)
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    print(f"{options.records:,} records, {options.workers} workers; MB over all processes, less those of a short list")
    for method in METHODS:
        plain = run("list", method, options.records)["total"] - run("list", method, 1000)["total"]
        shared = run("shared", method, options.records)
        used, size = shared["total"] - run("shared", method, 1000)["total"], shared["size"]
        print(
            f"  {method:<10}  list {plain / 1e6:7.1f}   SharedList {used / 1e6:7.1f}   "
            f"one copy {size / 1e6:6.1f}   ratio {used / size:.3f}"
        )


if __name__ == "__main__":
    main()
