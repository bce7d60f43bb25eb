"""What a trace in `RUN/profile` says of its steps: time by group, launches, waits, copies (BENCH-5)."""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.bench.groups import PRODUCT, Profile, Span, summarise
from src.trainer.callbacks.profiling import END

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that are work of a GPU."""
CALLS = ("cuda_runtime", "cuda_driver")
"""Categories that are calls of the host to a GPU."""
WAITS = re.compile(r"^cu(da)?(Device|Stream|Event|Ctx)Synchronize|^cudaMemcpy$|^cuMemcpyDtoH_v2$")
"""Calls that return only once the device has come so far."""
TO_HOST = re.compile(r"DtoH|Device -> (Host|Pageable|Pinned)")
"""Copies from the device to the host."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One step of the window."""

    number: int
    """As the log counts it."""
    logs: bool
    """It reads metrics back, evaluates or saves, which other steps do not."""
    launches: int
    """Kernels, copies and fills of the device; on a CPU operations."""
    waits: Mapping[str, int]
    """Call that waits for the device → how often."""
    copies: int
    """Copies from the device to the host."""


@dataclass(frozen=True)
class Report:
    """A trace, read."""

    device: str
    profile: Profile
    steps: Sequence[Step]

    def json(self, kernels: int) -> dict[str, Any]:
        """All of it as one object, with the largest kernels."""
        rows = self.profile.kernels[:kernels]
        names = ("name", "group", "ms", "launches")
        return {
            "device": self.device,
            "steps": [{**vars(step), "waits": dict(step.waits)} for step in self.steps],
            "share": self.profile.share,
            "kernels": [dict(zip(names, row, strict=True)) for row in rows],
        }

    def lines(self, kernels: int) -> list[str]:
        """Groups, the largest kernels, and a line a step."""
        groups = sorted(self.profile.share.items(), key=lambda item: -item[1])
        unit = "kernels" if self.device == "cuda" else "operations"
        return [
            *(f"{group:<10} {share:6.1%}" for group, share in groups if share),
            *("", *self.profile.lines(kernels), ""),
            f"{'step':>6}  {unit:>10}  {'waits':>5}  {'to host':>7}",
            *(self._row(step) for step in self.steps),
        ]

    def _row(self, step: Step) -> str:
        numbers = f"{step.number:>6}  {step.launches:>10}  {sum(step.waits.values()):>5}  {step.copies:>7}"
        waits = ", ".join(f"{name} x{count}" for name, count in step.waits.items())
        why = ["reads metrics, evaluates or saves"] if step.logs else []
        return "  ".join([numbers, *why, waits]).rstrip()


def read(path: Path) -> Report:
    """A trace that `profile.steps` has written.

    Raises:
        ValueError: it is no such trace.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = json.load(file)
    if "manyhead" not in found:
        raise ValueError(f"{path} was not written by profile.steps: it does not say which steps it holds")
    return report(found["traceEvents"], found["manyhead"])


def report(events: Sequence[Event], facts: Mapping[str, Any]) -> Report:
    """Of the events of a trace; `facts` as `callbacks.profiling.facts` gives them."""
    timed = [event for event in events if event.get("ph") == "X"]
    on_gpu = facts["device"] == "cuda"
    work = [e for e in timed if e.get("cat") in ON_DEVICE]
    spans = [Span(e["name"], e["ts"], e["ts"] + e["dur"]) for e in work] if on_gpu else own_times(timed)
    steps = steps_of(timed, facts) if on_gpu else _host_steps(timed, facts)
    profile = summarise(spans, head_times(timed, facts["vocabulary"], on_gpu), len(steps))
    return Report(facts["device"], profile, steps)


def steps_of(events: Sequence[Event], facts: Mapping[str, Any]) -> list[Step]:
    """Each step's launches, waits and copies, by the step in which the host asked for them."""
    calls = [e for e in events if e.get("cat") in CALLS]
    asked: dict[int, float] = {
        e["args"]["correlation"]: e["ts"] for e in calls if "correlation" in e.get("args", {})
    }
    work = [e for e in events if e.get("cat") in ON_DEVICE]
    starts = _starts(events)
    end: float = min([e["ts"] for e in events if e["name"] == END], default=float("inf"))
    launches, copies = Counter[int](), Counter[int]()
    waits: dict[int, Counter[str]] = defaultdict(Counter)
    for event in work:
        call = asked.get(event["args"].get("correlation"))
        index = bisect_right(starts, event["ts"] if call is None else call) - 1
        launches[index] += 1
        copies[index] += event["cat"] == "gpu_memcpy" and bool(TO_HOST.search(event["name"]))
    for event in calls:
        if WAITS.match(event["name"]) and event["ts"] < end:
            waits[bisect_right(starts, event["ts"]) - 1][event["name"]] += 1
    return [
        Step(number, number in facts["logging"], launches[index], waits[index], copies[index])
        for index, number in enumerate(range(facts["first"], facts["last"] + 1))
    ]


def _host_steps(events: Sequence[Event], facts: Mapping[str, Any]) -> list[Step]:
    starts = _starts(events)
    counts = Counter(bisect_right(starts, e["ts"]) - 1 for e in events if e.get("cat") == "cpu_op")
    numbers = enumerate(range(facts["first"], facts["last"] + 1))
    return [Step(number, number in facts["logging"], counts[index], {}, 0) for index, number in numbers]


def _starts(events: Iterable[Event]) -> list[float]:
    """Where each step begins on the host."""
    marks = ("ProfilerStep#", "user_annotation")
    return sorted(e["ts"] for e in events if e["name"].startswith(marks[0]) and e.get("cat") == marks[1])


def own_times(events: Iterable[Event]) -> list[Span]:
    """Operations of the host, each without those that it called: nested ones lie inside on one thread."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and "::" in event["name"]:
            threads[event["tid"]].append(event)
    found = []
    for thread in threads.values():
        thread.sort(key=lambda e: (e["ts"], -e["dur"]))
        inside: list[int] = []
        own = [event["dur"] for event in thread]
        for index, event in enumerate(thread):
            while inside and _end(thread[inside[-1]]) <= event["ts"]:
                inside.pop()
            if inside:
                own[inside[-1]] -= event["dur"]
            inside.append(index)
        found += [Span(e["name"], e["ts"], e["ts"] + max(0.0, t)) for e, t in zip(thread, own, strict=True)]
    return found


def _end(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def head_times(events: Sequence[Event], vocabulary: int, on_gpu: bool) -> Counter[str]:
    """Kernel → microseconds under products that have the vocabulary among their sizes."""
    products = {
        e["args"]["External id"]: e
        for e in events
        if e.get("cat") == "cpu_op" and PRODUCT.search(e["name"]) and _has(e, vocabulary)
    }
    found: Counter[str] = Counter()
    timed = [e for e in events if e.get("cat") == "kernel"] if on_gpu else products.values()
    for event in timed:
        if event["args"].get("External id") in products:
            found[event["name"]] += event["dur"]
    return found


def _has(event: Event, size: int) -> bool:
    return any(isinstance(dims, list) and size in dims for dims in event["args"].get("Input Dims", []))
