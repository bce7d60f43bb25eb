"""The rules; `python -m src.kernels.autotune --list` prints them and whether each applies here."""

from __future__ import annotations

from src.kernels.autotune.rule import Rule, table
from src.kernels.toolchain import Toolchain


def on_rocm(toolchain: Toolchain) -> bool:
    """on ROCm"""
    return toolchain.device == "rocm"


FLA_KDA_STAGES = Rule(
    id="fla_kda_stages",
    module="fla.ops.kda.chunk_intra",
    kernels=("chunk_kda_bwd_kernel_intra", "chunk_kda_fwd_kernel_intra_sub_chunk"),
    when=on_rocm,
    versions={"triton": "<3.7"},
    keep=lambda config: config.num_stages <= 2,
    clamp={"num_stages": 2},
    reason="pipelining over 4 stages aborts Triton's AMD compiler, and the process with it (triton #9815)",
    remove_when="triton 3.7 is the oldest supported",
    measured_cost="5.4 % of a kernel, 0.96 % of the operation, within 0.8 % of noise from end to end "
    "(Primus); the forward kernel is narrowed without need today: 4 stages would win it 4.9 %",
)

RULES = table(FLA_KDA_STAGES)
