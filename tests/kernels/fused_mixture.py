"""Checks of the Triton kernels of a mixture's layer, which `test_fused.py` runs in the interpreter."""

ROWS = """
from src.kernels import combine, permute, rows
from tests.kernels.test_rows import check_combine, check_permute, routings
rows.BLOCK, rows.ELEMENTS = 4, 8
torch.manual_seed(0)
for ids in routings().values():
    check_permute(permute.triton_permute, ids, torch.float32)
    check_combine(combine.triton_combine, ids, torch.float32)
"""

EXPERT_BIAS = """
from src.kernels import expert_bias as op
from tests.kernels.test_expert_bias import LOADS, check
op.BLOCK, op.ROWS, op.COLUMNS, op.TILES = 4, 8, 4, 2
for counts in (*LOADS.values(), [19, 0, 3, 0, 0, 13, 1, 0], [0, 0, 24, 0], [8, 8, 0, 8, 1]):
    check(op.triton_expert_bias, counts, torch.float32)
"""

RMS_NORM = """
from src.kernels import rms_norm as op
op.TILE, op.STEPS = 32, 2
torch.manual_seed(0)
for rows, D in ((0, 5), (1, 37), (29, 5), (64, 8)):
    x, residual, w = torch.randn(rows, D), torch.randn(rows, D), torch.randn(D)
    ups = torch.randn(rows, D), torch.randn(rows, 1).expand(rows, D)
    for joined in (True, False):
        found = []
        for f in (op.triton_rms_norm, op.rms_norm):
            leaves = [t.clone().requires_grad_() for t in (x, w, residual)[: 2 + joined]]
            out = f(*leaves[:2], 1e-3, *leaves[2:])[: 1 + joined]
            found.append((*out, *torch.autograd.grad(out, leaves, ups[: 1 + joined])))
        for a, b in zip(*found):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
"""

ROUTE = """
from src.kernels import route_triton
from src.kernels.route import triton_route
from tests.kernels import test_route as test
route_triton.ELEMENTS = 1024
test.route = triton_route
for groups, kept in ((1, 1), (5, 2), (3, 1)):
    test.test_route_1_choice_and_weights(groups, kept, True)
for logits in (torch.zeros(4, 15), torch.full((4, 15), 1e4), torch.eye(4, 15) * 1e4):
    test.test_mod_4_ties_go_to_the_lowest_id_and_ids_are_distinct(logits)
test.test_given_ids_skip_the_choice()
test.test_route_6_the_gradient_passes_through_the_softmax_over_all()
test.test_route_4_softmax_of_the_chosen_logits()
test.test_route_5_renormalised_scores_are_the_softmax_of_the_chosen_logits(2.5)
test.test_ids_are_distinct_whatever_the_bias(5, 1)
logits = torch.randn(3, 15)
logits[0, 4], logits[1] = torch.nan, -torch.inf
for scoring in ("softmax", "softmax_of_chosen"):
    rule = {"groups": 1, "groups_kept": 1, "renormalise": False, "scale": 1.0, "scoring": scoring}
    ids = triton_route(logits, 3, **rule).ids_TK.tolist()
    assert ids[1] == [0, 1, 2] and all(len({*row, 15}) == 4 and min(row) >= 0 for row in ids), ids
"""

SORT_BY_EXPERT = """
from src.kernels import sort_by_expert as op
from tests.kernels import test_rows as test
op.ELEMENTS = 128
test.sort_by_expert = op.triton_sort_by_expert
for name in test.routings():
    test.test_op_8_rows_are_ordered_by_expert_then_slot(name)
"""

MIXTURE = {
    "rows": ROWS,
    "expert_bias": EXPERT_BIAS,
    "rms_norm": RMS_NORM,
    "route": ROUTE,
    "sort_by_expert": SORT_BY_EXPERT,
}
