"""What a person reads when something goes wrong on a device, where errors come late and memory is small."""

from engine.accelerator.conftest import Accelerator, read


def test_a_loss_that_is_not_finite(accelerator: Accelerator) -> None:
    """Its step is named though the device was found to be at it later, and nothing of it is saved."""
    loss = "{$REPLACE: true, ce: {type: tests.small.NotANumber, after: 5}}"
    text = accelerator.bad("--loss", loss, "--progress.epoch_save_latest", "1step", "--progress.log_every", "5")
    assert "the loss of step 6 is not a finite number" in text
    assert read(accelerator.runs.root / "run" / "checkpoints" / "latest.pt")["position"]["step"] == 5


def test_a_gradient_that_is_not_finite(accelerator: Accelerator) -> None:
    """It is named, and not the loss of the next step, which follows from it."""
    loss = "{$REPLACE: true, ce: {type: tests.small.NanGradient, at: 3}}"
    text = accelerator.bad("--loss", loss, "--progress.log_every", "5")
    assert "the gradient of step 3, of train samples" in text


def test_memory_that_runs_out_in_training(accelerator: Accelerator) -> None:
    small = ("--dataset.val.eval_batch_size", "8", "--dataset.eval", "null", "--pictures.every", "-1")
    text = accelerator.bad("--model.width", "64", *small, EMU_MEMORY="2000000")
    assert "EMU out of memory" in text and "training step 1" in text
    assert "in training, a smaller batch_size (raise optim.accumulate)" in text


def test_memory_that_runs_out_in_an_evaluation(accelerator: Accelerator) -> None:
    """A smaller batch_size would change nothing there: it is said where the memory ran out, and what helps."""
    words = ("--model.width", "16", "--batch_size", "2", "--debug.max_samples", "0", "--progress.max_steps", "2")
    text = accelerator.bad(*words, "--progress.epoch", "null", EMU_MEMORY="3000000")
    assert "EMU out of memory" in text and "in an evaluation, a smaller eval_batch_size of the dataset" in text
    assert "in trying a batch of val before training" in text


def test_a_label_that_is_no_class(accelerator: Accelerator) -> None:
    """The device reports it steps later, where neither the batch nor the output is at hand."""
    wrong = "{type: engine.accelerator.parts.WrongLabel}"
    text = accelerator.bad("--dataset.train", wrong, "--progress.log_every", "3")
    assert "label 99 in sample 7 of dataset.train: the model gives 10 classes, so labels must be 0 to 9" in text
    text = accelerator.bad("--dataset.val", wrong)
    assert "label 99 in sample 7 of dataset.val: the model gives 10 classes" in text


def test_a_part_of_the_loss_that_is_a_constant(accelerator: Accelerator) -> None:
    """On the CPU, beside the others on the device."""
    accelerator.train("--loss.boxes", "{type: engine.accelerator.parts.no_boxes}", "--progress.log_every", "2")
