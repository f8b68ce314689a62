"""What a run costs as its processes grow in number: connections, messages, bytes and time, for 1 to 64 real processes.

Each run is train.py of the project on a tiny model, as torchrun would start it, with a plugin of this file that
measures in every process; they are forked from a server that has imported torch. Counts do not depend on how busy the
machine is; seconds do, and with more processes than cores they also grow for that reason alone. Prints a table with
the law of each row, fitted, and its value at 1,000. Then connects the failure monitors of up to 1,000 ranks in one
process. Takes 15 minutes on two cores, and 14 GB of memory.

    python bench/scale.py [--processes 1,2,4,8,16,32,64]
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.proj_name}}"
sys.path.insert(0, str(PROJECT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train  # noqa: E402
from common.distributed import Rank, barrier, max_over_ranks  # noqa: E402
from common.distributed.process import raise_file_limit  # noqa: E402
from common.failure import monitor  # noqa: E402
from common.failure.monitor import end  # noqa: E402

OUTPUT = "SCALE_OUTPUT"
REPEATS = 20
WORDS = (
    "--config configs/default.yaml --model.width 4 --batch_size 2 --debug.max_samples 512 --progress.max_steps 2 "
    "--progress.epoch null --progress.epoch_val -1 --progress.epoch_eval -1 --dataset.val.eval_batch_size 2 "
    "--monitor.writers [] --dist.timeout 3000 --plugins [scale.attach]"
)
# The laws that are tried: the one with the smallest error is shown.
LAWS: dict[str, Callable[[Any], Any]] = {
    "a": lambda n: 0 * n,
    "a + b log2 N": np.log2,
    "a + b N": lambda n: n,
    "a + b N^2": lambda n: n**2,
}


def written() -> tuple[int, int]:
    """Calls that wrote, and bytes that they wrote, of all threads of this process: to files and to sockets."""
    pairs = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    counts = {name: int(value) for name, value in pairs}
    return counts["syscw"], counts["wchar"]


def open_files() -> tuple[int, int]:
    """Open files of this process, and how many of them are connections."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the listing itself
            continue
    return len(names), sum(name.startswith("socket:") for name in names)


def measured(rank: Any, call: Callable[[], Any], times: int = 1) -> dict[str, float]:
    """Call on all ranks at once: messages and bytes that this process writes, and seconds, for each call."""
    call()
    barrier(rank)
    time.sleep(0.5)  # the others leave the barrier
    before, start = written(), time.perf_counter()
    for _ in range(times):
        call()
    seconds, after = time.perf_counter() - start, written()
    barrier(rank)
    return {
        "messages": (after[0] - before[0]) / times,
        "bytes": (after[1] - before[1]) / times,
        "seconds": seconds / times,
    }


def attach(trainer: Any) -> None:
    """Measure in a process of a run, as its plugin."""
    rank, usage = trainer.rank, resource.getrusage(resource.RUSAGE_SELF)
    hub = getattr(rank.failure_monitor, "_hub", None)
    found: dict[str, Any] = {"cpu": usage.ru_utime + usage.ru_stime, "rank": rank.rank}
    found["files"], found["connections"] = open_files()
    found["monitor"] = len(getattr(hub, "_members", ()))
    barrier(rank)
    if dist.is_initialized():
        found["keys"] = dist.distributed_c10d._get_default_store().num_keys()  # type: ignore[attr-defined]
    found["agreement"] = measured(rank, lambda: max_over_ranks(1, rank), REPEATS)
    found["state"] = measured(rank, lambda: trainer.state.state_dict(trainer.at, {}))
    found["evaluation"] = measured(rank, lambda: trainer.evaluator.run(trainer.val))
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(os.environ[OUTPUT], f"rank{rank.rank}.json").write_text(json.dumps(found))


