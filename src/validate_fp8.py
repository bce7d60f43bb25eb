"""Problems of fp8 with the precision, the backend and the widths of a model (FP8-1); no torch here."""

from __future__ import annotations

from collections.abc import Iterator

from src.config import Config
from src.errors import Problem
from src.models.names import is_expert_stack, parameters
from src.models.schema import HfConfig

MULTIPLE = 16
"""What products in fp8 want of the widths of a weight (FP8-4); `kernels/fp8.py` has the same, in a test."""
KEY, RULE = "precision.fp8", "FP8-1"
HALF = "precision=master, precision=split or precision=bf16"


def fp8_problems(config: Config) -> Iterator[Problem]:
    """What cannot run in fp8, all at once; what the device lacks is asked where it is."""
    fp8, recipe, name = config.precision.fp8, config.precision.fp8_recipe, config.precision.name
    if fp8 == "none":
        if recipe != "tensor":
            fix = f"type {KEY}=dense, or leave the recipe out"
            yield Problem("precision.fp8_recipe", f"{recipe}, but {KEY}=none", fix, RULE)
        return
    is_fp32 = name == "auto" and config.platform.name == "cpu"
    if is_fp32 or name in ("fp32", "fp64"):
        words = "auto, fp32 on a CPU" if is_fp32 else name
        yield Problem(KEY, f"{fp8} goes with bf16 products, and precision={words} has none", HALF, RULE)
    if config.backend.name == "transformers":
        message = f"{fp8}, but the products of backend=transformers are its own"
        yield Problem(KEY, message, f"backend=native or {KEY}=none", RULE)
    if not isinstance(config.model, HfConfig):
        yield from _of_model(config)


def _of_model(config: Config) -> Iterator[Problem]:
    model, fp8 = config.model, config.precision.fp8
    if fp8 == "dense_experts" and not model.num_experts:
        message = f"dense_experts, but {model.name} has no experts"
        yield Problem(KEY, message, f"type {KEY}=dense", RULE)
    bad = {}
    for name, shape in parameters(model).items() if model.vocab_size is not None else ():
        if is_product(name, shape, fp8) and any(width % MULTIPLE for width in shape[-2:]):
            short = name.split(".", 3)[3]
            bad[short] = f"{short} {shape[-2]}x{shape[-1]}"
    if bad:
        message = (
            f"{fp8} wants widths of a multiple of {MULTIPLE}, and {model.name} has {', '.join(bad.values())}"
        )
        yield Problem(KEY, message, f"other widths, or {KEY}=none", RULE)


def is_product(name: str, shape: tuple[int, ...], fp8: str) -> bool:
    """Whether a parameter's products run in fp8: matrices of layers but for the router's."""
    if fp8 == "none" or not name.startswith("model.layers.") or ".mlp.gate." in name:
        return False
    if is_expert_stack(name):
        return fp8 == "dense_experts" and len(shape) == 3
    return len(shape) == 2
