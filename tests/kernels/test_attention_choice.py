"""OP-2, DET-7, REG-1: which kernel of attention each made-up device takes, and why not another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from src.config import DeterminismConfig, KernelsConfig
from src.errors import UserError
from src.kernels import registry
from src.kernels.declaration import Device, Need
from src.kernels.registry import choose, implementations

FLASH_4, FLASH_2 = {"flash-attn-4": "4.0.0b36"}, {"flash-attn": "2.8.3"}
BF16 = torch.bfloat16


def need(*features: str, key: int = 128, value: int | None = None) -> Need:
    unequal = {"unequal_widths"} if value is not None else set()
    return Need(frozenset({*features, *unequal}), {"key": key, "value": value or key})


MLA, PACKED_MLA = need(key=192, value=128), need("packed", key=192, value=128)
GQA, PACKED_GQA = need("gqa"), need("gqa", "packed")
GPT_OSS = need("gqa", "packed", "window", "sinks", key=64)
WHOLE_GPT_OSS = need("gqa", "window", "sinks", key=64)


def taken(arch: str, asked: Need, installed: dict[str, str], bitwise: bool = False, **more: Any) -> str:
    device = Device(more.pop("kind", "cuda"), arch, packages=installed)
    determinism = DeterminismConfig(name="bitwise") if bitwise else DeterminismConfig()
    needs = {"attention": asked}
    dtype = more.pop("dtype", BF16)
    return choose(KernelsConfig(**more), device, dtype, determinism, needs).choices["attention"].name


@pytest.mark.parametrize(
    ("asked", "with_4", "without"),
    [
        (MLA, "sdpa_cudnn", "sdpa_cudnn"),
        (GQA, "sdpa_cudnn", "sdpa_cudnn"),
        (need("gqa", key=64), "flash_attn_4", "sdpa_cudnn"),
        (need("gqa", "packed", key=64), "flash_attn_4", "varlen_attn"),
        (PACKED_GQA, "varlen_attn", "varlen_attn"),
        (PACKED_MLA, "flash_attn_4", "sdpa_efficient"),
        (need("packed", "window"), "flash_attn_4", "varlen_attn"),
        (need("packed", "sinks"), "flash_attn_4", "varlen_attn"),
        (need("sinks"), "flash_attn_4", "sdpa_cudnn"),
        (GPT_OSS, "flash_attn_4", "varlen_attn"),
        (WHOLE_GPT_OSS, "flash_attn_4", "varlen_attn"),
        (need("packed", key=24, value=8), "sdpa_efficient", "sdpa_efficient"),
        (need("gqa", "packed", key=192, value=128), "sdpa_efficient", "sdpa_efficient"),
        (need("packed", key=20), "eager", "eager"),
        (need("packed", "context_parallel"), "eager", "eager"),
    ],
)
def test_op_2_auto_on_hopper(asked: Need, with_4: str, without: str) -> None:
    assert taken("sm90", asked, FLASH_4) == with_4
    assert taken("sm90", asked, {}) == without
    assert taken("sm90", asked, {"flash-attn-4": "4.0.0b35"}) == without


@pytest.mark.parametrize(
    ("asked", "with_4", "without"),
    [
        (MLA, "flash_attn_4", "sdpa_flash_padded"),
        (PACKED_MLA, "flash_attn_4", "sdpa_flash_padded"),
        (GQA, "sdpa_flash", "sdpa_flash"),
        (PACKED_GQA, "varlen_attn", "varlen_attn"),
        (GPT_OSS, "flash_attn_4", "varlen_attn"),
    ],
)
def test_det_7_auto_where_runs_are_bitwise(asked: Need, with_4: str, without: str) -> None:
    assert taken("sm90", asked, FLASH_4, bitwise=True) == with_4
    assert taken("sm90", asked, {}, bitwise=True) == without


@pytest.mark.parametrize(
    ("kind", "arch", "dtype", "asked", "name"),
    [
        ("cuda", "sm80", BF16, GQA, "sdpa_flash"),
        ("cuda", "sm80", BF16, PACKED_MLA, "sdpa_efficient"),
        ("cuda", "sm80", BF16, GPT_OSS, "varlen_attn"),
        ("cuda", "sm100", BF16, GQA, "sdpa_cudnn"),
        ("cuda", "sm100", BF16, GPT_OSS, "varlen_attn"),
        ("cuda", "sm90", torch.float32, PACKED_GQA, "sdpa_efficient"),
        ("cuda", "sm90", torch.float32, GPT_OSS, "eager"),
        ("cuda", "sm90", torch.float64, GQA, "eager"),
        ("rocm", "gfx942", BF16, GQA, "eager"),
        ("cpu", "cpu", BF16, GPT_OSS, "sdpa_cpu"),
    ],
)
def test_op_2_auto_elsewhere(kind: str, arch: str, dtype: torch.dtype, asked: Need, name: str) -> None:
    assert taken(arch, asked, FLASH_4 | FLASH_2, kind=kind, dtype=dtype) == name


@pytest.mark.parametrize(
    ("name", "arch", "asked", "installed", "said"),
    [
        ("flash_attn_4", "sm90", GPT_OSS, FLASH_4, None),
        ("flash_attn_4", "sm90", GPT_OSS, {}, "needs flash-attn-4 >=4.0.0b36,<4.0.0b37, and none is"),
        ("flash_attn_4", "sm90", GPT_OSS, {"flash-attn-4": "4.0.0b37"}, "4.0.0b37 is installed"),
        ("flash_attn_4", "sm80", GPT_OSS, FLASH_4, "runs on sm90, not on sm80"),
        ("flash_attn_4", "sm90", need(key=16), FLASH_4, "takes heads of 64 and more, not key 16, value 16"),
        ("flash_attn_4", "sm90", need(key=264), FLASH_4, "takes heads up to 256 wide, not key 264"),
        ("flash_attn_4", "sm90", need(key=68), FLASH_4, "multiple of 16 bytes, which key 68, value 68"),
        (
            "flash_attn_4",
            "sm90",
            need("gqa", key=192, value=128),
            FLASH_4,
            "cannot do gqa, unequal_widths together",
        ),
        ("varlen_attn", "sm90", PACKED_MLA, {}, "cannot do unequal_widths"),
        ("varlen_attn", "sm80", GPT_OSS, {}, None),
        ("sdpa_flash", "sm90", PACKED_GQA, {}, "cannot do packed"),
        ("sdpa_flash_padded", "sm90", PACKED_MLA, {}, None),
        ("sdpa_flash_padded", "sm90", need(key=8, value=16), {}, "no wider than key heads"),
        ("flash_attn", "sm90", GPT_OSS, FLASH_2, None),
        ("flash_attn", "sm90", PACKED_MLA, FLASH_2, "cannot do unequal_widths"),
        ("flash_attn", "sm90", GQA, {"flash-attn": "2.7.4"}, "needs flash-attn >=2.8,<3, and 2.7.4"),
        ("flex_attention", "sm90", need(key=24, value=8), {}, "takes heads of 16 and more, not value 8"),
        ("sdpa_cudnn", "sm90", need("window"), {}, "cannot do window"),
    ],
)
def test_reg_1_missing_capability_is_one_sentence(
    name: str, arch: str, asked: Need, installed: dict[str, str], said: str | None
) -> None:
    found = implementations()["attention"][name].missing(
        Device("cuda", arch, packages=installed), BF16, asked, bitwise=False
    )
    assert (found is None) if said is None else (found is not None and said in found)


def test_det_2_bitwise_names_what_there_is_instead() -> None:
    with pytest.raises(UserError, match=r"(?s)flex_attention is not deterministic.*varlen_attn") as caught:
        taken("sm90", GPT_OSS, {}, bitwise=True, attention="flex_attention")
    assert caught.value.code == 3


def test_reg_2_auto_names_implementations_that_there_are() -> None:
    orders = [case.order for cases in registry.CASES.values() for case in cases]
    known = implementations()["attention"]
    assert all(set(order) <= set(known) for order in (*orders, registry.AUTO["cuda"]["attention"]))


def test_num_6_an_order_that_forgets_the_need_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CASES", {})
    with pytest.raises(AssertionError):
        test_op_2_auto_on_hopper(GPT_OSS, "flash_attn_4", "varlen_attn")
