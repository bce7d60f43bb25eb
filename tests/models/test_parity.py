"""MOD-3: the odd member, exported by name, equals transformers in logits, loss and every gradient (fp32)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.models import deepseek_v2
from src.models.convert.deepseek_v2 import hf_config
from src.models.protocol import Carry
from src.models.schema import DeepseekV2Config, YarnConfig
from tests.models import odd
from tests.models.tools import batch, by_canonical_name, gradients, make, relative

SAMPLES, LENGTH = 2, 24
LIMITS = {"logits": 1e-5, "loss": 1e-6, "gradient": 2e-5}

SWITCHES: dict[str, dict[str, Any]] = {
    "odd": {},
    "no q-LoRA": {"q_lora_rank": None},
    "greedy": {"routing": "greedy", "num_groups": 1, "groups_kept": 1},
    "tied head": {"tie_embeddings": True},
    "attention bias": {"attention_bias": True},
    "plain rotary": {"yarn": YarnConfig()},
    "no truncation": {"yarn": replace(odd.deepseek_v2().yarn, truncate=False)},
}


def tokens() -> tuple[Tensor, Tensor]:
    """Ids and shifted labels, some of which are −100 (TRAP-4)."""
    generator = torch.Generator().manual_seed(3)
    ids_BS = torch.randint(0, 97, (SAMPLES, LENGTH), generator=generator)
    labels_BS = torch.randint(0, 97, (SAMPLES, LENGTH), generator=generator)
    labels_BS[0, 3:7] = -100
    labels_BS[:, -1] = -100
    return ids_BS, labels_BS


def ours(config: DeepseekV2Config, kernels: str = "eager") -> tuple[Any, Tensor, Tensor, dict[str, Tensor]]:
    """Model, logits, mean loss and gradients by canonical name."""
    model, dispatcher = make(config, kernels=kernels)
    ids_BS, labels_BS = tokens()
    hidden_BSD = model(ids_BS, batch(LENGTH), dispatcher)
    loss = model.loss(hidden_BSD, labels_BS, 1 / (labels_BS != -100).sum())
    loss.backward()
    return model, model.logits(hidden_BSD).detach(), loss.detach(), by_canonical_name(config, gradients(model))


def theirs(config: DeepseekV2Config, model: Any, path: Path) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same of transformers, which reads the weights from files in our canonical names."""
    safetensors = pytest.importorskip("safetensors.torch")
    transformers = pytest.importorskip("transformers")
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
    return logits_BSV.detach(), loss.detach(), by_canonical_name(config, grads)


def errors(mine: tuple[Any, Tensor, Tensor, dict[str, Tensor]], peer: tuple[Tensor, Tensor, dict[str, Tensor]]) -> dict[str, float]:
    """The three figures that MOD-3 limits; the gradients' is the worst one."""
    _, logits, loss, grads = mine
    assert grads.keys() == peer[2].keys()
    return {
        "logits": float((logits - peer[0]).abs().max() / peer[0].abs().max()),
        "loss": abs(float(loss / peer[1]) - 1),
        "gradient": max(relative(grads[name], reference) for name, reference in peer[2].items() if untouched(reference, grads[name])),
    }


def untouched(reference: Tensor, grad: Tensor) -> bool:
    """Compare unless both are exactly zero: an expert that no token visits."""
    return bool(reference.any()) or bool(grad.any())


@pytest.mark.parametrize("switch", SWITCHES)
def test_parity_with_transformers(switch: str, tmp_path: Path) -> None:
    config = odd.deepseek_v2(**SWITCHES[switch])
    mine = ours(config)
    found = errors(mine, theirs(config, mine[0], tmp_path))
    print(switch, found)
    assert all(found[key] <= limit for key, limit in LIMITS.items()), found
