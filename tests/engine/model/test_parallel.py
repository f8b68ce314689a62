"""How a model is prepared for training: frozen parts, recomputed and compiled blocks, DDP and its conditions."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._pytree import tree_map

from common.base.errors import UserError
from common.distributed import DistConfig, Rank
from common.model import fixed
from common.model.prepare import PrepareConfig, prepare, recompute_in_backward
from common.optim.precision import Precision
from common.trainer import Trainer
from tests.conftest import Runs, load, metrics, same
from tests.ranks import refused, several
from tests.resume import same_after_cut
from tests.small import Block
from tests.test_task import TURNS

TOWER = ["--model", "{type: tests.small.Tower}", "--progress.epoch", "1"]
BATCH_TOWER = ["--model", "{type: tests.small.Tower, batch: true}", "--progress.epoch", "1"]
PLAIN = ["--model", "{type: tests.small.Plain}", "--progress.epoch", "1"]
SPARE = ["--progress.epoch", "1", "--model"]


def log(folder: Path) -> str:
    return (folder / "train.log").read_text()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_frozen_part_stays_as_it_was(runs: Runs, world: int) -> None:
    """Weights and batch norm statistics, by pattern; not in the optimizer; no rank waits."""
    source = runs.train("--progress.epoch", "1", name="source")
    words = ["--init_from", f"{{path: {source / 'checkpoints' / 'best.pt'}}}", "--prepare.freeze", "[features.*]"]
    if world == 1:
        folder = runs.train(*words)
    else:
        folder = runs.root / "run"
        several(runs, world, runs.words(*words, "--batch_size", "16"))
    before, state = load(source, "best")["model"], load(folder)
    for name, value in state["model"].items():
        assert torch.equal(value, before[name]) == name.startswith("features."), name
    assert state["optimizer"]["param_groups"][0]["param_names"] == ["head.2.weight", "head.2.bias"]
    assert "frozen: 9 of 11 parameters, 3 norms in evaluation mode: features.0.0.weight," in log(folder)


def test_single_names_can_be_frozen(runs: Runs) -> None:
    """The matched set is logged; a batch norm that is trained in part still moves."""
    folder = runs.train("--prepare.freeze", "['*.1.bias', head.2.weight]", "--progress.epoch", "1")
    assert "frozen: 4 of 11 parameters, 0 norms in evaluation mode" in log(folder)
    assert ": features.0.1.bias, features.1.1.bias, features.3.1.bias, head.2.weight\n" in log(folder)
    assert load(folder)["model"]["features.0.1.num_batches_tracked"] == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prepare.freeze", "[feature.0.0.bias]"], "prepare.freeze: feature.0.0.bias matches none"),
        (["--prepare.freeze", "[feature.0.0.weight]"], "did you mean features.0.0.weight?"),
        (["--prepare.activation_checkpointing", "[layer.*]"], "available: features, features.0"),
        ([*TOWER, "--prepare.activation_checkpointing", "[layers]"], "layers is a ModuleList, which is never called"),
        (["--prepare.compile.blocks", "[nothing.*]"], "prepare.compile.blocks: nothing.* matches none"),
        (["--prepare.fsdp.blocks", "[nothing.*]"], "prepare.fsdp.blocks: nothing.* matches none"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(runs: Runs, words: list[str], message: str) -> None:
    """Before an earlier run of the name is moved out of the way."""
    kept = runs.root / "run" / "checkpoints" / "latest.pt"
    kept.parent.mkdir(parents=True)
    kept.touch()
    with pytest.raises(UserError) as caught:
        runs.train(*words)
    assert message in str(caught.value)
    assert [path.name for path in runs.root.iterdir()] == ["run"]


def freezing_late(trainer: Trainer) -> None:
    trainer.task.model.get_parameter("head.2.bias").requires_grad_(False)


def unfreezing_late(trainer: Trainer) -> None:
    trainer.task.model.get_parameter("features.0.0.weight").requires_grad_(True)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [("freezing_late", "head.2.bias was frozen or"), ("unfreezing_late", "features.0.0.weight was frozen or")],
)
def test_freezing_later_is_refused(runs: Runs, plugin: str, message: str) -> None:
    """Once the model is prepared, others rely on what is trained."""
    words = ["--plugins", f"[engine.model.test_parallel:{plugin}]", "--prepare.freeze", "[features.*]"]
    assert runs.fail(*words) == 2
    assert message in log(runs.root / "run")
    assert "Use prepare.freeze" in log(runs.root / "run")


def test_all_frozen_is_refused(runs: Runs) -> None:
    """There would be nothing to train."""
    assert runs.fail("--prepare.freeze", "['*']") == 2
    assert "none of its 11 parameters requires a gradient" in log(runs.root / "run")


@pytest.mark.parametrize("model", [TOWER, BATCH_TOWER], ids=["layer norm", "batch norm"])
def test_recomputed_activations_change_nothing(runs: Runs, model: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Same gradients to the last bit, with dropout and keyword arguments; statistics move once."""
    calls = []
    original = Block.forward

    def forward(self: Block, *args: Any, **kwargs: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Block, "forward", forward)
    plain = runs.train(*model, name="plain")
    once = sum(calls)
    calls.clear()
    again = runs.train(*model, "--prepare.activation_checkpointing", "[layers.*]", name="again")
    assert sum(calls) == 2 * once > 0
    for part in ("model", "optimizer", "random", "best"):
        assert same(load(plain)[part], load(again)[part]), part


