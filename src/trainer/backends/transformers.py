"""The transformers backend: Hugging Face's model under the native step, on the axes rep and dp.

Only the model differs: micro-batches, loss and head, balance, reductions, norm and checkpoints are those of
the native backend, so that a comparison of the two compares models and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from src.config import Config
from src.errors import Problem, UserError
from src.kernels.registry import Ops, resolve
from src.models import hf
from src.models.build import CausalLM, ParamSpec, build, param_specs, whole
from src.models.hf import load_package
from src.models.names import Entry, canonical
from src.models.schema import HfConfig
from src.seeds import generator
from src.trainer.backends.native import NativeBackend
from src.trainer.backends.peer import Peer, choose_attention, choose_experts, conversion_of
from src.trainer.parallel.data import is_sharded, shard
from src.trainer.parallel.init import initialise
from src.trainer.parallel.masters import cast_for_compute
from src.trainer.parallel.pipeline.adapter import settle
from src.trainer.parallel.precision import Precision, precision_of
from src.trainer.parallel.shards import LocalEntry
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
        ops = cls.choose_ops(config, runtime.device)
        peer = materialise(config, runtime, ops, precision)
        backend = cls(config, runtime, cast(CausalLM[Any], peer), ops, precision)
        held, mapped = set(backend.parameters), {e.parameter for e in backend._canonical().values()}
        assert held == mapped <= set(backend.specs), held ^ mapped
        if isinstance(config.model, HfConfig):
            take_over(config, config.model, backend.local_entries(), peer)
        else:
            initialise(config, backend.local_entries(), backend.specs)
        return backend

    @classmethod
    def choose_ops(cls, config: Config, device: torch.device) -> Ops:
        """As of our own models; what transformers computes asks nothing of ours."""
        compute = precision_of(config, device).compute
        return resolve(config.kernels, device, compute, config.determinism, {})

    def ops_record(self) -> dict[str, Any]:
        """What `kernels.json` says: our loss, and what transformers was told for the rest."""
        peer, record = cast(Peer, self._model), self.ops.record()
        loss = record["operations"]["linear_cross_entropy"]
        theirs = {"attention": peer.attention, "experts": peer.experts}
        chosen = {
            name: {"choice": f"transformers {way or 'default'}", "refused": {}}
            for name, way in theirs.items()
        }
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
        if isinstance(self._config.model, HfConfig):
            return canonical(self._config.model)
        place = conversion_of(self._config.model).entry
        return {name: place(entry) for name, entry in canonical(self._config.model).items()}


def peer_specs(config: Config, ops: Ops) -> dict[str, ParamSpec]:
    """The specs of our own model, by the names of transformers'; of a directory's model by their shapes."""
    if isinstance(config.model, HfConfig):
        kinds = {True: ParamSpec("normal"), False: ParamSpec("ones", decay=False)}
        return {name: kinds[len(shape) > 1] for name, shape in hf.shapes(config.model).items()}
    place = conversion_of(config.model).entry
    with torch.device("meta"):
        native = param_specs(build(config.model, whole(config.model), ops))
    return {place(entry).parameter: native[entry.parameter] for entry in canonical(config.model).values()}


def materialise(config: Config, runtime: Runtime, ops: Ops, precision: Precision) -> Peer:
    """transformers' model in memory, sharded; weights are still garbage, buffers are not."""
    wanted = config.backend
    attention = choose_attention(wanted.attn_implementation, config.model)
    experts = choose_experts(wanted.experts_implementation, config.model, precision.compute)
    with torch.device("meta"):
        peer = Peer(config.model, ops, precision.compute, attention, experts)
    if config.balance.force != "none":
        peer.force_choices()
    sharded, specs = is_sharded(runtime), peer_specs(config, ops)
    if precision.is_split or not sharded:
        cast_for_compute(peer, specs, precision)
    if sharded:
        shard(cast(CausalLM[Any], peer), specs, runtime, precision)
    peer.to_empty(device=runtime.device)
    peer.settle()
    if sharded:
        settle(peer)
    return peer


@torch.no_grad()
def take_over(config: Config, model: HfConfig, entries: Mapping[str, LocalEntry], peer: Peer) -> None:
    """Weights of the directory, or where it has none those that transformers draws, the same on every mesh.

    Each rank makes the whole model on the CPU and keeps its shards.

    Raises:
        UserError: the head is not a plain product with the hidden states (3).
    """
    source = whole_model(config, model)
    tensors = hf.named(source)
    for name, entry in entries.items():
        for offsets, view in entry.parts:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))
            view.copy_(tensors[name][box])
    decoder, head = hf.parts(source)
    buffers = dict(decoder.named_buffers())
    for name, buffer in peer.model.named_buffers():
        buffer.copy_(buffers[name])
    check_head(source, decoder, head)


def whole_model(config: Config, model: HfConfig) -> Any:
    """transformers' model in fp32 on the CPU, with weights."""
    package = load_package()
    auto = package.AutoModelForCausalLM
    if hf.has_weights(model.path):
        found = auto.from_pretrained(model.path, dtype=torch.float32, local_files_only=True)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(generator(config, "init", "hf").integers(2**31)))
            found = auto.from_config(hf.settings_of(package, model.path), dtype=torch.float32)
    return found.eval()


def check_head(source: Any, decoder: Any, head: Any) -> None:
    """Our loss multiplies hidden states by the head's weight; a bias, a scale or a cap would be lost."""
    ids = torch.arange(8)[None] % head.weight.shape[0]
    ours = decoder(input_ids=ids, use_cache=False).last_hidden_state @ head.weight.T
    theirs = source(input_ids=ids, use_cache=False).logits
    if not torch.allclose(ours, theirs.to(ours.dtype), rtol=1e-4, atol=1e-4):
        message = f"{type(source).__name__} does more to its logits than one product (a bias, a scale, a cap)"
        raise UserError([Problem("model.path", message, "a model with a plain head", "backend")], code=3)
