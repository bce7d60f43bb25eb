"""REG-1 to REG-6: capabilities are pure facts, all refusals come at once, the choice is recorded."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

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
H200 = Device("cuda", "sm90")
PACKED = Need(frozenset({"packed", "unequal_widths"}), {"key": 24, "value": 8})
DETERMINISM = DeterminismConfig()
CUDA = {"rope": "real", "rotary_heads": "triton", "latent_heads": "triton", "swiglu": "triton"}
CUDA |= {"route": "triton", "sort_by_expert": "triton"}
CUDA |= {"permute": "triton", "combine": "triton", "expert_bias": "triton"}
CUDA |= {"linear_cross_entropy": "triton", "accumulate": "triton", "grad_norm": "triton", "adamw": "triton"}
FAST: dict[tuple[str, torch.dtype], dict[str, str]] = {
    ("cpu", torch.float32): {"attention": "sdpa_cpu", "grouped_mm": "torch_grouped_mm"},
    ("cpu", torch.bfloat16): {"attention": "sdpa_cpu", "grouped_mm": "torch_grouped_mm"},
    ("cuda", torch.float64): {"rope": "real", "rotary_heads": "real", "latent_heads": "real"},
    ("cuda", torch.float32): CUDA | {"attention": "sdpa_efficient", "quantise_weight": "triton"},
    ("cuda", torch.bfloat16): CUDA
    | {"attention": "sdpa_efficient", "grouped_mm": "torch_grouped_mm_cuda", "router_linear": "split"}
    | {"linear_fp8": "scaled_mm", "grouped_mm_fp8": "scaled_grouped_mm", "quantise_weight": "triton"},
}
"""What `auto` takes for packed samples on Hopper; what is not named is the reference."""
WITHOUT: dict[str, tuple[str, ...]] = {
    "sm80": ("grouped_mm", "linear_fp8", "grouped_mm_fp8", "quantise_weight"),
    "sm100": ("grouped_mm_fp8",),
}
"""Operations for which another architecture has the reference only."""


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
    fast = fast | dict.fromkeys(WITHOUT.get(device.arch, ()), EAGER)
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
        ("swiglu", "triton", "cuda", torch.bfloat16, Need(frozenset({"clamped"})), None),
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


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({}, "needs another-kernels >=4,<5, and none is installed"),
        ({"another-kernels": "3.9"}, "needs another-kernels >=4,<5, and 3.9 is installed"),
        ({"another-kernels": "4.0.0b36"}, "needs another-kernels >=4,<5, and 4.0.0b36 is installed"),
        ({"another-kernels": "4.1.dev2"}, None),
        ({"another-kernels": "5.0"}, "needs another-kernels >=4,<5, and 5.0 is installed"),
    ],
)
def test_reg_1_packages_are_facts_of_the_device(installed: dict[str, str], said: str | None) -> None:
    """What is on this machine does not matter to a device that is made up."""
    bound = Implementation(
        "swiglu", "bound", abs, (True, True), "x", source="library", packages={"another-kernels": ">=4,<5"}
    )
    device = Device("cuda", "sm90", packages=installed)
    assert bound.missing(device, torch.float32, Need(), bitwise=False) == said


@pytest.mark.parametrize(
    ("arch", "installed", "name"),
    [
        ("sm90", {}, "torch_grouped_mm_cuda"),
        ("sm90", {"quack-kernels": "0.6.5"}, "quack"),
        ("sm90", {"quack-kernels": "0.7"}, "torch_grouped_mm_cuda"),
        ("sm100", {"quack-kernels": "0.6.5"}, "torch_grouped_mm_cuda"),
    ],
)
def test_reg_4_auto_takes_what_is_installed(arch: str, installed: dict[str, str], name: str) -> None:
    ops = choose_with(Device("cuda", arch, packages=installed), torch.bfloat16)
    assert ops.choices["grouped_mm"].name == name
    assert ops.record()["packages"] == {"triton": None} | (installed if name == "quack" else {})


LOOSE = Implementation("swiglu", "loose", lambda x: x, deterministic=(True, False), saves="x")


def test_det_2_bitwise_refuses_what_is_not_declared_deterministic() -> None:
    missing = LOOSE.missing(DEVICES[-1], torch.float32, Need(), bitwise=True)
    assert missing is not None
    assert "determinism=bitwise" in missing
    assert LOOSE.missing(DEVICES[-1], torch.float32, Need(), bitwise=False) is None
    ours = replace(LOOSE, source="triton")
    interpreted = Device("cpu", "cpu", interprets=True)
    assert ours.missing(interpreted, torch.float32, Need(), bitwise=True) == missing
    assert ours.missing(interpreted, torch.float32, Need(), bitwise=False) is None


def test_det_2_a_choice_by_name_is_an_error_with_an_alternative() -> None:
    """DET-2, DET-7: `auto` passes by, and says so; who names it hears what there is instead."""
    needs = {"attention": Need(widths={"key": 64, "value": 64})}
    bitwise = DeterminismConfig(name="bitwise")
    loose = {name for name, i in implementations()["attention"].items() if not all(i.deterministic)}
    assert "sdpa_cudnn" in loose
    ops = choose(KernelsConfig(), H200, torch.bfloat16, bitwise, needs)
    chosen = ops.choices["attention"]
    assert chosen.name not in loose
    assert chosen.refused["sdpa_cudnn"] == "is not deterministic, which determinism=bitwise asks for"
    assert (
        choose(KernelsConfig(), H200, torch.bfloat16, DETERMINISM, needs).choices["attention"].name in loose
    )
    with pytest.raises(UserError, match=r"(?s)sdpa_cudnn is not deterministic.*available: eager") as caught:
        choose(KernelsConfig(attention="sdpa_cudnn"), H200, torch.bfloat16, bitwise, needs)
    assert caught.value.code == 3


def test_det_3_a_declaration_is_compulsory() -> None:
    """Without `deterministic` or `saves` there is no implementation, so that importing it fails."""
    compulsory: Any = Implementation
    with pytest.raises(TypeError, match="deterministic"):
        compulsory("swiglu", "mute", abs, saves="x")
    with pytest.raises(TypeError, match="saves"):
        compulsory("swiglu", "mute", abs, deterministic=(True, True))


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


def names_of(device: Device, dtype: torch.dtype, name: str) -> dict[str, str]:
    return {
        operation: choice.name for operation, choice in choose_with(device, dtype, name=name).choices.items()
    }


def test_reg_4_library_takes_anothers_kernel_and_triton_ours() -> None:
    library, ours = (names_of(H200, torch.bfloat16, name) for name in ("library", "triton"))
    assert {o: n for o, n in library.items() if n != EAGER} == {
        "attention": "sdpa_efficient",
        "grouped_mm": "torch_grouped_mm_cuda",
        "linear_fp8": "scaled_mm",
        "grouped_mm_fp8": "scaled_grouped_mm",
    }
    made = {o for o, known in implementations().items() if "triton" in known}
    assert {o for o, n in ours.items() if n == "triton"} == made
    assert {n for o, n in ours.items() if o not in made} == {EAGER}


def test_reg_4_triton_on_a_cpu_needs_the_interpreter_and_says_so() -> None:
    with pytest.raises(UserError, match=r"kernels: triton .*TRITON_INTERPRET=1 asks for: .*adamw") as caught:
        names_of(DEVICES[-1], torch.float32, "triton")
    assert caught.value.code == 3
    (problem,) = caught.value.problems
    ours = [operation for operation, known in implementations().items() if "triton" in known]
    assert problem.message.endswith(", ".join(ours))
    typed = dict(word.removeprefix("kernels.").split("=") for word in problem.fix.split() if "eager" in word)
    assert list(typed) == ours
    assert choose_with(DEVICES[-1], name="triton", **typed).choices["adamw"].name == EAGER
    interpreted = Device("cpu", "cpu", interprets=True)
    assert names_of(interpreted, torch.float32, "triton")["swiglu"] == "triton"
    with pytest.raises(UserError, match="takes float32 in Triton's interpreter, not bfloat16"):
        names_of(interpreted, torch.bfloat16, "triton")


def test_reg_1_every_operation_may_be_chosen_and_every_implementation_says_what_it_is() -> None:
    chosen_by_name = {f.name for f in fields(KernelsConfig) if f.type == "str | None"}
    assert chosen_by_name == set(OPERATIONS)
    for known in implementations().values():
        assert all(i.source in ("torch", "library", "triton") and i.saves for i in known.values())
        assert all((i.source == "triton") == (i.name == "triton") for i in known.values())


def test_reg_3_the_record_says_what_was_chosen_and_what_that_declares() -> None:
    record = choose_with(H200, torch.bfloat16).record()
    assert record["operations"]["swiglu"] == {
        "choice": "triton",
        "refused": {},
        "deterministic": {"forward": True, "backward": True},
        "saves": "gate_up",
    }
    assert record["operations"]["attention"]["deterministic"] == {"forward": True, "backward": False}
    assert "sdpa_cpu" in record["operations"]["attention"]["refused"]
    assert "triton" in record["packages"]


def test_an_explicit_choice_wins_over_the_name() -> None:
    assert choose_with(name="eager", attention="sdpa_cpu").choices["attention"].name == "sdpa_cpu"
    assert choose_with(name="auto", attention="eager").choices["attention"].name == EAGER


def test_reg_3_the_record_names_choice_and_refusals() -> None:
    ops = resolve(KernelsConfig(), torch.device("cpu"), torch.float64, DETERMINISM, {"attention": PACKED})
    record = json.loads(json.dumps(ops.record()))
    assert record["device"] == {"kind": "cpu", "arch": "cpu", "card": platform.machine()}
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


IMPORTED = """
import sys
import src.kernels.registry
import torch
asked = ("flash_attn", "fla", "quack", "cutlass", "hydra", "transformers", "src.kernels.fused")
print([m for m in sys.modules if m.startswith(asked)])
print(torch.cuda.is_initialized())
"""


def test_reg_6_import_probes_no_device_no_optional_package_and_no_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]
