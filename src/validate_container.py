"""What is wrong with `container` beside the launcher, found before anything starts (CONT-1)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from src.config import Config, ContainerConfig
from src.errors import Problem

NAME = re.compile(r"[A-Za-z_*][A-Za-z0-9_*]*")
DECIDED = ("--name", "--label", "--rm", "--detach", "-d", "--entrypoint", "--interactive", "-i", "--rootfs")
"""Arguments that `container.args` may not have: a launch depends on its own."""
BY_NAME = ("-e", "--env", "--env-file", "--container-env")
"""A variable that came by an argument would show its value to everybody on the machine."""


def container_problems(config: Config) -> Iterator[Problem]:
    """Every contradiction of `container` and `launcher`, and each entry that no runtime could read."""
    wanted = config.container
    if wanted.name == "none":
        return
    yield from _place(config)
    yield from _image(wanted)
    yield from _mounts(wanted)
    for name in wanted.env:
        if not NAME.fullmatch(name):
            fix = "names only: values come from your shell, or from +env.NAME=VALUE"
            yield Problem("container.env", f"{name!r} is no name of a variable", fix, "CONT-1")
    for word in wanted.args:
        flag = word.partition("=")[0]
        if flag in BY_NAME:
            fix = "list its name in container.env, or type +env.NAME=VALUE"
            yield Problem("container.args", f"{flag} would put a value on a command line", fix, "CONT-1")
        elif flag in DECIDED:
            yield Problem("container.args", f"{flag} is decided by the launcher", "leave it out", "CONT-2")


def _place(config: Config) -> Iterator[Problem]:
    name, launcher = config.container.name, config.launcher.name
    if launcher == "direct":
        message = f"{name}, but with launcher=direct the ranks are started by something else"
        fix = "put the container around that command, and type container=none"
        yield Problem("container", message, fix, "CONT-1")
    elif name == "pyxis" and launcher != "slurm":
        message = f"pyxis is a plugin of Slurm, which launcher={launcher} does not use"
        yield Problem("container", message, "type launcher=slurm, or container=podman", "CONT-1")


def _image(wanted: ContainerConfig) -> Iterator[Problem]:
    image = wanted.image
    if image is None:
        fix = "type container.image=NAME"
        yield Problem("container.image", f"is not set, and container={wanted.name} needs one", fix, "CONT-1")
    elif image == "" or image.startswith("-") or any(letter.isspace() for letter in image):
        yield Problem("container.image", f"{image!r} is no image", "type container.image=NAME", "CONT-1")
    elif wanted.name == "docker" and image.startswith("/"):
        message = f"{image} is a path, and docker takes names of images only"
        yield Problem("container.image", message, "type container=podman, or a name", "CONT-1")


def _mounts(wanted: ContainerConfig) -> Iterator[Problem]:
    for text in wanted.mounts:
        parts = text.removesuffix(":rw").removesuffix(":ro").split(":")
        if len(parts) > 2 or not all(part.startswith("/") for part in parts):
            message = f"{text!r} is neither SOURCE nor SOURCE:TARGET, with :rw or :ro behind it"
            yield Problem("container.mounts", message, "give both as absolute paths", "CONT-1")
