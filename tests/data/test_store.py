"""Complete or absent, built once (STORE-3 to STORE-5, STORE-8, LEASE-3, LEASE-4, LEASE-5)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from src.errors import UserError
from src.trainer.data import store as module
from src.trainer.data.keys import Record, key_of
from src.trainer.data.lease import Lease, Watch
from src.trainer.data.store import Artifact, NotReadyError, Store, read_manifest, verify

RECORD: Record = {"format": 1, "what": "ever"}
KEY = key_of(RECORD)


class Builder:
    """Writes two files and counts how often."""

    def __init__(self, content: bytes = b"ids") -> None:
        self.calls = 0
        self.content = content

    def __call__(self, directory: Path, lease: Lease) -> Record:
        self.calls += 1
        (directory / "a.bin").write_bytes(self.content)
        (directory / "b.idx").write_bytes(b"offsets")
        return {"count": 3}


def make(root: Path, lines: list[str] | None = None, timeout: float = 60) -> Store:
    return Store(root, timeout, (lines if lines is not None else []).append)


def ensure(store: Store, build: Any, record: Record = RECORD) -> tuple[Artifact, bool]:
    return store.ensure("tokens", record, build, space=2**20)


def names(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_built_once_then_found(tmp_path: Path) -> None:
    """STORE-3, STORE-4."""
    builder = Builder()
    artifact, built = ensure(make(tmp_path), builder)
    again, built_again = ensure(make(tmp_path), builder)
    assert (built, built_again, builder.calls) == (True, False, 1)
    assert artifact == again
    assert artifact.manifest["record"] == RECORD
    assert artifact.manifest["files"]["a.bin"]["size"] == 3
    assert names(tmp_path) == [f"tokens/{KEY}/{n}" for n in ("a.bin", "b.idx", "manifest.json")]
    ensure(make(tmp_path), builder, {"format": 2})
    assert builder.calls == 2
    assert verify(artifact.path, KEY) == artifact.manifest


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


DAMAGE = {
    "a.bin truncated": (lambda d: os.truncate(d / "a.bin", 2), "a.bin"),
    "a.bin empty": (lambda d: os.truncate(d / "a.bin", 0), "a.bin"),
    "b.idx missing": (lambda d: (d / "b.idx").unlink(), "b.idx"),
    "b.idx longer": (lambda d: (d / "b.idx").write_bytes(b"offsets and more"), "b.idx"),
    "manifest missing": (lambda d: (d / "manifest.json").unlink(), "manifest.json"),
    "manifest empty": (lambda d: os.truncate(d / "manifest.json", 0), "manifest.json"),
    "manifest cut": (lambda d: os.truncate(d / "manifest.json", 100), "manifest.json"),
    "directory a file": (lambda d: (shutil.rmtree(d), d.touch()), "manifest.json"),
    "manifest a list": (lambda d: (d / "manifest.json").write_text("[]"), "manifest.json"),
    "manifest edited": (
        lambda d: (d / "manifest.json").write_text((d / "manifest.json").read_text().replace("3", "4", 1)),
        "manifest.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen_named_moved_aside_and_rebuilt(tmp_path: Path, damage: str) -> None:
    """STORE-5."""
    artifact, _ = ensure(make(tmp_path), Builder())
    spoil, file = DAMAGE[damage]
    spoil(artifact.path)
    with pytest.raises(NotReadyError, match=file):
        make(tmp_path).open("tokens", KEY)
    lines: list[str] = []
    builder = Builder()
    assert ensure(make(tmp_path, lines), builder) == (artifact, True)
    assert builder.calls == 1
    (bad,) = (tmp_path / "tokens").glob(f"{KEY}.bad-*")
    assert any(bad.name in line and file in line for line in lines)
    assert verify(artifact.path, KEY) == artifact.manifest


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    """STORE-5: a flipped byte in the manifest; only flips in white space are harmless."""
    artifact, _ = ensure(make(tmp_path), Builder())
    path = artifact.path / "manifest.json"
    whole = path.read_bytes()
    for at, byte in enumerate(whole):
        if bytes((byte,)).isspace():
            continue
        flip(path, at)
        with pytest.raises(NotReadyError, match=r"manifest\.json|a\.bin|b\.idx"):
            read_manifest(artifact.path, KEY)
        path.write_bytes(whole)


def test_a_flipped_byte_of_data_is_found_by_verify_alone(tmp_path: Path) -> None:
    artifact, _ = ensure(make(tmp_path), Builder())
    flip(artifact.path / "a.bin", 1)
    assert read_manifest(artifact.path, KEY) == artifact.manifest
    with pytest.raises(NotReadyError, match=r"a\.bin"):
        verify(artifact.path, KEY)


def test_another_key_in_our_place_is_not_ours(tmp_path: Path) -> None:
    artifact, _ = ensure(make(tmp_path), Builder())
    artifact.path.rename(artifact.path.with_name("0" * 16))
    with pytest.raises(NotReadyError, match=KEY):
        make(tmp_path).open("tokens", "0" * 16)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def build(directory: Path, lease: Lease) -> Record:
        (directory / "a.bin").write_bytes(b"half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        ensure(make(tmp_path), build)
    assert names(tmp_path) == []
    assert ensure(make(tmp_path), Builder())[1]


@pytest.mark.parametrize("stage", ["build", "publish"])
def test_a_full_disk_says_what_is_needed_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """STORE-8."""

    def full(*_: Any) -> Record:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if stage == "publish":
        monkeypatch.setattr(module, "_sync", full)
    with pytest.raises(UserError, match=r"needs up to 1\.0 MiB.*free") as caught:
        ensure(make(tmp_path), full if stage == "build" else Builder())
    assert caught.value.code == 4
    assert names(tmp_path) == []


@pytest.mark.parametrize("place", ["lease", "beat"])
def test_a_disk_that_is_full_from_the_start_leaves_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """STORE-8, LEASE-1: the next starter need not wait for a holder that never was."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if place == "lease":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr(Path, "replace", full)
        with pytest.raises(UserError, match=r"no space left.*needs up to 1\.0 MiB"):
            ensure(make(tmp_path / "new"), lambda *_: pytest.fail("built without a durable lease"))
    assert names(tmp_path) == []
    assert ensure(make(tmp_path / "new"), Builder())[1]


