"""MOD-3: each odd member, exported by name, equals transformers in logits, loss and every gradient (fp32)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from src.kernels.rope import rope
from src.kernels.route import Routed
from src.models.convert.table import CONVERSIONS
from src.models.layers import Rotary
from src.models.names import Entry, canonical
from src.models.protocol import Carry, Routing
from src.models.rotary import softmax_factor
from src.models.schema import ModelConfig, YarnConfig
from tests.models import odd
from tests.models.tools import batch, by_canonical_name, make, relative, view

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

SAMPLES, LENGTH = 2, 24
LIMITS = {"logits": 1e-5, "loss": 1e-6, "gradient": 2e-5}

CLASSES = {
    "deepseek_v2": transformers.DeepseekV2ForCausalLM,
    "qwen3_moe": transformers.Qwen3MoeForCausalLM,
    "gpt_oss": transformers.GptOssForCausalLM,
    "dense": transformers.LlamaForCausalLM,
}

Change = Callable[[Any], None]


class Mine(NamedTuple):
    """What is compared."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


SWITCHES: dict[tuple[str, str], dict[str, Any]] = {
    ("deepseek_v2", "odd"): {},
    ("deepseek_v2", "no q-LoRA"): {"q_lora_rank": None},
    ("deepseek_v2", "greedy"): {"routing": "greedy", "num_groups": 1, "groups_kept": 1},
    ("deepseek_v2", "tied head"): {"tie_embeddings": True},
    ("deepseek_v2", "attention bias"): {"attention_bias": True},
    ("deepseek_v2", "plain rotary"): {"yarn": YarnConfig()},
    ("deepseek_v2", "no truncation"): {"yarn": replace(odd.deepseek_v2().yarn, truncate=False)},
    ("qwen3_moe", "odd"): {},
    ("qwen3_moe", "not renormalised"): {"norm_topk_prob": False},
    ("qwen3_moe", "every second layer"): {"decoder_sparse_step": 2, "num_layers": 4},
    ("qwen3_moe", "tied head"): {"tie_embeddings": True},
    ("qwen3_moe", "attention bias"): {"attention_bias": True},
    ("qwen3_moe", "a key head each"): {"num_kv_heads": 6},
    ("gpt_oss", "odd"): {},
    ("gpt_oss", "window of the whole sample"): {"sliding_window": LENGTH},
    ("gpt_oss", "no attention bias"): {"attention_bias": False},
    ("gpt_oss", "truncation"): {"yarn": replace(odd.gpt_oss().yarn, truncate=True)},
    ("gpt_oss", "a key head each"): {"num_kv_heads": 6},
    ("gpt_oss", "tied head"): {"tie_embeddings": True},
    ("dense", "odd"): {},
    ("dense", "tied head"): {"tie_embeddings": True},
    ("dense", "attention bias"): {"attention_bias": True},
    ("dense", "a key head each"): {"num_kv_heads": 6},
    ("dense", "one key head"): {"num_kv_heads": 1},
}
"""Family and switch → what is changed in its odd member; with the step, layer 1 stays dense by the list."""
Peers = Callable[[str, str], Mine]


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Peers:
    """transformers' figures for a switch, computed once."""
    return cache(lambda family, switch: theirs(member(family, switch), tmp_path_factory.mktemp("peer")))


def member(family: str, switch: str = "odd") -> ModelConfig:
    return odd.MEMBERS[family](**SWITCHES[family, switch])


