"""The plan: parameters and bytes per rank, batch arithmetic, what fits (CFG-17, PLAN, PROJ-1)."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from src.compose import compose
from src.config import Config, PipelineConfig
from src.errors import UserError
from src.launchers import rank_plans
from src.launchers.activations import layer_of
from src.launchers.layer_form import form_of
from src.launchers.memory import rank_memory
from src.launchers.plan import check_memory, dry_run_text, make_plan
from src.machine import Machine, find_machine
from src.mesh_spec import parse
from src.models.names import canonical, is_expert_stack, is_router, parameters
from tests.models.odd import gpt_oss, qwen3_moe

CPU = Machine("cpu", 1, 8 * 2**30, "a test")
MESHES = ["single", "pp2", "ep2", "dp3", "pp2ep2", "dp2ep2", "pp4dp2ep8", "dp5ep4", "rep2dp2"]


def on(base: Config, spec: str) -> Config:
    """The config on another mesh."""
    sizes = {} if spec == "single" else parse(spec)
    base.mesh = replace(base.mesh, spec=spec, **{"pp": 1, "rep": 1, "dp": 1, "ep": 1, **sizes})
    return base


@pytest.mark.parametrize("spec", MESHES)
def test_shards_add_up_to_the_model(base: Config, spec: str) -> None:
    """PROJ-1: over the ranks of one replica every parameter is held exactly once, on odd shards too."""
    config = on(base, spec)
    held = sum(rank_memory(config, rank, "cpu").parameters for rank in range(config.mesh.world))
    assert held == config.mesh.rep * sum(prod(entry.shape) for entry in canonical(config.model).values())


def test_shared_key_heads_are_counted_once(base: Config) -> None:
    """PROJ-1: keys and values of an eighth of the heads; over the ranks every parameter is there once."""
    config = on(base, "pp2ep2")
    config.model = qwen3_moe(num_layers=4, num_experts=14, num_heads=8, num_kv_heads=1)
    held = sum(rank_memory(config, rank, "cpu").parameters for rank in range(4))
    assert held == sum(prod(entry.shape) for entry in canonical(config.model).values())
    few = rank_memory(config, 0, "cpu").activations
    config.model.num_kv_heads = 8
    tokens, layers, in_flight = config.micro_batch_size * config.sequence_length, 2, 2
    more = in_flight * tokens * layers * 4 * 7 * config.model.head_dim * 4  # The key thrice: it is normed.
    assert rank_memory(config, 0, "cpu").activations == few + more


@pytest.mark.parametrize("spec", ["dp3", "ep2", "pp2ep5", "dp2ep5", "dp11"])
def test_biases_of_experts_shard_by_their_first_dimension(base: Config, spec: str) -> None:
    """ENG-2, PROJ-1: 10 experts; stacks are cut inside where their number does not divide, biases are not."""
    config = on(base, spec)
    config.model = gpt_oss(num_layers=4, num_experts=10)
    held = sum(rank_memory(config, rank, "cpu").parameters for rank in range(config.mesh.world))
    assert held == sum(prod(entry.shape) for entry in canonical(config.model).values())


def test_shards_follow_the_rule_for_uneven_stacks(base: Config) -> None:
    """ENG-2: 6 experts on 4 shards: by the second dimension if that divides, else by ceiling."""
    base.model.num_experts, base.mesh.dp = 6, 4
    stacks = [shape for name, shape in parameters(base.model).items() if ".mlp.experts." in name]
    assert {shape[0] for shape in stacks} == {6}
    assert {shape[1] % 4 for shape in stacks} == {0}
    even = [rank_memory(base, rank, "cpu").parameters for rank in range(4)]
    rest = [
        sum(
            -(-s[0] // 4) * prod(s[1:]) for n, s in parameters(base.model).items() if ".mlp.experts." not in n
        )
    ]
    assert even[0] == rest[0] + sum(prod(shape) for shape in stacks) // 4
    base.model.hidden_size, base.model.expert_size = 45, 9  # type: ignore[attr-defined]
    uneven = [rank_memory(base, rank, "cpu").parameters for rank in range(4)]
    assert uneven[3] < uneven[2] == uneven[1] <= uneven[0]


def test_bytes_by_precision_and_optimizer(base: Config) -> None:
    """PROJ-1: fp32 with AdamW takes 4 + 4 + 8 bytes a parameter; a lone rank in fp32 gathers nothing."""
    memory = rank_memory(base, 0, "cpu")
    n = memory.parameters
    assert (memory.weights, memory.gradients, memory.optimizer, memory.unsharded) == (4 * n, 4 * n, 8 * n, 0)
    assert memory.total == 16 * n + memory.activations - memory.pending
    base.optimizer.kind = "sgd"
    assert rank_memory(base, 0, "cpu").optimizer == 0
    base.optimizer.momentum = 0.9
    assert rank_memory(base, 0, "cpu").optimizer == 4 * n
    base.precision.name = "fp64"
    assert rank_memory(base, 0, "cpu").weights == 8 * n
    base.precision.name = "auto"
    routers = sum(prod(shape) for name, shape in parameters(base.model).items() if is_router(name))
    assert rank_memory(base, 0, "cuda").weights == 6 * n - 2 * routers


@pytest.mark.parametrize("fp8", ["dense", "dense_experts"])
def test_weights_in_fp8_are_whole_on_each_rank(base: Config, fp8: str) -> None:
    """PROJ-1, FP8-5: both forms of a projection, 2 bytes a number, and of an expert's rank's own experts."""
    plain = on(base, "dp2ep2")
    with_fp8 = replace(plain, precision=replace(plain.precision, fp8=fp8))
    names = (
        "q_proj",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj",
        "kv_b_proj",
        "o_proj",
        "shared_experts",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    sizes = {name: prod(shape) for name, shape in parameters(plain.model).items()}
    dense = sum(
        size
        for name, size in sizes.items()
        if any(part in name for part in (*names, "mlp.down_proj")) and "norm" not in name
    )
    experts = sum(size for name, size in sizes.items() if is_expert_stack(name)) // 2
    more = rank_memory(with_fp8, 0, "cpu").weights - rank_memory(plain, 0, "cpu").weights
    assert more == 2 * (dense + (experts if fp8 == "dense_experts" else 0))


def test_what_is_shared_out_is_gathered(base: Config) -> None:
    """ENG-16: on ep2 all that a rank uses stands there once more with its gradient, 4 + 4 bytes each.

    FSDP2 copies the experts too, although nobody else has a shard of them.
    """
    config = on(base, "ep2")
    stacks = sum(prod(s) for name, s in parameters(config.model).items() if is_expert_stack(name))
    used = sum(map(prod, parameters(config.model).values())) - stacks // 2
    assert rank_memory(config, 0, "cpu").unsharded == 8 * used


def test_pipeline_ranks_keep_what_their_schedule_needs(base: Config) -> None:
    """ENG-13: 1f1b keeps min(N, P - r) micro-batches, gpipe all of them."""
    config = on(base, "pp4")
    config.model.num_layers = 4
    config.model.first_dense = 0  # type: ignore[attr-defined]
    kept = [rank_memory(config, rank, "cpu").activations for rank in range(4)]
    assert kept[0] - kept[1] == kept[1] - kept[2] > 0
    config.pipeline.schedule = "gpipe"
    more = [rank_memory(config, rank, "cpu").activations for rank in range(3)]
    assert more[0] == more[1] == more[2] == kept[0] + 4 * (kept[0] - kept[1])


IN_STAGES = [("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("zbv", 2), ("dualpipev", 2)]


@pytest.mark.parametrize(("schedule", "per_rank"), IN_STAGES)
@pytest.mark.parametrize("tied", [False, True])
def test_several_stages_a_rank(base: Config, schedule: str, per_rank: int, tied: bool) -> None:
    """ENG-14, PROJ-1: the parameters of all stages, the ends of a V on the first rank, and what it keeps."""
    config = on(base, "pp2ep2")
    config.model.tie_embeddings = tied
    config.pipeline = PipelineConfig(schedule, per_rank)
    memory = [rank_memory(config, rank, "cpu") for rank in range(4)]
    assert sum(m.parameters for m in memory) == sum(prod(e.shape) for e in canonical(config.model).values())
    layers = {rank: make_plan(config, [], CPU).ranks[rank].layers for rank in (0, 2)}
    assert sorted(layers[0] + layers[2]) == list(range(7))
    assert (6 in layers[0]) == (schedule in ("zbv", "dualpipev"))
    live = {"interleaved_1f1b": 2 * (per_rank - 1) + 3, "zbv": 4, "dualpipev": 5}[schedule]
    form, longest = form_of(config, "cpu"), 2 if per_rank == 2 else 1
    layer = layer_of(config, form, 5)
    tokens = config.micro_batch_size * config.sequence_length
    stage = longest * tokens * (layer.kept + layer.held).bytes(4)
    headless = memory[0 if schedule == "interleaved_1f1b" else 2]
    assert live * stage <= headless.activations < (live + 1) * stage


def test_the_plan_names_every_run_of_layers(base: Config) -> None:
    """CFG-17: stages of a rank that do not touch are told apart; a notice where zbv must idle (ENG-1)."""
    config = on(base, "pp2")
    config.pipeline = PipelineConfig("zbv", 2)
    plan = make_plan(config, [], CPU)
    assert "layers 0-1, 6;" in plan.text()
    assert "layers 2-5;" in plan.text()
    assert plan.notices == []
    few = make_plan(replace(config, global_batch_size=4), [], CPU)
    assert "there are 2" in few.notices[0]
    assert "global_batch_size=6 would do" in few.text()


def test_the_plan_of_lite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CFG-17: text and one JSON object: ranks, parameters, batch, key, `fits: false` with the arithmetic."""
    words = ["model=deepseek_v2/lite", "mesh=pp2ep4", "dry_run=true", f"paths.runs={tmp_path}/runs"]
    words += [f"paths.data={tmp_path}/data"]
    plan = make_plan(compose(words).config, words, CPU)
    text, _, line = dry_run_text(plan).rpartition("\n")
    told = json.loads(line)
    assert (told["world"], len(told["ranks"]), told["mesh"]["spec"]) == (8, 8, "pp2ep4")
    assert (
        sum(rank["memory"]["parameters"] for rank in told["ranks"])
        == told["parameters"]["total"]
        == 15706484224
    )
    assert [layer for rank in (0, 4) for layer in told["ranks"][rank]["layers"]] == list(range(27))
    assert told["batch"] == {
        **{"global_batch_size": 16, "micro_batch_size": 2, "data_ranks": 4, "micro_batches": 2},
        "positions_per_step": 4096,
    }
    assert "16 samples = 2 micro-batches x 2 samples x 4 data ranks" in text
    assert len(told["data_key"]) == 16
    assert told["data_ready"] is False
    assert told["memory"]["fits"] is False
    assert "fits       false" in text
    assert "optimizer 117 GiB" in told["memory"]["arithmetic"]
    assert told["run_directory"].startswith(f"{tmp_path}/runs/deepseek_v2-lite-pp2ep4-s0-")
    assert told["command"].endswith(f"-m src.trainer.worker {told['run_directory']}")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"weights .* = .* of 8\.0 GiB") as caught:
        check_memory(plan)
    assert caught.value.code == 3
    check_memory(replace(plan, force=True))


