"""PERF-5 to PERF-10: what the operations' benchmarks count, and that their inputs are what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from src.bench import op, op_shapes, ops_attention, ops_elementwise, ops_head, ops_moe, ops_optimizer
from src.bench.op import FORWARD, TRAINING, Cost, Subject
from src.bench.op_shapes import Shape
from src.bench.ops_rows import activation
from src.bench.place import Key, Place
from src.bench.stopwatch import tensors
from src.kernels.local_experts import local_experts
from tests.docs.commands import ROOT

CPU = Place(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(3))
TINY, BIASED = (op_shapes.SHAPES[name] for name in ("tiny", "tiny_biased"))


def counted(subject: Subject, key: Key, direction: str) -> tuple[int, Cost]:
    """FLOPs of products as torch counts them, and what the formula says."""
    side = next(side for side in subject.sides if side.key == key)
    inputs = subject.make()
    with FlopCounterMode(display=False) as counter:
        if direction == FORWARD or side.training is not None:
            side.run(direction, inputs)
        else:  # The counter follows modules through `backward` alone.
            found = side.call(inputs)
            outputs = [found] if isinstance(found, Tensor) else [*found]
            torch.autograd.backward(outputs, [inputs[name] for name in side.grads])
    return counter.get_total_flops(), side.cost[direction]


@pytest.mark.parametrize("direction", op.DIRECTIONS)
def test_flops_are_those_of_the_products_that_run(direction: str) -> None:
    """PERF-5, PERF-7: torch's own count of the reference; a formula that forgets the up product is seen."""
    router = 2 * TINY.tokens * TINY.experts * TINY.width * (1 if direction == FORWARD else 3)
    for subject in ops_moe.subjects("tiny", TINY, CPU)[:2]:
        for operation, name, more in (("grouped_mm", "eager", 0), ("moe_layer", "grouped_mm=eager", router)):
            found, cost = counted(subject, (operation, name), direction)
            assert found == cost.flops + more, (subject.case, operation)
            assert found != cost.flops * 2 // 3 + more
    (head,) = ops_head.subjects("tiny", ops_head.SHAPES["tiny"], CPU)
    keys = [ops_head.PRODUCTS]
    if direction == FORWARD:  # Of three products torch does not count the one that adds in place.
        keys.append(("linear_cross_entropy", "eager"))
    for key in keys:
        found, cost = counted(head, key, direction)
        assert found == cost.flops, key


def test_attention_counts_half_of_the_scores() -> None:
    """PERF-6: the reference computes all of them; its backward has four products, a fused one five."""
    (subject,) = ops_attention.subjects("tiny", ops_attention.SHAPES["tiny"], CPU)
    key = ("attention", "eager")
    (whole, forward), (both, training) = (counted(subject, key, way) for way in op.DIRECTIONS)
    assert whole == 2 * forward.flops
    assert both == 3 * whole
    assert training.flops == pytest.approx(both / 2 * 3.5 / 3)


@pytest.mark.parametrize("name", ["tiny", "tiny_packed"])
@pytest.mark.parametrize("window", [None, 1, 7, 60])
def test_attention_counts_the_pairs_of_a_document(name: str, window: int | None) -> None:
    """PERF-6: pair by pair, but for the diagonal, of which MFU counts half."""
    shape = replace(ops_attention.SHAPES[name], window=window)
    batch = ops_attention.batch_of(shape, CPU.device)
    documents_BS = batch.documents_BS
    if documents_BS is None:
        documents_BS = torch.zeros_like(batch.positions_BS)
    queries_S1 = torch.arange(shape.seq)[:, None]
    distance_SS = queries_S1 - queries_S1.T
    is_seen = (distance_SS >= 0) & (distance_SS < (window or shape.seq))
    pairs = int((is_seen & (documents_BS[..., None] == documents_BS[:, None])).sum())
    lengths = torch.tensor(shape.bounds()).diff()
    assert lengths.numel() == shape.batch * shape.documents
    half = float(lengths.clamp(max=window or shape.seq).sum() / 2)
    flops = shape.cost()[FORWARD].flops
    assert flops == 2 * (pairs - half) * shape.heads * (shape.key + shape.value)


