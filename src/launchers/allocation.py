"""The checks of every node of an allocation, by one step of srun (CHECK-2)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from src.code_identity import CHECKOUT
from src.config import Config
from src.durations import seconds
from src.errors import UserError
from src.launchers import hostlist
from src.launchers.checks import Check, NodeReport
from src.records import write_atomic

START = 30.0
"""Seconds that srun and Python may take on top of a node's own checks."""


def hosts_of(shell: Mapping[str, str]) -> list[str]:
    """Nodes of the job around this process; raises UserError (2) outside of one."""
    if "SLURM_JOB_NODELIST" not in shell:
        raise UserError("--nodes looks at the nodes of a job: start it by salloc or in a batch script")
    return hostlist.expand(shell["SLURM_JOB_NODELIST"])


def check_nodes(config: Config, overrides: Sequence[str]) -> list[NodeReport]:
    """The reports of all nodes, in the order of the job's list; one that does not answer is a `timeout`.

    Raises:
        UserError: there is no job (2), or no srun (3).
    """
    hosts = hosts_of(os.environ)
    limit = seconds(config.platform.thresholds.probe) + START
    script = [sys.executable, str(CHECKOUT / "scripts" / "doctor.py"), "--json", *overrides]
    count = str(len(hosts))
    command = ["srun", "-N", count, "-n", count, "--overlap", "--label", *script]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    try:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise UserError(f"srun cannot be started: {error.strerror}", code=3) from error
    try:
        output = process.communicate(timeout=limit)[0]
        lost = Check("answer", "failed", f"no report; srun ended with code {process.returncode}")
    except subprocess.TimeoutExpired as late:
        process.terminate()
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        lost = Check("answer", "timeout", f"no answer within {limit:.0f} s")
    return arrange(hosts, output, lost, config.platform.name)


def arrange(hosts: Sequence[str], output: str, lost: Check, platform: str) -> list[NodeReport]:
    """The reports in what `srun --label` printed, one for each host; `lost` stands for a missing one.

    srun passes a task's output on in messages of 1 KiB, which mix with those of other tasks even within a
    line; `--label` puts the task's number before each message and ends it, so a report is the sum of its
    task's lines.
    """
    said: dict[str, str] = {}
    for task, text in re.findall(r"^ *(\d+): (.*)$", output, re.MULTILINE):
        said[task] = said.get(task, "") + text
    found = {report.node: report for report in map(read_report, said.values()) if report is not None}
    return [found.get(host, NodeReport(host, time.time(), platform, [lost])) for host in hosts]


def read_report(text: str) -> NodeReport | None:
    """The report that starts somewhere in `text`; None where there is none."""
    try:
        fields: dict[str, Any] = json.JSONDecoder().raw_decode(text[text.index('{"schema"') :])[0]
        checks = [Check(**check) for check in fields["checks"]]
        return NodeReport(fields["node"], fields["time"], fields["platform"], checks, fields["schema"])
    except (ValueError, KeyError, TypeError):
        return None


def write_lists(reports: Sequence[NodeReport], folder: Path) -> None:
    """`passing_nodes.txt` and `failing_nodes.txt`: names with commas between, as `--nodelist` takes them."""
    for name, passed in (("passing_nodes.txt", True), ("failing_nodes.txt", False)):
        listed = [report.node for report in reports if report.passed == passed]
        write_atomic(folder / name, f"{','.join(listed)}\n" if listed else "")