def tokens(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Ids and shifted labels, some of which are −100 (TRAP-4)."""
    generator, vocabulary = torch.Generator().manual_seed(3), config.vocab_size or 0
    ids_BS = torch.randint(0, vocabulary, (SAMPLES, LENGTH), generator=generator)
    labels_BS = torch.randint(0, vocabulary, (SAMPLES, LENGTH), generator=generator)
    labels_BS[0, 3:7] = -100
    labels_BS[:, -1] = -100
    return ids_BS, labels_BS


def ours(config: ModelConfig, kernels: str = "eager", change: Change | None = None) -> Mine:
    """Logits, mean loss and gradients by canonical name; `change` spoils the model first."""
    model, dispatcher = make(config, kernels=kernels)
    if change is not None:
        change(model)
    ids_BS, labels_BS = tokens(config)
    hidden_BSD = model(ids_BS, batch(LENGTH), dispatcher)
    loss = model.loss(hidden_BSD, labels_BS, 1 / (labels_BS != -100).sum())
    loss.backward()
    # A gradient that never arrived counts as zero here, so the comparison fails on it.
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return Mine(model.logits(hidden_BSD).detach(), loss.detach(), by_canonical_name(config, grads))


def theirs(config: ModelConfig, path: Path) -> Mine:
    """The same of transformers, which reads the weights from files in our canonical names."""
    peer = load_peer(config, path)
    ids_BS, labels_BS = tokens(config)
    logits_BSV = peer(ids_BS, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())
    loss.backward()
    named = {name: parameter.grad for name, parameter in peer.named_parameters()}
    grads = {name: view(entry, named) for name, entry in peer_entries(config).items()}
    return Mine(logits_BSV.detach(), loss.detach(), grads)


def peer_entries(config: ModelConfig) -> dict[str, Entry]:
    """Canonical name → where transformers' model holds it."""
    return {name: CONVERSIONS[config.family].entry(entry) for name, entry in canonical(config).items()}


def load_peer(config: ModelConfig, path: Path, drawn: torch.dtype = torch.float32) -> Any:
    """transformers' model in fp32 from a checkpoint written by name; nothing missing, nothing unexpected.

    The weights are those that our model has in the dtype `drawn`.
    """
    model, _ = make(config, drawn)
    model.float()
    weights = by_canonical_name(config, {name: p.detach() for name, p in model.named_parameters()})
    if config.family == "gpt_oss":  # It reads and writes its stacks as it holds them.
        weights = stacked(config, weights)
    safetensors.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONVERSIONS[config.family].config(config)))
    peer, info = CLASSES[config.family].from_pretrained(
        path,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return peer


def stacked(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the names and in the layout of transformers' own parameters."""
    with torch.device("meta"):
        peer = CLASSES[config.family](
            transformers.AutoConfig.for_model(**CONVERSIONS[config.family].config(config))
        )
    tensors = {name: torch.full(p.shape, torch.nan) for name, p in peer.named_parameters()}
    for name, entry in peer_entries(config).items():
        view(entry, tensors).copy_(weights[name])
    return tensors


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


@pytest.mark.parametrize(("family", "switch"), SWITCHES)
@pytest.mark.parametrize("kernels", ["eager", "auto"])
def test_mod_3_parity_with_transformers(family: str, switch: str, kernels: str, peers: Peers) -> None:
    found = errors(ours(member(family, switch), kernels), peers(family, switch))
    assert within(found), found


@pytest.mark.parametrize("family", odd.MEMBERS)
def test_att_3_logits_at_positions_0_1_and_31(family: str, tmp_path: Path) -> None:
    config = member(family)
    model, dispatcher = make(config)
    ids_BS = torch.randint(0, 97, (1, 32), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        mine = model.logits(model(ids_BS, batch(32, samples=1), dispatcher))[0]
        peer = load_peer(config, tmp_path)(ids_BS, use_cache=False).logits[0]
    for position in (0, 1, 31):
        assert float((mine[position] - peer[position]).abs().max() / peer.abs().max()) <= LIMITS["logits"]


def test_hfn_2_stacks_of_gpt_oss_by_element(tmp_path: Path) -> None:
    """HFN-2, FFN-2: [E,D,2F] and [E,F,D] there, gate and up in turn; every element where it belongs."""
    config = member("gpt_oss")
    model, _ = make(config)
    ours, peer = (m.model.layers for m in (model, load_peer(config, tmp_path)))
    for index in range(config.num_layers):
        mine, other = ours[str(index)].mlp.experts, peer[index].mlp.experts
        E, D, F = config.num_experts, config.hidden_size, config.expert_size
        for e, f in ((e, f) for e in range(E) for f in range(F)):
            assert torch.equal(mine.gate_up[e, f], other.gate_up_proj[e, :, 2 * f])
            assert torch.equal(mine.gate_up[e, F + f], other.gate_up_proj[e, :, 2 * f + 1])
            assert torch.equal(mine.down[e, :, f], other.down_proj[e, f])
        assert torch.equal(
            mine.gate_up_bias.view(E, 2, F).transpose(1, 2), other.gate_up_proj_bias.view(E, F, 2)
        )
        assert torch.equal(mine.down_bias, other.down_proj_bias)
        assert other.down_proj.shape == (E, F, D)
        router = peer[index].mlp.router
        assert torch.equal(ours[str(index)].mlp.gate.weight, router.weight)
        assert torch.equal(ours[str(index)].mlp.gate.bias, router.bias)


def moe_layers(model: Any) -> list[Any]:
    return [layer for layer in model.model.layers.values() if layer.is_moe]


def layers(model: Any) -> list[Any]:
    return list(model.model.layers.values())


def attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in layers(model)]


def router_grad(model: Any) -> None:
    """Routing weights detached between stages 1 and 5."""
    for layer in moe_layers(model):
        aggregate = layer.aggregate
        layer.aggregate = lambda rows, routing, carry, home, aggregate=aggregate: aggregate(
            rows, Routing(routing.ids_TK, routing.weights_TK.detach()), carry, home
        )


def residual_grad(model: Any) -> None:
    """No gradient through one layer's residual."""
    layer = layers(model)[-1]
    aggregate = layer.aggregate
    layer.aggregate = lambda rows, routing, carry, *home: aggregate(
        rows, routing, Carry(carry.residual_TD.detach()), *home
    )


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
    routed(model, groups_kept=3)


def unscaled(model: Any) -> None:
    routed(model, scale=1.0)


def not_renormalised(model: Any) -> None:
    routed(model, renormalise=False)


def routed(model: Any, **changes: Any) -> None:
    """Another routing rule in every layer."""
    for layer in moe_layers(model):
        layer.mlp.gate.rule = replace(layer.mlp.gate.rule, **changes)


def renorm_grad(model: Any) -> None:
    """No gradient through the sum that the routing weights are divided by."""
    for layer in moe_layers(model):
        gate = layer.mlp.gate
        gate.rule = replace(gate.rule, renormalise=False)
        route = gate.route
        gate.route = lambda logits, ids, route=route: divided(route(logits, ids))


def divided(routed: Routed) -> Routed:
    weights_TK = routed.weights_TK
    return routed._replace(weights_TK=weights_TK / weights_TK.sum(-1, keepdim=True).detach())


def swapped_halves(model: Any) -> None:
    """Gate and up rows of the experts exchanged."""
    with torch.no_grad():
        for layer in moe_layers(model):
            stack = layer.mlp.experts.gate_up
            stack.copy_(stack.roll(stack.shape[1] // 2, 1))


def gate_for_up(model: Any) -> None:
    """The activation on the other product of the dense FFN."""
    for layer in layers(model):
        layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def unlike_norms(model: Any) -> None:
    """The gains of a layer's two norms exchanged."""
    layer = layers(model)[1]
    layer.input_layernorm, layer.post_attention_layernorm = (
        layer.post_attention_layernorm,
        layer.input_layernorm,
    )


def neighbours_rotated(model: Any) -> None:
    """The rotary pairs of DeepSeek's weights."""

    def turn(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        return rope(x, cos, sin, interleaved=not interleaved)

    replaced(model, "rotary_heads", lambda heads: partial(heads.func, turn))


def heads_in_turn(model: Any) -> None:
    """Query head h reads key head h mod G, instead of neighbours sharing one."""

    def spread(attention: Any) -> Any:
        def mutant(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
            times = q.shape[2] // k.shape[2]
            return attention(q, k.repeat(1, 1, times, 1), v.repeat(1, 1, times, 1), *rest)

        return mutant

    replaced(model, "attention", spread)


def replaced(model: Any, operation: str, wrap: Callable[[Any], Any]) -> None:
    """Another implementation of an operation in every attention."""
    for attention in attentions(model):
        mutant = wrap(getattr(attention.ops, operation))
        attention.ops = replace(attention.ops, **{operation: mutant})


def normed_after_rotation(model: Any) -> None:
    """ATT-4: the norm commutes with the rotation, its gain does not."""
    for attention in attentions(model):
        attention.heads = partial(late_norms, attention)


def late_norms(attention: Any, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    heads = (-1, attention.config.head_dim)
    q, k, v = (p(x_BSD).unflatten(-1, heads) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    q, k = (attention.ops.rope(x, cos, sin, interleaved=False) for x in (q, k))
    return attention.q_norm(q), attention.k_norm(k), v


def scale_of_hidden_size(model: Any) -> None:
    """Heads taken for D/H wide."""
    for attention in attentions(model):
        attention.scale = (attention.config.hidden_size / attention.config.num_heads) ** -0.5


def sinks_as(change: Callable[[Any, Tensor], Tensor | None]) -> Change:
    """The attention with other sinks, from its module and the right ones."""

    def spoil(model: Any) -> None:
        for attention in attentions(model):
            attend = attention.ops.attention
            attention.ops = replace(
                attention.ops,
                attention=lambda *rest, sinks_H, attend=attend, attention=attention, **window: attend(
                    *rest, **window, sinks_H=change(attention, sinks_H)
                ),
            )

    return spoil


def window_wider(by: int) -> Change:
    """Another window in the layers that have one."""

    def spoil(model: Any) -> None:
        for attention in attentions(model):
            attention.window = None if attention.window is None else attention.window + by

    return spoil


def other_parity(model: Any) -> None:
    """Windows on the odd layers."""
    for attention in attentions(model):
        attention.window = attention.config.sliding_window if attention.window is None else None


def truncated(model: Any) -> None:
    """The bounds of YaRN's ramp rounded to whole dimensions."""
    for attention in attentions(model):
        config = attention.config
        attention.rotary = Rotary(config.head_dim, config.rope_theta, replace(config.yarn, truncate=True))


def plain_cos(model: Any) -> None:
    """YaRN without its factor on cos and sin."""
    for attention in attentions(model):
        attention.rotary.factor = 1.0


def expert_numbers(**numbers: float) -> Change:
    """Other constants in the experts' activation."""

    def spoil(model: Any) -> None:
        for layer in moe_layers(model):
            vars(layer.mlp.experts).update(numbers)

    return spoil


def of_all_experts(model: Any) -> None:
    """Weights from a softmax over all experts."""
    routed(model, scoring="softmax")


def without_expert_bias_grad(model: Any) -> None:
    for layer in moe_layers(model):
        experts = layer.mlp.experts
        add = experts.ops.expert_bias
        experts.ops = replace(experts.ops, expert_bias=lambda x, b, offs, add=add: add(x, b.detach(), offs))


MUTATIONS: dict[tuple[str, str], Change] = {
    ("deepseek_v2", "router_grad"): router_grad,
    ("deepseek_v2", "residual_grad"): residual_grad,
    ("deepseek_v2", "shared_grad"): shared_grad,
    ("deepseek_v2", "yarn factor absent"): yarn_factor(0),
    ("deepseek_v2", "yarn factor once"): yarn_factor(1),
    ("deepseek_v2", "factor on cos"): factor_on_cos,
    ("deepseek_v2", "latent eps"): latent_eps,
    ("deepseek_v2", "one group more"): one_group_more,
    ("deepseek_v2", "unscaled"): unscaled,
    ("deepseek_v2", "swapped halves"): swapped_halves,
    ("qwen3_moe", "router_grad"): router_grad,
    ("qwen3_moe", "residual_grad"): residual_grad,
    ("qwen3_moe", "renorm_grad"): renorm_grad,
    ("qwen3_moe", "not renormalised"): not_renormalised,
    ("qwen3_moe", "swapped halves"): swapped_halves,
    ("qwen3_moe", "neighbours rotated"): neighbours_rotated,
    ("qwen3_moe", "heads in turn"): heads_in_turn,
    ("qwen3_moe", "normed after rotation"): normed_after_rotation,
    ("qwen3_moe", "scale of the hidden size"): scale_of_hidden_size,
    ("gpt_oss", "router_grad"): router_grad,
    ("gpt_oss", "weights of all experts"): of_all_experts,
    ("gpt_oss", "sinks detached"): sinks_as(lambda attention, sinks: sinks.detach()),
    ("gpt_oss", "sinks absent"): sinks_as(lambda attention, sinks: None),
    ("gpt_oss", "sinks scaled"): sinks_as(lambda attention, sinks: sinks * attention.scale),
    ("gpt_oss", "window one more"): window_wider(1),
    ("gpt_oss", "window one less"): window_wider(-1),
    ("gpt_oss", "windows on odd layers"): other_parity,
    ("gpt_oss", "truncated ramp"): truncated,
    ("gpt_oss", "plain cos"): plain_cos,
    ("gpt_oss", "limit of the release"): expert_numbers(limit=7.0),
    ("gpt_oss", "alpha 1"): expert_numbers(alpha=1.0),
    ("gpt_oss", "expert bias detached"): without_expert_bias_grad,
    ("gpt_oss", "swapped halves"): swapped_halves,
    ("gpt_oss", "neighbours rotated"): neighbours_rotated,
    ("dense", "residual_grad"): residual_grad,
    ("dense", "gate for up"): gate_for_up,
    ("dense", "norms exchanged"): unlike_norms,
    ("dense", "neighbours rotated"): neighbours_rotated,
    ("dense", "heads in turn"): heads_in_turn,
    ("dense", "scale of the hidden size"): scale_of_hidden_size,
}


@pytest.mark.parametrize(("family", "name"), MUTATIONS)
def test_mod_3_mutations_fail(family: str, name: str, peers: Peers) -> None:
    found = errors(ours(member(family), change=MUTATIONS[family, name]), peers(family, "odd"))
    assert not within(found), found
