"""What is asked of Spur's sbatch: flags in its spelling, refusals before anything is sent (SPUR-2, 3).

Spur drops what it cannot read without a word (a time, `--export=ALL,X=1`), so everything is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from src import durations
from src.config import Config
from src.errors import Problem, UserError
from src.launchers.environment import SECRET
from src.launchers.flags import OURS, Flag, asked, extra_words, with_extra
from src.launchers.spread import Spread
from src.launchers.spur_capabilities import Capabilities, of_version
from src.launchers.spur_table import ADDED, ALTERNATIVES, DROPPED, STEPS_ON_ALL_NODES

MINE = {name: why for name, why in OURS.items() if name not in ("export", "signal")}
"""What other flags may not set: `export` means lines of the script here, and there is no `signal`."""
TIME = re.compile(r"\d+|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")
MEMORY = re.compile(r"\d+[KMGkmg]?|\d+\.\d+[Gg]")
NAME = re.compile(r"[A-Za-z_]\w*")


def spur_flags(
    config: Config,
    overrides: Sequence[str],
    where: Spread,
    platform: str,
    name: str,
    capabilities: Capabilities,
) -> list[Flag]:
    """The flags of sbatch in a stable order, each once with its origin.

    Args:
        config: the job's.
        overrides: of the command line, by which an origin is told.
        where: nodes and ranks per node.
        platform: `cpu` asks for no GPU.
        name: of the job.
        capabilities: of the Spur that will take it.

    Raises:
        UserError: all flags that this Spur lacks or cannot read, with alternatives (2).
    """
    flags = [_clocked(flag, config) for flag in asked(config, overrides, where, platform, name)]
    extra = extra_words(config)
    flags, problems = with_extra(flags, extra, overrides, MINE)
    keys = {name: f"launcher.{key}" for key, name, _ in extra}
    kept = [flag for flag in flags if flag.name not in DROPPED]
    for flag in kept:
        wrong = _wrong(flag, capabilities)
        if wrong is not None and flag.name not in MINE.keys() & keys.keys():
            key = keys.get(flag.name, f"launcher.{flag.name.replace('-', '_')}")
            problems.append(Problem(key, *wrong, "SPUR-3"))
    problems += _wrong_exports(config) + _wrong_nodes(where, capabilities)
    if problems:
        raise UserError(problems)
    return kept


def exports(config: Config) -> dict[str, str]:
    """Variables that `+launcher.extra.export` sets by value; the script exports them (SPUR-2)."""
    return dict(pair for pair in map(_pair, _export_words(config)) if NAME.fullmatch(pair[0]) and pair[1])


def _export_words(config: Config) -> list[str]:
    texts = [value for _, name, value in extra_words(config) if name == "export"]
    words = (word.strip() for text in texts for word in text.split(","))
    return [word for word in words if word not in ("", "ALL")]


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _wrong_exports(config: Config) -> list[Problem]:
    """`NONE` would take the path from the job, and no secret stands in a file; jobs get all else anyway."""
    problems = []
    for name, value in map(_pair, _export_words(config)):
        if name == "NONE" or not NAME.fullmatch(name):
            message, fix = f"--export: {name!r} cannot be kept", 'write "NAME=VALUE,NAME2=VALUE2"'
        elif value and SECRET.search(name):
            message, fix = (
                f"--export: the script would show {name}",
                f"export {name} in the shell: jobs get it",
            )
        else:
            continue
        problems.append(Problem("launcher.extra.export", message, fix, "SPUR-2"))
    return problems


def _wrong_nodes(where: Spread, capabilities: Capabilities) -> list[Problem]:
    if where.nodes == 1 or capabilities.number >= STEPS_ON_ALL_NODES:
        return []
    message = f"{where.nodes} nodes: srun of Spur {capabilities.version} starts its command on the first only"
    return [Problem("launcher.nodes", message, "take Spur 0.6 or newer, or ranks of one node", "SPUR-4")]


def _clocked(flag: Flag, config: Config) -> Flag:
    """The time limit as D-HH:MM:SS, in seconds; `H:MM` would mean hours (SPUR-3)."""
    if flag.name != "time":
        return flag
    assert config.launcher.time is not None
    minutes, seconds = divmod(durations.seconds(config.launcher.time), 60)
    text = f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:{seconds:02d}"
    return Flag("time", text, flag.origin.removesuffix(", in whole minutes") + ", normalised to D-HH:MM:SS")


def _wrong(flag: Flag, capabilities: Capabilities) -> tuple[str, str] | None:
    """What is wrong with a flag, and what to type instead."""
    if flag.name not in capabilities.sbatch:
        return f"sbatch of Spur {capabilities.version} has no --{flag.name}", _instead(flag.name)
    if capabilities.sbatch[flag.name] != (flag.value != "true"):
        takes = "takes a value" if capabilities.sbatch[flag.name] else 'takes no value; write "true"'
        return f"--{flag.name}={flag.value}: on Spur it {takes}", "write it so, or leave it out"
    readable: Mapping[str, tuple[re.Pattern[str], str]] = {
        "time": (TIME, "write D-HH:MM:SS"),
        "mem": (MEMORY, "write 64G, or megabytes"),
        "mem-per-cpu": (MEMORY, "write 4G, or megabytes"),
    }
    pattern, fix = readable.get(flag.name, (None, ""))
    if pattern is not None and not pattern.fullmatch(flag.value):
        return f"--{flag.name}={flag.value}: Spur does not read this as it stands", fix
    if "\n" in flag.value or ("'" in flag.value and '"' in flag.value):
        return f"--{flag.name}={flag.value!r} cannot stand in a line of the script", "use one kind of quotes"
    return None


def _instead(name: str) -> str:
    """An alternative to a flag: another one, or a version that has it."""
    later = [version for version in ADDED if name in of_version(version).sbatch]
    return ALTERNATIVES.get(name) or (f"take Spur {later[0]} or newer" if later else "leave it out")


def line(flag: Flag) -> str:
    """The flag's line in a script; Spur's own splitting knows quotes, but nothing that escapes."""
    text = str(flag)
    quote = '"' if "'" in text else "'"
    is_plain = not any(letter.isspace() or letter in "'\"" for letter in text)
    return f"#SBATCH {text}" if is_plain else f"#SBATCH {quote}{text}{quote}"


def lines(flags: Iterable[Flag]) -> list[str]:
    """The flags' lines."""
    return [line(flag) for flag in flags]
