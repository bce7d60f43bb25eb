"""BENCH-2 to BENCH-4: clock, parking and groups of kernels, each on its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from src.bench import park
from src.bench.clock import quantile, spread, time_calls
from src.bench.groups import GROUPS, RULES, Span, group_of, summarise
from src.bench.side import opened
from src.trainer.runtime import start
from tests.trainer.small import small_config

NAMES = {
    "void cutlass::device_kernel<detail::enable_3x_kernel_for_sm9x<GroupProblemShape<>>>": "experts",
    "_grouped_mm_kernel": "experts",
    "triton_poi_fused_mul_silu_3": "experts",
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNN": "dense",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "dense",
    "void cublasLt::splitKreduce_kernel<32, 16>": "dense",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128": "attention",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
    "void at::native::reduce_kernel<512, 1, NormTwoOps<float>>": "optimizer",
    "void at::native::indexSelectLargeIndex<c10::BFloat16>": "permute",
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<>": "routing",
    "triton_per_fused__softmax_topk_1": "routing",
    "triton_red_fused__to_copy_mean_mul_pow_rsqrt_0": "norms",
    "triton_red_fused_logsumexp_sub_2": "head",
    "Memcpy DtoD (Device -> Device)": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_bench_4_kernels_have_their_group(name: str) -> None:
    """BENCH-4: names as traces of such steps show them."""
    assert group_of(name) == NAMES[name]


def test_bench_4_every_rule_fills_a_group_and_has_an_example() -> None:
    """BENCH-4: no rule for nothing."""
    assert {group for group, _ in RULES} | {"other", "idle"} == set(GROUPS)
    assert {group for group, _ in RULES} <= set(NAMES.values())


def test_bench_4_shares_of_a_made_up_trace() -> None:
    """BENCH-4: two overlapping kernels, a gap, and a product of which half is the head's."""
    spans = [Span("nvjet_a", 0, 40), Span("flash_b", 20, 60), Span("nvjet_a", 80, 100)]
    found = summarise(spans, Counter({"nvjet_a": 30}), steps=1)
    assert found.share["idle"] == pytest.approx(0.2)
    assert found.share["head"] == found.share["dense"] == pytest.approx(0.8 * 30 / 100)
    assert found.share["attention"] == pytest.approx(0.8 * 40 / 100)
    assert found.kernels[0] == ("nvjet_a", "dense", 0.06, 2.0)


def test_quantiles_and_spread() -> None:
    """Between neighbours by distance, whatever the order; the spread is of the median."""
    values = [7.0, 1.0, 3.0]
    assert [quantile(values, share) for share in (0, 0.25, 0.5, 1)] == [1.0, 2.0, 3.0, 7.0]
    assert spread([10.0, 11.0, 9.0]) == pytest.approx(0.2)


def test_bench_3_a_parked_side_goes_on_as_if_it_had_stayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BENCH-3: weights, moments and their aliases come back; the mutation that brings zeros back is seen."""
    monkeypatch.setattr(park, "SMALLEST", 1)
    config = small_config(tmp_path, max_steps=9)
    config.optimizer.kind, config.optimizer.lr = "adamw", 1e-2
    runtime = start(config)
    losses = {}
    for name in ("stays", "parked", "lost"):
        with opened(config, runtime, tmp_path / name, name) as side:
            side.step()
            if name != "stays":
                garage, held = park.Garage(), side.storages()
                bytes_held = sum(storage.nbytes() for storage in held)
                parameters = sum(p.nbytes for p in side.run.backend.parameters.values())
                assert bytes_held >= 3 * parameters, "parameters and both moments"
                garage.park(name, held)
                assert sum(storage.nbytes() for storage in held) == 0
                if name == "lost":
                    garage._parked[name][0].zero_()
                garage.bring_back(name)
            for _ in range(3):
                side.step()
            losses[name] = [side.loss(index) for index in range(4)]
    assert losses["parked"] == losses["stays"] != losses["lost"]


def test_bench_3_a_slab_is_used_again_and_a_small_one_is_not() -> None:
    """BENCH-3: host memory of the larger side serves both."""
    garage, small, large = park.Garage(), torch.arange(300), torch.arange(9000)
    garage.park("large", [large.untyped_storage()])
    slab = garage._parked["large"][0]
    garage.bring_back("large")
    garage.park("small", [small.untyped_storage()])
    assert garage._parked["small"][0] is slab
    garage.park("large", [large.untyped_storage()])
    garage.bring_back("small")
    garage.forget("nobody")
    garage.bring_back("large")
    assert small.equal(torch.arange(300))
    assert large.equal(torch.arange(9000))


@pytest.mark.gpu
def test_bench_2_events_time_the_device_and_parking_empties_it() -> None:
    """BENCH-2, BENCH-3: events time a copy; a parked tensor's memory is given back."""
    device = torch.device("cuda", 0)
    data = torch.randint(0, 256, (1 << 28,), dtype=torch.uint8, device=device)
    target = torch.empty_like(data)
    times = time_calls(lambda: target.copy_(data), 5, device)
    assert all(0.03 < time < 100 for time in times[1:]), times
    alias, before, expected = data.detach(), torch.cuda.memory_allocated(device), data.cpu()
    garage = park.Garage()
    garage.park("data", park.storages({"a": [data, alias]}))
    assert torch.cuda.memory_allocated(device) <= before - data.numel()
    assert garage._parked["data"][0].is_pinned()
    garage.bring_back("data")
    assert alias.cpu().equal(expected)
