"""Advice by patterns of errors. Add your own: `explain.py` shows the first one that matches."""

# torch's warning for a target (B,) and a prediction (B, 1), or the other way round; not for a single sample.
BROADCAST = (
    r"Using a target size \(torch\.Size\(\[(?!1\b)(\d+)(?:, 1)?\]\)\) that is different to the input size "
    r"\(torch\.Size\(\[\1(?:, 1)?\]\)\)"
)
# Patterns of an error's type and message, and what to do; the first match is used. {forward} and {output} are the
# places of the model's forward and the task's output.
ADVICE = {
    r"must be Tensor, not|has no attribute '(shape|dim|size|float|topk|softmax|dtype)'": (
        "a tensor is needed, see the batch and the output above: {forward} must return the model's output (not a "
        "tuple, not None), and every label must be a number"
    ),
    r"(list|tuple) indices must be integers": (
        "a sample is a dict: return {{'image': image, 'label': label}} from the dataset's __getitem__, not (image, "
        "label); or begin its transforms with {{type: Named, names: [image, label]}}; or change {output}"
    ),
    r"^KeyError: .* at .*(batch|output)": (
        "the keys are listed above; rename one in the dataset's __getitem__, in {output}, or where it is read"
    ),
    r"expected target dtype|expected scalar type Long|not implemented for '(Int|Short|Char|Bool)'": (
        "class labels must be of type int64: return torch.tensor(int(label)), or label.long(), from the dataset"
    ),
    r"expected scalar type|same dtype|Input type \(|expected m1 and m2|cannot be cast": (
        "the batch, listed above, does not have the dtype of the weights (float32): return image.float() from the "
        "dataset (NumPy's default is float64, that of image files uint8); for mixed precision see precision.mode"
    ),
    r"0D or 1D target tensor expected": (
        "each label must be a single number: return torch.tensor(label), not torch.tensor([label]), from the dataset"
    ),
    BROADCAST: (
        "the loss would compare each prediction with each target: give both the same shape, with target[:, None] in "
        "the dataset, or output.squeeze(1) in {output}"
    ),
    r"1D target must|match target batch_size|target size .* input size|range of \[-1, 0\], but got 1": (
        "the output must keep the first dimension, the samples, and have one row for each: see what {forward} returns"
    ),
    r"shapes cannot be multiplied|to have \d+ channels|size mismatch|must match the size|normalized_shape|too small": (
        "the model does not fit the batch above: change model.*, such as model.in_channels for images (samples, "
        "channels, height, width), or what the dataset returns"
    ),
    r"index out of range in self": "an index in the batch is too large for an embedding: raise its num_embeddings",
    r"does not require grad": (
        "the result of {forward} or of the loss is detached from the weights by .detach(), .item(), .data, .numpy(), "
        "torch.no_grad(), argmax, rounding, or torch.tensor(...) of a tensor; evaluation runs without gradients: those "
        "that {output} or a loss needs there (forces, derivatives) are computed in `with torch.enable_grad():`"
    ),
    r"inplace operation": (
        "a value needed for the gradient was changed in place (x += y, x[i] = y, relu_): make a new one, as in "
        "x = x + y; --debug shows which"
    ),
    # Of machines, beginning with workers.
    r"Cannot re-initialize \w+ in forked|CUDA error: initialization error": (
        "a worker process that was forked cannot use the GPU: keep the dataset on the CPU, or start workers with "
        "--loader.start_method forkserver, or use none (--num_workers 0)"
    ),
    r"DataLoader timed out": "a batch took longer than loader.timeout: raise it, or use more --num_workers",
    r"Too many open files|items of ancdata": (
        "this process may not open more files: raise the limit before the start (ulimit -n 65536; docker run --ulimit "
        "nofile=65536), or use fewer --num_workers; with --num_workers 0, batches need no open files"
    ),
    r"Resource temporarily unavailable|can't start new thread|failed to create thread|pthread_create": (
        "this user or container may not start more processes or threads: raise the limit (ulimit -u; docker run "
        "--pids-limit), or start fewer: --num_workers 0, OMP_NUM_THREADS=1"
    ),
    r"shared memory|SemLock|sem_open|[Bb]us error|killed by signal 7\b": (
        "worker processes pass batches through /dev/shm, which is too small, full or read-only: enlarge it (docker run "
        "--shm-size 8g; Kubernetes: an emptyDir of medium Memory at /dev/shm), or use no workers: --num_workers 0"
    ),
    r"[Oo]ut of memory|can't allocate memory": (
        "in training, a smaller batch_size (raise optim.accumulate); in an evaluation, a smaller eval_batch_size of "
        "the dataset; or a smaller model, or precision.mode bf16"
    ),
    r"worker.*(killed|exited unexpectedly)": (
        "a worker was killed, probably out of memory (see dmesg; in a container, also /dev/shm): use fewer "
        "--num_workers, a smaller loader.prefetch or batch_size; --num_workers 0 shows an error of its own"
    ),
    r"No space left on device": "the disk is full, or has no free inodes: see df -h and df -i",
    r"more than 1 value per channel when training": (
        "batch norm cannot compute the variance of one sample: --loader.drop_last true, or another --batch_size"
    ),
    # After an assert in a kernel, the first call that says so may be one of cuBLAS.
    r"CUBLAS_STATUS_ALLOC_FAILED": (
        "the GPU is out of memory: a smaller batch_size; or, after an assert in a kernel, label >= the number of "
        "classes? Rerun with CUDA_LAUNCH_BLOCKING=1"
    ),
    r"device-side assert|CUBLAS_STATUS_INTERNAL_ERROR": (
        "label >= the number of classes? Rerun with CUDA_LAUNCH_BLOCKING=1"
    ),
    r"Target .* out of bounds": "a label is not below the number of classes: change those of the model, or the labels",
}
