"""End to end: a case is our backend in each precision against a peer, in one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.bench import compare, facts
from src.bench.clock import Ceilings
from src.bench.groups import Profile, profile
from src.bench.lines import gib, line_of
from src.bench.side import GIB, Side, opened
from src.compose import compose
from src.config import Config
from src.trainer.runtime import Runtime


@dataclass(frozen=True)
class Options:
    """What a comparison is asked for."""

    precisions: tuple[str, ...]
    """Of our side."""
    peer: str | None
    """The backend of the other side; None measures ours alone."""
    peer_precision: str
    peer_clips: bool
    peer_compiles: tuple[str, ...]
    """Values of `backend.compile` of the peer, each a side of its own."""
    tokens: int | None
    """Tokens of a step; None is what the case says."""
    blocks: int
    steps: int
    warmup: int
    profiles: bool
    overrides: tuple[str, ...]

    @property
    def total_steps(self) -> int:
        """More steps than any side makes: those of the peer stand in each comparison with one of ours."""
        return 100 + self.warmup + len(self.precisions) * self.blocks * (self.steps + 1)


def compose_side(
    case: str, backend: str, precision: str, clips: bool, options: Options, compiles: str = "auto"
) -> Config:
    """The config of a side, as training composes it.

    Raises:
        UserError: the case, an override, or what they say together is wrong.
    """
    words = [f"experiment=bench/{case}", f"backend={backend}", f"precision={precision}"]
    words += [f"backend.compile={compiles}", f"max_steps={options.total_steps}"]
    words += [*([] if clips else ["optimizer.max_norm=null"])]
    if options.tokens is not None:
        length = compose([*words, *options.overrides]).config.sequence_length
        words.append(f"global_batch_size={max(1, options.tokens // length)}")
    return compose([*words, *options.overrides]).config


def configs_of(case: str, options: Options) -> tuple[list[Config], list[Config]]:
    """Ours, one a precision, and the peer's. In bf16 states ours clips as the peer does, else always."""
    ours = [
        compose_side(case, "native", precision, precision != "bf16" or options.peer_clips, options)
        for precision in options.precisions
    ]
    if options.peer is None:
        return ours, []
    peer, precision, clips = options.peer, options.peer_precision, options.peer_clips
    forms = options.peer_compiles
    return ours, [compose_side(case, peer, precision, clips, options, form) for form in forms]


@dataclass(frozen=True)
class Result:
    """One side of one comparison; the side itself may be gone."""

    line: dict[str, Any]
    profile: Profile | None


class Bench:
    """Measures cases in one process; an error ends a comparison, not the others."""

    def __init__(
        self, options: Options, runtime: Runtime, ceilings: Ceilings, scratch: Path, say: compare.Say
    ) -> None:
        self._options, self._runtime, self._ceilings = options, runtime, ceilings
        self._scratch, self._say = scratch, say
        self._floor = compare.Floor(runtime.device, say)
        self._clock = facts.query_number(runtime.device, facts.CLOCK)
        self.failed: list[str] = []
        """What ended in an error."""

    def case(self, case: str, done: Callable[[list[Result]], None]) -> None:
        """Each form of the peer, ours in each precision against it; `done` gets each comparison's results."""
        ours, peers = configs_of(case, self._options)
        if not peers:
            self._each(case, ours, None, done)
        for theirs in peers:
            self._against(case, ours, theirs, done)
            compare.collect(self._runtime.device)

    def _against(
        self, case: str, ours: Sequence[Config], theirs: Config, done: Callable[[list[Result]], None]
    ) -> None:
        """One form of the peer; no name holds it when the next one is built."""
        name = f"{case}-peer-{theirs.backend.compile}"
        with (
            self._surviving(case),
            self._warm(theirs, name, theirs.backend.name) as peer,
            self._floor.leaving(peer),
        ):
            self._each(case, ours, peer, done)

    def _each(
        self, case: str, ours: Sequence[Config], peer: Side | None, done: Callable[[list[Result]], None]
    ) -> None:
        for config in ours:
            with self._surviving(f"{case} {config.precision.name}"):
                done(self._alone(case, config) if peer is None else self._compare(case, config, peer))
            compare.collect(self._runtime.device)

    def _alone(self, case: str, config: Config) -> list[Result]:
        with self._warm(config, f"{case}-{config.precision.name}", "native") as side:
            for _ in range(self._options.blocks):
                side.block(self._options.steps)
            return [self._result(side, None, compare.noise(side))]

    def _compare(self, case: str, config: Config, peer: Side) -> list[Result]:
        self._floor.clear(peer)
        peer.blocks.clear()
        name = f"{case}-{config.precision.name}"
        with self._warm(config, name, "native") as side, self._floor.leaving(side):
            compare.check_same_start(side, peer)
            compare.alternate(side, peer, self._options.blocks, self._options.steps, self._floor, self._say)
            noise = compare.noise(side, peer)
            self._floor.bring(side, peer)
            first = self._result(side, peer, noise)
            self._floor.bring(peer, side)
            return [first, self._result(peer, None, noise)]

    @contextmanager
    def _warm(self, config: Config, directory: str, name: str) -> Iterator[Side]:
        """A side after its first steps."""
        with opened(config, self._runtime, self._scratch / directory, name) as side:
            side.warm(self._options.warmup)
            peak = gib(side, "allocated")
            memory = "" if peak is None else f", peak {peak:.1f} GiB, {side.state / GIB:.1f} between steps"
            self._say(f"  {name} {config.precision.name} is warm, first loss {side.loss(0):.4f}{memory}")
            yield side

    def _result(self, side: Side, peer: Side | None, noise: float) -> Result:
        traced = None
        if self._options.profiles:
            vocabulary = side.config.model.vocab_size
            assert vocabulary is not None
            traced = profile(side.step, side.device, vocabulary)
        return Result(line_of(side, peer, self._ceilings, self._clock, traced, noise), traced)

    @contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """Note an error and go on; its traceback would keep the memory of a side."""
        try:
            yield
        except Exception as error:
            self._say(traceback.format_exc())
            self.failed.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}")
