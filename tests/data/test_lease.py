"""One holder at a time (LEASE-1 to LEASE-4)."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from src.trainer.data import lease as module
from src.trainer.data.lease import Lease, LeaseHeld, LeaseLost, Watch, beat_path, claim
from src.trainer.data.owner import Owner, read_owner

ROOT = Path(__file__).parents[2]


class Clock:
    """A monotonic clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "key.d" / "lease"


def foreign(path: Path, **changes: object) -> Owner:
    """A lease as a process of another host leaves it."""
    owner = dataclasses.replace(Owner.here(""), host="elsewhere", **changes)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(owner)))
    return owner


def beat(path: Path, counter: int) -> None:
    beat_path(path).write_text(f"x {counter}\n")


def test_one_takes_it_and_leaves_nothing_behind(path: Path) -> None:
    """LEASE-1."""
    with Lease.take(path, "run#1") or pytest.fail("free lease not taken") as held:
        assert Lease.take(path) is None
        assert read_owner(path) == held.owner
        assert held.owner.attempt == "run#1"
        held.check()
    assert list(path.parent.iterdir()) == []
    assert Watch(path).verdict() == "free"


def test_the_holder_beats(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEASE-2: uuid and a counter that grows, from a thread."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    with claim(path) as held:
        deadline = time.monotonic() + 10
        while beat_path(path).read_text() in ("", f"{held.owner.uuid} 0\n") and time.monotonic() < deadline:
            time.sleep(0.005)
        uuid, counter = beat_path(path).read_text().split()
        assert (uuid, int(counter) > 0) == (held.owner.uuid, True)


def test_a_beat_is_replaced_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEASE-2: a waiter never reads half of one; it is a new file each time."""
    with claim(path) as held, beat_path(path).open() as old:
        held._beat(1)
        assert os.fstat(old.fileno()).st_ino != beat_path(path).stat().st_ino
        assert old.read() == f"{held.owner.uuid} 0\n"


def test_a_hiccup_of_the_storage_does_not_end_the_beat(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEASE-2: the holder lives on, or a waiter would rob it 30 s later."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    plain, went_on = Lease._beat, threading.Event()

    def beat_badly(self: Lease, counter: int) -> None:
        if counter == 1:
            raise OSError("stale file handle")
        plain(self, counter)
        if counter > 1:
            went_on.set()

    monkeypatch.setattr(Lease, "_beat", beat_badly)
    with claim(path):
        assert went_on.wait(10)


def test_release_waits_for_the_beat_under_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat written after the release would stand beside the next holder's lease."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    plain, under_way = Lease._beat, threading.Event()

    def beat_slowly(self: Lease, counter: int) -> None:
        if counter:
            under_way.set()
            time.sleep(0.2)
        plain(self, counter)

    monkeypatch.setattr(Lease, "_beat", beat_slowly)
    with claim(path) as held:
        assert under_way.wait(10)
    held._thread.join(10)
    assert list(path.parent.iterdir()) == []


def test_a_beating_holder_on_another_host_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEASE-2: seen by its beat, since its pid means nothing here."""
    owner = foreign(path)
    counts = iter(range(50))
    monkeypatch.setattr(module.time, "sleep", lambda seconds: beat(path, next(counts)))
    with pytest.raises(LeaseHeld, match=r"elsewhere") as caught:
        claim(path)
    assert caught.value.owner == owner


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"boot_id": "an earlier boot"}, {"pid_start": ""}])
def test_only_a_pid_of_this_kernel_is_looked_up(path: Path, change: dict[str, str]) -> None:
    """LEASE-2: same host and boot, or the pid says nothing and silence decides."""
    path.parent.mkdir()
    owner = dataclasses.replace(Owner.here(""), pid=2**22 + 1, pid_start="7")
    for found, verdict in ((owner, "dead"), (dataclasses.replace(owner, **change), "silent")):
        path.write_text(json.dumps(dataclasses.asdict(found)))
        assert Watch(path).verdict() == verdict


