"""Which comparisons `scripts/bench_model.py` is asked for, as composed configs (BENCH-1, BENCH-6)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from src.code_identity import code_record
from src.compose import compose
from src.config import Config
from src.digest import identity
from src.errors import UserError

LEARNED = "learned"
MOST = 24
"""Comparisons of one command at most (BENCH-6)."""


@dataclass(frozen=True)
class Options:
    """What a comparison is asked for."""

    precisions: tuple[str, ...]
    """Of our side."""
    peer: str | None
    """The other side: `transformers`; `eager`, our own with reference kernels; `plain`, our own without the
    overrides of `ours`; None: ours alone."""
    peer_precision: str
    """Of transformers; eager has that of ours."""
    peer_clips: bool
    peer_compiles: tuple[str, ...]
    """Values of `backend.compile` of the peer, each a side of its own."""
    routings: tuple[str | None, ...]
    """`learned`, or values of `balance.force`; None is what the case says."""
    tokens: tuple[int | None, ...]
    """Tokens of a step; None is what the case says."""
    blocks: int
    steps: int
    warmup: int
    profiles: bool
    ours: tuple[str, ...]
    """Overrides of our side alone."""
    overrides: tuple[str, ...]
    """Overrides of both sides."""

    @property
    def total_steps(self) -> int:
        """More steps than any side makes: those of the peer stand in each comparison with one of ours."""
        return 100 + self.warmup + len(self.precisions) * self.blocks * (self.steps + 1)


@dataclass(frozen=True)
class Group:
    """Our side in several precisions against one form of the peer."""

    case: str
    ours: tuple[Config, ...]
    peer: Config | None
    engine: str | None
    """Name of the peer."""

    @property
    def name(self) -> str:
        """What the console calls it."""
        first = self.ours[0]
        tokens = first.global_batch_size * first.sequence_length
        routing = LEARNED if first.balance.force == "none" else first.balance.force
        return f"{self.case}, {routing} routing, {tokens:,} tokens a step"

    def comparison(self, ours: Config, overrides: Sequence[str]) -> dict[str, object]:
        """What makes a measurement of `ours` in this group the same one again, whichever command asks."""
        parts = [ours, *([] if self.peer is None else [self.peer])]
        digests = [identity(replace(config, max_steps=1)) for config in parts]
        whole = hashlib.sha256(" ".join([*digests, str(self.engine)]).encode()).hexdigest()
        code = code_record().code_identity
        return {"name": self.case, "ours": list(overrides), "identity": whole[:16], "code": code[:16]}


def groups_of(cases: Sequence[str], options: Options, skip: list[str]) -> list[Group]:
    """Every comparison, composed; what a model has no use for is named in `skip`.

    Raises:
        UserError: a case, an override, or what they say together is wrong; or there are too many.
    """
    count = prod(map(len, (cases, options.routings, options.tokens, options.precisions)))
    count *= 1 if options.peer is None else len(options.peer_compiles)
    if count > MOST:
        message = f"{count} comparisons: cases x routings x tokens x precisions x forms of the peer"
        raise UserError(f"{message}; one command takes {MOST} at most")
    found: list[Group] = []
    for case in cases:
        base = compose([f"experiment=bench/{case}", *options.overrides]).config
        for routing, tokens in product(options.routings, options.tokens):
            if routing in (None, LEARNED) or base.model.num_experts:
                found += _groups(case, _words(base, routing, tokens), options)
            else:
                skip.append(f"{case} has no experts: no {routing} routing")
    return found


def _words(base: Config, routing: str | None, tokens: int | None) -> list[str]:
    """Routing and size of a step as overrides."""
    found = [] if routing is None else [f"balance.force={'none' if routing == LEARNED else routing}"]
    if tokens is not None:
        found.append(f"global_batch_size={max(1, tokens // base.sequence_length)}")
    return found


def _groups(case: str, words: Sequence[str], options: Options) -> Iterator[Group]:
    """In bf16 states our side clips only as transformers does; against itself it always clips."""

    def side(precision: str, clips: bool, *more: str) -> Config:
        """As training composes it."""
        first = [f"experiment=bench/{case}", f"precision={precision}", f"max_steps={options.total_steps}"]
        clipping = [] if clips else ["optimizer.max_norm=null"]
        return compose([*first, *clipping, *words, *options.overrides, *more]).config

    always = options.peer == "eager" or options.peer_clips
    clips = {precision: precision != "bf16" or always for precision in options.precisions}
    ours = {p: side(p, clips[p], "backend=native", *options.ours) for p in options.precisions}
    if options.peer is None:
        yield Group(case, tuple(ours.values()), None, None)
        return
    for form in options.peer_compiles:
        compiles = f"backend.compile={form}"
        if options.peer == "transformers":
            theirs = ("backend=transformers", compiles)
            peer = side(options.peer_precision, options.peer_clips, *theirs)
            yield Group(case, tuple(ours.values()), peer, options.peer)
        else:
            kernels = ["kernels=eager"] if options.peer == "eager" else []
            for precision, config in ours.items():
                peer = side(precision, clips[precision], "backend=native", *kernels, compiles)
                yield Group(case, (config,), peer, options.peer)


def split_overrides(text: str) -> list[str]:
    """`a=1,b=[2,3]` as two overrides: a comma separates where a key and `=` follow it."""
    return re.split(r",(?=[+~]{0,2}[A-Za-z_][\w.]*=)", text)
