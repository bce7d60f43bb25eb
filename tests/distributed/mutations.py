"""Faults that law 1 must notice, as patches inside the ranks; most leave the forward pass alone (T-5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from src.kernels import route
from src.kernels.route import Routed
from src.models import gpt_oss
from src.models.decoder_layer import DecoderLayer, MoE, Router
from src.models.layers import Experts
from src.models.protocol import Carry, Routing
from src.trainer.backends.native import NativeBackend
from src.trainer.parallel import data, init
from src.trainer.parallel.balance import LayerBalance, Unit
from src.trainer.parallel.shards import local
from src.trainer.runtime import Runtime
from tests.distributed import laws, ring_faults
from tests.distributed.configs import CP2, MESHES, Case, Key
from tests.distributed.patches import wrapped
from tests.distributed.reference import Trace


def router_grad() -> Any:
    """No gradient from the experts' outputs into the router."""

    def detached(original: Any, *arguments: Any) -> Routing:
        routing: Routing = original(*arguments)
        return replace(routing, weights_TK=routing.weights_TK.detach())

    return wrapped(Router, "forward", detached)


def residual_grad() -> Any:
    """No gradient into the residual stream."""

    def detached(
        original: Any, layer: Any, rows: Tensor, routing: Any, carry: Carry, *home: Tensor
    ) -> Tensor:
        out: Tensor = original(layer, rows, routing, Carry(carry.residual_TD.detach()), *home)
        return out

    return wrapped(DecoderLayer, "aggregate", detached)


def shared_grad() -> Any:
    """No gradient into the shared expert."""

    def detached(original: Any, moe: MoE, *arguments: Any) -> None:
        original(moe, *arguments)
        moe.shared_experts.register_forward_hook(lambda module, into, out: out.detach())

    return wrapped(MoE, "__init__", detached)


def expert_scale() -> Any:
    """Expert gradients times ep."""

    def scaled(original: Any, backend: NativeBackend) -> None:
        original(backend)
        for name, parameter in backend.parameters.items():
            if backend.specs[name].expert:
                local(parameter.grad).mul_(backend._runtime.mesh.ep)

    return wrapped(NativeBackend, "_reduce", scaled)


def fsdp_default() -> Any:
    """The experts' unit keeps FSDP2's default factor."""
    return wrapped(
        data, "sum_only", lambda original, module: None if isinstance(module, Experts) else original(module)
    )


def local_count() -> Any:
    """Every rank divides by its own label count."""
    return wrapped(laws, "count_tokens", lambda original, runtime, mine: mine)


def lb_scale() -> Any:
    """Auxiliary terms without n_j / N_tok."""
    return wrapped(
        Unit,
        "weights",
        lambda original, *arguments, **keywords: original(*arguments, **keywords) * 0 + 1,
    )


def second_softmax() -> Any:
    """Auxiliary terms of a softmax of the scores."""

    def again(original: Any, hook: Any, logits: Tensor, scores: Tensor, *arguments: Any) -> Tensor:
        weights: Tensor = original(hook, logits, scores.softmax(-1), *arguments)
        return weights

    return wrapped(LayerBalance, "apply", again)


def masked_scores() -> Any:
    """Auxiliary terms of the scores that the group limit leaves."""

    def masked(original: Any, router: Router, *arguments: Any) -> Routed:
        routed: Routed = original(router, *arguments)
        by_group = routed.scores_TE.unflatten(1, (router.rule.groups, -1))
        kept = by_group.amax(-1).topk(router.rule.groups_kept).indices
        keep = torch.zeros_like(by_group[..., 0]).scatter(1, kept, 1.0)
        return routed._replace(scores_TE=(by_group * keep[..., None]).flatten(1))

    return wrapped(Router, "route", masked)


def norm_rep() -> Any:
    """The norm counts replicas twice."""

    def twice(original: Any, backend: NativeBackend, *arguments: Any) -> tuple[Tensor, Tensor]:
        first = replace(backend._runtime.place, rep=0)
        with mock.patch.object(backend, "_runtime", replace(backend._runtime, place=first)):
            found: tuple[Tensor, Tensor] = original(backend, *arguments)
        return found

    return wrapped(NativeBackend, "norm_and_loss", twice)


def norm_pp() -> Any:
    """A norm for each stage."""

    def within(original: Any, backend: NativeBackend, *arguments: Any) -> tuple[Tensor, Tensor]:
        reduce = backend._runtime.reduce
        with mock.patch.object(Runtime, "sum_world", lambda runtime, t: reduce(t, ("rep", "dp", "cp", "ep"))):
            found: tuple[Tensor, Tensor] = original(backend, *arguments)
        return found

    return wrapped(NativeBackend, "norm_and_loss", within)


