"""CKPT-1, FFN-2, HFN: canonical names are global, one per expert and projection, and cover all once."""

from __future__ import annotations

import pytest
import torch

from src.models.build import Stage, alone, build, param_specs, whole
from src.models.names import canonical, parameters
from tests.models import odd
from tests.models.tools import by_canonical_name, make, operations, view


def test_ckpt_1_names_of_the_odd_member() -> None:
    entries = canonical(odd.deepseek_v2())
    assert entries["model.layers.2.mlp.experts.14.up_proj.weight"].shape == (9, 45)
    assert entries["model.layers.2.mlp.experts.14.down_proj.weight"].shape == (45, 9)
    assert entries["model.layers.0.mlp.gate_proj.weight"].shape == (31, 45)
    assert entries["model.layers.1.mlp.shared_experts.gate_proj.weight"].shape == (18, 45)
    assert entries["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"].shape == (20, 45)
    assert "model.layers.0.mlp.gate.weight" not in entries
    assert len([name for name in entries if ".mlp.experts." in name]) == 2 * 15 * 3


def test_ckpt_1_names_of_the_odd_qwen() -> None:
    entries = canonical(odd.qwen3_moe())
    assert entries["model.layers.2.mlp.experts.6.up_proj.weight"].shape == (14, 44)
    assert entries["model.layers.1.mlp.down_proj.weight"].shape == (44, 31)
    assert entries["model.layers.1.self_attn.q_proj.weight"].shape == (60, 44)
    assert entries["model.layers.1.self_attn.v_proj.weight"].shape == (20, 44)
    assert entries["model.layers.0.self_attn.k_norm.weight"].shape == (10,)
    assert entries["model.layers.0.mlp.gate.weight"].shape == (7, 44)
    assert "model.layers.1.mlp.gate.weight" not in entries
    assert len([name for name in entries if ".mlp.experts." in name]) == 2 * 7 * 3


def test_ckpt_1_names_of_the_odd_gpt_oss() -> None:
    """HFN: one bias per expert and projection, and the release's name of the router."""
    entries = canonical(odd.gpt_oss())
    prefix = "model.layers.2.mlp.experts.4"
    assert entries[f"{prefix}.up_proj.weight"].shape == (22, 36)
    assert entries[f"{prefix}.down_proj.weight"].shape == (36, 22)
    assert entries[f"{prefix}.gate_proj.bias"].shape == entries[f"{prefix}.up_proj.bias"].shape == (22,)
    assert entries[f"{prefix}.down_proj.bias"].shape == (36,)
    assert entries["model.layers.0.mlp.router.weight"].shape == (5, 36)
    assert entries["model.layers.0.mlp.router.bias"].shape == (5,)
    assert entries["model.layers.1.self_attn.sinks"].shape == (6,)
    assert entries["model.layers.1.self_attn.o_proj.bias"].shape == (36,)
    assert not [name for name in entries if ".gate." in name]
    assert len([name for name in entries if ".mlp.experts." in name]) == 3 * 5 * 6


def test_ckpt_1_names_of_the_odd_dense_model() -> None:
    """DENSE-1: Llama's names; every entry is a whole parameter, and there is no router."""
    entries = canonical(odd.dense())
    assert {name: entry.shape for name, entry in entries.items() if ".layers.2." in name} == {
        "model.layers.2.input_layernorm.weight": (42,),
        "model.layers.2.self_attn.q_proj.weight": (60, 42),
        "model.layers.2.self_attn.k_proj.weight": (20, 42),
        "model.layers.2.self_attn.v_proj.weight": (20, 42),
        "model.layers.2.self_attn.o_proj.weight": (42, 60),
        "model.layers.2.post_attention_layernorm.weight": (42,),
        "model.layers.2.mlp.gate_proj.weight": (31, 42),
        "model.layers.2.mlp.up_proj.weight": (31, 42),
        "model.layers.2.mlp.down_proj.weight": (42, 31),
    }
    assert all(entry.expert is None and entry.rows is None for entry in entries.values())


@pytest.mark.parametrize("family", odd.MEMBERS)
def test_entries_cover_every_element_exactly_once(family: str) -> None:
    config = odd.MEMBERS[family]()
    touched = {name: torch.zeros(shape) for name, shape in parameters(config).items()}
    for entry in canonical(config).values():
        part = view(entry, touched)
        assert tuple(part.shape) == entry.shape
        part += 1
    assert all(bool((count == 1).all()) for count in touched.values())


def test_ffn_2_gate_rows_come_first_in_the_stack() -> None:
    config = odd.deepseek_v2()
    model, _ = make(config)
    stack = model.get_parameter("model.layers.1.mlp.experts.gate_up").detach()
    named = by_canonical_name(config, {name: p.detach() for name, p in model.named_parameters()})
    assert torch.equal(named["model.layers.1.mlp.experts.4.gate_proj.weight"], stack[4, :9])
    assert torch.equal(named["model.layers.1.mlp.experts.4.up_proj.weight"], stack[4, 9:])


def test_trap_5_a_stage_keeps_global_numbers_and_its_share_of_experts() -> None:
    config = odd.deepseek_v2()
    stage = alone(Stage(range(1, 3), first=False, last=True), range(5, 10))
    names = {name: tuple(p.shape) for name, p in build(config, stage, operations(config)).named_parameters()}
    everything = parameters(config)
    expected = {name for name in everything if not name.startswith(("model.layers.0.", "model.embed_tokens"))}
    assert set(names) == expected
    assert names["model.layers.2.mlp.experts.gate_up"] == (5, 18, 45)
    dense = build(config, alone(Stage(range(1), first=True, last=False), range(15)), operations(config))
    assert "model.layers.0.mlp.gate_proj.weight" in dict(dense.named_parameters())


@pytest.mark.parametrize("family", odd.MEMBERS)
def test_every_parameter_declares_how_it_starts(family: str) -> None:
    """MOD-5, ENG-2: matrices N(0, 0.02), gains 1, biases 0; the class of experts is declared, not derived.

    Sinks and the router's bias are drawn like matrices, and not decayed.
    """
    config = odd.MEMBERS[family](attention_bias=True)
    specs = param_specs(build(config, whole(config), operations(config)))
    assert set(specs) == set(parameters(config))
    for name, spec in specs.items():
        assert spec.expert == (".mlp.experts." in name)
        drawn = name.endswith((".sinks", "mlp.gate.bias"))
        kind = "zeros" if name.endswith("bias") and not drawn else "ones" if "norm" in name else "normal"
        assert (spec.init, spec.decay, spec.std) == (
            kind,
            kind == "normal" and not drawn,
            0.02 if kind == "normal" else 0.0,
        )
        assert spec.wide == ("mlp.gate." in name)


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is null"):
        parameters(odd.deepseek_v2(vocab_size=None))
    config = odd.deepseek_v2(tie_embeddings=True)
    with pytest.raises(ValueError, match=r"mesh\.pp=1"):
        build(config, alone(Stage(range(2), first=True, last=False), range(15)), operations(config))