def test_a_store_that_cannot_be_written_is_a_message(tmp_path: Path) -> None:
    """Code 4 with the path and the system's reason; what is there already is found without writing."""
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=rf"cannot build below paths\.data={tmp_path}/file: .*Not a dir"
    ) as caught:
        ensure(make(tmp_path / "file"), Builder())
    assert caught.value.code == 4


def test_an_error_of_the_system_ends_the_build(tmp_path: Path) -> None:
    """Only a robbed builder goes back to waiting; one that holds its lease tells the cause once."""
    calls = []

    def build(directory: Path, lease: Lease) -> Record:
        calls.append(1)
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/some/file")

    with pytest.raises(UserError, match="/some/file: Input/output error") as caught:
        ensure(make(tmp_path), build)
    assert (caught.value.code, len(calls), names(tmp_path)) == (4, 1, [])


def test_nothing_is_published_before_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """STORE-4: files, then the manifest, then the directory, then the rename, then its parent."""
    events: list[str] = []
    sync, rename = module._sync, os.rename

    def note_sync(path: Path) -> None:
        events.append(path.name if path.is_file() else "parent" if path.name == "tokens" else "directory")
        sync(path)

    def note_rename(source: Any, target: Any) -> None:
        events.extend(["rename"] * (Path(target).name == KEY))
        rename(source, target)

    monkeypatch.setattr(module, "_sync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    ensure(make(tmp_path), Builder())
    assert events == ["a.bin", "b.idx", "manifest.json", "directory", "rename", "parent"]


def test_what_a_killed_builder_left_goes_with_the_next_build(tmp_path: Path) -> None:
    left = tmp_path / "tokens" / f".tmp-{KEY}-host-1-abc"
    other = tmp_path / "tokens" / ".tmp-0000000000000000-host-1-abc"
    for directory in (left, other):
        directory.mkdir(parents=True)
        (directory / "train.bin").write_bytes(b"half")
    ensure(make(tmp_path), Builder())
    assert not left.exists()
    assert other.exists()


def test_of_many_starters_one_builds(tmp_path: Path) -> None:
    """LEASE-1: the others wait and find it."""
    together = threading.Barrier(5)
    entered = threading.Event()
    builder, found, lines = Builder(), [], []

    def build(directory: Path, lease: Lease) -> Record:
        entered.wait(0.3)
        return builder(directory, lease)

    def start() -> None:
        together.wait()
        found.append(ensure(make(tmp_path, lines), build))

    threads = [threading.Thread(target=start) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert builder.calls == 1
    assert sorted(built for _, built in found) == [False] * 4 + [True]
    assert any("waiting for" in line for line in lines)


def test_what_was_published_before_the_lease_was_ours_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other builder may finish between a look at the store and the lease."""
    take = Lease.take

    def late(path: Path, attempt: str = "") -> Lease | None:
        monkeypatch.setattr(Lease, "take", take)
        ensure(make(tmp_path), Builder())
        return take(path)

    monkeypatch.setattr(Lease, "take", late)
    builder = Builder()
    assert not ensure(make(tmp_path), builder)[1]
    assert builder.calls == 0


def rob(root: Path) -> None:
    watch = Watch(root / "tokens" / f"{KEY}.d" / "lease")
    watch.verdict()
    assert watch.steal()


def test_a_robbed_builder_publishes_nothing_and_takes_what_the_thief_built(tmp_path: Path) -> None:
    """LEASE-4: stolen from while it builds, it deletes its own directory and goes back to waiting."""
    lines: list[str] = []
    thief = Builder(b"the thief's")

    def build(directory: Path, lease: Lease) -> Record:
        rob(tmp_path)
        ensure(make(tmp_path), thief)
        assert not directory.exists(), "a thief removes what the robbed one wrote"
        raise UserError("some reader's words for a file that is gone")

    artifact, built = ensure(make(tmp_path, lines), build)
    assert not built
    assert (artifact.path / "a.bin").read_bytes() == b"the thief's"
    assert any("lost" in line for line in lines)
    assert names(tmp_path) == [f"tokens/{KEY}/{n}" for n in ("a.bin", "b.idx", "manifest.json")]


def test_a_builder_robbed_before_publishing_stops(tmp_path: Path) -> None:
    calls = []

    def build(directory: Path, lease: Lease) -> Record:
        calls.append(1)
        fields = Builder()(directory, lease)
        if len(calls) == 1:
            rob(tmp_path)
        return fields

    assert ensure(make(tmp_path), build)[1]
    assert len(calls) == 2


def test_publishing_twice_is_harmless(tmp_path: Path) -> None:
    """LEASE-4: a rename onto a full directory fails, and what is there is checked."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    artifact, _ = ensure(make(tmp_path), Builder())
    for directory in (ours, theirs):
        directory.mkdir()
    (ours / "a.bin").write_bytes(b"x")
    module._publish(ours, artifact.path)
    assert verify(artifact.path, KEY) == artifact.manifest
    os.truncate(artifact.path / "a.bin", 0)
    with pytest.raises(NotReadyError, match=r"a\.bin"):
        module._publish(ours, artifact.path)


def test_a_dead_builder_is_followed(tmp_path: Path) -> None:
    """LEASE-3, through the store."""
    lease = Lease.take(tmp_path / "tokens" / f"{KEY}.d" / "lease")
    assert lease is not None
    text = json.loads(lease.path.read_text())
    lease.path.write_text(json.dumps({**text, "uuid": "gone", "pid_start": "1"}))
    lines: list[str] = []
    assert ensure(make(tmp_path, lines), Builder())[1]
    assert any("taking over" in line for line in lines)


def test_a_wait_ends_naming_the_owner_and_the_likely_cause(tmp_path: Path) -> None:
    """LEASE-5."""
    lease = Lease.take(tmp_path / "tokens" / f"{KEY}.d" / "lease")
    assert lease is not None
    with lease, pytest.raises(UserError, match=rf"{lease.owner.pid} on .*shared") as caught:
        ensure(make(tmp_path, timeout=0.25), Builder())
    assert caught.value.code == 4


def test_waits_double_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LEASE-5's polls: 0.1 s, doubling to 2 s."""
    lease = Lease.take(tmp_path / "tokens" / f"{KEY}.d" / "lease")
    assert lease is not None
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 8:
            lease.release()

    monkeypatch.setattr(module.time, "sleep", sleep)
    assert ensure(make(tmp_path), Builder())[1]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
