"""The transformers backend: Hugging Face's model under the native step, on the axes rep and dp.

Only the model differs: micro-batches, loss and head, balance, reductions, norm and checkpoints are those of
the native backend, so that a comparison of the two compares models and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from src.config import Config
from src.kernels.registry import Ops, resolve
from src.models.build import CausalLM, ParamSpec, build, param_specs, whole
from src.models.names import Entry, canonical
from src.trainer.backends.native import NativeBackend
from src.trainer.backends.peer import Peer, choose_experts, conversion_of
from src.trainer.parallel.data import is_sharded, shard
from src.trainer.parallel.init import initialise
from src.trainer.parallel.masters import cast_for_compute
from src.trainer.parallel.pipeline.adapter import settle
from src.trainer.parallel.precision import Precision, precision_of
from src.trainer.runtime import Runtime


class TransformersBackend(NativeBackend):
    """transformers' model, our step."""

    @classmethod
    def build(cls, config: Config, runtime: Runtime) -> TransformersBackend:
        """Build this rank's shards of transformers' model, with the native backend's initial weights.

        Raises:
            UserError: transformers is missing, or a choice is not available for this model (3).
        """
        precision = precision_of(config, runtime.device)
        ops = resolve(config.kernels, runtime.device, precision.compute, config.determinism, {})
        peer = materialise(config, runtime, ops, precision)
        backend = cls(config, runtime, cast(CausalLM[Any], peer), ops, precision)
        held, mapped = set(backend.parameters), {e.parameter for e in backend._canonical().values()}
        assert held == mapped <= set(backend.specs), held ^ mapped
        initialise(config, backend.local_entries(), backend.specs)
        return backend

    def ops_record(self) -> dict[str, Any]:
        """What `kernels.json` says: our loss, and what transformers was told for the rest."""
        peer, record = cast(Peer, self._model), self.ops.record()
        loss = record["operations"]["linear_cross_entropy"]
        theirs = {"attention": peer.attention, "experts": peer.experts}
        chosen = {name: {"choice": f"transformers {way}", "refused": {}} for name, way in theirs.items()}
        operations = {"linear_cross_entropy": loss, **chosen}
        return record | {"operations": operations, "transformers": peer.version}

    def _settle_compile(self) -> str:
        balance = self._config.balance
        if self._config.backend.compile == "auto" and (balance.kind != "none" or balance.z_loss):
            return "none"
        return super()._settle_compile()

    def _compile(self) -> None:
        """Nobody watches the routers of compiled layers: hooks would break the graphs."""
        if self.compiled == "none":
            return
        peer = cast(Peer, self._model)
        peer.is_watched = self._sees_routing = False
        for part in [peer.model] if self.compiled == "model" else peer.model.layers:
            part.compile(dynamic=False)

    def _specs(self) -> dict[str, ParamSpec]:
        return peer_specs(self._config, self.ops)

    def _canonical(self) -> dict[str, Entry]:
        rename, entries = conversion_of(self._config.model).parameter, canonical(self._config.model)
        return {name: replace(entry, parameter=rename(entry.parameter)) for name, entry in entries.items()}


def peer_specs(config: Config, ops: Ops) -> dict[str, ParamSpec]:
    """The specs of our own model, by the names of transformers'."""
    rename = conversion_of(config.model).parameter
    with torch.device("meta"):
        native = build(config.model, whole(config.model), ops)
    return {rename(name): spec for name, spec in param_specs(native).items()}


def materialise(config: Config, runtime: Runtime, ops: Ops, precision: Precision) -> Peer:
    """transformers' model in memory, sharded; weights are still garbage, buffers are not."""
    wanted = config.backend
    attention = "sdpa" if wanted.attn_implementation == "auto" else wanted.attn_implementation
    experts = choose_experts(wanted.experts_implementation, config.model, precision.compute)
    with torch.device("meta"):
        peer = Peer(config.model, ops, precision.compute, attention, experts)
    sharded, specs = is_sharded(runtime), peer_specs(config, ops)
    if sharded:
        shard(cast(CausalLM[Any], peer), specs, runtime, precision)
    else:
        cast_for_compute(peer, specs, precision)
    peer.to_empty(device=runtime.device)
    peer.settle()
    if sharded:
        settle(peer)
    return peer
