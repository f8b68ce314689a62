"""tools.analyze counts what a transformer and a GAN compute."""

from pathlib import Path

from tests.tools.test_analyze import analyzed, modules


def test_a_transformer_and_a_model_with_two_updates(tmp_path: Path) -> None:
    found = analyzed(tmp_path, "examples/language_model/config.yaml", "--batch", "4")
    tokens, width, text = 4 * 64, 96, 64
    block = 2 * tokens * width * (3 * width + width + 8 * width) + 2 * 2 * tokens * text * width
    forward = 2 * block + 2 * tokens * width * 96
    assert found["batches"][0]["flops_forward"] == forward
    assert found["batches"][0]["flops_train"] == 3 * forward
    assert modules(found)["blocks.1"]["flops_forward"] == block
    assert modules(found)["task"]["parameters"] == 96 * 96 + 64 * 96 + 2 * (12 * 96 * 96 + 4 * 96) + 2 * 96
    found = analyzed(tmp_path, "examples/gan/config.yaml", "--batch", "8")
    assert found["batches"][0]["flops_forward"] == 8 * 2 * (26 * 128 + 128 * 128 + 128 * 64)
    assert modules(found)["discriminator"]["flops_train"] > 0
