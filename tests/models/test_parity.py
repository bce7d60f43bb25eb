"""MOD-3: the odd member, exported by name, equals transformers in logits, loss and every gradient (fp32)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from src.models.convert.deepseek_v2 import hf_config
from src.models.protocol import Carry, Routing
from src.models.rotary import softmax_factor
from src.models.schema import DeepseekV2Config, YarnConfig
from tests.models import odd
from tests.models.tools import batch, by_canonical_name, make, relative

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

SAMPLES, LENGTH = 2, 24
LIMITS = {"logits": 1e-5, "loss": 1e-6, "gradient": 2e-5}

Change = Callable[[Any], None]


class Mine(NamedTuple):
    """What is compared."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


SWITCHES: dict[str, dict[str, Any]] = {
    "odd": {},
    "no q-LoRA": {"q_lora_rank": None},
    "greedy": {"routing": "greedy", "num_groups": 1, "groups_kept": 1},
    "tied head": {"tie_embeddings": True},
    "attention bias": {"attention_bias": True},
    "plain rotary": {"yarn": YarnConfig()},
    "no truncation": {"yarn": replace(odd.deepseek_v2().yarn, truncate=False)},
}


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mine]:
    """transformers' figures for a switch, computed once."""
    return cache(lambda switch: theirs(odd.deepseek_v2(**SWITCHES[switch]), tmp_path_factory.mktemp("peer")))


def tokens() -> tuple[Tensor, Tensor]:
    """Ids and shifted labels, some of which are −100 (TRAP-4)."""
    generator = torch.Generator().manual_seed(3)
    ids_BS = torch.randint(0, 97, (SAMPLES, LENGTH), generator=generator)
    labels_BS = torch.randint(0, 97, (SAMPLES, LENGTH), generator=generator)
    labels_BS[0, 3:7] = -100
    labels_BS[:, -1] = -100
    return ids_BS, labels_BS


def ours(config: DeepseekV2Config, kernels: str = "eager", change: Change | None = None) -> Mine:
    """Logits, mean loss and gradients by canonical name; `change` spoils the model first."""
    model, dispatcher = make(config, kernels=kernels)
    if change is not None:
        change(model)
    ids_BS, labels_BS = tokens()
    hidden_BSD = model(ids_BS, batch(LENGTH), dispatcher)
    loss = model.loss(hidden_BSD, labels_BS, 1 / (labels_BS != -100).sum())
    loss.backward()
    # A gradient that never arrived counts as zero here, so the comparison fails on it.
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return Mine(model.logits(hidden_BSD).detach(), loss.detach(), by_canonical_name(config, grads))


def theirs(config: DeepseekV2Config, path: Path) -> Mine:
    """The same of transformers, which reads the weights from files in our canonical names."""
    peer = load_peer(config, path)
    ids_BS, labels_BS = tokens()
    logits_BSV = peer(ids_BS, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())
    loss.backward()
    stacks = {".experts.gate_up_proj": ".experts.gate_up", ".experts.down_proj": ".experts.down"}
    grads: dict[str, Tensor] = {}
    for name, parameter in peer.named_parameters():
        for old, new in stacks.items():
            name = name.replace(old, new)
        grads[name] = parameter.grad
    return Mine(logits_BSV.detach(), loss.detach(), by_canonical_name(config, grads))