def test_attention_is_told_where_documents_begin() -> None:
    """PERF-6: bounds, numbers and positions agree; the mean document of 4k positions has 1k."""
    shape = ops_attention.SHAPES["mla_packed"]
    batch = ops_attention.batch_of(shape, CPU.device)
    assert batch.cu_seqlens is not None
    assert batch.documents_BS is not None
    numbers_N, positions_N = batch.documents_BS.flatten().long(), batch.positions_BS.flatten()
    assert batch.cu_seqlens.long()[numbers_N].add(positions_N).equal(torch.arange(numbers_N.numel()))
    assert float(batch.cu_seqlens.diff().float().mean()) == 1024
    dense = replace(shape, documents=1).cost()[FORWARD].flops
    assert dense == shape.batch * shape.heads * shape.seq**2 * (shape.key + shape.value)
    assert shape.cost()[FORWARD].flops < dense / 2


READS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rms_norm": (("x",), ("x",)),
    "swiglu": (("x",), ("x",)),
    "permute": (("x",), ()),
    "combine": (("y", "slots", "weights", "residual"), ("y", "slots", "weights")),
    "router_linear": (("x", "w"), ("x", "w")),
    "expert_bias": (("x", "bias", "offs"), ("offs",)),
    "rope": (("x", "cos", "sin"), ("cos", "sin")),
    "rotary_heads": (("q", "k", "cos", "sin"), ("q", "k", "cos", "sin")),
    "latent_heads": (("q", "kv", "k", "cos", "sin"), ("cos", "sin")),
}
"""What a pass has to read besides upstream gradients; indices of rows are apart."""
SMALL = ("gain", "q_gain", "k_gain", "residual")
"""Leaves whose gradients count for nothing, or are the upstream gradient itself."""


def small_subjects() -> list[Subject]:
    """Each operation once."""
    latent = ops_elementwise.Heads(TINY, 3, 3, 14, 29, value=10, rotated=4)
    biased = [operation.subject("biased", CPU, {}) for operation in activation(BIASED, CPU)]
    grouped = ops_elementwise.subjects("tiny", ops_elementwise.SHAPES["tiny"], CPU)
    return [*biased, *grouped, *ops_elementwise.subjects("latent", latent, CPU)]


def test_bytes_are_those_of_the_tensors() -> None:
    """PERF-9: counted from the tensors that come and go, without the formula."""
    seen = set()
    for subject in small_subjects():
        side, inputs = subject.sides[0], subject.make()
        if side.key[0] not in READS:
            continue
        seen.add(side.key[0])
        first, second = READS[side.key[0]]
        index = inputs["slots"].nbytes if side.key[0] == "permute" else 0
        outputs = sum(x.nbytes for x in tensors([side.run(FORWARD, inputs)]))
        forward = index + sum(inputs[read].nbytes for read in first) + outputs
        assert side.cost[FORWARD].bytes == forward, side.key
        gradients = dict(zip(side.leaves, side.run(TRAINING, inputs), strict=True))
        upstream = sum(inputs[grad].nbytes for grad in side.grads)
        downstream = sum(grad.nbytes for leaf, grad in gradients.items() if leaf not in SMALL)
        backward = index + sum(inputs[read].nbytes for read in second) + upstream + downstream
        assert side.cost[TRAINING].bytes == forward + backward, side.key
    assert seen == set(READS)


def test_bytes_of_the_loss_are_two_reads_and_a_write() -> None:
    """PERF-9: of the logits of a chunk; the largest and the sum in one pass, the gradient in another."""
    subject = ops_elementwise.loss_passes("tiny", ops_elementwise.SHAPES["tiny"], CPU)
    assert subject.sides[0].cost[TRAINING].bytes == 3 * subject.make()["logits"].nbytes


def test_bytes_of_the_update_and_of_sums() -> None:
    """PERF-8, OP-4: of one parameter computed in bf16 as the operation says; from the tensors on a CPU."""
    moved = {name: kept.bytes_moved(torch.bfloat16) for name, kept in ops_optimizer.LAYOUTS.items()}
    assert moved == {"master": 28, "split": 26, "split_bf16": 22, "plain": 14}
    for subject in ops_optimizer.subjects("tiny", ops_optimizer.SHAPES["tiny"], CPU):
        inputs, operation = subject.make(), subject.sides[0].key[0]
        nbytes = {name: sum(x.nbytes for x in tensors(value)) for name, value in inputs.items()}
        expected = {
            "adamw": lambda n: 2 * (n["p"] + n["low"] + n["m"] + n["v"]) + n["g"] + n["copy"],
            "accumulate": lambda n: 2 * n.get("total", n["g"] / 2) + n["g"],
            "grad_norm": lambda n: n["g"],
        }[operation](nbytes)
        assert subject.sides[0].cost[FORWARD].bytes == expected, (subject.case, operation)


