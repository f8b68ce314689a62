"""Models of sentences. They take the same inputs: words (B, T), int64, and mask (B, T), bool, false on padding."""

from torch import Tensor, nn


class Reader(nn.Module):
    """A recurrent network that reads a sentence from left to right, so padding at its end reaches no word before it."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.network = nn.GRU(width, width, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        """Map words (B, T) to features (B, T, width) of the sentence up to each of them."""
        features: Tensor = self.network(self.words(words))[0]
        return features


class SentenceClassifier(nn.Module):
    """One prediction per sentence, from the mean over its real words.

    Args:
        vocabulary: number of different words.
        classes: number of classes.
        width: features per word.
    """

    def __init__(self, vocabulary: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.reader = Reader(vocabulary, width)
        self.head = nn.Linear(width, classes)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        """Returns logits (B, classes)."""
        features = self.reader(words) * mask.unsqueeze(-1)
        return self.head(features.sum(dim=1) / mask.sum(dim=1, keepdim=True))


class NextWordModel(nn.Module):
    """One prediction per word: the word after it.

    Args:
        vocabulary: number of different words.
        width: features per word.
    """

    def __init__(self, vocabulary: int, width: int = 32) -> None:
        super().__init__()
        self.reader = Reader(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        """Returns logits (B, T, vocabulary); those at padding mean nothing."""
        return self.head(self.reader(words))
