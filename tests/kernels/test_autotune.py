"""KDA-1 to KDA-14 on Triton's own tuners, built without a device; `tuned.py` stands for the package."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is there on Linux only")

from src.kernels.autotune import __main__ as listing  # noqa: E402
from src.kernels.autotune.narrow import HOPS, Clamped, clamped, find_tuner, narrowed  # noqa: E402
from src.kernels.autotune.pins import key_of, pinned  # noqa: E402
from src.kernels.autotune.rule import Rule, table  # noqa: E402
from src.kernels.autotune.rules import FLA_KDA_STAGES, RULES  # noqa: E402
from src.kernels.toolchain import Toolchain  # noqa: E402
from tests.kernels import tuned  # noqa: E402

ROCM = Toolchain("rocm", {"triton": "3.6.0+rocm7.2.2", "fla": "0.6.0"})
USED = ("tests",)
RULE = replace(FLA_KDA_STAGES, module="tests.kernels.tuned", kernels=("backward", "forward"))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Tuners as the package makes them."""
    importlib.reload(tuned)
    yield
    importlib.reload(tuned)


def rule(*kernels: str, **changes: Any) -> Rule:
    return replace(RULE, kernels=kernels, **changes)


def stages(tuner: Any) -> list[int]:
    return [config.num_stages for config in tuner.configs]


def launch(kernel: Any, n: int = 8) -> dict[str, Any]:
    """What the launch would run with."""
    kernel.run("x", n, 3, grid=(1,), warmup=False)
    return tuned.LAUNCHES.seen[-1]


def test_kda_1_the_tuner_is_found_in_any_stack() -> None:
    """Heuristics over a tuner, a tuner over heuristics, foreign wrappers; cycles and failing properties."""
    assert find_tuner(tuned.backward) is tuned.backward.fn
    assert find_tuner(tuned.forward) is tuned.forward.fn
    assert find_tuner(tuned.inner) is tuned.inner
    assert find_tuner(tuned.deep) is tuned.inner
    assert HOPS == 8
    for kernel in (tuned.too_deep, tuned.circle, tuned.untuned, None, 3):
        assert find_tuner(kernel) is None


def test_kda_2_survivors_keep_order_identity_and_their_other_axes() -> None:
    tuner = tuned.backward.fn
    before = list(tuner.configs)
    text = [str(config) for config in before]
    with narrowed([RULE], ROCM, USED) as outcomes:
        assert [o.line() for o in outcomes] == [
            f"rule fla_kda_stages: kept 4 of 12 of {name}" for name in ("backward", "forward")
        ]
        assert all(a is b for a, b in zip(tuner.configs, before[::3], strict=True))
        assert [config.num_warps for config in tuner.configs] == [1, 2, 4, 8]
        assert stages(tuned.inner) == [2, 3, 4] * 4
    assert tuner.configs == before
    assert [str(config) for config in before] == text


def test_kda_3_a_rule_that_would_keep_nothing_changes_nothing() -> None:
    nothing = rule("backward", keep=lambda config: False)
    tuner = tuned.backward.fn
    before, cache = tuner.configs, tuner.cache
    narrowing = narrowed([nothing], ROCM, USED)
    with pytest.warns(RuntimeWarning, match="kept 0 of 12") as caught:
        outcomes = narrowing.__enter__()
    assert len(caught) == 1
    assert [o.status for o in outcomes] == ["would_empty"]
    assert tuner.configs is before
    assert tuner.cache is cache


def test_kda_4_twice_is_once() -> None:
    with narrowed([RULE], ROCM, USED) as first, narrowed([RULE], ROCM, USED) as second:
        assert [o.status for o in first] == ["narrowed", "narrowed"]
        assert [o.status for o in second] == ["already", "already"]
    assert stages(tuned.backward.fn) == [2, 3, 4] * 4


