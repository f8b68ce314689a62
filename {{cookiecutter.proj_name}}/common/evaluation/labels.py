"""Labels as people have them: class numbers, probabilities, and values that mark what is to be ignored."""

from torch import Tensor


def class_numbers(label: Tensor, logits: Tensor) -> Tensor:
    """Return the class of each label, int64; -1 for one that is no class, such as -100, -1 or 255: it is ignored.

    Args:
        label: class numbers (B, ...), or probabilities (B, classes, ...), of which the likeliest class counts.
        logits: (B, classes, ...).
    """
    if label.is_floating_point() and label.shape == logits.shape:
        return label.argmax(dim=1)
    is_class = (label >= 0) & (label < logits.shape[1])
    return label.long().masked_fill(~is_class, -1)