@pytest.mark.parametrize(("spec", "expected"), [("single", 8), ("pp2", 8), ("pp2ep2", 4), ("ep4", 2)])
def test_micro_batches_of_the_default(base: Config, spec: str, expected: int) -> None:
    """KEY-4: N by mesh."""
    assert make_plan(on(base, spec), [], CPU).batch["micro_batches"] == expected


def test_the_default_fits(base: Config) -> None:
    """PROJ-2: and its launch is not refused, nor where the memory is not known."""
    check_memory(make_plan(base, [], CPU))
    unknown = make_plan(base, [], Machine("cuda", 1, None, "unprobed: a test"))
    assert unknown.memory.fits is None
    assert "unprobed" in unknown.text()
    check_memory(unknown)


def test_gpus_belong_to_one_rank_each(base: Config) -> None:
    """RANK-3: more ranks than devices is exit 3 with both numbers; a GPU's memory is for one rank."""
    plan = make_plan(on(base, "pp2"), [], Machine("cuda", 1, 80 * 2**30, "a test"))
    with pytest.raises(UserError, match="2 ranks need a GPU each, 1 are visible") as caught:
        check_memory(plan)
    assert caught.value.code == 3
    assert plan.memory.needed == max(rank.memory.total for rank in plan.ranks)


def test_many_ranks_stay_readable(base: Config) -> None:
    """PLAN: the text lists sixteen ranks, the JSON all."""
    base.global_batch_size = 128
    plan = make_plan(on(base, "pp4dp2ep8"), [], CPU)
    assert len(plan.ranks) == 64
    assert plan.text().count("rank ") == 16 + 1
    assert "and 48 more ranks" in plan.text()


