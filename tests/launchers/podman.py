"""A real podman for tests; `python -m tests.launchers.podman` installs Debian's packages where missing."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys

PACKAGES = ("podman", "runc")
USER = 5309
"""Number of a user without a name, in whose place root tries a rootless podman."""


def limits() -> list[str]:
    """Limits that this process may hand on: podman's own are above them where root lacks a capability."""
    files, processes = (
        resource.getrlimit(what)[1] for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    )
    if min(files, processes) < 0:
        return []
    return [f"--ulimit=nofile={files}:{files}", f"--ulimit=nproc={min(files, processes)}"]


def missing() -> str | None:
    """Why no podman container can be started with this machine's own root file system."""
    if shutil.which("podman") is None:
        return "podman is not installed; python -m tests.launchers.podman does it on Debian"
    command = ["podman", "run", "--rm", "--network=host", "--ipc=host", *limits(), "--rootfs", "/:O", "true"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    return f"podman starts nothing here: {done.stderr.strip()[-200:]}" if done.returncode else None


def install() -> int:
    """Install the packages; 1 where that cannot be done."""
    if shutil.which("podman") is not None:
        return 0
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print("podman is missing; installing it takes root and apt-get", file=sys.stderr)
        return 1
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    words = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *PACKAGES]
    for command in (["apt-get", "update", "-qq"], words):
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(install())
