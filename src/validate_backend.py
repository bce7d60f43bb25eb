"""Problems of a backend with the model and the options that another one reads (CFG-2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from src.config import Config, KernelsConfig
from src.errors import Problem
from src.models.convert.table import CONVERSIONS
from src.models.hf import is_windowed
from src.models.schema import HfConfig

OPERATIONS = tuple(f.name for f in fields(KernelsConfig) if f.type == "str | None")
"""The operations whose implementation may be chosen by name; the registry's, in a test."""
SHARED_OPERATIONS = ("linear_cross_entropy", "accumulate", "grad_norm", "adamw")
"""Those that are ours whatever the backend."""


def backend_problems(config: Config) -> Iterator[Problem]:
    """What transformers owns is chosen by its keys, what we own by ours; neither passes unread."""
    if config.backend.name != "transformers":
        if isinstance(config.model, HfConfig):
            message = f"hf is a model of transformers, which backend={config.backend.name} does not build"
            yield Problem("model", message, "backend=transformers", "backend")
        for key in ("attn_implementation", "experts_implementation"):
            value = getattr(config.backend, key)
            if value != "auto":
                message = f"{value} is for transformers; backend={config.backend.name} chooses by kernels"
                yield Problem(f"backend.{key}", message, f"type backend.{key}=auto", "backend")
        return
    for operation in OPERATIONS:
        choice: str | None = getattr(config.kernels, operation)
        if choice is not None and operation not in SHARED_OPERATIONS:
            message = f"{choice} is ours; backend=transformers computes this by its own code"
            theirs = {"attention": "attn", "grouped_mm": "experts"}.get(operation)
            fix = f"type backend.{theirs}_implementation= instead" if theirs else "leave it out"
            yield Problem(f"kernels.{operation}", message, fix, "backend")
    if isinstance(config.model, HfConfig):
        yield from _local_model(config, config.model)
        return
    conversion = CONVERSIONS.get(config.model.family)
    if conversion is None:
        message = f"the family {config.model.family} has no conversion to transformers"
        yield Problem("backend", message, f"model={' or model='.join(CONVERSIONS)}", "backend")
    else:
        yield from conversion.problems(config.model)


def force_problems(config: Config) -> Iterator[Problem]:
    """Forced choices where no router of ours or of a known conversion makes any (DET-4)."""
    force = config.balance.force
    if force != "none" and not config.model.num_experts and not isinstance(config.model, HfConfig):
        message = f"{force}, but {config.model.name} has no experts that a choice could be forced on"
        yield Problem("balance.force", message, "type balance.force=none", "DET-4")


def _local_model(config: Config, model: HfConfig) -> Iterator[Problem]:
    """What a model that we know from its description only cannot do."""
    from src.trainer.data.synthetic import is_dense  # It takes numpy with it.

    force = config.balance.force
    if force != "none":
        message = f"{force}, but the routers of {model.path} are transformers' own"
        yield Problem("balance.force", message, "type balance.force=none", "backend")
    if config.balance.kind != "none" or config.balance.z_loss:
        message = f"{config.balance.kind}, but the routers of {model.path} are transformers' own"
        yield Problem("balance", message, "balance=none balance.z_loss=0", "backend")
    if is_windowed(model.path) and not is_dense(config):
        message = f"layers of {model.path} see a window, which the mask of packed samples would open"
        yield Problem("data.packing", message, "samples that are full documents, or another model", "backend")
