"""Faults of other people's code that a run meets: when they are there, what is done, until when (PATCH).

A quirk is either repaired here, by a patch that a context manager undoes, or met by a wrapper of ours, which
is named; then it is a fact in the record. `tests/kernels/test_quirks.py` holds for each a test that it is
still needed, which fails once the package is mended. The config's check reads the ids, so that nothing here
imports torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from src.errors import Problem, UserError
from src.kernels.autotune.narrow import Outcome, narrowed
from src.kernels.autotune.rules import FLA_KDA_STAGES
from src.kernels.toolchain import Toolchain

Patch = Callable[[Toolchain, Collection[str]], AbstractContextManager[Sequence[Outcome]]]


@dataclass(frozen=True)
class Quirk:
    """One fault of a package, and what is done about it."""

    id: str
    kind: str
    """`correctness`: without the patch a run must not start; `performance`: it may."""
    target: str
    """Package that must be in use; an empty one always is."""
    when: Callable[[Toolchain], bool]
    """Whether the fault shows on this device; its docstring says so."""
    versions: Mapping[str, str]
    """Package → versions that have the fault."""
    reason: str
    met_by: str
    """What keeps the fault away: the place of our wrapper, or what the patch does."""
    patch: Patch | None = None
    after: tuple[str, ...] = ()
    """Quirks whose patches come first."""


@dataclass(frozen=True)
class Standing:
    """What became of a quirk."""

    id: str
    status: str
    """`applied`, `met` (by a wrapper of ours), `disabled`, `unused`, `not_applicable` or `failed`."""
    why: str = ""
    rules: Sequence[Outcome] = field(default=())


def anywhere(toolchain: Toolchain) -> bool:
    """on any device"""
    return True


def on_gpus(toolchain: Toolchain) -> bool:
    """on GPUs"""
    return toolchain.device != "cpu"


def in_interpreter(toolchain: Toolchain) -> bool:
    """in Triton's interpreter"""
    return toolchain.interpreted