def test_kda_5_nothing_is_imported_where_the_rule_has_no_business() -> None:
    """Another device, a later Triton, a run that does not use the package: the module stays unimported."""
    away = replace(RULE, module="tests.kernels.not_there")
    later = Toolchain("rocm", {"triton": "3.7.0"})
    for toolchain, used, status, why in (
        (replace(ROCM, device="cuda"), USED, "not_applicable", "not on ROCm"),
        (later, USED, "not_applicable", "triton 3.7.0 is not <3.7"),
        (Toolchain("rocm", {}), USED, "not_applicable", "triton is not installed"),
        (ROCM, ("torch",), "unused", "does not use tests"),
    ):
        with narrowed([away], toolchain, used) as outcomes:
            assert [o.status for o in outcomes] == [status]
            assert why in outcomes[0].why
    with narrowed(RULES, ROCM, ()) as outcomes:
        assert [o.status for o in outcomes] == ["unused"]
    assert "fla" not in sys.modules


def test_kda_6_cached_winners_are_clamped_and_not_tuned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory; all other fields equal; 100 launches, no timing; without the clamp 4 stages come back."""
    tuner = tuned.backward.fn
    assert launch(tuned.backward)["num_stages"] == 4
    timed, winner = len(tuned.TIMED), tuner.cache[(8,)]
    fields = dict(vars(winner))
    with narrowed([rule("backward", "from_file")], ROCM, USED):
        for _ in range(100):
            seen = launch(tuned.backward)
        assert (seen["num_stages"], seen["num_warps"], seen["TILE"]) == (2, 8, 16)
        assert dict(vars(tuner.cache[(8,)])) == fields | {"num_stages": 2}
        assert len(tuned.TIMED) == timed
    assert tuner.cache[(8,)] is winner
    assert vars(winner) == fields
    monkeypatch.setattr(Clamped, "within", lambda self, config: config)
    with narrowed([rule("backward")], ROCM, USED):
        assert launch(tuned.backward)["num_stages"] == 4


def test_kda_6_winners_of_a_package_file(tmp_path: Path) -> None:
    tuned.from_file.path = tmp_path / "kernel.json"
    tuned.from_file.path.write_text(json.dumps({"kwargs": {"TILE": 16}, "num_warps": 2, "num_stages": 4}))
    assert launch(tuned.from_file)["num_stages"] == 4
    with narrowed([rule("from_file")], ROCM, USED):
        for _ in range(100):
            seen = launch(tuned.from_file)
        assert (seen["num_stages"], seen["num_warps"]) == (2, 2)
    assert tuned.TIMED == []


def test_kda_6_kda_8_winners_of_tritons_disk_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was timed before comes from the disk clamped, and stays there as it is."""
    module = sys.modules["triton.runtime.autotuner"]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "driver", Driver())
    tuner = tuned.backward.fn
    tuner.cache_results, tuner.fn = True, Compiled()
    try:
        assert launch(tuned.backward)["num_stages"] == 4
        files = hashes(tmp_path)
        assert files
        with narrowed([rule("backward", keep=below_4, clamp={"num_stages": 3})], ROCM, USED):
            timed = len(tuned.TIMED)
            assert launch(tuned.backward)["num_stages"] == 3
            tuner.cache.clear()
            assert launch(tuned.backward)["num_stages"] == 3  # Triton keys the file by the list it tried.
            assert len(tuned.TIMED) == timed + 8
            poison(tmp_path, files)
            tuner.cache.clear()
            assert launch(tuned.backward)["num_stages"] == 3
            assert len(tuned.TIMED) == timed + 8
        assert {path: hashes(tmp_path)[path] for path in files} == files
    finally:
        tuner.fn = tuned.LAUNCHES


def below_4(config: Any) -> bool:
    return bool(config.num_stages < 4)


class Driver:
    """Enough of a driver for the key of a file."""

    @property
    def active(self) -> Driver:
        return self

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class Compiled(triton.runtime.jit.JITFunction):  # type: ignore[misc]
    """A jitted function whose launch is noted instead."""

    def __init__(self) -> None:
        super().__init__(tuned.plain)

    def run(self, *args: Any, **kwargs: Any) -> None:
        tuned.LAUNCHES.run(*args, **kwargs)


def hashes(folder: Path) -> dict[Path, str]:
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def poison(folder: Path, old: dict[Path, str]) -> None:
    """Put a winner with 4 stages into the files that the narrowed tuner wrote."""
    for path in set(hashes(folder)) - set(old):
        if path.name.endswith(".autotune.json"):
            held = json.loads(path.read_text())
            held["configs_timings"][0] = [held["configs_timings"][0][0] | {"num_stages": 4}, [0.0] * 3]
            path.write_text(json.dumps(held))


