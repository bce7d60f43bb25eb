"""Rotary frequencies and the factors of YaRN, as plain numbers (ATT-3; YaRN, arXiv 2309.00071, sec. 3)."""

from __future__ import annotations

from math import ceil, floor, log, pi

from src.models.schema import YarnConfig


def inverse_frequencies(width: int, theta: float, yarn: YarnConfig) -> tuple[list[float], float]:
    """The angle per position of each of the width/2 pairs, and the factor on cos and sin."""
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    if yarn.factor <= 1:
        return plain, 1.0
    low, high = ramp(width, theta, yarn)
    span = high - low if high != low else 0.001
    share = [min(max((i - low) / span, 0.0), 1.0) for i in range(width // 2)]
    scaled = [f * (1 - r + r / yarn.factor) for f, r in zip(plain, share, strict=True)]
    return scaled, _cos_factor(yarn)


def ramp(width: int, theta: float, yarn: YarnConfig) -> tuple[float, float]:
    """Bounds of the ramp: dimensions below the first keep their frequency, above the second it is divided."""

    def dimension(rotations: float) -> float:
        return width * log(yarn.original_length / (2 * pi * rotations)) / (2 * log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = floor(low), ceil(high)
    return max(low, 0), min(high, width - 1)


def softmax_factor(yarn: YarnConfig) -> float:
    """Factor on MLA's softmax scale: m(mscale_all_dim)², 1 without it."""
    return _m(yarn.factor, yarn.mscale_all_dim) ** 2


def _cos_factor(yarn: YarnConfig) -> float:
    if yarn.mscale and yarn.mscale_all_dim:
        return _m(yarn.factor, yarn.mscale) / _m(yarn.factor, yarn.mscale_all_dim)
    return _m(yarn.factor, 1.0)


def _m(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1 if factor > 1 else 1.0
