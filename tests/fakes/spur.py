"""A Spur of one machine: its commands, strict about what each version takes; jobs really run (FAKE-1).

`FAKE_SPUR` is the folder of its state, `calls.jsonl` there records each command. `FAKE_SPUR_VERSION` is the
version; `later` can requeue, as Spur does since 0.8.0 was out. `FAKE_SPUR_MODES` lists what goes wrong:
`failing` (every command), `deaf` (scancel does nothing), `missing` (squeue knows no job), `late` (a job is
seen after a second), `slow` (the second node starts late). What it does was read in Spur's source: steps are
no children of the batch shell, so cancelling a job leaves them alone; a step's output comes at its end; the
largest code of its tasks is its code, after the last has ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from src.launchers.outcome import exit_code
from src.launchers.spur_capabilities import of_version, words_of
from src.launchers.spur_table import SBATCH, SRUN
from tests.fakes.options import letters_of, parse, reject

STATE = Path(os.environ.get("FAKE_SPUR", "/nonexistent"))
VERSION = os.environ.get("FAKE_SPUR_VERSION", "0.8.0")
TABLE = of_version("99.0.0" if VERSION == "later" else VERSION)
MODES = os.environ.get("FAKE_SPUR_MODES", "").split(",")
SQUEUE = (
    "user/u= partition/p= states/t= jobs/j= account/A= name/n= nodelist/w= format/o= long/l noheader/h "
    "sort/S="
)
LETTERS = letters_of(SBATCH + " " + SRUN + " qos/q= nodefile/F=")
COMMANDS = ("show", "hold", "release", "requeue", *(["requeuehold"] if VERSION == "later" else []))


def main(name: str, words: list[str]) -> int:
    """Run one command."""
    STATE.joinpath("jobs").mkdir(parents=True, exist_ok=True)
    with (STATE / "calls.jsonl").open("a") as file:
        shown = {key: os.environ[key] for key in os.environ if key.startswith(("SBATCH", "SLURM", "SPUR"))}
        file.write(json.dumps({"command": name, "argv": words, "env": shown}) + "\n")
    if "failing" in MODES:
        return reject("connection refused")
    if words in (["--version"], ["-V"]):
        print(f"spur {'0.8.1' if VERSION == 'later' else VERSION} (0123abcd)")
        return 0
    commands = {"sbatch": sbatch, "srun": srun, "squeue": squeue, "scancel": scancel, "scontrol": scontrol}
    return commands[name](words)


def show_help(name: str, flags: dict[str, bool]) -> int:
    """Help in clap's shape; Spur prints it as an error."""
    lines = [f"Error: {name} of a fake", "", f"Usage: {name} [OPTIONS]", "", "Options:"]
    letters = {long: letter for letter, long in LETTERS.items()}
    for long, valued in flags.items():
        letter = f"-{letters[long]}, " if long in letters else "    "
        value = f" <{long.upper().replace('-', '_')}>" if valued else ""
        lines.append(f"  {letter}--{long}{value}\n          What --{long} does")
    return reject("\n".join([*lines, "  -h, --help\n          Print help"]))


def job(number: str) -> dict[str, Any]:
    """What is known of a job."""
    return dict(json.loads((STATE / "jobs" / f"{number}.json").read_text()))


def change(number: str, **values: Any) -> None:
    """Change what is known of a job."""
    path = STATE / "jobs" / f"{number}.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    path.with_suffix(f".{os.getpid()}").write_text(json.dumps({**old, **values}))
    path.with_suffix(f".{os.getpid()}").rename(path)


def sbatch(words: list[str]) -> int:
    """Take a script and start a process that runs it."""
    if words == ["--help"]:
        return show_help("sbatch", TABLE.sbatch)
    typed, rest = parse(words, TABLE.sbatch, LETTERS)
    text = Path(rest[0]).read_text()
    lines = [line[7:] for line in text.splitlines() if line.startswith("#SBATCH")]
    directives = [word for line in lines for word in split(line)]
    asked, _ = parse(directives, TABLE.sbatch, LETTERS)
    asked |= {name: value for name, value in typed.items() if name != "parsable"}
    int(asked.get("nodes", "1"))
    number = new_id()
    change(number, flags=asked, script=text, state="PENDING", reason="None", code=0)
    change(number, cwd=os.getcwd(), since=time.time())
    subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.spurd", number],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(STATE / "spurd.log").open("ab"),
        start_new_session=True,
    )
    print(number if "parsable" in typed else f"Submitted batch job {number}")
    return 0


