"""docker, podman and apptainer as a launch sees them: strict about their words, honest about processes.

A fake notes its argv and the names of the payload's variables in `$FAKE_RUNTIMES`, and runs the payload with
the variables that it was told of and no others. As with a daemon, the payload is in a session of its own and
outlives a client that is killed; it then reads the end of its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

VALUED = {
    "name",
    "label",
    "network",
    "ipc",
    "user",
    "workdir",
    "env",
    "mount",
    "ulimit",
    "device",
    "group-add",
}
ONLY = {"docker": {"gpus"}, "podman": {"userns", "cgroups"}}
BARE = {"rm", "interactive"}
IMAGE = {"PATH": "/usr/local/bin:/usr/bin:/bin", "FROM_IMAGE": "1"}
"""What every image sets."""
DIGEST = "sha256:" + "7" * 64


def main(runtime: str, words: list[str]) -> int:
    """What the command of this name does."""
    folder = Path(os.environ["FAKE_RUNTIMES"])
    folder.mkdir(exist_ok=True)
    note(folder, runtime, {"argv": words})
    if runtime == "apptainer":
        return apptainer(folder, words)
    verbs = {"run": run, "ps": ps, "rm": remove, "pull": pull, "image": inspect}
    if words[0] not in verbs:
        return refuse(f"unknown command {words[0]}")
    return verbs[words[0]](folder, runtime, words[1:])


def note(folder: Path, runtime: str, record: dict) -> None:
    """Append a record."""
    with (folder / "calls.jsonl").open("a") as file:
        file.write(json.dumps({"runtime": runtime, **record}) + "\n")


def refuse(message: str) -> int:
    """As a client refuses: 125."""
    print(f"Error: {message}", file=sys.stderr)
    return 125


def run(folder: Path, runtime: str, words: list[str]) -> int:
    """`run FLAGS IMAGE COMMAND`."""
    flags: list[tuple[str, str]] = []
    while words and words[0].startswith("--"):
        word = words.pop(0)
        name, equals, value = word[2:].partition("=")
        if runtime == "podman" and word == "--rootfs":
            break
        if not (name in VALUED | ONLY[runtime] and equals) and word[2:] not in BARE:
            return refuse(f"unknown flag: {word}")
        flags.append((name, value))
    image, *command = words
    if image.startswith("missing"):
        return refuse(f"no such image {image}")
    environment = dict(IMAGE)
    for text in (value for name, value in flags if name == "env"):
        name, equals, value = text.partition("=")
        if equals or name in os.environ:
            environment[name] = value if equals else os.environ[name]
    for fields in (value.split(",") for name, value in flags if name == "mount"):
        source = next(field for field in fields if field.startswith("source=")).removeprefix("source=")
        if not Path(source).exists():
            return refuse(f"statfs {source}: no such file or directory")
    given = dict(flags)
    if (folder / given["name"]).exists():
        return refuse(f"the name {given['name']} is in use")
    labels = [value for name, value in flags if name == "label"]
    return payload(folder, runtime, command, environment, given["name"], labels, given.get("workdir"))


def payload(
    folder: Path,
    runtime: str,
    command: list[str],
    environment: dict[str, str],
    name: str,
    labels: list[str],
    workdir: str | None,
) -> int:
    """Run the command beside this process, hand standard input and signals on, return its code."""
    note(folder, runtime, {"payload": sorted(environment)})
    try:
        process = subprocess.Popen(
            command, env=environment, cwd=workdir, stdin=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        print(error, file=sys.stderr)
        return 127
    place = folder / name
    place.write_text(json.dumps({"pid": process.pid, "labels": labels}))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: process.send_signal(got))
    threading.Thread(target=hand_on, args=(process,), daemon=True).start()
    code = process.wait()
    place.unlink(missing_ok=True)
    return 128 - code if code < 0 else code


def hand_on(process: subprocess.Popen) -> None:
    """The end of standard input reaches the payload."""
    while os.read(0, 4096):
        pass
    process.stdin.close()


def ps(folder: Path, runtime: str, words: list[str]) -> int:
    """`ps --all --quiet --filter label=…`: names of containers that have all labels."""
    if words[:2] != ["--all", "--quiet"] or set(words[2::2]) - {"--filter"}:
        return refuse(f"unknown flags {words}")
    wanted = {text.removeprefix("label=") for text in words[3::2]}
    for path in folder.glob("manyhead-*"):
        if wanted <= set(json.loads(path.read_text())["labels"]):
            print(path.name)
    return 0


def remove(folder: Path, runtime: str, words: list[str]) -> int:
    """`rm --force NAME`."""
    if words[0] != "--force":
        return refuse(f"unknown flag {words[0]}")
    place = folder / words[1]
    pid = json.loads(place.read_text())["pid"]
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    place.unlink(missing_ok=True)
    return 0


def pull(folder: Path, runtime: str, words: list[str]) -> int:
    """`pull IMAGE`."""
    time.sleep(0.01)
    if words[0].startswith("missing"):
        return refuse(f"manifest unknown: {words[0]}")
    (folder / "pulled").touch()
    return 0


def inspect(folder: Path, runtime: str, words: list[str]) -> int:
    """`image inspect --format TEMPLATE IMAGE`: known once it was pulled."""
    if words[:2] != ["inspect", "--format"] or "igest" not in words[2] or len(words) != 4:
        return refuse(f"unknown words {words}")
    if not (folder / "pulled").exists():
        return refuse(f"no such image {words[3]}")
    print(DIGEST)
    return 0


def apptainer(folder: Path, words: list[str]) -> int:
    """`exec FLAGS IMAGE COMMAND`; the payload takes this process's place, as without a PID namespace."""
    if words.pop(0) != "exec":
        return 255
    while words[0].startswith("--"):
        name = words.pop(0).partition("=")[0]
        if name not in ("--cleanenv", "--no-home", "--pwd", "--nv", "--rocm", "--bind"):
            print(f'Error for command "exec": unknown flag: {name}', file=sys.stderr)
            return 255
    prefix = "APPTAINERENV_"
    told = {name.removeprefix(prefix): value for name, value in os.environ.items() if name.startswith(prefix)}
    environment = {**IMAGE, **told}
    note(folder, "apptainer", {"payload": sorted(environment)})
    os.execvpe(words[1], words[1:], environment)
