"""The transformers backend against the native one, from one set of weights (MOD-3, ENG-3 to ENG-9)."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from src.config import BalanceConfig, MeshConfig
from src.errors import UserError
from src.trainer.backends.peer import Peer
from src.trainer.backends.registry import backend_class
from src.trainer.parallel.balance import BoundBalance
from src.trainer.parallel.shards import local
from src.trainer.runtime import join, start
from tests.backends.compare import SINGLE, Choice, measure, trace_of
from tests.distributed import laws, world
from tests.distributed.batches import step_batch
from tests.distributed.configs import BATCHES, MESHES, MODELS, Case
from tests.distributed.laws import worst
from tests.distributed.reference import Trace

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
EVEN = {"hidden_size": 48, "expert_size": 12}
"""Widths that grouped_mm takes in fp32."""
CHOICES = {
    "eager": Choice(),
    "sdpa": Choice(attention="sdpa"),
    "grouped_mm": Choice(attention="auto", experts="auto", model=EVEN),
    "no q-LoRA": Choice(model={"q_lora_rank": None, "routing": "greedy"}),
    "tied head": Choice(model={"tie_embeddings": True}),
    "attention bias": Choice(model={"attention_bias": True}),
    "qwen3_moe": Choice(),
    "qwen3_moe, not renormalised, by step": Choice(
        attention="sdpa", model={"norm_topk_prob": False, "decoder_sparse_step": 2}
    ),
    "gpt_oss": Choice(attention="auto"),
    "gpt_oss, grouped_mm, without attention bias": Choice(
        attention="auto",
        experts="auto",
        model={"hidden_size": 48, "expert_size": 24, "attention_bias": False},
    ),
    "dense": Choice(attention="auto", experts="auto"),
}
FAST = ("eager", "sdpa", "grouped_mm", "qwen3_moe", "gpt_oss")
"""The others change what is mapped by name, and take a native trace each."""
Traces = Callable[[str, str], Trace]


@pytest.fixture(scope="module")
def natives() -> Traces:
    """What the native backend does with the model of a choice, computed once."""

    @cache
    def find(name: str, batch: str) -> Trace:
        if name == "sdpa":
            return find("eager", batch)
        return trace_of(case(batch, family(name)), Choice("native", model=CHOICES[name].model))

    return find


def case(batch: str, family: str = "deepseek_v2") -> Case:
    return Case(SINGLE, "1f1b", batch, "fp32", family=family)


def family(name: str) -> str:
    """The model family of a choice."""
    return next((known for known in MODELS if name.startswith(known)), "deepseek_v2")


ROWS = [
    pytest.param(name, batch, marks=[pytest.mark.slow] if name not in FAST else [])
    for name in CHOICES
    for batch in BATCHES
]


@pytest.mark.parametrize(("name", "batch"), ROWS)
def test_mod_3_parity_with_native(name: str, batch: str, natives: Traces) -> None:
    """Initial weights bitwise; loss, norm, balance, counts, gradients, three updates, evaluation, logits."""
    report = measure(case(batch, family(name)), natives(name, batch), CHOICES[name])
    print(name, batch, worst(report))
    assert worst(report)[1] <= 1


@pytest.mark.parametrize(
    ("name", "force"),
    [
        ("qwen3_moe", "uniform"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (("eager", "even"), ("gpt_oss", "dirichlet"))
        ),
    ],
)
def test_mod_3_parity_under_forced_choices(name: str, force: str) -> None:
    """MOD-3, DET-4: the same experts, weighed by the router's own rule; counts and gradients agree."""
    which = replace(case("packed", family(name)), force=force)
    trace = trace_of(which, Choice("native"))
    assert worst(measure(which, trace, CHOICES[name]))[1] <= 1


def forced_step(compiled: str) -> tuple[float, float]:
    """Loss and norm of a step whose experts are forced, in fp32 without an auxiliary loss."""
    which = Case(SINGLE, "1f1b", "dense", "fp32", family="qwen3_moe", force="uniform")
    config = Choice(attention="sdpa").config(which)
    config.balance = BalanceConfig("none", force="uniform")
    config.backend.compile = compiled
    backend: Any = backend_class("transformers").build(config, start(config))
    losses = []
    for step in range(2):
        batch = step_batch("dense", step, 0, 1)
        sums = backend.forward_backward(batch, torch.tensor(batch.target_tokens))
        losses.append(float(sums.loss))
    return sum(losses), float(backend.norm_and_loss(sums.loss)[0])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["model", pytest.param("layers", marks=pytest.mark.soak)])
