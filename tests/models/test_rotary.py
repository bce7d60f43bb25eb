"""ATT-3: YaRN against the literals of the releases, and the mutations that must show."""

from __future__ import annotations

from math import log, pi

import pytest
import torch

from src.models.layers import Rotary
from src.models.rotary import inverse_frequencies, ramp, softmax_factor
from src.models.schema import YarnConfig
from tests.models.tools import batch

V2 = YarnConfig(factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707)
V3 = YarnConfig(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0)
GPT_OSS = YarnConfig(factor=32.0, original_length=4096, truncate=False)


@pytest.mark.parametrize(
    ("yarn", "width", "theta", "bounds", "cos_factor", "softmax", "scale"),
    [
        (V2, 64, 1e4, (10, 23), 1.0, 1.5896262, 0.1147214),
        (V3, 64, 1e4, (10, 23), 1.0, 1.8738542, 0.1352338),
        (GPT_OSS, 64, 150000.0, (8.0928, 17.3980), 1.3465736, 1.0, None),
    ],
)
def test_att_3_literals(
    yarn: YarnConfig,
    width: int,
    theta: float,
    bounds: tuple[float, float],
    cos_factor: float,
    softmax: float,
    scale: float | None,
) -> None:
    assert ramp(width, theta, yarn) == pytest.approx(bounds, abs=1e-4)
    assert inverse_frequencies(width, theta, yarn)[1] == pytest.approx(cos_factor, abs=1e-7)
    assert softmax_factor(yarn) == pytest.approx(softmax, abs=1e-7)
    if scale is not None:
        assert 192**-0.5 * softmax_factor(yarn) == pytest.approx(scale, abs=1e-7)


def test_att_3_bounds_before_rounding() -> None:
    low, high = ramp(64, 1e4, YarnConfig(factor=40.0, original_length=4096, truncate=False))
    assert (low, high) == pytest.approx((10.4722, 22.5134), abs=1e-4)


def test_att_3_frequencies_below_inside_and_above_the_ramp() -> None:
    found, _ = inverse_frequencies(64, 1e4, V2)
    plain = [1e4 ** (-i / 32) for i in range(32)]
    assert found[:11] == pytest.approx(plain[:11])
    assert found[23:] == pytest.approx([f / 40 for f in plain[23:]])
    share = (16 - 10) / (23 - 10)
    assert found[16] == pytest.approx(plain[16] * (1 - share) + plain[16] / 40 * share)


def test_plain_rotary_is_a_choice_of_config() -> None:
    assert inverse_frequencies(6, 100.0, YarnConfig()) == ([1.0, 100 ** (-1 / 3), 100 ** (-2 / 3)], 1.0)
    assert softmax_factor(YarnConfig()) == 1.0


def test_equal_bounds_do_not_divide_by_zero() -> None:
    """Both bounds clip to 0, and the first dimension only keeps its frequency."""
    tight = YarnConfig(factor=4.0, original_length=2)
    assert ramp(6, 100.0, tight)[0] == 0
    found, _ = inverse_frequencies(6, 100.0, tight)
    assert all(f > 0 for f in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trap_7_frequencies_are_recomputed_after_meta(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        rotary = Rotary(64, 1e4, V2)
    rotary.to_empty(device="cpu")
    rotary.inverse_R.fill_(float("nan"))
    rotary.reset_buffers(torch.device("cpu"), dtype)
    cos, sin = rotary(batch(7))
    angles = torch.arange(7, dtype=dtype)[:, None] * torch.tensor(
        inverse_frequencies(64, 1e4, V2)[0], dtype=dtype
    )
    assert torch.equal(cos[0], angles.cos())
    assert torch.equal(sin[1], angles.sin())
    assert cos.dtype == dtype
    assert not list(rotary.state_dict())


def test_frequencies_are_angles_per_position() -> None:
    """At L0 the slowest kept dimension has turned β_fast times, by the definition of r(n)."""
    index = 64 * log(4096 / (2 * pi * 32)) / (2 * log(1e4))
    assert 4096 * 1e4 ** (-2 * index / 64) / (2 * pi) == pytest.approx(32)
