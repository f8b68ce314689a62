"""A small GPT: the transformer that predicts the next character from those before it."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.base.errors import UserError


class GPT(nn.Module):
    """A decoder-only transformer with learnt positions, and one matrix for reading characters and for writing them.

    Normalisation comes before attention and before the two layers that follow it, as in GPT-2.

    Args:
        vocabulary: number of different characters.
        context: characters that the model can look back on, itself included.
        layers: number of blocks.
        heads: attention heads of a block; a divisor of `width`.
        width: features per character.
        dropout: probability of dropping a feature, 0..1.
    """

    def __init__(
        self, vocabulary: int, context: int = 64, layers: int = 2, heads: int = 4, width: int = 96, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.characters.weight
        self.apply(_initialise)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith("out.weight"):  # added to the features: their variance must not grow with the depth
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, characters: Tensor) -> Tensor:
        """Map characters (B, T), int64, T <= context, to the logits (B, T, vocabulary) of the character after each."""
        length = characters.shape[1]
        if length > self.context:
            raise UserError(f"the dataset's blocks have {length} characters, but model.context is {self.context}")
        positions = torch.arange(length, device=characters.device)
        features = self.dropout(self.characters(characters) + self.positions(positions))
        for block in self.blocks:
            features = block(features)
        return self.head(self.norm(features))


class Block(nn.Module):
    """Attention to earlier characters, then two layers for each character; both are added to their input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width)."""
        features = features + self.dropout(self.attention(self.attention_norm(features)))
        return features + self.dropout(self.out(F.gelu(self.hidden(self.norm(features)))))


class CausalAttention(nn.Module):
    """Scaled dot product attention with several heads, from each position to itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width)."""
        query, key, value = self.query_key_value(features).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _initialise(module: nn.Module) -> None:
    """GPT-2's initial weights: small, so that the first predictions are close to uniform."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
