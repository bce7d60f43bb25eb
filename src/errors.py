"""A user's mistake, and the exit codes that every part of Manyhead uses (EXIT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_CODES: dict[int, str] = {
    0: "done, or already finished",
    1: "error in the run",
    2: "configuration, Hydra's and argparse's errors included",
    3: "capability, memory or package missing",
    4: "data preparation",
    5: "submission; another process holds the run; job lost",
    6: "rendezvous or collective timed out",
    7: "loss or gradient not finite, or too many skipped updates in a row",
    8: "checkpoint unreadable, or run directory or resume refused",
    75: "stopped on request, state saved: start again",
}
"""The one list from which code, docs and tests take their tables (EXIT-3); 128+n: ended by signal n."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with what the user asked for."""

    key: str
    """The config key, or the word on the command line."""
    message: str
    """What is wrong, with both values."""
    fix: str = ""
    """What to type instead."""
    rule: str = ""
    """Identifier of the rule, such as `experts` or `CFG-6`."""

    def __str__(self) -> str:
        rule = f" [{self.rule}]" if self.rule else ""
        fix = f"\n      {self.fix}" if self.fix else ""
        return f"  {self.key}: {self.message}{rule}{fix}"


class UserError(Exception):
    """All problems found at once, with the exit code they end in; printed without a traceback."""

    def __init__(self, problems: Sequence[Problem] | str, code: int = 2) -> None:
        self.problems = [] if isinstance(problems, str) else list(problems)
        self.code = code
        text = problems if isinstance(problems, str) else "\n".join(str(p) for p in problems)
        super().__init__(text)
