"""What the Spur that is installed can do: its own `--help`, kept until the binary changes (SPUR-1).

Only a submission asks it. A dry run reads what was kept, else the newest version's table, and says which.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from src.errors import UserError
from src.launchers.scheduler import ask
from src.launchers.spur_table import ADDED, NEWEST
from src.records import read_json, write_json

OPTION = re.compile(r"^\s+(?:-(\w), )?--([a-z][a-z-]+)( <|=)?", re.M)
"""A line of clap's help that begins an option: letter, long name, whether it takes a value."""
VERSION = re.compile(r"^spur (\d+)\.(\d+)\S*", re.M)


@dataclass(frozen=True)
class Capabilities:
    """One Spur."""

    version: str
    source: str
    """Where this is known from."""
    sbatch: dict[str, bool]
    """Long flag → whether it takes a value."""
    srun: dict[str, bool]

    def __str__(self) -> str:
        return f"Spur {self.version}, {self.source}"

    @property
    def number(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = (int(part) for part in self.version.split(".")[:2])
        return major, minor


def words_of(table: str) -> dict[str, bool]:
    """A line of the table as flags."""
    return {word.rstrip("=").partition("/")[0]: word.endswith("=") for word in table.split()}


def of_version(wanted: str) -> Capabilities:
    """The table up to a version, such as 0.6.0."""
    found: dict[str, dict[str, bool]] = {"sbatch": {}, "srun": {}}
    for version, added in ADDED.items():
        if [int(part) for part in version.split(".")] <= [int(part) for part in wanted.split(".")]:
            for command, table in added.items():
                found[command] |= words_of(table)
    return Capabilities(wanted, f"the table of {wanted}; no Spur was asked", found["sbatch"], found["srun"])


def read_help(text: str) -> dict[str, bool]:
    """The flags that a help text lists."""
    found = {name: valued is not None for _, name, valued in map(re.Match.groups, OPTION.finditer(text))}
    return {name: valued for name, valued in found.items() if name not in ("help", "version")}


def read_capabilities(version: str, help_of: Mapping[str, str], source: str) -> Capabilities:
    """Capabilities from what `sbatch --version` and both `--help` say.

    A help text that lists nothing, of a version to come, stands for the flags that all known versions have.
    """
    found = VERSION.search(version)
    assert found is not None
    common = of_version(next(iter(ADDED)))
    flags = {name: read_help(help_of[name]) for name in ("sbatch", "srun")}
    if not all(flags.values()):
        flags = {"sbatch": common.sbatch, "srun": common.srun}
        source += "; its help lists no flags, those of every version are taken"
    number = found.group().removeprefix("spur ")
    return Capabilities(number, source, flags["sbatch"], flags["srun"])


def stamp() -> dict[str, str] | None:
    """The sbatch on PATH, with what changes when another is installed; None without one."""
    found = shutil.which("sbatch")
    if found is None:
        return None
    path = Path(found).resolve()
    return {"path": str(path), "changed": str(path.stat().st_mtime_ns)}


def kept() -> Path:
    """Where the last answer is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "manyhead" / "spur.json"


def known() -> Capabilities:
    """What is known without asking."""
    record = read_json(kept())
    if record is not None and record.get("stamp") is not None and record["stamp"] == stamp():
        return Capabilities(**record["capabilities"])
    return of_version(NEWEST)


def probe() -> Capabilities:
    """What is known, or asked of the binaries on PATH and kept.

    Raises:
        UserError: there is no Spur (3).
    """
    mark = stamp()
    if mark is None:
        fix = "submit from a login node, type launcher=local, or dry_run=true to see the script"
        raise UserError(f"launcher=spur: there is no sbatch on PATH; {fix}", code=3)
    found = known()
    if not found.source.startswith("the table"):
        return found
    version = said("sbatch", "--version")
    if VERSION.search(version) is None:
        first = version.strip().partition("\n")[0] or "nothing"
        fix = "type launcher=slurm, or put Spur's commands first on PATH"
        raise UserError(f"launcher=spur: {mark['path']} says {first!r}, not spur; {fix}", code=3)
    help_of = {name: said(name, "--help") for name in ("sbatch", "srun")}
    found = read_capabilities(version, help_of, f"asked of {mark['path']}")
    keep(mark, found)
    return found


def keep(mark: Mapping[str, str], found: Capabilities) -> None:
    """Keep an answer; where that cannot be written it is asked again."""
    try:
        kept().parent.mkdir(parents=True, exist_ok=True)
        write_json(kept(), {"stamp": mark, "capabilities": asdict(found)})
    except OSError:
        return


def said(*command: str) -> str:
    """All that a command prints: Spur's help goes to stderr, with exit code 1."""
    done = ask(*command)
    return "" if done is None else done.stdout + done.stderr