def load_peer(config: DeepseekV2Config, path: Path) -> Any:
    """transformers' model from a checkpoint written by name; nothing missing, nothing unexpected."""
    model, _ = make(config)
    weights = by_canonical_name(config, {name: p.detach() for name, p in model.named_parameters()})
    safetensors.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(hf_config(config)))
    peer, info = transformers.DeepseekV2ForCausalLM.from_pretrained(
        path,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return peer


def errors(mine: Mine, peer: Mine) -> dict[str, float]:
    """The three figures that MOD-3 limits; the gradients' is the worst one.

    A gradient is zero only in an expert that no token visits, and then it is exactly that in both.
    """
    assert mine.grads.keys() == peer.grads.keys()
    idle = {name for name, reference in peer.grads.items() if not reference.any()}
    assert all(".mlp.experts." in name for name in idle)
    compared = [name for name, grad in mine.grads.items() if name not in idle or grad.any()]
    worst = max(relative(mine.grads[name], peer.grads[name]) for name in compared)
    return {
        "logits": float((mine.logits - peer.logits).abs().max() / peer.logits.abs().max()),
        "loss": abs(float(mine.loss / peer.loss) - 1),
        "gradient": worst,
    }


def within(found: dict[str, float]) -> bool:
    return all(found[key] <= limit for key, limit in LIMITS.items())


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("kernels", ["eager", "auto"])
def test_mod_3_parity_with_transformers(switch: str, kernels: str, peers: Callable[[str], Mine]) -> None:
    found = errors(ours(odd.deepseek_v2(**SWITCHES[switch]), kernels), peers(switch))
    assert within(found), found


def test_att_3_logits_at_positions_0_1_and_31(tmp_path: Path) -> None:
    config = odd.deepseek_v2()
    model, dispatcher = make(config)
    ids_BS = torch.randint(0, 97, (1, 32), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        mine = model.logits(model(ids_BS, batch(32, samples=1), dispatcher))[0]
        peer = load_peer(config, tmp_path)(ids_BS, use_cache=False).logits[0]
    for position in (0, 1, 31):
        assert float((mine[position] - peer[position]).abs().max() / peer.abs().max()) <= LIMITS["logits"]


def moe_layers(model: Any) -> list[Any]:
    return [layer for layer in model.model.layers.values() if layer.is_moe]


def attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers.values()]


def router_grad(model: Any) -> None:
    """Routing weights detached between stages 1 and 5."""
    for layer in moe_layers(model):
        aggregate = layer.aggregate
        layer.aggregate = lambda rows, routing, carry, aggregate=aggregate: aggregate(
            rows, Routing(routing.ids_TK, routing.weights_TK.detach()), carry
        )


def residual_grad(model: Any) -> None:
    """No gradient through one layer's residual."""
    layer = moe_layers(model)[-1]
    aggregate = layer.aggregate
    layer.aggregate = lambda rows, routing, carry: aggregate(rows, routing, Carry(carry.residual_TD.detach()))


def shared_grad(model: Any) -> None:
    """No gradient through the shared expert to what it read."""
    shared = moe_layers(model)[0].mlp.shared_experts
    forward = shared.forward
    shared.forward = lambda x: forward(x.detach())


def yarn_factor(power: float) -> Change:
    """The softmax factor to another power than the square."""

    def change(model: Any) -> None:
        for attention in attentions(model):
            m = softmax_factor(attention.config.yarn) ** 0.5
            attention.scale *= m ** (power - 2)

    return change


def factor_on_cos(model: Any) -> None:
    for attention in attentions(model):
        attention.rotary.factor = 1.01


def latent_eps(model: Any) -> None:
    """The smallest error found: the latent norms take the config's eps."""
    for attention in attentions(model):
        attention.kv_a_layernorm.eps = attention.config.rms_norm_eps


def one_group_more(model: Any) -> None:
    for layer in moe_layers(model):
        layer.mlp.gate.config = replace(layer.mlp.gate.config, groups_kept=3)


def unscaled(model: Any) -> None:
    for layer in moe_layers(model):
        layer.mlp.gate.config = replace(layer.mlp.gate.config, routed_scaling=1.0)


def swapped_halves(model: Any) -> None:
    """Gate and up rows of the experts exchanged."""
    with torch.no_grad():
        for layer in moe_layers(model):
            layer.mlp.experts.gate_up.copy_(layer.mlp.experts.gate_up.roll(9, 1))


MUTATIONS: dict[str, Change] = {
    "router_grad": router_grad,
    "residual_grad": residual_grad,
    "shared_grad": shared_grad,
    "yarn factor absent": yarn_factor(0),
    "yarn factor once": yarn_factor(1),
    "factor on cos": factor_on_cos,
    "latent eps": latent_eps,
    "one group more": one_group_more,
    "unscaled": unscaled,
    "swapped halves": swapped_halves,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mod_3_mutations_fail(name: str, peers: Callable[[str], Mine]) -> None:
    found = errors(ours(odd.deepseek_v2(), change=MUTATIONS[name]), peers("odd"))
    assert not within(found), found