def test_kda_7_a_config_of_two_keys_is_clamped_once() -> None:
    tuner = tuned.backward.fn
    tuner.cache[(8,)] = tuner.cache[(9,)] = tuner.configs[2]
    with narrowed([RULE], ROCM, USED):
        assert tuner.cache[(8,)] is tuner.cache[(9,)]
        assert tuner.cache[(8,)].num_stages == 2
    assert tuner.configs[2].num_stages == 4


def test_kda_8_no_file_of_the_package_changes() -> None:
    folder = Path(triton.__file__).parent / "runtime"
    before = hashes(folder), hashlib.sha256(Path(tuned.__file__).read_bytes()).hexdigest()
    with narrowed([RULE], ROCM, USED):
        launch(tuned.backward)
    assert before == (hashes(folder), hashlib.sha256(Path(tuned.__file__).read_bytes()).hexdigest())


def test_kda_9_early_config_prune_sees_the_narrowed_list() -> None:
    with narrowed([rule("pruned")], ROCM, USED):
        launch(tuned.pruned)
    assert [[c.num_stages for c in offered] for offered in tuned.SEEN] == [[2, 2, 2, 2]]


def test_kda_10_threads_narrow_once_and_what_was_compiled_is_reported() -> None:
    found: Counter[str] = Counter()
    go, stop = threading.Barrier(8), threading.Barrier(8)

    def work() -> None:
        go.wait()
        with narrowed([rule("forward")], ROCM, USED) as outcomes:
            found[outcomes[0].status] += 1
            stop.wait()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"narrowed": 1, "already": 7}
    tuner = tuned.backward.fn
    tuner.fn = tuner.jit
    built = [type("Kernel", (), {"metadata": type("Meta", (), {"num_stages": s})}) for s in (2, 4, 4)]
    tuner.jit.device_caches[0] = ({str(k): kernel for k, kernel in enumerate(built)},)
    with narrowed([rule("backward")], ROCM, USED) as outcomes:
        assert outcomes[0].why == "2 unsafe kernels were compiled before"


def test_kda_11_and_12_the_record_is_plain_and_the_list_says_why() -> None:
    """KDA-12: id, kernels, gate, reason, cost and whether it applies here, for two toolchains."""
    text = listing.describe(FLA_KDA_STAGES, ROCM)
    for words in (
        "fla_kda_stages", "chunk_kda_bwd_kernel_intra", "on ROCm, triton <3.7", "here     applies", "#9815",
        "5.4 %", "0.96 %", "4.9 %",
    ):  # fmt: skip
        assert words in text
    assert "does not apply: triton 3.7.1 is not <3.7" in listing.describe(
        FLA_KDA_STAGES, Toolchain("rocm", {"triton": "3.7.1"})
    )
    done = subprocess.run(
        [sys.executable, "-m", "src.kernels.autotune", "--list"], capture_output=True, text=True, check=True
    )
    assert all(known.id in done.stdout for known in RULES)


def test_kda_14_targets_that_are_gone_are_said_once() -> None:
    """Absent, renamed, without a config list; no gate can ask for an architecture, for it is given none."""
    for kernels, module in (
        (("gone",), RULE.module),
        (("untuned",), RULE.module),
        ((), "tests.kernels.gone"),
    ):
        gone = replace(RULE, kernels=kernels, module=module)
        with pytest.warns(RuntimeWarning, match="not_found") as caught, narrowed([gone], ROCM, USED) as found:
            assert [o.status for o in found] == ["not_found"]
        assert len(caught) == 1
    assert set(Toolchain.__dataclass_fields__) == {"device", "versions", "interpreted"}


def test_kda_14_every_rule_expires_and_its_clamp_is_kept() -> None:
    with pytest.raises(ValueError, match="never expires"):
        replace(RULE, versions={"triton": ">=3.6"})
    with pytest.raises(ValueError, match="two rules have the id fla_kda_stages"):
        table(RULE, RULE)
    for known in RULES:
        for config in tuned.configs():
            assert known.keep(config) or known.keep(clamped(known, config))


