"""REG-1 to REG-6: capabilities are pure facts, all refusals come at once, the choice is recorded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from src.config import DeterminismConfig, KernelsConfig
from src.errors import UserError
from src.kernels.declaration import EAGER, Device, Implementation, Need
from src.kernels.registry import OPERATIONS, Ops, choose, implementations, resolve

DEVICES = [
    Device("cuda", "sm80"),
    Device("cuda", "sm90"),
    Device("cuda", "sm100"),
    Device("rocm", "gfx942"),
    Device("cpu", "cpu"),
]
PACKED = Need(frozenset({"packed", "unequal_widths"}), {"key": 24, "value": 8})
DETERMINISM = DeterminismConfig()
CUDA = {"rope": "real", "rotary_heads": "triton", "latent_heads": "triton", "swiglu": "triton"}
CUDA |= {"linear_cross_entropy": "triton", "accumulate": "triton", "adamw": "triton"}
FAST: dict[tuple[str, torch.dtype], dict[str, str]] = {
    ("cpu", torch.float32): {"attention": "sdpa_cpu", "grouped_mm": "torch_grouped_mm"},
    ("cpu", torch.bfloat16): {"attention": "sdpa_cpu", "grouped_mm": "torch_grouped_mm"},
    ("cuda", torch.float64): {"rope": "real", "rotary_heads": "real", "latent_heads": "real"},
    ("cuda", torch.float32): CUDA | {"attention": "sdpa_efficient"},
    ("cuda", torch.bfloat16): CUDA
    | {"attention": "sdpa_efficient", "grouped_mm": "torch_grouped_mm_cuda", "router_linear": "split"},
}
"""What `auto` takes for packed samples; what is not named is the reference."""


def choose_with(device: Device = DEVICES[-1], dtype: torch.dtype = torch.float32, **kernels: str) -> Ops:
    needs = {"attention": PACKED, "grouped_mm": Need(widths={"hidden_size": 64, "expert_size": 40})}
    return choose(KernelsConfig(**kernels), device, dtype, DETERMINISM, needs)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["auto", "eager"])
def test_reg_4_everything_resolves_everywhere(device: Device, dtype: torch.dtype, name: str) -> None:
    ops = choose_with(device, dtype, name=name)
    chosen = {operation: ops.choices[operation].name for operation in OPERATIONS}
    fast = FAST.get((device.kind, dtype), {}) if name == "auto" else {}
    if device.arch == "sm80":
        fast = fast | {"grouped_mm": EAGER}
    assert chosen == {operation: fast.get(operation, EAGER) for operation in OPERATIONS}


@pytest.mark.parametrize(
    ("operation", "name", "device", "dtype", "need", "said"),
    [
        ("attention", "sdpa_cpu", "cuda", torch.float32, PACKED, "runs on cpu, not on cuda"),
        ("attention", "sdpa_cpu", "cpu", torch.float64, PACKED, "takes bfloat16, float32, not float64"),
        (
            "attention",
            "sdpa_efficient",
            "cuda",
            torch.bfloat16,
            Need(frozenset({"sinks"})),
            "cannot do sinks",
        ),
        (
            "attention",
            "sdpa_efficient",
            "cuda",
            torch.bfloat16,
            Need(frozenset({"window"})),
            "cannot do window",
        ),
        ("attention", "sdpa_cpu", "cpu", torch.float32, Need(frozenset({"sinks", "window"})), None),
        ("swiglu", "triton", "cuda", torch.bfloat16, Need(frozenset({"clamped"})), "cannot do clamped"),
        ("attention", "sdpa_cpu", "cpu", torch.float32, Need(widths={"key": 12, "value": 24}), "no wider"),
        ("attention", "sdpa_cpu", "cpu", torch.float32, PACKED, None),
        ("attention", "sdpa_cpu", "cpu", torch.float32, Need(frozenset({"gqa"})), None),
        (
            "grouped_mm",
            "torch_grouped_mm",
            "cpu",
            torch.bfloat16,
            Need(widths={"expert_size": 44}),
            "expert_size 44",
        ),
        ("grouped_mm", "torch_grouped_mm", "cpu", torch.float32, Need(widths={"expert_size": 44}), None),
        ("grouped_mm", EAGER, "rocm", torch.float64, Need(widths={"expert_size": 9}), None),
    ],
)
def test_reg_1_missing_capability_is_one_sentence(
    operation: str, name: str, device: str, dtype: torch.dtype, need: Need, said: str | None
) -> None:
    implementation = implementations()[operation][name]
    found = implementation.missing(Device(device, device), dtype, need, bitwise=False)
    assert (found is None) if said is None else (found is not None and said in found)


def test_det_2_bitwise_refuses_what_is_not_declared_deterministic() -> None:
    loose = Implementation("swiglu", "loose", lambda x: x, deterministic=(True, False), saves="x")
    missing = loose.missing(DEVICES[-1], torch.float32, Need(), bitwise=True)
    assert missing is not None
    assert "determinism=bitwise" in missing
    assert loose.missing(DEVICES[-1], torch.float32, Need(), bitwise=False) is None


def test_reg_2_all_unavailable_choices_come_at_once() -> None:
    with pytest.raises(UserError) as caught:
        choose_with(
            DEVICES[0], attention="sdpa_cpu", grouped_mm="torch_grouped_mm", linear_cross_entropy="lige"
        )
    assert caught.value.code == 3
    keys = [problem.key for problem in caught.value.problems]
    assert sorted(keys) == ["kernels.attention", "kernels.grouped_mm", "kernels.linear_cross_entropy"]
    assert "available: eager" in str(caught.value)
    assert "'lige'" in str(caught.value)


def test_eng_22_keys_in_blocks_need_what_takes_them() -> None:
    """ENG-22: under context parallelism `auto` takes such an attention and says so; another is refused."""
    needs = {"attention": PACKED.plus("context_parallel")}
    cpu, dtype = DEVICES[-1], torch.float32
    ops = choose(KernelsConfig(), cpu, dtype, DETERMINISM, needs)
    assert ops.choices["attention"].name == EAGER
    assert ops.choices["attention"].refused["sdpa_cpu"] == "cannot do context_parallel"
    with pytest.raises(
        UserError, match=r"(?s)kernels\.attention.*sdpa_cpu cannot do context_parallel.*eager"
    ) as error:
        choose(KernelsConfig(attention="sdpa_cpu"), cpu, dtype, DETERMINISM, needs)
    assert error.value.code == 3


def test_an_explicit_choice_wins_over_the_name() -> None:
    assert choose_with(name="eager", attention="sdpa_cpu").choices["attention"].name == "sdpa_cpu"
    assert choose_with(name="auto", attention="eager").choices["attention"].name == EAGER


def test_reg_3_the_record_names_choice_and_refusals() -> None:
    ops = resolve(KernelsConfig(), torch.device("cpu"), torch.float64, DETERMINISM, {"attention": PACKED})
    record = json.loads(json.dumps(ops.record()))
    assert record["device"] == {"kind": "cpu", "arch": "cpu"}
    assert record["torch"] == torch.__version__
    assert set(record["operations"]) == set(OPERATIONS)
    attention = record["operations"]["attention"]
    assert attention["choice"] == EAGER
    assert attention["refused"]["sdpa_cpu"] == "takes bfloat16, float32, not float64"
    assert attention["refused"]["sdpa_cudnn"] == "runs on cuda, not on cpu"


def test_every_operation_has_a_reference_that_runs_everywhere() -> None:
    for operation, known in implementations().items():
        assert all(i.operation == operation and i.saves for i in known.values())
        reference = known[EAGER]
        assert reference.devices is None
        assert reference.dtypes is None
        assert reference.deterministic == (True, True)


def test_reg_6_import_probes_no_device_and_no_optional_package() -> None:
    code = (
        "import sys, src.kernels.registry, torch; "
        "print([m for m in ('flash_attn', 'fla', 'hydra', 'transformers') if m in sys.modules], "
        "torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]