def test_forced_choices_reach_compiled_layers(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DET-4, CMP-2: hooks that stay are part of the graphs, and new ids a step are not baked in."""
    compile_module = torch.nn.Module.compile

    def quickly(module: Any, **options: Any) -> None:
        compile_module(module, backend="aot_eager", **options)

    plain = forced_step("none")
    monkeypatch.setattr(torch.nn.Module, "compile", quickly)
    assert forced_step(compiled) == pytest.approx(plain, rel=1e-5)
    monkeypatch.setattr(BoundBalance, "forced", lambda *_: None)
    assert forced_step(compiled) != pytest.approx(plain, rel=1e-5)


def own_mean(peer: Peer, hidden: Any, labels: Any, scale: Any, original: Any = Peer.loss) -> Any:
    """The mean over the labels of each micro-batch, as transformers' own loss has it."""
    blocks = laws.step_batch("packed", 0, 0, 1).micro_batches
    mean = 1 / (labels != -100).sum().clamp(min=1) / len(blocks)
    return original(peer, hidden, labels, mean.to(scale.dtype))


def one_document(peer: Peer, ids: Any, batch: Any, *others: Any, original: Any = Peer.forward) -> Any:
    """Packing ignored: positions go on over the whole sample, and everybody sees what came before."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return original(peer, ids, type(batch)(positions, None, None, batch.real_BS, batch.balances), *others)


@pytest.mark.parametrize(("method", "fault"), [("loss", own_mean), ("forward", one_document)])
def test_mutations_are_noticed(
    method: str, fault: Any, natives: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T-5: more than a hundred limits off."""
    monkeypatch.setattr(Peer, method, fault)
    assert worst(measure(case("packed"), natives("eager", "packed"), Choice()))[1] > 100


def positions_seen() -> bool:
    """Whether the rotary tables were made for positions that restart in each document.

    Rotary scores depend on distances alone, so no output tells where counting began.
    """
    backend: Any = build(case("packed"))
    seen: list[torch.Tensor] = []

    def look(module: Any, inputs: Any, named: Any) -> None:
        seen.extend(t for t in (*inputs, *named.values()) if t.dtype == torch.int64)

    backend._model.model.rotary_emb.register_forward_pre_hook(look, with_kwargs=True)
    batch = step_batch("packed", 0, 0, 1)
    backend.forward_backward(batch, torch.tensor(batch.target_tokens))
    wanted = [m.positions_BS for m in batch.micro_batches]
    return len(seen) == len(wanted) and all(map(torch.equal, seen, wanted))


def test_positions_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """PACK-6; the mutation leaves the mask alone."""
    assert positions_seen()
    original = Peer.forward

    def straight(peer: Peer, ids: Any, batch: Any, *others: Any) -> Any:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        fields = (batch.cu_seqlens, batch.documents_BS, batch.real_BS, batch.balances)
        return original(peer, ids, type(batch)(positions, *fields), *others)

    monkeypatch.setattr(Peer, "forward", straight)
    assert not positions_seen()


def build(which: Case, choice: Choice = CHOICES["eager"]) -> Any:
    runtime = join(which.mesh, 0, 0, torch.device("cpu"))
    return backend_class("transformers").build(choice.config(which), runtime)


DP2, REP2 = MESHES[2][:2]
FEW = [Case(DP2, "1f1b", "packed", "fp32"), Case(REP2, "1f1b", "dense", "fp32")]
MORE = [
    Case(DP2, "1f1b", "dense", "fp32"),
    Case(REP2, "1f1b", "packed", "fp32"),
    *(Case(mesh, "1f1b", "packed", "fp32", "micro_batch") for mesh in (DP2, REP2)),
]


def measure_meshes(
    cases: list[Case], traces: dict[str, Trace], choice: Choice
) -> list[tuple[str, str, float]]:
    """Two ranks against one: the worst of each case."""
    return [(str(c), *worst(measure(c, traces[c.batch], choice))) for c in cases]


@pytest.mark.parametrize(
    ("cases", "name"),
    [
        (FEW, "eager"),
        pytest.param(MORE, "eager", marks=[pytest.mark.slow, pytest.mark.soak]),
        pytest.param(FEW, "tied head", marks=pytest.mark.slow),
    ],
    ids=["few", "more", "tied head"],
)
def test_dp_and_rep_equal_one_rank(cases: list[Case], name: str) -> None:
    """Law 1 within T-2, against this backend on one rank."""
    traces = {batch: trace_of(case(batch), CHOICES[name]) for batch in {c.batch for c in cases}}
    found = world.run(2, measure_meshes, cases, traces, CHOICES[name])[0]
    print(*found, sep="\n")
    assert all(distance <= 1 for _, _, distance in found)


@pytest.mark.slow
def test_eng_2_transposed_stacks_are_cut_inside() -> None:
    """ENG-2, ENG-9: 10 experts on 4 shards, cut by their input's width, which is our second dimension."""
    which = Case(MeshConfig("dp4", dp=4), "1f1b", "packed", "fp32", family="gpt_oss")
    traces = {"packed": trace_of(case("packed", "gpt_oss"), CHOICES["gpt_oss"])}
    ((_, what, distance),) = world.run(4, measure_meshes, [which], traces, CHOICES["gpt_oss"])[0]
    assert distance <= 1, what


def mixed_step(precision: str, family: str = "deepseek_v2") -> tuple[float, float, set[str]]:
    """Loss and norm of a step on one rank, and which dtypes were seen where."""
    which = Case(SINGLE, "1f1b", "packed", precision, family=family)
    config = Choice().config(which)
    runtime = start(config)
    backend: Any = backend_class("transformers").build(config, runtime)
    seen: set[str] = set()
    for module in backend._model.modules():
        name = type(module).__name__.replace("FSDP", "").replace("DeepseekV2", "")
        if name in ("TopkRouter", "Experts", "Linear"):
            module.register_forward_pre_hook(witness(name, seen))
    batch = step_batch("packed", 0, 0, 1)
    sums = backend.forward_backward(batch, torch.tensor(batch.target_tokens))
    seen |= {f"gradient {p.grad.dtype}" for p in backend.parameters.values()}
    return float(sums.loss), float(backend.norm_and_loss(sums.loss)[0]), seen


def witness(name: str, seen: set[str]) -> Any:
    """A hook that notes dtypes of parameters, and of the routing weights that experts get."""

    def look(module: Any, inputs: Any) -> None:
        seen.update(f"{name} {local(p).dtype}" for p in module.parameters(recurse=False))
        if name == "Experts":
            seen.add(f"weights {inputs[2].dtype}")

    return look


def test_masters_stay_in_fp32() -> None:
    """MOD-4: under `master` router, routing weights, masters and gradients are fp32, products bf16."""
    loss, norm, _ = mixed_step("fp32")
    ((mixed_loss, mixed_norm, dtypes),) = world.run(1, mixed_step, "master")
    assert dtypes == {
        "TopkRouter torch.float32",
        "weights torch.float32",
        "Experts torch.bfloat16",
        "Linear torch.bfloat16",
        "gradient torch.float32",
    }
    assert mixed_loss == pytest.approx(loss, rel=1e-4)
    assert mixed_norm == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_mod_4_routers_read_what_they_can_multiply(family: str) -> None:
    """MOD-4: those of transformers do not cast their input; under `master` weight and input are fp32."""
    loss, norm, _ = mixed_step("fp32", family)
    for precision in ("master", "split"):
        mixed_loss, mixed_norm, _ = mixed_step(precision, family)
        assert mixed_loss == pytest.approx(loss, rel=1e-4)
        assert mixed_norm == pytest.approx(norm, rel=4e-3)


def test_a_missing_package_is_exit_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """EXIT: with what to type."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = project["optional-dependencies"]["transformers"]
    with pytest.raises(UserError, match=f"pip install '{re.escape(needed)}'") as caught:
        build(case("dense"))
    assert caught.value.code == 3


def test_grouped_mm_by_name_wants_whole_blocks() -> None:
    """REG-2: a choice by name that cannot run is refused; `auto` takes the loop instead."""
    with pytest.raises(UserError, match=r"multiples of 4 .*hidden_size=45, model.expert_size=9") as caught:
        build(case("dense"), Choice(experts="grouped_mm"))
    assert caught.value.code == 3
    record = build(case("dense"), Choice(attention="auto", experts="auto")).ops_record()
    chosen = {name: operation["choice"] for name, operation in record["operations"].items()}
    assert chosen == {
        "attention": "transformers sdpa",
        "experts": "transformers eager",
        "linear_cross_entropy": "eager",
    }
