"""model=hf: a model of transformers from a directory, under our step, on rep and dp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.compose import compose
from src.config import Config
from src.errors import UserError
from src.models import hf
from src.trainer.backends.registry import backend_class
from src.trainer.data.batch import StepBatch
from src.trainer.data.corpus import open_data
from src.trainer.data.keys import data_key
from src.trainer.data.loader import Loader
from src.trainer.parallel.shards import local
from src.trainer.runtime import Runtime, join, start
from tests.distributed import world

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2},
}
KINDS = {
    "dense": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=44, head_dim=10),
    "tied": lambda: transformers.Qwen3Config(
        **SIZES, intermediate_size=44, head_dim=10, tie_word_embeddings=True
    ),
    "experts": lambda: transformers.OlmoeConfig(
        **SIZES, intermediate_size=20, num_experts=7, num_experts_per_tok=3, pad_token_id=0
    ),
}


def directory(tmp_path: Path, kind: str, weights: bool = False) -> Path:
    """A directory as transformers saves it."""
    path = tmp_path / kind
    if weights:
        torch.manual_seed(5)
        transformers.AutoModelForCausalLM.from_config(KINDS[kind]()).save_pretrained(path)
    else:
        KINDS[kind]().save_pretrained(path)
    return path


def config_of(path: Path, *words: str) -> Config:
    """Four packed samples a step in fp32."""
    fixed = ["backend=transformers", "model=hf", f"model.path={path}", "balance=none", "data=synthetic"]
    fixed += ["data.rule=zipf", "data.ids=97", "data.documents=41", "precision=fp32", "evaluation=none"]
    fixed += ["sequence_length=20", "global_batch_size=4", "micro_batch_size=1", "platform=cpu"]
    return compose([*fixed, *words]).config


def batch_of(config: Config, runtime: Runtime) -> StepBatch:
    data = open_data(config, data_key(config))
    return Loader(config, data, runtime.data_coordinate, config.mesh.data_ranks, 0).read(0)


def step_of(path: Path, mesh: str) -> dict[str, Tensor]:
    """Loss, norm and every whole gradient of a first step."""
    config = config_of(path, f"mesh={mesh}")
    rank = torch.distributed.get_rank() if config.mesh.world > 1 else 0
    runtime = join(config.mesh, rank, rank, torch.device("cpu"))
    backend = backend_class("transformers").build(config, runtime)
    batch = batch_of(config, runtime)
    n_tokens = runtime.sum_world(torch.tensor(batch.target_tokens))
    sums = backend.forward_backward(batch, n_tokens)
    found = {"loss": runtime.sum_world(sums.loss.clone()), "norm": backend.norm_and_loss(sums.loss)[0]}
    for name, parameter in backend.parameters.items():
        gradient: Any = parameter.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else local(gradient)
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def measure(paths: list[Path], meshes: list[str]) -> list[dict[str, Tensor]]:
    return [step_of(path, mesh) for path in paths for mesh in meshes]


@pytest.mark.slow
def test_law_1_meshes_of_a_directory_equal_one_rank(tmp_path: Path) -> None:
    """Odd widths, tied heads, stacks of seven experts; with the directory's weights and without."""
    paths = [directory(tmp_path, kind, weights=kind == "tied") for kind in KINDS]
    found = world.run(2, measure, paths, ["dp2", "rep2"])[0]
    for index, path in enumerate(paths):
        alone = step_of(path, "single")
        assert len(alone) > 20
        for shared in found[2 * index : 2 * index + 2]:
            assert shared.keys() == alone.keys()
            for name, want in alone.items():
                assert torch.allclose(shared[name], want, rtol=2e-4, atol=2e-6), (path.name, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    """Its own model, asked document by document: mean loss over all targets and every gradient."""
    path = directory(tmp_path, kind, weights=True)
    config = config_of(path)
    runtime = start(config)
    backend = backend_class("transformers").build(config, runtime)
    batch = batch_of(config, runtime)
    sums = backend.forward_backward(batch, torch.tensor(batch.target_tokens))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    total = torch.zeros(())
    for m in batch.micro_batches:
        documents = torch.zeros_like(m.ids_BS) if m.documents_BS is None else m.documents_BS
        for document in documents.unique():
            at = documents == document
            logits = theirs(input_ids=m.ids_BS[at][None], use_cache=False).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, m.labels_BS[at], reduction="sum")
    (total / batch.target_tokens).backward()
    assert float(sums.loss.detach()) == pytest.approx(float(total.detach()) / batch.target_tokens, rel=1e-5)
    for name, parameter in hf.named(theirs).items():
        gradient = backend.parameters[name].grad
        assert gradient is not None
        assert parameter.grad.any()
        assert torch.allclose(gradient, parameter.grad, rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["backend=native", "backend.compile=auto"], "backend=transformers"),
        (["balance=sequence"], "balance=none"),
        (["balance.force=even"], "balance.force=none"),
        (["model.path=nowhere"], "config.json cannot be read"),
        (["mesh=ep2"], "experts are not divided"),
        (["model.hidden_size=128"], "128, but"),
    ],
)
def test_what_it_cannot_be_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        config_of(directory(tmp_path, "experts"), *words)
    assert said in str(caught.value)
    assert caught.value.code == 2


def test_windows_are_refused_with_packed_samples(tmp_path: Path) -> None:
    """A 4-D mask takes the place of the window's own, so a token would see all of its document."""
    transformers.MistralConfig(**SIZES, intermediate_size=44, sliding_window=8).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="see a window"):
        config_of(tmp_path)
    assert config_of(tmp_path, "data.rule=uniform").model.num_layers == 3


SHORT = {
    **{"vocab_size": 97, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 6},
    **{"num_key_value_heads": 2, "intermediate_size": 44},
}


def test_what_a_description_leaves_out_is_the_default_of_its_class(tmp_path: Path) -> None:
    """Mistral's window and Gemma's tied head need not stand in the file to be there."""
    for kind in ("mistral", "gemma"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind, **SHORT}))
    with pytest.raises(UserError, match="see a window"):
        config_of(tmp_path / "mistral")
    (tmp_path / "mistral" / "config.json").write_text("{no json")
    with pytest.raises(UserError, match="transformers cannot read") as caught:
        config_of(tmp_path / "mistral")
    assert caught.value.code == 2
    config = config_of(tmp_path / "gemma")
    assert config.model.tie_embeddings
    backend = backend_class("transformers").build(config, start(config))
    assert "lm_head.weight" not in backend.parameters


def test_a_head_that_does_more_than_a_product_is_refused(tmp_path: Path) -> None:
    """Gemma 2 caps its logits, which our loss would not."""
    sizes = SIZES | {"head_dim": 10, "query_pre_attn_scalar": 10, "layer_types": ["full_attention"] * 3}
    cap = transformers.Gemma2Config(**sizes, intermediate_size=44, final_logit_softcapping=0.05)
    cap.save_pretrained(tmp_path)
    config = config_of(tmp_path, "backend.attn_implementation=eager")
    with pytest.raises(UserError, match="does more to its logits") as caught:
        backend_class("transformers").build(config, start(config))
    assert caught.value.code == 3


def test_run_8_other_content_is_another_run(tmp_path: Path) -> None:
    path = directory(tmp_path, "dense")
    before = config_of(path).model
    told = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(told | {"rope_theta": 5.0, "rms_norm_eps": 1e-3}))
    after = config_of(path).model
    assert (before.hidden_size, before.vocab_size, before.num_layers) == (36, 97, 3)
    assert getattr(before, "content") != getattr(after, "content")  # noqa: B009
