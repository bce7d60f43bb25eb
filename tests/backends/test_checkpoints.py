"""Checkpoints and resume across backends: one set of names, whoever wrote it (CKPT-1, CKPT-2, RUN-9)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from src.config import BackendConfig, Config, EvaluationConfig, MeshConfig, OptimizerConfig
from src.digest import flatten
from src.models.convert.deepseek_v2 import hf_config
from src.resume import differences
from src.trainer.backends.registry import backend_class
from src.trainer.checkpoint.find import find
from src.trainer.checkpoint.load import load
from src.trainer.checkpoint.save import save
from src.trainer.checkpoint.weights import load_weights
from src.trainer.optimizer import Optimizer
from src.trainer.runtime import Runtime, join
from tests.checkpoint.fake import MODEL, alone, config, fill, wrong
from tests.distributed import world
from tests.models.odd import deepseek_v2, gpt_oss
from tests.trainer.small import lines, run_here, small_config

transformers: Any = pytest.importorskip("transformers")

PEER = BackendConfig("transformers", attn_implementation="eager", experts_implementation="eager")


class Member:
    """A backend with its moments on one rank."""

    def __init__(self, settings: Config, runtime: Runtime) -> None:
        self.config, self.runtime = settings, runtime
        self.backend: Any = backend_class(settings.backend.name).build(settings, runtime)
        self.moments = Optimizer(settings.optimizer, self.backend.parameters, self.backend.specs).moments

    def save(self, run: Path, step: int, factor: float = 1) -> None:
        """Save tensors whose values are those of their names times `factor`."""
        fill(self.backend, self.moments, factor)
        self.save_as_is(run, step)

    def save_as_is(self, run: Path, step: int) -> None:
        save(self.config, run, 1, step, self.backend, self.moments, {"step": step}, self.runtime, "key")

    def load(self, run: Path) -> None:
        fill(self.backend, self.moments, float("nan"))
        found = find(self.config, run, self.runtime, self.backend)
        assert found is not None
        load(found, self.config, self.backend, self.moments, self.runtime, "key")


def there_and_back(settings: Config, runtime: Runtime, run: Path) -> list[str]:
    """Native saves, transformers loads and saves, native loads: names that are not bitwise the same."""
    native = Member(settings, runtime)
    peer = Member(replace(settings, backend=PEER), runtime)
    native.save(run, 1)
    peer.load(run)
    bad = wrong(peer.backend, peer.moments)
    peer.save_as_is(run, 2)
    native.load(run)
    return bad + wrong(native.backend, native.moments)


def settings_of(mesh: MeshConfig, family: str = "deepseek_v2") -> Config:
    """An odd number of experts: on two shards one stack is cut on its second dimension, the other unevenly.

    Those of gpt_oss are both cut inside, and transformers holds them transposed.
    """
    model = gpt_oss() if family == "gpt_oss" else replace(MODEL, num_experts=15, hidden_size=9)
    return config(model, mesh=mesh, balance__kind="global_batch_lagged")


def test_native_to_transformers_and_back_bitwise(tmp_path: Path) -> None:
    """CKPT-2: parameters, moments and lagged load, experts apart though both stack them."""
    assert there_and_back(settings_of(MeshConfig()), alone(), tmp_path) == []
    peer = Member(replace(settings_of(MeshConfig()), backend=PEER), alone())
    initial = load_weights(
        replace(peer.config, init_from=str(tmp_path / "checkpoints/step-00000002")),
        peer.backend,
        peer.runtime,
    )
    assert initial == []
    assert wrong(peer.backend, {}) == [f"extra.{name}" for name in peer.backend.extra_state()]


def test_transposed_stacks_there_and_back_bitwise(tmp_path: Path) -> None:
    """CKPT-2, HFN: entries that are strided views of transformers' stacks, biases among them."""
    assert there_and_back(settings_of(MeshConfig(), "gpt_oss"), alone(), tmp_path) == []


def sharded(run: str, family: str) -> list[str]:
    """The same on two shards."""
    mesh, rank = MeshConfig("dp2", dp=2), dist.get_rank()
    return there_and_back(settings_of(mesh, family), join(mesh, rank, rank, torch.device("cpu")), Path(run))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss"])
def test_the_same_on_shards(tmp_path: Path, family: str) -> None:
    assert world.run(2, sharded, str(tmp_path), family) == [[], []]


@pytest.mark.parametrize("backend", [BackendConfig(), PEER], ids=["native", "transformers"])
def test_weights_that_transformers_wrote(tmp_path: Path, backend: BackendConfig) -> None:
    """CKPT-13, HFN: the file of `save_pretrained` starts a run of either backend, bitwise."""
    settings = small_config(tmp_path, backend=backend)
    peer = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**hf_config(deepseek_v2())), dtype=torch.float32
    )
    peer.save_pretrained(tmp_path)
    member = Member(replace(settings, init_from=str(tmp_path / "model.safetensors")), alone())
    assert load_weights(member.config, member.backend, member.runtime) == []
    stacks = {".experts.gate_up_proj": ".experts.gate_up", ".experts.down_proj": ".experts.down"}
    for name, tensor in peer.named_parameters():
        for theirs, ours in stacks.items() if backend.name == "native" else ():
            name = name.replace(theirs, ours)
        assert torch.equal(member.backend.parameters[name], tensor), name


def test_a_swapped_stack_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: gate and up rows exchanged in the map of names."""
    peer = Member(replace(settings_of(MeshConfig()), backend=PEER), alone())
    peer.save(tmp_path, 1)
    original = peer.backend._canonical()
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj", "down_proj": "down_proj"}

    def other(name: str) -> str:
        prefix, _, last = name.removesuffix(".weight").rpartition(".")
        return f"{prefix}.{swap[last]}.weight" if ".mlp.experts." in name else name

    swapped = {name: original[other(name)] for name in original}
    with monkeypatch.context() as patch:
        patch.setattr(peer.backend, "_canonical", lambda: swapped)
        peer.load(tmp_path)
    assert any(".mlp.experts." in name for name in wrong(peer.backend, peer.moments))


def test_a_run_goes_on_under_the_other_backend(tmp_path: Path) -> None:
    """SEED, RUN-9: three steps of one and three of the other follow the curve of one alone."""
    native = small_config(
        tmp_path,
        optimizer=OptimizerConfig(kind="adamw", lr=0.02),
        evaluation=EvaluationConfig(name="heldout", every=3, samples=3),
    )
    native.lr_schedule.horizon = 6
    run_here(native, tmp_path / "native")
    run_here(replace(native, max_steps=3), tmp_path / "both")
    other = replace(native, backend=PEER)
    allowed, refused = differences(flatten(native), flatten(other))
    assert refused == []
    assert "backend.name: 'native' -> 'transformers'" in map(str, allowed)
    run_here(other, tmp_path / "both", attempt=2)
    one, two = lines(tmp_path / "native"), lines(tmp_path / "both")
    for key in ("loss", "grad_norm", "aux_loss"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=1e-4), key
    for key in ("tokens", "samples_total", "lr", "epoch"):
        assert [line[key] for line in two] == [line[key] for line in one], key
    evaluations = [[r["loss"] for r in lines(tmp_path / n, "evaluation.jsonl")] for n in ("native", "both")]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)
