"""Which backends there are and what each can do; no torch, so that composition can refuse by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from src.errors import Problem, UserError

if TYPE_CHECKING:
    from src.trainer.backends.base import Backend


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; everything else is refused at composition."""

    path: str
    """`module:class` of the implementation."""
    axes: tuple[str, ...]
    """Mesh axes that may exceed one."""
    schedules: tuple[str, ...]
    """Values of `pipeline.schedule`, where there are stages."""
    overlap: bool
    """Takes `pipeline.overlap=true`."""
    recompute: tuple[str, ...]
    """Values of `recompute`."""
    precision: tuple[str, ...]
    """Values of `precision`."""
    balance: tuple[str, ...]
    """Values of `balance`."""
    force: tuple[str, ...]
    """Values of `balance.force`."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Key → why other values are refused; without one they do not exist yet."""


BACKENDS: dict[str, Capabilities] = {
    "native": Capabilities(
        path="src.trainer.backends.native:NativeBackend",
        axes=("pp", "rep", "dp", "cp", "ep"),
        schedules=("gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev"),
        overlap=False,
        recompute=("none", "stage", "full"),
        precision=("auto", "fp32", "fp64", "master", "split", "bf16"),
        balance=("sequence", "micro_batch", "global_batch_lagged", "bias", "none"),
        force=("none", "even", "uniform", "dirichlet"),
    ),
    "transformers": Capabilities(
        path="src.trainer.backends.transformers:TransformersBackend",
        axes=("rep", "dp"),
        schedules=("gpipe", "1f1b"),
        overlap=False,
        recompute=("none",),
        precision=("auto", "fp32", "master", "split", "bf16"),
        balance=("sequence", "micro_batch", "global_batch_lagged", "none"),
        force=("none", "even", "uniform", "dirichlet"),
        reasons={
            "mesh.pp": "transformers' layers are not cut into stages",
            "mesh.cp": "transformers' attention wants the whole sequence",
            "mesh.ep": "transformers' experts are not divided",
            "balance": "transformers' routers choose by their own scores, where no bias of ours enters",
            "precision": "transformers computes norms, softmax and router in fp32 whatever the model's dtype",
        },
    ),
}
"""The backends that exist."""

RESERVED = ("megatron", "automodel")
"""Names that are kept for backends to come and refused until then."""


def problem(name: str) -> Problem | None:
    """Why `backend=name` cannot run, or None if it can."""
    if name in BACKENDS:
        return None
    why = "reserved and does not exist yet" if name in RESERVED else "not a backend"
    return Problem("backend", f"'{name}' is {why}", f"use backend={' or '.join(BACKENDS)}", rule="backend")


def backend_class(name: str) -> type[Backend]:
    """The class behind `backend=name`.

    Raises:
        UserError: the name is reserved or unknown.
    """
    refused = problem(name)
    if refused is not None:
        raise UserError([refused])
    module, _, attribute = BACKENDS[name].path.partition(":")
    found: type[Backend] = getattr(import_module(module), attribute)
    return found
