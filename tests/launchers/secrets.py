"""Secrets as a shell holds them, and a look for their values where anybody could read them (CFG-16)."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

SECRETS = {
    "WANDB_API_KEY": "s3cret-of-wandb-5f2a",
    "HF_TOKEN": "hf_s3cretOfTheHub7b",
    "HUGGING_FACE_HUB_TOKEN": "hf_s3cretOfTheOldHub9d",
    "MLFLOW_TRACKING_PASSWORD": "s3cret-of-mlflow-c1",
    "AWS_SECRET_ACCESS_KEY": "s3cret/of+aws-33",
    "MY_OWN_CREDENTIALS": "s3cret-of-mine-88",
}


def found_in(root: Path) -> list[str]:
    """Files below `root` with the name of the secret that each holds, but for copies of this code."""
    return [
        f"{path}: {name}"
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and ".code" not in path.parts
        for name, value in SECRETS.items()
        if value.encode() in path.read_bytes()
    ]


def named_in(text: str) -> list[str]:
    """Names of the secrets whose values stand in the text."""
    return [name for name, value in SECRETS.items() if value in text]


class CommandLines:
    """Every command line of this machine while the context lasts, by looking again and again."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not self._over.wait(0.1):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    self.seen.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))

    def __enter__(self) -> CommandLines:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