def new_id() -> str:
    """The next free id from `FAKE_SPUR_FIRST`, which no other cluster here has: ports follow from it."""
    number = int(os.environ.get("FAKE_SPUR_FIRST", "1"))
    while True:
        try:
            (STATE / "jobs" / str(number)).mkdir()
            return str(number)
        except FileExistsError:
            number += 1


def split(line: str) -> list[str]:
    """Words between blanks; quotes keep blanks, nothing escapes."""
    words, word, quote = [], "", ""
    for letter in line.strip() + " ":
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == " " and not quote:
            words += [word] if word else []
            word = ""
        else:
            word += letter
    return words


def srun(words: list[str]) -> int:
    """Run a step of the job that this is called in: as many tasks as asked for, spread over its nodes."""
    if words == ["--help"]:
        return show_help("srun", TABLE.srun)
    asked, command = parse(words, TABLE.srun, LETTERS, trailing=True)
    number = os.environ["SPUR_JOB_ID"]
    nodes = int(job(number)["flags"].get("nodes", "1"))
    tasks = 1 if VERSION == "0.5.0" else int(asked.get("ntasks", asked.get("nodes", nodes)))
    per_node = max(1, tasks // nodes)
    steps = len(list((STATE / "jobs").glob(f"{number}.step.*")))
    (STATE / "jobs" / f"{number}.step.{steps}").touch()
    running = []
    for task in range(tasks):
        scope = {"STEP_ID": steps, "STEP_NUM_TASKS": tasks, "NTASKS": tasks, "NNODES": nodes, "PROCID": task}
        scope |= {"NODEID": task // per_node, "LOCALID": task % per_node, "JOB_NODELIST": nodelist(nodes)}
        local = {"LOCAL_RANK": str(task % per_node), "LOCAL_WORLD_SIZE": str(per_node)}
        env = {**os.environ, **twins(scope), **local}
        if "slow" in MODES and task:
            time.sleep(2)
        running.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
        )
    outputs = [process.communicate()[0] for process in running]
    sys.stdout.write(b"".join(outputs).decode())
    return max(exit_code(process.returncode) for process in running)


def nodelist(nodes: int) -> str:
    """Hosts without brackets; the first must resolve."""
    return ",".join(["localhost", *(f"n{k}" for k in range(1, nodes))])


def twins(values: dict[str, Any]) -> dict[str, str]:
    """Each variable as SPUR_* and SLURM_*."""
    return {f"{prefix}_{name}": str(value) for name, value in values.items() for prefix in ("SPUR", "SLURM")}


def squeue(words: list[str]) -> int:
    """Lines of the jobs that were asked for; all, if an id is no number."""
    asked, _ = parse(words, words_of(SQUEUE), letters_of(SQUEUE))
    numbers = [number for number in asked.get("jobs", "").split(",") if number.isdecimal()]
    for path in sorted((STATE / "jobs").glob("*.json")):
        known = job(path.stem)
        is_hidden = "missing" in MODES or ("late" in MODES and time.time() - known["since"] < 1)
        if (numbers and path.stem not in numbers) or is_hidden:
            continue
        limit = known["flags"].get("time", "UNLIMITED").removeprefix("0-")
        fields = {"i": path.stem, "T": known["state"], "r": known["reason"], "l": limit, "M": "0:00"}
        print("|".join(fields[letter.lstrip("%")] for letter in asked["format"].split("|")))
    return 0


def scancel(words: list[str]) -> int:
    """Ask for the end of jobs; says nothing and succeeds, whatever happens."""
    for number in words:
        if "deaf" not in MODES and (STATE / "jobs" / f"{number}.json").exists():
            change(number, wanted="CANCELLED")
    return 0


def scontrol(words: list[str]) -> int:
    """`show job`, and `requeue`, which only later versions do."""
    if words == ["--help"]:
        lines = "".join(f"  {command}  What it does\n" for command in COMMANDS)
        return reject(f"Usage: scontrol [OPTIONS] <COMMAND>\n\nCommands:\n{lines}")
    if words[:2] == ["show", "job"]:
        known = job(words[2])
        print(f"JobId={words[2]} JobName=x\n   JobState={known['state']}")
        print(f"   ExitCode={known['code']}:0 DerivedExitCode=0:0 Priority=1")
        return 0
    if words[0] != "requeue" or len(words) != 2:
        return reject(f"unrecognized subcommand {words}")
    change(words[1], wanted="REQUEUED" if VERSION == "later" else "CANCELLED")
    return 0
