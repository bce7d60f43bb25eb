"""Where the time of a step goes, by the names of the kernels that ran (BENCH-4)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

STEPS = 3
"""Steps of a profile, after one that is thrown away."""

RULES: tuple[tuple[str, str], ...] = (
    ("optimizer", r"adam|grad_norm|lp_?norm|normtwo|multi_tensor|foreach|clip_grad|vector_norm"),
    ("attention", r"flash|fmha|attention|attn|sdpa|compute_dot_do_o|convert_dq|_cos_|_sin_|rope"),
    ("experts", r"group(ed)?_?(mm|gemm|problem)|swiglu|silu|expert|tail_kernel"),
    ("head", r"cross_entropy|logsumexp|log_softmax|nll_loss|ce_chunk"),
    ("permute", r"permute|combine|spread|index_?select|index_?put|indexing|gather|scatter|::index"),
    ("routing", r"top_?k|sort|radix|bincount|histogram|cumsum|scan|rout|softmax|sgemm|gemm_f32f32_f32f32"),
    ("dense", r"gemm|nvjet|cutlass|cublas|xmma|split_?k|wgmma|gemv|::(add|b)?mm\b|::linear|matmul"),
    ("norms", r"rms|layer_?norm|rsqrt|norm"),
)
"""Group → what the name of one of its kernels contains, the first rule that fits; else `other`."""

GROUPS = (
    *("experts", "dense", "attention", "head", "optimizer"),
    *("permute", "routing", "norms", "other", "idle"),
)
"""All groups, as BENCH-7 lists them."""

PRODUCT = re.compile(r"::(add)?mm$")
"""Operations that are one dense product."""

_RULES = [(group, re.compile(pattern, re.IGNORECASE)) for group, pattern in RULES]


@dataclass(frozen=True)
class Span:
    """One kernel's run; on a CPU one operation's, without those that it called."""

    name: str
    start: float
    """Microseconds, as `end`."""
    end: float


@dataclass(frozen=True)
class Profile:
    """What a few steps showed."""

    share: dict[str, float]
    """Group → share of the time from the first kernel's start to the last one's end; together 1."""
    kernels: list[tuple[str, str, float, float]]
    """Name, group, milliseconds and launches a step, the longest first."""

    def lines(self, count: int = 15) -> list[str]:
        """The largest kernels, aligned."""
        return [
            f"  {ms:9.3f} ms  x{launches:6.1f}  {group:<9}  {name[:90]}"
            for name, group, ms, launches in self.kernels[:count]
        ]


def group_of(name: str) -> str:
    """The group of a kernel by its name."""
    return next((group for group, pattern in _RULES if pattern.search(name)), "other")


def profile(step: Callable[[], object], device: torch.device, vocabulary: int) -> Profile:
    """Trace `STEPS` steps; products with `vocabulary` among their sizes belong to the head."""
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CPU, activity.CUDA] if device.type == "cuda" else [activity.CPU]
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=STEPS)
    events: list[Any] = []
    with torch.profiler.profile(
        activities=kinds,
        schedule=schedule,
        record_shapes=True,
        on_trace_ready=lambda done: events.extend(done.events()),
    ) as tracer:
        for index in range(STEPS + 1):
            step()
            if device.type == "cuda" and index in (0, STEPS):  # Between steps it would show as idle.
                torch.cuda.synchronize(device)
            tracer.step()
    return summarise(spans(events, device), head_times(events, vocabulary))


def spans(events: Iterable[Any], device: torch.device) -> list[Span]:
    """The kernels of a trace, or on a CPU the operations with the time that is their own."""
    found = []
    for event in events:
        if event.is_user_annotation or event.name.startswith("ProfilerStep"):
            continue
        start, end = event.time_range.start, event.time_range.end
        if device.type == "cuda" and event.device_type.name == "CUDA":
            found.append(Span(event.name, start, end))
        elif device.type == "cpu" and "::" in event.name:
            found.append(Span(event.name, start, start + event.self_cpu_time_total))
    return found


def head_times(events: Iterable[Any], vocabulary: int) -> Counter[str]:
    """Kernel → microseconds under products that have the vocabulary among their sizes."""
    found: Counter[str] = Counter()
    for event in events:
        if PRODUCT.search(event.name) and any(vocabulary in s for s in event.input_shapes if s):
            kernels = event.kernels or [event]
            for kernel in kernels:
                found[kernel.name] += getattr(kernel, "duration", None) or event.time_range.elapsed_us()
    return found


def summarise(kernels: Sequence[Span], head: Counter[str], steps: int = STEPS) -> Profile:
    """Shares by group, and the kernels by their time. Kernels that overlap share the busy time."""
    took: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for span in kernels:
        took[span.name] += span.end - span.start  # type: ignore[assignment]
        runs[span.name] += 1
    window, busy = window_and_busy(kernels)
    groups: Counter[str] = Counter()
    for name, time in took.items():
        part = min(time, head[name])
        groups["head"] += part
        groups[group_of(name)] += time - part
    scale = busy / (sum(took.values()) or 1) / (window or 1)
    share = {group: groups[group] * scale for group in GROUPS}
    share["idle"] = 1 - busy / window if window else 0.0
    rows = [
        (name, group_of(name), time / steps / 1e3, runs[name] / steps) for name, time in took.most_common()
    ]
    return Profile(share, rows)


def window_and_busy(kernels: Sequence[Span]) -> tuple[float, float]:
    """Microseconds from the first start to the last end, and those in which a kernel ran."""
    ordered = sorted(kernels, key=lambda span: span.start)
    busy, until = 0.0, float("-inf")
    for span in ordered:
        busy += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return (until - ordered[0].start, busy) if ordered else (0.0, 0.0)
