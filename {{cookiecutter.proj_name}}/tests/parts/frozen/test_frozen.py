"""`checkpoint.frozen: false`: what is not trained stays out of the files; a resume takes it from its source again."""

from tests.checkpoint.test_state import MODEL, resumed_is_uncut
from tests.conftest import Runs, load


def test_a_small_file_resumes_exactly(runs: Runs) -> None:
    """With extra state."""
    words = ["--model", MODEL.format("Extra"), "--prepare.freeze", "[layers.1.*]", "--checkpoint.frozen", "false"]
    state = load(resumed_is_uncut(runs, *words))
    assert set(state["frozen"]) == {"layers.1.weight", "layers.1.bias"}
    assert not state["model"].keys() & state["frozen"].keys()