@contextmanager
def scalar_bounds(toolchain: Toolchain, used: Collection[str]) -> Iterator[Sequence[Outcome]]:
    """Loop bounds read in a kernel become plain numbers, as triton 3.7 makes them.

    The interpreter sets `__index__` of its tensors at each launch, so what it sets is replaced there.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched
    try:
        yield ()
    finally:
        interpreter._patch_lang_tensor = original


@contextmanager
def refused(toolchain: Toolchain, used: Collection[str]) -> Iterator[Sequence[Outcome]]:
    """Both versions of flash-attn in one environment.

    Raises:
        ValueError: always; there is nothing to repair.
    """
    raise ValueError(
        "flash-attn 2 brings a folder of its own where flash-attn-4 lies: uninstall one of the two"
    )
    yield ()


def table(*quirks: Quirk) -> Mapping[str, Quirk]:
    """Id → quirk, in the order in which patches are made. Raises ValueError for an id that comes twice."""
    known: dict[str, Quirk] = {}
    for quirk in quirks:
        if quirk.id in known:
            raise ValueError(f"two quirks have the id {quirk.id}")
        if set(quirk.after) - set(known):
            raise ValueError(f"{quirk.id} comes after {sorted(set(quirk.after) - set(known))}: move it down")
        known[quirk.id] = quirk
    return known


QUIRKS = table(
    Quirk(
        "interpreter_numpy",
        "correctness",
        "",
        in_interpreter,
        {"triton": "<3.7", "numpy": ">=2.4"},
        "a loop bound read in a kernel raises TypeError, as numpy makes no number of an array (triton #9171)",
        "a patch: bounds are squeezed to scalars first",
        scalar_bounds,
    ),
    Quirk(
        "fla_kda_stages",
        "correctness",
        FLA_KDA_STAGES.root,
        FLA_KDA_STAGES.when,
        FLA_KDA_STAGES.versions,
        FLA_KDA_STAGES.reason,
        "a rule that narrows the autotuner, python -m src.kernels.autotune --list",
        lambda toolchain, used: narrowed([FLA_KDA_STAGES], toolchain, used),
    ),
    Quirk(
        "flash_attn_2_over_4",
        "correctness",
        "flash_attn_4",
        on_gpus,
        {"flash_attn": "<3", "flash_attn_4": "<5"},
        "flash-attn 2 bundles a flash_attn/cute that is imported in place of flash-attn-4's",
        "a refusal",
        refused,
    ),
    Quirk(
        "grouped_mm_stride_0",
        "correctness",
        "",
        anywhere,
        {"torch": "<2.14"},
        "the backward of grouped_mm refuses a gradient of stride 0, as from a sum",
        "src/kernels/grouped_mm.py makes it contiguous",
    ),
    Quirk(
        "grouped_mm_tail",
        "correctness",
        "",
        anywhere,
        {"torch": "<2.14"},
        "rows past the last offset are left as the memory was (pytorch #193633)",
        "src/kernels/grouped_mm.py writes zeros there",
    ),
    Quirk(
        "varlen_attn_gqa",
        "correctness",
        "",
        on_gpus,
        {"torch": ">=2.13,<2.14"},
        "varlen_attn takes fewer heads of keys only with enable_gqa=True, which torch 2.11 does not know",
        "src/kernels/attention_flash.py calls the operation below it",
    ),
    Quirk(
        "traced_cast",
        "correctness",
        "",
        anywhere,
        {"torch": "<2.13"},
        "a compiled rule of autograd whose output is a cast that does nothing gives gradients of zero",
        "src/kernels/dtypes.py leaves out a cast that does nothing",
    ),
    Quirk(
        "fp8_trans",
        "correctness",
        "",
        on_gpus,
        {"triton": ">=3.7,<3.8"},
        "tl.trans of an fp8 tile gives wrong values",
        "no kernel of ours transposes one",
    ),
)
"""The quirks; patches are made in this order and undone in the opposite one."""
PATCHES = [name for name, quirk in QUIRKS.items() if quirk.patch is not None]
"""Those that can be switched off."""


def check_disabled(disabled: Sequence[str]) -> list[Problem]:
    """`kernels.quirks_disabled` names patches only."""
    wrong = [name for name in disabled if name not in PATCHES]
    if not wrong:
        return []
    known = [name for name in wrong if name in QUIRKS]
    why = f"{', '.join(wrong)}: no such patch"
    if known:
        why += f"; {', '.join(known)} is met by code of ours, which stays"
    return [Problem("kernels.quirks_disabled", why, f"patches: {', '.join(PATCHES)}", "PATCH")]


@contextmanager
def patched(
    toolchain: Toolchain,
    used: Collection[str],
    disabled: Sequence[str] = (),
    quirks: Mapping[str, Quirk] = QUIRKS,
) -> Iterator[list[Standing]]:
    """Every quirk that stands here is met, until the way out; each condition is asked once.

    Args:
        toolchain: what the quirks are asked about.
        used: packages that this run uses.
        disabled: ids that are left alone.
        quirks: the table.

    Raises:
        UserError: a patch against wrong results could not be made (3).
    """
    with ExitStack() as stack:
        yield [_meet(quirk, toolchain, used, disabled, stack) for quirk in quirks.values()]


def record(standings: Sequence[Standing]) -> dict[str, Any]:
    """The part of `kernels.json` about quirks and rules; equal on all ranks (PATCH-3, KDA-11)."""
    rules = [asdict(outcome) for standing in standings for outcome in standing.rules]
    quirks = {standing.id: {"status": standing.status, "why": standing.why} for standing in standings}
    return {"quirks": quirks, "rules": rules}


def _meet(
    quirk: Quirk, toolchain: Toolchain, used: Collection[str], disabled: Sequence[str], stack: ExitStack
) -> Standing:
    absent = toolchain.outside(quirk.versions) if quirk.when(toolchain) else f"not {quirk.when.__doc__}"
    if absent is not None:
        return Standing(quirk.id, "not_applicable", absent)
    if quirk.target and quirk.target not in used:
        return Standing(quirk.id, "unused", f"this run does not use {quirk.target}")
    if quirk.patch is None:
        return Standing(quirk.id, "met", quirk.met_by)
    if quirk.id in disabled:
        return Standing(quirk.id, "disabled", "kernels.quirks_disabled")
    try:
        outcomes = stack.enter_context(quirk.patch(toolchain, used))
    except Exception as error:
        return _failed(quirk, error)
    return Standing(quirk.id, "applied", quirk.met_by, tuple(outcomes))


def _failed(quirk: Quirk, error: Exception) -> Standing:
    """PATCH-6: a run that could compute something wrong does not start."""
    if quirk.kind == "correctness":
        fix = f"mend the installation, or at your own risk kernels.quirks_disabled=[{quirk.id}]"
        problem = Problem(f"quirk {quirk.id}", f"{error}; {quirk.reason}", fix, "PATCH-6")
        raise UserError([problem], code=3) from error
    warnings.warn(f"quirk {quirk.id} could not be patched, the run is slower: {error}", RuntimeWarning)
    return Standing(quirk.id, "failed", str(error))
