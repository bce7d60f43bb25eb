"""Auxiliary losses without a model: what their strength does not depend on (ENG-24)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from src.config import BalanceConfig
from src.trainer.data.batch import MicroBatch
from src.trainer.parallel.balance import AUXILIARY, Balancer, LayerBalance
from tests.distributed.batches import LENGTH, micro_batch, samples

EXPERTS, TOP_K, LAYER = 7, 3, 5


def router(batch: MicroBatch, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, scores, ids, weights of a router whose input depends on a token's id and position alone."""
    place = torch.arange(batch.ids_BS.shape[1]).expand_as(batch.ids_BS)
    features = torch.stack([(batch.ids_BS * k + place).double().sin() for k in range(1, 5)], -1).flatten(0, 1)
    logits_TE = features @ weight
    scores_TE = logits_TE.softmax(-1)
    weights_TK, ids_TK = scores_TE.topk(TOP_K)
    return logits_TE, scores_TE, ids_TK.int(), weights_TK


def run(config: BalanceConfig, batches: list[MicroBatch], n_tokens: int) -> tuple[Balancer, Tensor]:
    """Tally of one step over `batches`, and the gradient that the terms alone give the router."""
    balancer = Balancer(config, [LAYER], EXPERTS, torch.device("cpu"), torch.float64)
    balancer.lagged_ME = torch.linspace(0.1, 0.4, EXPERTS, dtype=torch.float64)[None]
    weight = torch.randn(
        4, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    for batch in batches:
        bound = balancer.bind(batch, torch.tensor(n_tokens))
        weights_TK = bound.at(LAYER).apply(*router(batch, weight))
        (weights_TK * 0).sum().backward()
    assert weight.grad is not None
    return balancer, weight.grad


def packed(blocks: int) -> list[MicroBatch]:
    """Twelve packed samples in so many micro-batches."""
    rows = samples("packed", 3)[:12]
    size = len(rows) // blocks
    return [micro_batch(rows[i : i + size]) for i in range(0, len(rows), size)]


@pytest.mark.parametrize("kind", ["sequence", "global_batch_lagged"])
def test_accumulation_does_not_matter(kind: str) -> None:
    """ENG-24: the same sums and router gradients from 1, 2 and 4 micro-batches.

    Of the lagged kind where P is linear in the units: a micro-batch's P is that of its own tokens, so the
    samples here are all full and have equal label counts.
    """
    rows = samples("dense", 1)[:12]
    runs = []
    for blocks in (1, 2, 4):
        size = len(rows) // blocks
        batches = [micro_batch(rows[i : i + size]) for i in range(0, len(rows), size)]
        runs.append(run(BalanceConfig(kind=kind, coef=0.3), batches, 144))
    for balancer, gradient in runs[1:]:
        torch.testing.assert_close(balancer.tally.aux, runs[0][0].tally.aux, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, runs[0][1], rtol=1e-11, atol=1e-15)
        assert torch.equal(balancer.tally.counts_ME, runs[0][0].tally.counts_ME)


def half_without_labels(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The same tokens, of every other label in turn none."""
    found = []
    for m in batches:
        labels_BS = m.labels_BS.clone()
        labels_BS[:, ::2] = -100
        labels_BS[0] = -100
        found.append(replace(m, labels_BS=labels_BS, target_tokens=int((labels_BS != -100).sum())))
    return found


@pytest.mark.parametrize("kind", AUXILIARY)
@pytest.mark.parametrize("labels", ["all", "half"])
def test_values_and_gradients(kind: str, labels: str) -> None:
    """ENG-24: the term and its gradient are those of the formula written out token by token.

    Also with half the labels −100: tokens without one count in f and P, labels only weigh the units.
    """
    batches, coef, beta = packed(4), 0.3, 0.7
    batches = half_without_labels(batches) if labels == "half" else batches
    n_tokens = sum(m.target_tokens for m in batches)
    balancer, gradient = run(BalanceConfig(kind=kind, coef=coef, z_loss=beta), batches, n_tokens)
    weight = torch.randn(
        4, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    aux, z = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for m in batches:
        logits_TE, scores_TE, ids_TK, _ = router(m, weight)
        real = [True] * len(ids_TK) if m.real_BS is None else m.real_BS.flatten().tolist()
        rows = [[t for t in range(b * LENGTH, (b + 1) * LENGTH) if real[t]] for b in range(len(m.ids_BS))]
        labels = (m.labels_BS != -100).sum(1).tolist()
        units = list(zip(rows, labels, strict=True))
        whole = ([t for row in rows for t in row], sum(labels))
        for tokens, count in units if kind == "sequence" else [whole]:
            share = [
                sum(int(e in ids_TK[t].tolist()) for t in tokens) / (TOP_K * len(tokens))
                for e in range(EXPERTS)
            ]
            if kind == "global_batch_lagged":
                share = torch.linspace(0.1, 0.4, EXPERTS, dtype=torch.float64).tolist()
            mean_E = scores_TE[tokens].mean(0)
            aux = aux + count / n_tokens * EXPERTS * sum(s * p for s, p in zip(share, mean_E, strict=True))
        z = z + whole[1] / n_tokens * (torch.logsumexp(logits_TE[whole[0]], 1) ** 2).mean()
    (coef * aux + beta * z).backward()
    torch.testing.assert_close(balancer.tally.aux.squeeze(), aux.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(balancer.tally.z.squeeze(), z.detach(), rtol=1e-12, atol=0)
    assert weight.grad is not None
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("kind", AUXILIARY)
def test_pads_change_nothing(kind: str) -> None:
    """ENG-24: what stands on pads enters neither counts nor values, and a unit of pads alone is no 0/0."""
    config = BalanceConfig(kind=kind, coef=0.3, z_loss=0.1)
    batch = packed(1)[0]
    assert batch.real_BS is not None
    noise = torch.where(batch.real_BS, batch.ids_BS, batch.ids_BS + 31)
    plain, noisy = (run(config, [m], 90)[0].tally for m in (batch, replace(batch, ids_BS=noise)))
    assert torch.equal(plain.counts_ME, noisy.counts_ME)
    assert int(plain.counts_ME.sum()) == TOP_K * int(batch.real_BS.sum())
    assert torch.equal(plain.aux, noisy.aux)
    assert torch.equal(plain.z, noisy.z)
    nothing = replace(
        batch, real_BS=torch.zeros_like(batch.real_BS), labels_BS=torch.full_like(batch.labels_BS, -100)
    )
    assert float(run(config, [nothing], 90)[0].tally.aux) == 0


@pytest.mark.parametrize("kind", AUXILIARY)
def test_appended_pads_change_nothing(kind: str) -> None:
    """ENG-24: twice the length, half of it pads: the same values, counts and router gradient."""
    config = BalanceConfig(kind=kind, coef=0.3, z_loss=0.1)
    plain = micro_batch(samples("dense", 2)[:5])
    ids_BS = torch.cat([plain.ids_BS, torch.full_like(plain.ids_BS, 55)], 1)
    labels_BS = torch.cat([plain.labels_BS, torch.full_like(plain.labels_BS, -100)], 1)
    real_BS = torch.arange(2 * LENGTH).expand_as(ids_BS) < LENGTH
    padded = replace(plain, ids_BS=ids_BS, labels_BS=labels_BS, real_BS=real_BS)
    (one, gradient), (two, padded_gradient) = (run(config, [m], 60) for m in (plain, padded))
    assert torch.equal(one.tally.counts_ME, two.tally.counts_ME)
    torch.testing.assert_close(two.tally.aux, one.tally.aux, rtol=1e-12, atol=0)
    torch.testing.assert_close(two.tally.z, one.tally.z, rtol=1e-12, atol=0)
    torch.testing.assert_close(padded_gradient, gradient, rtol=1e-11, atol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("kind", AUXILIARY)
def test_the_term_survives_compilation(kind: str) -> None:
    """ENG-24: one graph around router and hook feeds gradient 1 to the term and adds to the tally."""
    batch, found = packed(1)[0], []
    for compiled in (False, True):
        config = BalanceConfig(kind=kind, coef=0.3, z_loss=0.1)
        balancer = Balancer(config, [LAYER], EXPERTS, torch.device("cpu"), torch.float64)
        hook = balancer.bind(batch, torch.tensor(90)).at(LAYER)

        def routed(weight: Tensor, hook: LayerBalance) -> Tensor:
            weights_TK: Tensor = hook.apply(*router(batch, weight))
            return weights_TK.square().sum()

        call = torch.compile(routed, fullgraph=True, backend="aot_eager") if compiled else routed
        weight = torch.linspace(-1, 1, 4 * EXPERTS, dtype=torch.float64).view(4, -1).requires_grad_()
        call(weight, hook).backward()
        assert weight.grad is not None
        found.append([weight.grad, balancer.tally.aux, balancer.tally.z, balancer.tally.counts_ME])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-15)
    assert bool(found[1][1])
    assert bool(found[1][3].any())


def test_even_routing_is_one_and_collapse_is_e_over_k() -> None:
    """ENG-24: A is 1 when every expert gets as much, E/K when K experts get everything."""
    batch = micro_batch(samples("dense", 0)[:7])
    tokens = batch.ids_BS.numel()
    balancer = Balancer(BalanceConfig(coef=1.0), [LAYER], EXPERTS, torch.device("cpu"), torch.float64)
    bound = balancer.bind(batch, torch.tensor(int((batch.labels_BS != -100).sum())))
    even_TE = torch.full((tokens, EXPERTS), 1 / EXPERTS, dtype=torch.float64)
    turn = torch.arange(tokens)[:, None]
    bound.at(LAYER).apply(
        even_TE, even_TE, ((turn + torch.arange(TOP_K)) % EXPERTS).int(), even_TE[:, :TOP_K]
    )
    assert float(balancer.tally.aux) == pytest.approx(1, rel=1e-12)
    balancer.start()
    one_TE = torch.zeros_like(even_TE)
    one_TE[:, :TOP_K] = 1 / TOP_K
    bound.at(LAYER).apply(one_TE, one_TE, torch.arange(TOP_K).expand(tokens, -1).int(), one_TE[:, :TOP_K])
    assert float(balancer.tally.aux) == pytest.approx(EXPERTS / TOP_K, rel=1e-12)


def test_without_coefficient_the_weights_pass_untouched() -> None:
    """ENG-24: coefficient 0 is bitwise the run without; the measure is still taken."""
    batch = packed(1)[0]
    weight = torch.ones(4, EXPERTS, dtype=torch.float64, requires_grad=True)
    for kind, coef in (("sequence", 0.0), ("none", 1.0)):
        balancer = Balancer(
            BalanceConfig(kind=kind, coef=coef), [LAYER], EXPERTS, torch.device("cpu"), torch.float64
        )
        seen = router(batch, weight)
        assert balancer.bind(batch, torch.tensor(9)).at(LAYER).apply(*seen) is seen[3]
        assert (float(balancer.tally.aux) > 0) == (kind == "sequence")


def test_lagged_share_is_taken_over_only_from_applied_steps() -> None:
    """ENG-24, ENG-27: f is that of the last completed step; a skipped one leaves it."""
    config = BalanceConfig(kind="global_batch_lagged")
    balancer = Balancer(config, [LAYER], 4, torch.device("cpu"), torch.float64)
    assert balancer.lagged_ME.tolist() == [[0.25] * 4]
    balancer.finish(torch.tensor([[1, 2, 3, 2]]), torch.tensor(0.0))
    balancer.finish(torch.tensor([[8, 0, 0, 0]]), torch.tensor(1.0))
    assert balancer.lagged_ME.tolist() == [[0.125, 0.25, 0.375, 0.25]]