@pytest.mark.slow
def test_recomputed_and_frozen_on_two_ranks(runs: Runs) -> None:
    """Recomputing below DDP, with a frozen part."""
    words = [*BATCH_TOWER, "--prepare.freeze", "[stem.*, layers.0.*]", "--batch_size", "16"]
    several(runs, 2, runs.words(*words, name="plain"))
    several(runs, 2, runs.words(*words, "--prepare.activation_checkpointing", "[layers.*]", name="again"))
    assert same(load(runs.root / "plain")["model"], load(runs.root / "again")["model"])


def nearly(first: Path, second: Path, tolerance: float = 1e-5) -> None:
    """The models of two runs are equal but for rounding, and no name has changed."""
    one, other = load(first)["model"], load(second)["model"]
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=tolerance, msg=name)


@pytest.fixture
def _compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--prepare.compile.blocks", "[layers.*]"],
        ["--prepare.activation_checkpointing", "[layers.*]"],
    ],
    ids=["whole", "blocks", "recomputed"],
)
def test_a_compiled_model_trains_the_same(runs: Runs, more: list[str]) -> None:
    """Names unchanged, whole or by blocks, with recomputing too; the log says what was compiled."""
    plain = runs.train(*BATCH_TOWER, "--model.depth", "2", name="plain")
    words = ["--prepare.compile", "{enabled: true, backend: aot_eager}", *more]
    compiled = runs.train(*BATCH_TOWER, "--model.depth", "2", *words, name="compiled")
    nearly(plain, compiled)
    what = "layers.0, layers.1" if more else "Tower"
    assert f"compiled at the first step: {what}" in log(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    if not more:
        runs.train(*BATCH_TOWER, "--model.depth", "2", *words, "--resume", "auto", name="compiled")
        assert "this resume is bit-exact as far as compared: " in log(compiled)
        assert re.search(r"; not compared: .*torch.compile, whose code may depend on the shapes", log(compiled))


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
def test_compiled_to_machine_code(runs: Runs) -> None:
    """The default backend."""
    words = PLAIN
    plain = runs.train(*words, name="plain")
    compiled = runs.train(*words, "--prepare.compile.enabled", "true", name="compiled")
    nearly(plain, compiled)
    first, second = (metrics(folder, "val")[-1]["values"]["loss"] for folder in (plain, compiled))
    assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
def test_compiled_to_machine_code_it_resumes_to_the_bit(
    runs: Runs, evaluated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed inside an epoch, with dropout; compiled anew at the resume; evaluate.py measures the same."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))  # nothing is left of an earlier test
    words = ["--model", "{type: tests.small.Tower, depth: 1}", "--prepare.compile.enabled", "true"]
    _, resumed = same_after_cut(runs, "plain", *words, at=8)
    assert "compiled at the first step: Tower" in log(resumed)
    assert list((tmp_path / "code").rglob("*.so")), "inductor has compiled nothing"
    last = metrics(resumed, "val")[-1]["values"]
    assert evaluated(resumed / "checkpoints" / "latest.pt", "--split", "val")["values"] == pytest.approx(last, rel=1e-5)


@pytest.mark.slow
def test_compiled_on_two_ranks(runs: Runs) -> None:
    """Compiled below DDP."""
    words = [*PLAIN, "--batch_size", "16"]
    several(runs, 2, runs.words(*words, name="plain"))
    several(runs, 2, runs.words(*words, "--prepare.compile", "{enabled: true, backend: aot_eager}", name="compiled"))
    nearly(runs.root / "plain", runs.root / "compiled")


@pytest.mark.slow
def test_unused_parameters_are_named(runs: Runs) -> None:
    """Before the first step, on all ranks alike, with what to do; freezing them helps."""
    said = refused(runs, 2, runs.words(*SPARE, "{type: tests.small.Spare}"))
    assert (
        "2 parameters get no gradient on some rank in a first step, and DDP would wait for it: spare.weight, spare.bias"
        in said
    )
    several(runs, 2, runs.words(*SPARE, "{type: tests.small.Spare}", "--prepare.freeze", "[spare.*]"))


@pytest.mark.slow
def test_parameters_that_one_rank_does_not_use(runs: Runs) -> None:
    """The ranks differ, and still all end, with the reason; the option it names helps."""
    words = [*SPARE, "{type: tests.small.Spare, first_only: true}"]
    assert "get no gradient on some rank in a first step" in refused(runs, 2, runs.words(*words))
    several(runs, 2, runs.words(*words, "--dist.find_unused_parameters", "true"))


def test_one_process_tells_of_unused_parameters(runs: Runs) -> None:
    """Nothing waits for them there, but they are rarely meant."""
    folder = runs.train(*SPARE, "{type: tests.small.Spare}")
    assert log(folder).count("2 parameters got no gradient in the first step") == 1
    assert "got no gradient" not in log(runs.train(*PLAIN, name="plain"))


def wrapped_as_asked(trainer: Trainer) -> None:
    """What torch's own wrapper says about its options."""
    model = trainer.optimizer_step.updates["all"].model
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    asked = (model.broadcast_buffers, model.static_graph, model.bucket_bytes_cap)
    assert asked == (False, True, 2 * 1024 * 1024)


@pytest.mark.slow
def test_options_of_ddp(runs: Runs) -> None:
    """Each option of the config arrives, and the run trains with it."""
    options = ["--dist.broadcast_buffers", "false", "--dist.static_graph", "true", "--dist.bucket_mb", "2"]
    options += ["--optim.accumulate", "2"]
    words = [*TOWER, *options, "--plugins", "[engine.model.test_parallel:wrapped_as_asked]"]
    several(runs, 2, runs.words(*words))
    assert load(runs.root / "run")["position"]["epoch"] == 1


def count_exchanges(trainer: Trainer) -> None:
    """A plug-in that leaves a byte for each exchange of gradients."""
    file = (trainer.paths.root / f"exchanges{trainer.rank.rank}").open("wb", buffering=0)
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    scatter = getattr(dist, name)  # what FSDP calls; it has another name since PyTorch 2.13

    def counted(*arguments: Any, **options: Any) -> Any:
        file.write(b"x")
        return scatter(*arguments, **options)

    def hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        file.write(b"x")
        return allreduce_hook(group, bucket)

    model = trainer.optimizer_step.updates["all"].model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.register_comm_hook(None, hook)
    else:
        setattr(dist, name, counted)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_are_exchanged_once_a_step(runs: Runs, strategy: str) -> None:
    """Not for every micro-batch of a window. There are 5 of them, in windows of 3 and 2."""
    words = [*PLAIN, "--optim.accumulate", "3", "--batch_size", "16", "--dist.strategy", strategy]
    several(runs, 2, runs.words(*words, "--plugins", "[engine.model.test_parallel:count_exchanges]"))
    assert load(runs.root / "run")["position"]["step"] == 2
    assert [(runs.root / "run" / f"exchanges{rank}").read_bytes() for rank in (0, 1)] == [b"xx", b"xx"]


class Tied(nn.Module):
    """Two parts for `Turns`, of which the first has the same weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.first[1].weight = self.first[0].weight
        self.second = nn.Linear(64, 64)


@pytest.mark.slow
def test_tied_weights_that_an_update_does_not_train(runs: Runs) -> None:
    tied = {word: f"{{type: {__name__}.Tied}}" for word in TURNS if "Pair" in word}
    words = [*(tied.get(word, word) for word in TURNS), "--progress.max_steps", "4", "--dist.timeout", "20"]
    several(runs, 2, runs.words(*words, "--batch_size", "8"))
    assert load(runs.root / "run")["position"]["step"] == 4


def test_recomputation_knows_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keyword arguments too: torch keeps the random generators of their devices."""
    seen: list[Any] = []

    def note(function: Any, *given: Any, **options: Any) -> Any:
        tree_map(lambda leaf: seen.append(leaf) if isinstance(leaf, torch.Tensor) else None, given)
        return torch.utils.checkpoint.checkpoint(function, *given, **options)

    monkeypatch.setattr(sys.modules[recompute_in_backward.__module__], "checkpoint", note)
    module = Block(4, batch=False)
    x = torch.ones(2, 4, requires_grad=True)
    recompute_in_backward(module)
    module(x=x, scale=0.5).sum().backward()
    assert len(seen) == 1 and x.grad is not None


class Still(nn.Module):
    """Norms of which one is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(nn.BatchNorm1d(64), fixed(nn.BatchNorm1d(64)))
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.norms(image.flatten(1)))


def test_a_fixed_norm_among_synchronized_ones() -> None:
    """These are other modules, and run on GPUs alone."""
    task: Any = nn.Module()
    task.model = Still()
    prepare(task, PrepareConfig(), DistConfig(sync_bn=True), Precision(), Rank(world_size=2))
    task.train()
    assert [type(norm) for norm in task.model.norms] == 2 * [nn.SyncBatchNorm]
    assert [norm.training for norm in task.model.norms] == [True, False]