def test_loads_are_of_distinct_experts() -> None:
    """PERF-5: even turns, or a Dirichlet(0.5) popularity, the same for every set of inputs."""
    shape = Shape("qwen3_moe", 16, 3, 8, tokens=640)
    loads = {}
    for load in op_shapes.LOADS:
        popularity_E = op_shapes.popularity(16, load, CPU.device)
        ids_TK = op_shapes.choose(shape, popularity_E, CPU)
        assert all(len(set(row)) == 3 for row in ids_TK.tolist())
        counts_E = ids_TK.flatten().bincount(minlength=16)
        loads[load] = float(counts_E.max() / counts_E.float().mean())
    assert loads["balanced"] == 1
    assert loads["skewed"] > 2


@pytest.mark.parametrize("shape", [TINY, BIASED, Shape("deepseek_v2", 64, 6, 8, width=96, tokens=301)])
def test_the_layer_sends_tokens_where_they_are_to_go(shape: Shape) -> None:
    """PERF-5: the router itself chooses, so that its choice is timed; the products have the same offsets."""
    for subject in ops_moe.subjects("some", shape, CPU)[:2]:
        inputs = subject.make()
        layer, dispatcher = inputs["layers"]["moe_layer", "auto"], inputs["dispatchers"]["moe_layer", "auto"]
        routing = layer.mlp.gate(inputs["tokens"], inputs["batch"])
        assert dispatcher.order(routing.ids_TK).offs_E.equal(inputs["offs"]), subject.case
        largest = float(inputs["offs"].diff(prepend=torch.zeros(1)).max() / shape.rows * shape.experts)
        balanced = subject.case.endswith("balanced") and shape.rows % shape.experts == 0
        assert (largest == 1) == balanced


def test_the_layer_is_route_to_combine() -> None:
    """PERF-5: every way of it gives the reference on the router's choice, tokens being their residual."""
    subject = ops_moe.subjects("tiny", TINY, CPU)[1]
    inputs = subject.make()
    layer, dispatcher = inputs["layers"]["moe_layer", "auto"], inputs["dispatchers"]["moe_layer", "auto"]
    routing = layer.mlp.gate(inputs["tokens"], inputs["batch"])
    order, experts = dispatcher.order(routing.ids_TK), (inputs["gate_up"], inputs["down"])
    expected: Tensor = local_experts(inputs["tokens"], routing.weights_TK, inputs["tokens"], order, *experts)
    layers = [side for side in subject.sides if side.key[0] == "moe_layer"]
    assert len(layers) > 1
    for side in layers:
        torch.testing.assert_close(side.call(inputs), expected)
        gradients = side.run(TRAINING, inputs)
        assert all(float(gradient.abs().max()) > 0 for gradient in gradients), side.key


@pytest.mark.parametrize(
    ("name", "preset"),
    [("deepseek_v2", "deepseek_v2/lite"), ("qwen3", "qwen3_moe/30b_a3b"), ("gpt_oss", "gpt_oss/20b")],
)
def test_shapes_are_those_of_the_presets(name: str, preset: str) -> None:
    """BENCH-1: the sizes that training composes."""
    config = OmegaConf.load(ROOT / f"conf/model/{preset}.yaml")
    shape, heads = op_shapes.SHAPES[name], ops_elementwise.SHAPES[name]
    asked = (config.num_experts, config.top_k, config.expert_size, config.hidden_size)
    assert (shape.experts, shape.top_k, shape.expert_size, shape.width) == asked
    assert (heads.layer, heads.queries, heads.vocabulary) == (shape, config.num_heads, config.vocab_size)
    attention = ops_attention.SHAPES[
        {"deepseek_v2": "mla", "qwen3": "gqa", "gpt_oss": "gpt_oss_window"}[name]
    ]
    if name == "deepseek_v2":
        widths = (config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
        assert (heads.key, heads.value, heads.rotated) == (*widths, config.qk_rope_head_dim)
    else:
        widths = (config.head_dim, config.head_dim)
        assert (heads.key, heads.groups, attention.groups) == (config.head_dim, *[config.num_kv_heads] * 2)
    assert (attention.heads, attention.key, attention.value) == (config.num_heads, *widths)
    assert attention.window == config.get("sliding_window")
    if name in ops_head.SHAPES:
        assert ops_head.SHAPES[name].vocabulary == config.vocab_size
