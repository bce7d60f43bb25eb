"""The native backend: our models under our own parallelism, one class behind the loop.

Order of construction: model on the meta device → FSDP2 units → memory → initial weights by name. What a rank
holds is its stage's layers, its block of experts and its shards of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from src.config import Config
from src.kernels.dtypes import accumulate
from src.kernels.registry import Ops, resolve
from src.models.build import CausalLM, ParamSpec, Stage, needs, param_specs
from src.models.counts import moe_layers
from src.models.names import Entry, canonical
from src.trainer.backends.base import Sums
from src.trainer.data.batch import MicroBatch, StepBatch
from src.trainer.data.synthetic import is_dense
from src.trainer.parallel import layout
from src.trainer.parallel.assemble import make_dispatcher, materialise
from src.trainer.parallel.balance import Balancer
from src.trainer.parallel.bias import RouterBias
from src.trainer.parallel.context import Ring
from src.trainer.parallel.data import is_sharded, reshard, unshard
from src.trainer.parallel.force import Force
from src.trainer.parallel.init import initialise
from src.trainer.parallel.inputs import in_any_number, model_batch, own_part, padded, plain_batch, to_device
from src.trainer.parallel.masters import Masters
from src.trainer.parallel.pipeline.adapter import fold_gradients, reduce_gradients
from src.trainer.parallel.pipeline.deferral import Deferral
from src.trainer.parallel.pipeline.executor import make_executor
from src.trainer.parallel.pipeline.program import Plain, Program, Work
from src.trainer.parallel.pipeline.staged import Staged
from src.trainer.parallel.precision import Precision, precision_of
from src.trainer.parallel.quantised import QuantisedWeights, check_fp8
from src.trainer.parallel.shards import LocalEntry, local, local_entries
from src.trainer.ranges import Ranges
from src.trainer.runtime import Runtime

FORMS = 32
"""Forms in which the layers of a model may be compiled; beyond them torch refuses."""
ALL_DATA = ("rep", "dp", "cp", "ep")
"""Axes over which loss sums and load counts add up, stages apart."""


class NativeBackend:
    """Model, parallelism and step of one rank."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        model: CausalLM[Any],
        ops: Ops,
        precision: Precision,
        deferral: Deferral | None = None,
    ) -> None:
        """`deferral` is the one that the operations of `model` ask, if they ask one."""
        self._config, self._runtime, self._model = config, runtime, model
        self._deferral = deferral or Deferral()
        self.ops: Ops = ops
        """The chosen implementation of each operation."""
        self._precision = precision
        self._sharded = is_sharded(runtime)
        self._masters = None if self._sharded else Masters(model, precision, ops.accumulate)
        has_fp8 = config.precision.fp8 != "none"
        self._fp8 = QuantisedWeights(model, config.precision, ops.quantise_weight) if has_fp8 else None
        self.specs: dict[str, ParamSpec] = self._specs()
        """Module name → how the parameter starts and is treated."""
        held = self._masters.parameters if self._masters else dict(model.named_parameters())
        self.parameters: dict[str, nn.Parameter] = held
        """Module name → this rank's parameter: a plain tensor, or a DTensor where sharded."""
        self.remainders: dict[str, Tensor] = self._make_remainders()
        """Module name → int16 lower half of what is the upper half of a master."""
        self.moe_layers: list[int] = moe_layers(config.model)
        """Global indices of the layers with experts; the rows of `Sums.counts`."""
        experts, self._sums = config.model.num_experts, accumulate(precision.parameters)
        group = runtime.group("cp")
        self._ring = None if group is None else Ring(group)
        forces = config.balance.force != "none"
        force = Force(config, self.moe_layers, runtime.device) if forces else None
        self._balancer = Balancer(
            config.balance, self.moe_layers, experts, runtime.device, self._sums, self._ring, force
        )
        self._bias: RouterBias | None = None
        if config.balance.kind == "bias":
            like, rate = self._balancer.tally.aux, config.balance.bias_rate
            self._bias = RouterBias(model.model.layers, self.moe_layers, experts, rate, like)
        self._dispatcher = make_dispatcher(experts, runtime, ops)
        self._micro_batches = layout.micro_batches(config)
        self._stages = dict(
            zip(layout.stages_of(config, runtime.place.pp), model.holding.stages, strict=True)
        )
        self._executor = make_executor(model, config, self._micro_batches, runtime, precision.compute)
        self._counts: Tensor | None = None
        self._ranges: Ranges | None = None
        self._sees_routing = True
        self.compiled: str = self._settle_compile()
        """`none`, `layers` or `model`: what is one graph."""
        self._staged = layout.is_staged(config)
        self._compile()

    @classmethod
    def build(cls, config: Config, runtime: Runtime) -> NativeBackend:
        """Build and initialise this rank's part of the model.

        Raises:
            UserError: a kernel that the config names is not available here (3).
        """
        precision = precision_of(config, runtime.device)
        ops = cls.choose_ops(config, runtime.device)
        deferral = Deferral()
        asking = deferral.ops(ops) if layout.defers(config) else ops
        model = materialise(config, runtime, asking, precision)
        backend = cls(config, runtime, model, ops, precision, deferral)
        initialise(config, backend.local_entries(), backend.specs)
        return backend

    @classmethod
    def choose_ops(cls, config: Config, device: torch.device) -> Ops:
        """The implementation of each operation for the model of a config.

        Raises:
            UserError: a kernel that the config names is not available on the device (3).
        """
        wanted = needs(config.model)
        if config.mesh.cp > 1:
            wanted["attention"] = wanted["attention"].plus("context_parallel")
        if is_dense(config):
            wanted = {name: need.without("packed") for name, need in wanted.items()}
        if config.precision.fp8 == "dense_experts":
            wanted["local_experts"] = wanted["local_experts"].plus("fp8_experts")
            wanted["grouped_mm_fp8"] = wanted["grouped_mm"]
        compute = precision_of(config, device).compute
        ops = resolve(config.kernels, device, compute, config.determinism, wanted)
        check_fp8(config, ops, compute)
        return ops

    def forward_backward(self, batch: StepBatch, n_tokens: Tensor) -> Sums:
        """All micro-batches of a step; leaves the reduced gradients in `.grad` of `parameters`.

        Args:
            batch: this rank's micro-batches, as many as `layout.micro_batches` says.
            n_tokens: int64 device scalar, labels of the global batch (ENG-4).
        """
        tally = self._balancer.start()
        work = Work([self._place(m) for m in batch.micro_batches], n_tokens, self._balancer, self._ring)
        each, last = (_nothing, self._reduce)
        if self._config.pipeline.reduce == "micro_batch":
            each, last = last, each
        self._refresh()

        def after() -> None:
            self._collect()
            each()

        self._executor.run(self._program(work), after, last)
        if self._fp8 is not None:
            self._fp8.touch()  # The update comes next.
        self._counts = tally.counts_ME
        return Sums(
            work.loss, tally.aux.squeeze(), tally.z.squeeze(), tally.counts_ME if self._sees_routing else None
        )

    def _program(self, work: Work) -> Program:
        """How the layers of this rank's stages are run."""
        parts = (self._model, tuple(self._stages), self._dispatcher, work)
        if not self._staged:
            return Plain(*parts, self._ranges)
        recompute, poison = self._config.recompute.name, self._config.debug.poison
        return Staged(*parts, self._deferral, recompute, self._gather, poison, self._ranges)

    def annotate(self, ranges: Ranges | None) -> None:
        """Name layers and stages in a trace from now on, or no more."""
        self._ranges = ranges

    def norm_and_loss(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Global L2 norm of all gradients, each element once, and the global loss (ENG-5, ENG-6).

        Device scalars, equal on all ranks by one reduction; reads nothing back. The ranks of rep hold the
        same shards, so only the first puts its own in. The norm is not finite if the loss is not (ENG-27).

        Args:
            loss: this rank's part of the step, from `Sums`.
        """
        dtype = torch.float64 if self._runtime.device.type == "cpu" else self._sums
        gradients = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
        total = self.ops.grad_norm(gradients, dtype) * (1 if self._runtime.place.rep == 0 else 0)
        square, whole = self._runtime.sum_world(torch.stack([total, loss.to(dtype)])).unbind()
        return torch.where(torch.isfinite(whole), square.sqrt(), torch.nan), whole

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a device scalar."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)

    def finish_step(self, skip: Tensor) -> None:
        """Take over what a step leaves for the next one, unless `skip` is above 0 on the device."""
        state = self._balancer if self._config.balance.kind == "global_batch_lagged" else self._bias
        if state is not None:
            assert self._counts is not None
            state.finish(self._runtime.reduce(self._counts.clone(), ALL_DATA), skip)

    def largest_bias(self) -> Tensor | None:
        """Largest |bias| of this rank's routers, a device scalar; None without `balance=bias`."""
        return None if self._bias is None else self._bias.largest()

    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch) -> Tensor:
        """Σ cross entropy of a micro-batch, a scalar; 0 where the last stage is not. Counts nothing."""
        moved = self._place(micro_batch)
        one = torch.ones((), dtype=self._sums, device=self._runtime.device)
        self._refresh()

        def forward(stage: int, received: Tensor | None) -> Tensor:
            hidden = self._hidden(moved, received, self._stages[stage])
            return self._model.loss(hidden, moved.labels_BS, one) if self._stages[stage].last else hidden

        total = self._executor.infer(forward, self._example(moved.ids_BS))
        self._forget()
        return torch.zeros_like(one) if total is None else total

    @torch.no_grad()
    def logits(self, ids_BS: Tensor) -> Tensor:
        """Logits [B,S,V] of full documents, on every rank; every rank calls it with the same ids."""
        moved = self._place(plain_batch(padded(ids_BS, self._ring)))
        self._refresh()

        def forward(stage: int, received: Tensor | None) -> Tensor:
            hidden = self._hidden(moved, received, self._stages[stage])
            if not self._stages[stage].last:
                return hidden
            whole = hidden if self._ring is None else self._ring.join(hidden)
            return self._model.logits(whole[:, : ids_BS.shape[1]])

        found = self._executor.infer(forward, self._example(moved.ids_BS))
        self._forget()
        if self._config.mesh.pp == 1:
            assert found is not None
            return found
        return self._share(found, (*ids_BS.shape, self._vocabulary))

    def ops_record(self) -> dict[str, Any]:
        """What `kernels.json` says: the implementation of each operation, and why not the others."""
        return self.ops.record()

    @property
    def copies(self) -> dict[str, Tensor]:
        """Module name → tensor in the compute dtype that follows the parameter of that name."""
        return {} if self._masters is None else self._masters.copies

    def local_entries(self, tensors: Mapping[str, Tensor] | None = None) -> dict[str, LocalEntry]:
        """Canonical name → what this rank holds of it, in its parameters or in tensors shaped like them."""
        held = self.parameters if tensors is None else tensors
        if tensors is None and self._masters is not None:
            self._masters.touch()  # Who asks may write to them, as a load does.
        if tensors is None and self._fp8 is not None:
            self._fp8.touch()
        lows = self.remainders if tensors is None else {}
        return local_entries(self._canonical(), self.parameters, held, self._model.holding.experts, lows)

    def extra_state(self) -> dict[str, Tensor]:
        """Small tensors to save beside the parameters, by mesh-free name; equal on all ranks of a stage."""
        if self._bias is not None:
            return self._bias.held
        if self._config.balance.kind != "global_batch_lagged":
            return {}
        mine = set(self._model.holding.layers)
        rows = zip(self.moe_layers, self._balancer.lagged_ME, strict=True)
        return {f"balance.load.{layer}": row for layer, row in rows if layer in mine}

    def load_extra_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy back what `extra_state` gave, on any mesh."""
        for name, tensor in self.extra_state().items():
            tensor.copy_(tensors[name])

    def _specs(self) -> dict[str, ParamSpec]:
        return param_specs(self._model)

    def _make_remainders(self) -> dict[str, Tensor]:
        if not self._precision.is_split:
            return {}
        highs = {name: local(p) for name, p in self.parameters.items() if p.dtype == self._precision.compute}
        return {name: torch.zeros_like(high, dtype=torch.int16) for name, high in highs.items()}

    def _canonical(self) -> dict[str, Entry]:
        return canonical(self._config.model)

    @property
    def _vocabulary(self) -> int:
        assert self._config.model.vocab_size is not None
        return self._config.model.vocab_size

    def _place(self, micro_batch: MicroBatch) -> MicroBatch:
        """What this rank has of a micro-batch of its data coordinate, on the device."""
        placed = own_part(to_device(micro_batch, self._runtime.device), self._ring)
        return placed if self.compiled == "none" else in_any_number(placed)

    def _hidden(self, moved: MicroBatch, received: Tensor | None, stage: Stage) -> Tensor:
        """Without gradients and not compiled: other shapes and modes would be compiled once more."""
        into, batch = moved.ids_BS if received is None else received, model_batch(moved, None, self._ring)
        with nullcontext() if self.compiled == "none" else torch.compiler.set_stance("force_eager"):
            hidden: Tensor = self._model(into, batch, self._dispatcher, stage)
        return hidden

    def _settle_compile(self) -> str:
        """`backend.compile` with `auto` settled for this device and mesh."""
        wanted = self._config.backend.compile
        if wanted != "auto":
            return wanted
        return "layers" if self._runtime.device.type == "cuda" and not self._sharded else "none"

    def _compile(self) -> None:
        """Compile each layer by itself; all share one graph, whatever the counts (CMP-2, CMP-3)."""
        if self.compiled == "none":
            return
        # Dense or not, with pads or not, first forward or second: more forms than torch's eight.
        torch._dynamo.config.recompile_limit = max(FORMS, torch._dynamo.config.recompile_limit)
        for layer in self._model.model.layers.values():
            if self._staged:
                for stage in ("attend", "experts", "aggregate"):
                    compiled = torch.compile(getattr(layer, stage), fullgraph=True, dynamic=False)
                    setattr(layer, stage, compiled)
            else:
                layer.compile(fullgraph=True, dynamic=False)
        if self._model.holding.last:
            self._model.model.norm.compile(fullgraph=True, dynamic=False)

    def _example(self, ids_BS: Tensor) -> Tensor:
        shape = (*ids_BS.shape, self._config.model.hidden_size)
        return torch.empty(shape, dtype=self._precision.compute, device=self._runtime.device)

    def _share(self, found: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """The last stage's tensor, on every rank."""
        if found is None:
            found = torch.empty(shape, dtype=accumulate(self._precision.compute), device=self._runtime.device)
        tensor = found.contiguous()
        dist.broadcast(tensor, group=self._runtime.group("pp"), group_src=layout.last_rank(self._config))
        return tensor

    def _forget(self) -> None:
        if self._sharded:
            reshard(self._model)

    def _gather(self) -> None:
        if self._sharded:
            unshard(self._model)

    def _refresh(self) -> None:
        if self._masters is not None:
            self._masters.refresh()
        if self._fp8 is not None:
            self._fp8.refresh(self._gather)

    def _collect(self) -> None:
        if self._masters is not None:
            self._masters.collect(only=self._micro_batches == self._config.mesh.pp == 1)
        elif self._sharded and self._staged and self._precision.is_mixed:
            fold_gradients(self._model)

    def _reduce(self) -> None:
        """Reduce the gradients; a rank that shares nothing has them whole, zeros of idle experts included."""
        if self._sharded:
            reduce_gradients(self._model)


def _nothing() -> None:
    """No reduction at this point of the step."""