def test_two_rules_on_one_kernel_both_hold() -> None:
    fewer = rule("backward", id="warps", keep=lambda c: c.num_warps <= 4, clamp={"num_warps": 4})
    tuner = tuned.backward.fn
    with narrowed([rule("backward"), fewer], ROCM, USED) as outcomes:
        assert [(o.kept, o.of) for o in outcomes] == [(4, 12), (3, 4)]
        tuner.cache[(1,)] = triton.Config({"TILE": 16}, 8, 4)
        assert (tuner.cache[(1,)].num_warps, tuner.cache[(1,)].num_stages) == (4, 2)
    assert stages(tuner) == [2, 3, 4] * 4


def test_kda_13_pinned_takes_one_config_a_key_and_keeps_it(tmp_path: Path) -> None:
    """No timing; on disk; the next attempt takes the file's config although the list begins otherwise."""
    tuner = tuned.backward.fn
    with pinned(tmp_path / "autotune", 0):
        assert [launch(tuned.backward, n)["num_warps"] for n in (8, 9, 8)] == [1, 1, 1]
    assert tuned.TIMED == []
    held = json.loads((tmp_path / "autotune" / "rank_0.json").read_text())
    assert {key: pin["num_stages"] for key, pin in held["tests.kernels.tuned.plain"].items()} == {
        "(8,)": 2,
        "(9,)": 2,
    }
    importlib.reload(tuned)
    tuner = tuned.backward.fn
    tuner.configs = tuner.configs[::-1]
    with pinned(tmp_path / "autotune", 1):
        seen = [launch(tuned.backward, n) for n in (8, 10)]
        tuner.cache[(8,)] = tuner.configs[1]
        seen.append(launch(tuned.backward, 8))
    assert [(s["num_warps"], s["num_stages"]) for s in seen] == [(1, 2), (8, 4), (1, 2)]
    assert tuned.TIMED == []
    assert launch(tuned.inner)["num_stages"] == 4  # Undone: timed again.
    assert tuned.TIMED


def test_kda_13_rules_hold_for_pins_too(tmp_path: Path) -> None:
    tuned.backward.fn.configs = tuned.backward.fn.configs[2:]
    with pinned(tmp_path, 0):
        assert launch(tuned.backward)["num_stages"] == 4
    with narrowed([RULE], ROCM, USED), pinned(tmp_path, 0):
        assert launch(tuned.backward)["num_stages"] == 2


def test_kda_13_the_key_is_tritons() -> None:
    """A later Triton with another key would time again: the winner lies under ours after a timed launch."""
    typed = type("Typed", (), {"dtype": "bf16"})()
    tuned.backward.run(typed, 8, 3, grid=(1,), warmup=False)
    assert list(tuned.backward.fn.cache) == [key_of(tuned.backward.fn, (typed, 8, 3), {"EVEN": True})]


def on_device() -> tuple[Any, Any]:
    """A real kernel and its tuner, which times it by Triton's own clock."""
    tuner = tuned.backward.fn
    tuner.fn, tuner._do_bench = tuner.jit, None
    return tuned.backward, tuner


@pytest.mark.gpu
def test_kda_6_kda_10_on_a_device() -> None:
    """A winner with 4 stages, tuned and compiled: clamped, reported, launched 100 times without a clock."""
    kernel, tuner = on_device()
    x = torch.zeros(16, device="cuda")
    kernel[(1,)](x, 8, 3)
    (key,) = tuner.cache
    assert key == (8, "torch.float32")
    tuner.cache[key] = tuner.configs[2]
    kernel[(1,)](x, 8, 3)
    with narrowed([rule("backward")], ROCM, USED) as outcomes:
        assert "unsafe kernels were compiled before" in outcomes[0].why
        tuner.do_bench = None  # Timing would fail.
        for _ in range(100):
            kernel[(1,)](x, 8, 4)
        assert tuner.best_config.num_stages == 2
    assert x.tolist() == [12.0] * 16


@pytest.mark.gpu
def test_kda_13_on_a_device(tmp_path: Path) -> None:
    kernel, tuner = on_device()
    tuner._do_bench = lambda call, quantiles: pytest.fail("timed")
    x = torch.zeros(16, device="cuda")
    with pinned(tmp_path, 0):
        kernel[(1,)](x, 8, 3)
    assert x.tolist() == [11.0] * 16
    assert tuner.best_config is tuner.configs[0]
    assert (tmp_path / "rank_0.json").exists()