def cloned_experts() -> Any:
    """Initial values keyed by the expert's number on its rank."""

    def clone(original: Any, config: Any, name: str, *arguments: Any) -> Tensor:
        held = config.model.num_experts // config.mesh.ep
        name = re.sub(r"(experts\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) % held}", name)
        rows: Tensor = original(config, name, *arguments)
        return rows

    return wrapped(init, "draw", clone)


def reduced_twice() -> Any:
    """The experts' gradients are added twice, as by one reduction too many."""

    def twice(original: Any, backend: NativeBackend) -> None:
        original(backend)
        for name, parameter in backend.parameters.items():
            if backend.specs[name].expert:
                local(parameter.grad).add_(local(parameter.grad).clone())

    return wrapped(NativeBackend, "_reduce", twice)


def renorm_grad() -> Any:
    """No gradient through the sum that routing weights are divided by."""
    return mock.patch.object(route, "_shares", lambda w_TK: w_TK / w_TK.sum(-1, keepdim=True).detach())


def sink_grad() -> Any:
    """No gradient into the sinks."""
    return wrapped(gpt_oss, "attend", lambda original, *most: original(*most[:-1], most[-1].detach()))


def window(by: int) -> Any:
    """Windows that are longer than the config says."""

    def moved(original: Any, config: Any, index: int) -> int | None:
        found: int | None = original(config, index)
        return None if found is None else found + by

    return lambda: wrapped(gpt_oss, "window_of", moved)


def on(spec: str, batch: str = "packed", precision: str = "fp64", family: str = "deepseek_v2") -> Case:
    """A case on two ranks."""
    mesh = next(m for m in (*MESHES[2], CP2) if m.spec == spec)
    return Case(mesh, "1f1b", batch, precision, family=family)


MUTATIONS: Mapping[str, tuple[Any, Case, str]] = {
    "router_grad": (router_grad, on("ep2"), "gradient"),
    "residual_grad": (residual_grad, on("pp2"), "gradient"),
    "residual_grad, dense": (residual_grad, on("pp2", family="dense"), "gradient"),
    "renorm_grad": (renorm_grad, on("ep2", family="qwen3_moe"), "gradient"),
    "sink_grad": (sink_grad, on("ep2", family="gpt_oss"), "gradient"),
    "window one more": (window(1), on("dp2", family="gpt_oss"), "loss"),
    "window one less": (window(-1), on("dp2", family="gpt_oss"), "loss"),
    "shared_grad": (shared_grad, on("dp2"), "gradient"),
    "expert_scale": (expert_scale, on("ep2", precision="fp32"), "gradient"),
    "fsdp_default": (fsdp_default, on("dp2"), "gradient"),
    "local_count": (local_count, on("ep2", "dense"), "loss"),
    "lb_scale": (lb_scale, on("dp2", precision="fp32"), "gradient"),
    "second_softmax": (second_softmax, on("ep2", "dense"), "gradient"),
    "masked_scores": (masked_scores, on("pp2", "dense"), "gradient"),
    "norm_rep": (norm_rep, on("rep2"), "norm"),
    "norm_pp": (norm_pp, on("pp2"), "norm"),
    "cloned_experts": (cloned_experts, on("ep2"), "initial"),
    "reduced_twice": (reduced_twice, on("rep2"), "gradient"),
    "ring_hop": (ring_faults.ring_hop, on("cp2", "dense12", family="qwen3_moe"), "gradient"),
    "kv_b_hop": (ring_faults.kv_b_hop, on("cp2", "packed12"), "gradient"),
    "local_positions": (ring_faults.local_positions, on("cp2", "dense12", family="qwen3_moe"), "gradient"),
    "ignored_documents": (ring_faults.ignored_documents, on("cp2", "packed12"), "gradient"),
    "unsummed_counts": (ring_faults.unsummed_counts, on("cp2", "dense12", family="qwen3_moe"), "aux"),
    "counted_by_all": (ring_faults.counted_by_all, on("cp2", "packed12"), "loss"),
}
"""Name → patch, the case that must notice it, and in what."""


def measure_mutants(traces: Mapping[Key, Trace]) -> dict[str, tuple[str, float]]:
    """Mutation → the comparison that is most off in a first step, and by how many limits."""
    found = {}
    for name, (patch, case, what) in MUTATIONS.items():
        trace = traces[case.key]
        with patch():
            runtime, backend, report = laws.begin(case, trace)
            report |= laws.one_step(case, runtime, backend, 0, trace)
        found[name] = laws.worst({key: value for key, value in report.items() if key.startswith(what)})
    return found
