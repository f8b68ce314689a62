"""What to do about errors of the machine, its memory, disks and limits, and about a few of PyTorch."""

import re
import traceback

_SHARED_MEMORY = (
    "worker processes pass batches through /dev/shm, which is too small, full or read-only: enlarge it (docker run "
    "--shm-size 8g; Kubernetes: an emptyDir of medium Memory at /dev/shm), or use no workers: --num_workers 0"
)
# Patterns of an error's type and message, and of the line that raised it; the first match is used.
_HINTS = {
    r"Cannot re-initialize \w+ in forked|CUDA error: initialization error": (
        "a worker process that was forked cannot use the GPU: keep the dataset on the CPU, or start workers with "
        "--loader.start_method forkserver, or use none (--num_workers 0)"
    ),
    "DataLoader timed out": "a batch took longer than loader.timeout: raise it, or use more --num_workers",
    r"Too many open files|items of ancdata": (
        "this process may not open more files: raise the limit before the start (ulimit -n 65536; docker run --ulimit "
        "nofile=65536), or use fewer --num_workers; with --num_workers 0, batches need no open files"
    ),
    "Resource temporarily unavailable|can't start new thread|failed to create thread|pthread_create": (
        "this user or container may not start more processes or threads: raise the limit (ulimit -u; docker run "
        "--pids-limit), or start fewer: --num_workers 0, OMP_NUM_THREADS=1"
    ),
    "shared memory|SemLock|sem_open|bus error|killed by signal 7$": _SHARED_MEMORY,
    "out of memory|can't allocate memory": (
        "in training, a smaller batch_size (raise optim.accumulate); in an evaluation, a smaller eval_batch_size of "
        "the dataset; or a smaller model, or precision.mode bf16"
    ),
    "worker.*(killed|exited unexpectedly)": (
        "a worker was killed, probably out of memory (see dmesg; in a container, also /dev/shm): use fewer "
        "--num_workers, a smaller loader.prefetch or batch_size; --num_workers 0 shows an error of its own"
    ),
    "No space left on device": "the disk is full, or has no free inodes: see df -h and df -i",
    "more than 1 value per channel when training": (
        "batch norm cannot compute the variance of one sample: --loader.drop_last true, or another --batch_size"
    ),
    "device-side assert|Target .* out of bounds": "label >= the number of classes? Rerun with CUDA_LAUNCH_BLOCKING=1",
}


def machine_hint(error: BaseException, title: str) -> str:
    """Return what to do about `error`, whose type and message are `title`; "" if it is no known one of a machine."""
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{title}\n{error}\n"
    if frames:
        text += (frames[-1].line or "").partition("#")[0]
    for pattern, hint in _HINTS.items():
        if re.search(pattern, text, re.IGNORECASE):
            return hint
    return ""