@pytest.mark.parametrize("spec", ["pp4dp3ep2", "dp7ep2", "rep2dp5", "pp2dp9ep4"])
def test_ranks_of_one_kind_are_counted_once(base: Config, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PLAN, PROJ-1: by kinds each rank holds what it holds alone; where few are listed, the counts add up."""
    base.global_batch_size = 10080
    config = on(base, spec)
    alone = [rank_memory(config, rank, "cpu") for rank in range(config.mesh.world)]
    assert [rank.memory for rank in make_plan(config, [], CPU).ranks] == alone
    monkeypatch.setattr(rank_plans, "MOST_RANKS", 3)
    few = make_plan(config, [], CPU)
    assert len(few.ranks) < len(alone) == sum(rank.count for rank in few.ranks)
    assert [alone[rank.rank] for rank in few.ranks] == [rank.memory for rank in few.ranks]
    assert few.memory.needed == sum(memory.total for memory in alone)
    assert sum(rank.count * rank.memory.parameters for rank in few.ranks) == sum(m.parameters for m in alone)
    monkeypatch.setattr(rank_plans, "_edges", lambda config, of_experts: [])
    assert make_plan(config, [], CPU).memory.needed != few.memory.needed


def test_a_plan_for_ten_thousand_nodes(base: Config) -> None:
    """PLAN: 80,000 ranks on 10,000 nodes in less than a second, in a page of JSON."""
    base.global_batch_size = 160_000
    base.launcher.name, base.launcher.gpus_per_node, base.launcher.force = "slurm", 8, True
    began = time.monotonic()
    plan = make_plan(on(base, "pp2dp5000ep8"), [], Machine("cuda", 8, None, "unprobed: a test"))
    text = dry_run_text(plan)
    assert time.monotonic() - began < 1
    assert (plan.nodes, plan.world, sum(rank.count for rank in plan.ranks)) == (10_000, 80_000, 80_000)
    assert len(text) < 20_000


def test_the_machine(base: Config, tmp_path: Path) -> None:
    """CFG-17, ENV-2: GPUs by device files within what is shown; memory within the control group; no child."""
    files: dict[str, str] = defaultdict(str)
    files["proc/meminfo"] = "MemTotal: 9 kB\nMemAvailable:    8388608 kB\n"
    for name in ("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"):
        files[name] = ""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert find_machine(base, tmp_path, {}) == Machine("cuda", 2, None, "unprobed: the driver was not asked")
    assert find_machine(base, tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}).devices == 1
    assert find_machine(base, tmp_path, {"CUDA_VISIBLE_DEVICES": ""}).platform == "cpu"
    base.platform.name = "cpu"
    assert find_machine(base, tmp_path, {}) == Machine("cpu", 1, 2**33, "available memory")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("3000\n")
    (group / "memory.current").write_text("1000\n")
    assert find_machine(base, tmp_path, {}).memory == 2000
    base.platform.name = "cuda"
    assert find_machine(base, tmp_path / "nowhere", {}).devices == 0


@pytest.mark.parametrize("spec", ["single", "pp2ep2"])
def test_recomputation_keeps_less(base: Config, spec: str) -> None:
    """ENG-26: `full` keeps the input of each layer, and one layer at a time has everything again."""
    config = on(base, spec)
    kept = {}
    for name in ("none", "stage", "full"):
        config.recompute.name = name
        kept[name] = rank_memory(config, 0, "cpu").activations
    assert kept["full"] < kept["stage"] < kept["none"]
    config.micro_batch_size = 1
    inputs = config.sequence_length * config.model.hidden_size * 4
    config.model.num_layers += 2 * config.mesh.pp
    more = rank_memory(config, 0, "cpu").activations
    config.model.num_layers -= 2 * config.mesh.pp
    live = 1 if spec == "single" else 2
    assert more - rank_memory(config, 0, "cpu").activations == 2 * live * inputs
