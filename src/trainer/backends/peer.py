"""transformers' causal language model in the place of ours: the same calls, none of our layers.

Imported only when `backend=transformers` is chosen, and transformers itself only by `load_package`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from src.errors import Problem, UserError
from src.kernels.dtypes import widen
from src.kernels.registry import Ops
from src.kernels.route import Routed, route
from src.models import hf
from src.models.convert.table import CONVERSIONS, Conversion
from src.models.counts import moe_layers
from src.models.hf import load_package
from src.models.names import window_of
from src.models.protocol import Balance, Balances, Batch, Dispatcher
from src.models.schema import HfConfig, ModelConfig, MoeConfig
from src.models.stage import Stage, whole


class Peer(nn.Module):
    """transformers' decoder and head on this rank; `named_parameters()` are those of its own model."""

    def __init__(
        self, config: ModelConfig, ops: Ops, dtype: torch.dtype, attention: str, experts: str | None
    ) -> None:
        """`dtype` is that of activations."""
        super().__init__()
        package = load_package()
        chosen = {} if experts is None else {"experts_implementation": experts}
        try:
            causal_lm = package.AutoModelForCausalLM.from_config(
                settings_for(package, config), dtype=torch.float32, attn_implementation=attention, **chosen
            )
        except ValueError as error:
            raise UserError([Problem("backend", f"transformers: {error}", rule="REG-2")], code=3) from error
        causal_lm.eval()  # Dropout and noise in routers would draw numbers that depend on the mesh.
        self.config, self.ops, self.holding = config, ops, whole(config)
        self._dtype = dtype
        self.is_watched = True
        """Whether balance sees the routers, by hooks; those would break a compiled graph."""
        self.attention, self.experts, self.version = attention, experts, str(package.__version__)
        parts = hf.parts(causal_lm)
        self.model: Any = parts[0]
        self.lm_head: Any = parts[1]
        for router in self._routers().values():
            router.register_forward_pre_hook(_widened)
        self._forced: dict[int, Tensor | None] = {}

    def forward(
        self, ids_BS: Tensor, batch: Batch, dispatcher: Dispatcher, stage: Stage | None = None
    ) -> Tensor:
        """Ids int64 [B,S] → normed hidden [B,S,D]; the one stage, experts reached without the dispatcher."""
        for index in self._forced:
            self._forced[index] = None if batch.balances is None else batch.balances.forced(index)
        with self._watched(batch.balances if self.is_watched else None):
            out = self.model(
                input_ids=ids_BS,
                attention_mask=self._mask(batch),
                # Its own positions are the same, and given ones make it look for packed samples.
                position_ids=None if batch.documents_BS is None else batch.positions_BS,
                use_cache=False,
            )
        hidden_BSD: Tensor = out.last_hidden_state
        return hidden_BSD

    def loss(self, hidden_BSD: Tensor, labels_BS: Tensor, scale: Tensor) -> Tensor:
        """scale·Σ cross-entropy over labels ≠ −100, which come shifted; our head, neither shift nor mean."""
        loss: Tensor = self.ops.linear_cross_entropy(
            hidden_BSD.flatten(0, 1), self.lm_head.weight, labels_BS.flatten(), scale
        )
        return loss

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """[B,S,D] → [B,S,V], fp32 at least."""
        return F.linear(widen(hidden_BSD), widen(self.lm_head.weight))

    def force_choices(self) -> None:
        """Take the experts from the batch's balances, not from the routers (`balance.force`)."""
        chosen = conversion_of(self.config).chosen
        assert chosen is not None, self.config.family
        for index, router in self._routers().items():
            self._forced[index] = None
            rule = partial(route, **chosen(self.config), groups=1, groups_kept=1)
            router.register_forward_hook(partial(_replaced, self._forced, index, rule))

    @torch.no_grad()
    def settle(self) -> None:
        """After memory was given: tie again, and compute tables anew by transformers' own rule (TRAP-7)."""
        if self.config.tie_embeddings:  # Memory is given to each module's parameter apart.
            self.lm_head.weight = self.model.embed_tokens.weight
        if isinstance(self.config, HfConfig):  # Its tables come with its weights.
            return
        for parameter in self.parameters():
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        for module in self.model.modules():
            if next(module.buffers(recurse=False), None) is not None:
                self.model._init_weights(module)

    def _routers(self) -> dict[int, nn.Module]:
        """By the global index of their layers; those of a directory's model are not known."""
        layers = moe_layers(self.config)
        if not layers:
            return {}
        router = conversion_of(self.config).router
        assert router is not None, self.config.family
        return {index: self.model.layers[index].get_submodule(router) for index in layers}

    def _mask(self, batch: Batch) -> Tensor | dict[str, Tensor] | None:
        """None where samples are full documents, else who sees whom as this attention reads it.

        A model with windows takes the masks by the kind of layer.
        """
        if batch.documents_BS is None:
            return None
        windows = {window_of(self.config, index) for index in range(self.config.num_layers)}
        if windows == {None}:
            return self._allowed(batch.documents_BS, None)
        return {
            "full_attention" if window is None else "sliding_attention": self._allowed(
                batch.documents_BS, window
            )
            for window in windows
        }

    def _allowed(self, documents_BS: Tensor, window: int | None) -> Tensor:
        """[B,1,S,S]: a query sees its own document up to itself, and of that the last `window` keys."""
        length = documents_BS.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device=documents_BS.device).tril()
        if window is not None:
            allowed = allowed.triu(1 - window)
        allowed = allowed & (documents_BS[:, None, :, None] == documents_BS[:, None, None, :])
        if self.attention == "sdpa":
            return allowed
        zeros = torch.zeros(allowed.shape, dtype=self._dtype, device=allowed.device)
        return zeros.masked_fill_(~allowed, torch.finfo(self._dtype).min)

    @contextmanager
    def _watched(self, balances: Balances | None) -> Iterator[None]:
        """Let the balancer see every router's output for one forward, and put its term into the weights."""
        if balances is None:
            yield
            return
        handles = [
            router.register_forward_hook(partial(_balanced, balances.at(index)))
            for index, router in self._routers().items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _widened(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A router's input in the dtype of its weight, which policies leave wide; not all cast it (MOD-4)."""
    return (inputs[0].to(cast(Tensor, module.weight).dtype), *inputs[1:])


def _replaced(
    forced: Mapping[int, Tensor | None],
    index: int,
    rule: Callable[..., Routed],
    module: nn.Module,
    inputs: Any,
    output: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """A router's output with the forced experts and the weights that its own logits give them."""
    logits_TE, weights_TK, ids_TK = output
    given_TK = forced[index]
    if given_TK is None:
        return output
    routed = rule(logits_TE, ids_TK.shape[1], ids_TK=given_TK)
    return logits_TE, routed.weights_TK.to(weights_TK.dtype), given_TK.to(ids_TK.dtype)


def _balanced(
    balance: Balance, module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """A router's output with the auxiliary term in its weights; scores before group masks (ENG-24)."""
    logits_TE, weights_TK, ids_TK = output
    scores_TE = logits_TE.softmax(-1)
    return logits_TE, balance.apply(logits_TE, scores_TE, ids_TK, weights_TK), ids_TK


def settings_for(package: Any, config: ModelConfig) -> Any:
    """transformers' config of this architecture."""
    if isinstance(config, HfConfig):
        return hf.settings_of(package, config.path)
    return package.AutoConfig.for_model(**conversion_of(config).config(config))


def conversion_of(config: ModelConfig) -> Conversion:
    """The conversion of a family that has one; composition refuses the others."""
    return CONVERSIONS[config.family]


def choose_attention(wanted: str, config: ModelConfig) -> str:
    """The implementation that runs: under `auto` torch's, where the model can take it."""
    if wanted != "auto":
        return wanted
    return "sdpa" if isinstance(config, HfConfig) else conversion_of(config).attention


def choose_experts(wanted: str, config: ModelConfig, dtype: torch.dtype) -> str | None:
    """The implementation that runs: `auto` is grouped_mm where its rows are whole 16-byte blocks, else eager.

    Where we know of no experts, transformers keeps its own default under `auto`, which is None.

    Raises:
        UserError: grouped_mm was asked for by name and the widths do not allow it (3).
    """
    if not isinstance(config, MoeConfig):
        return None if wanted == "auto" else wanted
    widths = {"model.hidden_size": config.hidden_size, "model.expert_size": config.expert_size}
    unit = 16 // dtype.itemsize
    odd = {key: width for key, width in widths.items() if width % unit}
    if wanted == "auto":
        return "eager" if odd else "grouped_mm"
    if wanted == "grouped_mm" and odd:
        told = ", ".join(f"{key}={width}" for key, width in odd.items())
        message = f"grouped_mm takes widths in multiples of {unit} with {dtype}, not {told}"
        raise UserError([Problem("backend.experts_implementation", message, "eager", "REG-2")], code=3)
    return wanted