def test_silence_is_measured_by_the_waiter(path: Path) -> None:
    """LEASE-2: 30 s without a change of the beat, whatever the file times say."""
    foreign(path)
    beat(path, 0)
    clock = Clock()
    watch = Watch(path, clock)
    assert watch.verdict() == "silent"
    clock.now += 29.9
    assert watch.verdict() == "silent"
    beat(path, 1)
    assert watch.verdict() == "beating"
    clock.now += 29.9
    assert watch.verdict() == "silent"
    clock.now += 0.2
    assert watch.verdict() == "dead"


def test_another_holder_starts_the_clock_again(path: Path) -> None:
    foreign(path)
    clock = Clock()
    watch = Watch(path, clock)
    watch.verdict()
    clock.now += 29
    foreign(path, uuid="second")
    assert watch.verdict() == "silent"
    clock.now += 29
    assert watch.verdict() == "silent"
    assert watch.owner is not None
    assert watch.owner.uuid == "second"


@pytest.mark.parametrize("content", [b"", b"{", b'{"uuid": "x"}', b"[]", b"\xff\x00"])
def test_a_lease_that_was_never_written_dies_of_silence(path: Path, content: bytes) -> None:
    """A builder killed between creating and writing its lease."""
    path.parent.mkdir()
    path.write_bytes(content)
    clock = Clock()
    watch = Watch(path, clock)
    assert watch.verdict() == "silent"
    clock.now += 30
    assert watch.verdict() == "dead"
    assert watch.steal()
    assert Watch(path).verdict() == "free"


def start_holder(path: Path) -> subprocess.Popen[str]:
    program = "\n".join(
        [
            "import sys, time",
            f"sys.path.insert(0, {str(ROOT)!r})",
            "from pathlib import Path",
            "from src.trainer.data.lease import claim",
            f"held = claim(Path({str(path)!r}), 'theirs')",
            "print('held', flush=True)",
            "time.sleep(120)",
        ]
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_living_holder_is_named_and_a_killed_one_is_followed_at_once(path: Path) -> None:
    """LEASE-2's shortcut on one host, also while the killed process is a zombie."""
    holder = start_holder(path)
    try:
        started = time.monotonic()
        with pytest.raises(LeaseHeld) as caught:
            claim(path)
        assert caught.value.owner is not None
        assert (caught.value.owner.pid, caught.value.owner.attempt) == (holder.pid, "theirs")
        assert str(holder.pid) in str(caught.value)
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        with claim(path) as ours:
            assert ours.owner.pid != holder.pid
        assert time.monotonic() - started < 10
    finally:
        holder.kill()
        holder.wait()


def test_a_reused_pid_is_not_the_holder(path: Path) -> None:
    owner = dataclasses.replace(Owner.here(""), pid_start="1")
    path.parent.mkdir()
    path.write_text(json.dumps(dataclasses.asdict(owner)))
    assert Watch(path).verdict() == "dead"


def test_of_two_thieves_one_wins(path: Path) -> None:
    """LEASE-3: the second one's rename fails, and it neither takes nor harms the winner's lease."""
    foreign(path)
    first, second = Watch(path), Watch(path)
    first.verdict(), second.verdict()
    assert first.steal()
    assert not second.steal()
    with claim(path) as winner:
        assert not second.steal()
        winner.check()
    assert list(path.parent.iterdir()) == []


def test_a_robbed_holder_notices_and_leaves_the_thief_alone(path: Path) -> None:
    """LEASE-4."""
    robbed = claim(path)
    thief = Watch(path)
    thief.verdict()
    assert thief.steal()
    with pytest.raises(LeaseLost):
        robbed.check()
    with claim(path) as new:
        with pytest.raises(LeaseLost, match=str(new.owner.pid)):
            robbed.check()
        robbed.release()
        new.check()
        assert read_owner(path) == new.owner


def test_a_robbed_holder_stops_beating(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    robbed = claim(path)
    foreign(path)
    robbed._thread.join(timeout=10)
    assert not robbed._thread.is_alive()
    beat(path, 5)
    robbed.release()
    assert beat_path(path).read_text() == "x 5\n"


def test_the_lock_of_a_run_has_its_beat_beside_it(tmp_path: Path) -> None:
    with claim(tmp_path / "run.lock"):
        assert sorted(p.name for p in tmp_path.iterdir()) == ["run.lock", "run.lock.beat"]
