"""Scores, choice of experts and routing weights by a kernel each way (OP-7)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from src.kernels.blocks import power_of_two
from src.kernels.opaque import opaque

Three = tuple[Tensor, Tensor, Tensor]
ELEMENTS = 2048
"""Tokens times experts of the tile that one program holds."""


def _forward(
    logits_TE: Tensor,
    top_k: int,
    groups: int,
    groups_kept: int,
    of_chosen: bool,
    renormalise: bool,
    scale: float,
    bias_E: Tensor | None,
    ids_TK: Tensor | None,
) -> Three:
    from src.kernels.fused.route import route_kernel

    logits_TE = logits_TE.contiguous()
    found = _forward_shapes(logits_TE, top_k)
    tokens, sizes = logits_TE.shape[0], _sizes(logits_TE, top_k)
    if tokens:
        route_kernel[(-(-tokens // sizes["TOKENS"]),)](
            logits_TE, logits_TE if bias_E is None else bias_E.contiguous(),
            found[0] if ids_TK is None else ids_TK.contiguous(), *found, tokens, scale,
            BIASED=bias_E is not None, GIVEN=ids_TK is not None, OF_CHOSEN=of_chosen, SHARED=renormalise,
            GROUPS=groups, KEPT=groups_kept, **sizes,
        )  # fmt: skip
    return found


def _forward_shapes(logits_TE: Tensor, top_k: int, *rule: Any) -> Three:
    size = (logits_TE.shape[0], top_k)
    ids_TK, weights_TK = logits_TE.new_empty(size, dtype=torch.int32), logits_TE.new_empty(size)
    return ids_TK, weights_TK, logits_TE.new_empty(logits_TE.shape)


def _sizes(logits_TE: Tensor, top_k: int) -> dict[str, int]:
    """Constants of the kernels."""
    experts, block = logits_TE.shape[1], power_of_two(logits_TE.shape[1])
    tile = {"TOKENS": max(1, ELEMENTS // block), "BLOCK_E": block, "BLOCK_K": power_of_two(top_k)}
    return {"E": experts, "K": top_k, **tile}


def _backward(
    dweights_TK: Tensor,
    dscores_TE: Tensor | None,
    scores_TE: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    of_chosen: bool,
    renormalise: bool,
    scale: float,
) -> Tensor:
    from src.kernels.fused.route import route_backward_kernel

    dlogits_TE = scores_TE.new_empty(scores_TE.shape)
    tokens, sizes = scores_TE.shape[0], _sizes(scores_TE, ids_TK.shape[1])
    if tokens:
        route_backward_kernel[(-(-tokens // sizes["TOKENS"]),)](
            dweights_TK.contiguous(), scores_TE if dscores_TE is None else dscores_TE.contiguous(), scores_TE,
            ids_TK, weights_TK, dlogits_TE, tokens, scale, SCORED=dscores_TE is not None,
            OF_CHOSEN=of_chosen, SHARED=renormalise, **sizes,
        )  # fmt: skip
    return dlogits_TE


def _backward_shape(dweights_TK: Tensor, dscores_TE: Tensor | None, scores_TE: Tensor, *rest: Any) -> Tensor:
    return scores_TE.new_empty(scores_TE.shape)


_route = opaque(
    "route",
    "(Tensor logits, int top_k, int groups, int groups_kept, bool of_chosen, bool renormalise, float scale, "
    "Tensor? bias, Tensor? ids) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_shapes,
)
_route_backward = opaque(
    "route_backward",
    "(Tensor dweights, Tensor? dscores, Tensor scores, Tensor ids, Tensor weights, bool of_chosen, "
    "bool renormalise, float scale) -> Tensor",
    _backward,
    _backward_shape,
)


class Route(torch.autograd.Function):
    """Ids, weights and scores; a gradient that does not arrive is not read."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        choice: tuple[int, int, int],
        weighing: tuple[bool, bool, float],
        bias_E: Tensor | None,
        ids_TK: Tensor | None,
    ) -> Three:
        """`choice` is K, groups and groups kept; `weighing` of the chosen alone, renormalised, scale."""
        ids_TK, weights_TK, scores_TE = _route(logits_TE, *choice, *weighing, bias_E, ids_TK)
        ctx.save_for_backward(scores_TE, ids_TK, weights_TK)
        ctx.weighing = weighing
        ctx.mark_non_differentiable(ids_TK)
        ctx.set_materialize_grads(False)
        return ids_TK, weights_TK, scores_TE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        """Of the logits."""
        scores_TE, ids_TK, weights_TK = ctx.saved_tensors
        _, dweights_TK, dscores_TE = grads
        if dweights_TK is None:
            dweights_TK = torch.zeros_like(weights_TK)
        dlogits_TE = _route_backward(dweights_TK, dscores_TE, scores_TE, ids_TK, weights_TK, *ctx.weighing)
        return dlogits_TE, None, None, None, None
