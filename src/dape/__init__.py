"""Attention scores as feature maps: position encodings × score processors, for PyTorch.

Shapes everywhere: B batch, H heads, G key/value heads, Tq/Tk queries/keys, D head width, W convolution
width, k kernel size. Words: *scores* before the softmax, *weights* after, *bias* additive from positions,
*positions* integer places passed as data, *visible* who sees whom.
"""

from dape.ops.score_conv_attention import ConvWeights, DistanceBias, TileBias, Visible, score_conv_attention

__version__ = "0.1.0"

__all__ = ["ConvWeights", "DistanceBias", "TileBias", "Visible", "score_conv_attention"]
