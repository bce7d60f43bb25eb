"""Where ports of a released family went wrong: what must hold here, one test a trap (TRAP, ATT-1)."""

from __future__ import annotations

from math import log

import pytest
import torch

from src.compose import compose
from src.errors import UserError
from src.models.decoder_layer import MoE
from src.models.deepseek_v2 import LatentAttention
from src.models.gpt_oss import SinkAttention
from src.models.layers import RMSNorm
from src.models.qwen3_moe import GroupedAttention
from src.models.rotary import softmax_factor
from tests.models import odd
from tests.models.tools import batch, gradients, make, operations

LENGTH = 11


def test_att_1_scale_and_latent_eps() -> None:
    """ATT-1: the scale is that of the keys' width, not the values', and latent norms keep 1e-6."""
    config = odd.deepseek_v2()
    attention = LatentAttention(config, operations(config))
    assert attention.scale == pytest.approx(16**-0.5 * softmax_factor(config.yarn), rel=1e-12)
    assert config.v_head_dim != 16
    norms = {name: part.eps for name, part in attention.named_modules() if isinstance(part, RMSNorm)}
    assert norms == {"q_a_layernorm": 1e-6, "kv_a_layernorm": 1e-6}
    assert config.rms_norm_eps == 1e-3


def test_trap_1_no_row_of_the_embedding_is_left_out() -> None:
    """TRAP-1: ids 0 and V-1, which releases use for padding, get a gradient like any other."""
    config = odd.deepseek_v2()
    model, dispatcher = make(config)
    ids_BS = torch.randint(0, 97, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ids_BS[0, :2] = torch.tensor([0, 96])
    model.loss(model(ids_BS, batch(LENGTH), dispatcher), ids_BS.roll(-1), torch.tensor(1.0)).backward()
    rows = gradients(model)["model.embed_tokens.weight"].any(1)
    assert torch.equal(rows.nonzero().flatten(), ids_BS.unique())


def test_trap_3_shared_experts_are_one_wide_mlp() -> None:
    """TRAP-3: two shared experts are one of twice the width; the first layer has the dense width."""
    config = odd.deepseek_v2()
    model, _ = make(config)
    first, second = (model.model.layers[index].mlp for index in ("0", "1"))
    assert isinstance(second, MoE)
    assert second.shared_experts is not None
    assert second.shared_experts.up_proj.weight.shape == (2 * config.expert_size, config.hidden_size)
    assert first.up_proj.weight.shape == (config.intermediate_size, config.hidden_size)


def test_att_4_heads_are_as_wide_as_the_config_says() -> None:
    """ATT-4: queries are wider than the model, one gain serves all heads, and the scale is the head's."""
    config = odd.qwen3_moe()
    attention = GroupedAttention(config, operations(config))
    assert attention.scale == pytest.approx(10**-0.5, rel=1e-12)
    assert attention.q_proj.weight.shape == (60, 44)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (20, 44)
    norms = {name: part for name, part in attention.named_modules() if isinstance(part, RMSNorm)}
    assert {name: (part.eps, len(part.weight)) for name, part in norms.items()} == {
        "q_norm": (1e-3, 10),
        "k_norm": (1e-3, 10),
    }


def test_att_3_yarn_of_gpt_oss_leaves_the_softmax_alone() -> None:
    """ATT-3: its factor stands on cos and sin, the scale is the head's; TRAP-5: windows by global number."""
    config = odd.gpt_oss()
    model, _ = make(config)
    layers = [model.model.layers[str(index)].self_attn for index in range(3)]
    assert all(isinstance(layer, SinkAttention) for layer in layers)
    assert [layer.scale for layer in layers] == pytest.approx([10**-0.5] * 3, rel=1e-12)
    assert [layer.rotary.factor for layer in layers] == pytest.approx([0.1 * log(4) + 1] * 3, rel=1e-12)
    assert [layer.window for layer in layers] == [5, None, 5]


SWITCHES = {
    "mlp_only_layers": "[1]",
    "decoder_sparse_step": "2",
    "norm_topk_prob": "true",
    "clip_qkv": "8",
    "sliding_window": "4",
    "layer_types": "[full_attention]",
    "swiglu_limit": "7.0",
    "moe_layer_freq": "2",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_dense": "1",
    "routed_scaling": "2.0",
}
HONOURED = {
    "deepseek_v2": {"first_dense", "routed_scaling"},
    "qwen3_moe": {"mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"},
    "gpt_oss": {"sliding_window", "swiglu_limit"},
    "dense": set(),
}


@pytest.mark.parametrize("family", HONOURED)
def test_trap_6_and_8_switches_of_other_families_are_refused_by_name(family: str) -> None:
    """TRAP-6, TRAP-8: what a family does not honour is no key of it; all are named at once."""
    others = {key: value for key, value in SWITCHES.items() if key not in HONOURED[family]}
    with pytest.raises(UserError) as refused:
        compose([f"model={family}", *(f"+model.{key}={value}" for key, value in others.items())])
    assert refused.value.code == 2
    assert [key for key in others if f"model.{key}" not in str(refused.value)] == []
