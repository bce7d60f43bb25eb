"""Names that the design keeps for parts to come: refused by name, with what exists instead."""

from __future__ import annotations

from src.config import Config
from src.errors import Problem

RESERVED: dict[str, dict[str, str]] = {
    "model": dict.fromkeys(
        ("deepseek_v3", "qwen3_5_moe", "kimi_linear", "mixtral", "olmoe"),
        "this family is not written yet",
    ),
    "backend": {
        "megatron": "no Megatron engine stands behind the loop",
        "automodel": "no AutoModel engine stands behind the loop",
    },
    "data": {
        "hf": "datasets of the hub cannot be prepared yet",
        "tokens": "ready token files cannot be read yet",
        "sft_chat": "conversations cannot be prepared yet",
        "mixture": "corpora cannot be mixed yet",
    },
    "optimizer": {"muon": "Muon is not written yet"},
    "logger": {"mlflow": "there is no mlflow tracker yet"},
}
"""Group → reserved option → why it is refused."""


def refusal(group: str, option: str, existing: list[str]) -> Problem | None:
    """Why a reserved option cannot be chosen; None if the name is not reserved."""
    reason = RESERVED.get(group, {}).get(option.partition("/")[0])
    if reason is None:
        return None
    fix = f"what exists: {', '.join(f'{group}={name}' for name in existing)}"
    return Problem(group, f"{option} is reserved: {reason}", fix, "reserved")


def check(config: Config) -> list[Problem]:
    """Reserved names that came in as values of a key instead of a group's option."""
    problems = []
    for key, value, reasons in _values(config):
        if value in reasons:
            problems.append(Problem(key, f"{value} is reserved: {reasons[value]}", rule="reserved"))
    return problems


def _values(config: Config) -> list[tuple[str, str, dict[str, str]]]:
    named = [
        ("model.family", config.model.family, "model"),
        ("backend.name", config.backend.name, "backend"),
        ("data.kind", config.data.kind, "data"),
        ("optimizer.kind", config.optimizer.kind, "optimizer"),
        *(("logger.kinds", kind, "logger") for kind in config.logger.kinds),
    ]
    return [(key, value, RESERVED[group]) for key, value, group in named]
