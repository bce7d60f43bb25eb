"""End to end: our backend in each precision against a peer, in one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from src.bench import compare, facts
from src.bench.cases import Group, Options
from src.bench.clock import Ceilings
from src.bench.groups import Profile, profile
from src.bench.lines import Setting, done_before, gib, line_of, without_room
from src.bench.side import GIB, Side, opened
from src.config import Config
from src.trainer.runtime import Runtime


@dataclass(frozen=True)
class Result:
    """One side of one comparison; the side itself may be gone."""

    line: dict[str, Any]
    profile: Profile | None


Done = Callable[[list[Result]], None]


class Bench:
    """Measures groups in one process; an error ends a comparison, not the others."""

    def __init__(
        self,
        options: Options,
        runtime: Runtime,
        ceilings: Ceilings,
        scratch: Path,
        known: Sequence[dict[str, Any]],
        done: Done,
        say: compare.Say,
    ) -> None:
        """`known` are lines of before, which need not be measured again; `done` gets each result."""
        self._options, self._runtime, self._scratch = options, runtime, scratch
        self._known, self._done, self._say = known, done, say
        self._floor = compare.Floor(runtime.device, say)
        clock = facts.query_number(runtime.device, facts.CLOCK)
        self._setting = Setting(runtime.device, ceilings, clock)
        self.failed: list[str] = []
        """What ended in an error."""

    def group(self, group: Group) -> None:
        """Ours in each precision against one form of the peer."""
        self._say(group.name)
        left = [config for config in group.ours if not self._was_done(group, config)]
        while left:
            left = self._without_peer(group, left) if group.peer is None else self._against(group, left)
            compare.collect(self._runtime.device)

    def _was_done(self, group: Group, config: Config) -> bool:
        device = self._runtime.device
        expected = {
            "commit": facts.origin()["commit"],
            "versions": facts.versions(device),
            "card": facts.card(device, None)["name"],
            "comparison": group.comparison(config, self._options.ours),
            "engine": "native",
        }
        timed = self._options.blocks * self._options.steps
        date = done_before(self._known, expected, timed, self._options.profiles)
        if date is not None:
            self._say(f"  {config.precision.name} was measured {date}: skipped; --again measures anew")
        return date is not None

    def _against(self, group: Group, left: list[Config]) -> list[Config]:
        """Those that are left to do: none, or what follows one for which the device had no room.

        What lay in host memory then is not to be trusted, so the peer is built anew; no name holds it.
        """
        theirs, engine = group.peer, group.engine
        assert theirs is not None
        assert engine is not None
        name = f"{group.case}-peer-{theirs.backend.compile}"
        with self._surviving(f"{group.case} {engine}"):
            with (
                self._room(group, left[0], theirs, engine),
                self._warm(theirs, name, engine) as peer,
                self._floor.leaving(peer),
            ):
                return self._each(group, left, peer)
            return self._without_peer(group, left)
        return []

    def _without_peer(self, group: Group, left: list[Config]) -> list[Config]:
        for config in left:
            with (
                self._surviving(f"{group.case} {config.precision.name}"),
                self._room(group, config, config, "native"),
            ):
                self._alone(group, config)
            compare.collect(self._runtime.device)
        return []

    def _each(self, group: Group, left: list[Config], peer: Side) -> list[Config]:
        for index, config in enumerate(left):
            fitted = False
            with self._surviving(f"{group.case} {config.precision.name}"):
                with self._room(group, config, config, "native"):
                    self._compare(group, config, peer)
                    fitted = True
                if not fitted:
                    return left[index + 1 :]
            compare.collect(self._runtime.device)
        return []

    def _alone(self, group: Group, config: Config) -> None:
        with self._warm(config, f"{group.case}-{config.precision.name}", "native") as side:
            for _ in range(self._options.blocks):
                side.block(self._options.steps)
            self._done([self._result(group, config, side, "native", None, compare.noise(side))])

    def _compare(self, group: Group, config: Config, peer: Side) -> None:
        self._floor.clear(peer)
        peer.blocks.clear()
        name = f"{group.case}-{config.precision.name}"
        with self._warm(config, name, "native") as side, self._floor.leaving(side):
            compare.check_same_start(side, peer)
            compare.alternate(side, peer, self._options.blocks, self._options.steps, self._floor, self._say)
            noise = compare.noise(side, peer)
            self._floor.bring(side, peer)
            first = self._result(group, config, side, "native", peer, noise)
            self._floor.bring(peer, side)
            self._done([first, self._result(group, config, peer, peer.name, None, noise)])

    @contextmanager
    def _warm(self, config: Config, directory: str, name: str) -> Iterator[Side]:
        """A side after its first steps."""
        with opened(config, self._runtime, self._scratch / directory, name) as side:
            side.warm(self._options.warmup)
            peak = gib(side, "allocated")
            memory = "" if peak is None else f", peak {peak:.1f} GiB, {side.state / GIB:.1f} between steps"
            self._say(f"  {name} {config.precision.name} is warm, first loss {side.loss(0):.4f}{memory}")
            yield side

    def _result(
        self, group: Group, ours: Config, side: Side, engine: str, peer: Side | None, noise: float
    ) -> Result:
        traced = None
        if self._options.profiles:
            vocabulary = side.config.model.vocab_size
            assert vocabulary is not None
            traced = profile(side.step, side.device, vocabulary)
        setting = self._setting_of(group, ours)
        return Result(line_of(side, setting, engine, peer, traced, noise), traced)

    def _setting_of(self, group: Group, ours: Config) -> Setting:
        return replace(self._setting, comparison=group.comparison(ours, self._options.ours))

    @contextmanager
    def _room(self, group: Group, ours: Config, config: Config, engine: str) -> Iterator[None]:
        """Too little memory for a side is its result (BENCH-6); the traceback would keep what it has."""
        missing = ""
        try:
            yield
        except torch.OutOfMemoryError as error:
            missing = str(error).splitlines()[0]
        if missing:
            self._say(f"  {engine} {config.precision.name}: {missing}")
            line = without_room(config, self._setting_of(group, ours), engine)
            self._done([Result(line, None)])

    @contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """Note an error and go on; its traceback would keep the memory of a side."""
        try:
            yield
        except Exception as error:
            self._say(traceback.format_exc())
            self.failed.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}")