def be_rank(words: list[str], rank: int, processes: int, port: int, folder: str) -> None:
    """Train as one of the ranks, with the variables that torchrun would set."""
    terminal = os.open(f"{folder}/terminal{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "scale", OUTPUT: folder}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = True
    os.environ.update({name: str(value) for name, value in (place | shared).items()})
    torch.set_num_threads(1)
    end(train.main(words))


def run(processes: int) -> dict[str, float]:
    """Start a run, and return what it costs: of rank 0, of the rank with the most, or of all together."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [*WORDS.split(), "--dir.runs_dir", name]
        start = time.perf_counter()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["train", "scale"])
        port = store.port
        children = [
            context.Process(target=be_rank, args=(words, rank, processes, port, name)) for rank in range(processes)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
        if any(child.exitcode for child in children):
            sys.exit(f"the run of {processes} failed: {(folder / 'terminal0.txt').read_text()[-3000:]}")
        seconds = time.perf_counter() - start
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]
        saved = (folder / "default" / "checkpoints" / "latest.pt").stat().st_size
    first, last = ranks[0], ranks[-1]
    return {
        "whole run, s": seconds,
        "start: processor time of a rank, s": float(np.median([each["cpu"] for each in ranks])),
        "start: keys in the store": first.get("keys", 0),
        "connections of the last rank": last["connections"],
        "connections of rank 0": first["connections"],
        "open files of rank 0": first["files"],
        "failure monitor: connections of rank 0": first["monitor"],
        "agreement: messages of a rank": float(np.median([each["agreement"]["messages"] for each in ranks])),
        "agreement: bytes of a rank": float(np.median([each["agreement"]["bytes"] for each in ranks])),
        "agreement: s": first["agreement"]["seconds"],
        "state of a checkpoint: bytes sent by a rank": float(np.median([each["state"]["bytes"] for each in ranks])),
        "state of a checkpoint: s": first["state"]["seconds"],
        "evaluation: messages of a rank": float(np.median([each["evaluation"]["messages"] for each in ranks])),
        "evaluation: bytes sent by a rank": float(np.median([each["evaluation"]["bytes"] for each in ranks])),
        "checkpoint: bytes of the file": saved,
        "memory of rank 0, bytes": first["memory"],
    }


def connect_monitors(count: int) -> float:
    """Connect the failure monitors of so many ranks, all of them in this process. Returns seconds."""
    offers: list[Any] = []

    def offered(offer: Any, rank: Rank) -> Any:
        offers.append(offer)
        return offers[0]

    monitor.from_main = offered  # type: ignore[attr-defined]
    raise_file_limit(4 * count)
    start = time.perf_counter()
    each = [monitor.connect(Rank(number, number, count, backend="gloo", local_world=count)) for number in range(count)]
    hub = each[0]._hub  # type: ignore[attr-defined]
    while len(hub._members) < count:
        time.sleep(0.01)
    seconds = time.perf_counter() - start
    for one in reversed(each):
        one.leave()
    return seconds


def fit(processes: list[int], values: list[float]) -> tuple[str, float, float]:
    """The law that fits best from 2 processes on, its value at 1,000, and its largest relative error."""
    pairs = [(n, value) for n, value in zip(processes, values, strict=True) if n > 1]
    numbers, wanted = np.array([n for n, _ in pairs], float), np.array([value for _, value in pairs], float)
    best = ("a", float(wanted.mean()), float("inf"))
    scale = np.maximum(np.abs(wanted), 1e-9)
    for name, law in LAWS.items():
        table = np.stack([np.ones_like(numbers), law(numbers)][: 1 + (name != "a")], 1)
        factors = np.linalg.lstsq(table / scale[:, None], wanted / scale, rcond=None)[0]  # relative errors
        error = float(np.abs(table @ factors / wanted - 1).max()) if (wanted != 0).all() else 0.0
        if error < 0.8 * best[2]:  # a simpler law is preferred
            at = np.array([1.0, law(np.array(1000.0))])[: len(factors)] @ factors
            shown = name.replace("a", f"{factors[0]:.4g}", 1)
            shown = shown.replace("b", f"{factors[-1]:.4g}", 1) if len(factors) > 1 else shown
            best = (shown.replace("+ -", "- "), float(at), error)
    return best


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,2,4,8,16,32,64")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    os.chdir(PROJECT)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PROJECT), str(Path(__file__).parent)])  # of the server
    os.environ["OMP_NUM_THREADS"] = "1"
    processes = [int(each) for each in options.processes.split(",")]
    rows: list[dict[str, float]] = []
    for number in processes:
        rows.append(run(number))
        print(f"{number} processes: {rows[-1]['whole run, s']:.0f} s", file=sys.stderr, flush=True)
    print(f"{'':<46}" + "".join(f"{number:>13,}" for number in processes) + "   law, its largest error, at 1,000")
    for name in rows[0]:
        values = [row[name] for row in rows]
        law, at, error = fit(processes, values)
        cells = "".join(f"{value:>13,.0f}" if value >= 100 else f"{value:>13.3g}" for value in values)
        print(f"{name:<46}{cells}   {law}  ({error:.0%})  {at:,.4g}")
    if options.json:
        options.json.write_text(json.dumps({"processes": processes, "rows": rows}, indent=1) + "\n")
    for count in (10, 100, 1000):
        print(f"failure monitor: {count:,} connections in {connect_monitors(count):.2f} s")


if __name__ == "__main__":
    main()
