"""Write again the tables in Markdown files that are made from code and results: exit codes, options,
environment, benchmarks.

A table stands between two comments, `<!-- generated: NAME -->` and `<!-- end -->`. A test fails while one of
them differs from what this script would write.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import GenericAlias, UnionType
from typing import Any, get_type_hints

from src.bench import op_record, record
from src.bench.table import COLUMNS, NEWEST_COLUMNS, newest_rows, row_of
from src.config import Config
from src.errors import EXIT_CODES
from src.help import field_sentences
from src.kernels.declaration import EAGER, Implementation
from src.kernels.registry import AUTO, CASES
from src.kernels.table import IMPLEMENTATIONS
from src.launchers.environment import TABLE
from src.launchers.environment_omitted import OMITTED
from src.models.schema import FAMILIES, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
RESULTS = "benchmarks/bench_model.jsonl"
OPERATIONS = {
    name: f"benchmarks/bench_{name}.jsonl"
    for name in ("moe", "attention", "head", "optimizer", "elementwise")
}
"""Script of operations → its results."""
NOTHING = "Nothing has been recorded yet."
SCHEMA = tuple(
    ROOT / "src" / name for name in ("config.py", "config_compute.py", "config_launch.py", "models/schema.py")
)


def main() -> int:
    """Rewrite what differs and name it."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for path in documents():
        old = path.read_text(encoding="utf-8")
        new = regenerate(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


def documents() -> list[Path]:
    """Markdown files that hold a generated table."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [path for path in pages if BLOCK.search(path.read_text(encoding="utf-8"))]


def regenerate(text: str) -> str:
    """`text` with the content of each block made anew; `KeyError` names an unknown one."""
    return BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]]()}\n{block[3]}", text)


def exit_codes() -> str:
    """The exit codes and what they mean."""
    signals = ("128+n", "ended by signal n (130: Ctrl-C)")
    other = ("other", "the first failing rank's own code")
    return table(
        ("code", "meaning"), [*((str(code), words) for code, words in EXIT_CODES.items()), signals, other]
    )


def environment() -> str:
    """The variables that a launch sets for its ranks."""
    rows = [
        (f"`{row.name}`", row.rule.words, row.where, row.kind, ", ".join(row.platforms), row.reason)
        for row in TABLE
    ]
    return table(("variable", "value", "decided by", "kind", "platforms", "reason"), rows)


def environment_omitted() -> str:
    """The variables that another launcher sets and ours does not."""
    shown = [[f"`{name}`" + "…" * name.endswith("_") for name in names] for names, _ in OMITTED]
    rows = [(", ".join(names), reason) for names, (_, reason) in zip(shown, OMITTED, strict=True)]
    return table(("variable there", "why not here"), rows)


def options() -> str:
    """Every key of the schema, a section to each group, a model's family in place of `model`."""
    parts = [f"### Root\n\n{table(HEAD, rows_of(Config, ''))}"]
    hints = get_type_hints(Config)
    for item in fields(Config):
        if is_dataclass(hints[item.name]) and hints[item.name] is not ModelConfig:
            rows = rows_of(hints[item.name], f"{item.name}.")
            parts.append(f"### `{item.name}`\n\n{hints[item.name].__doc__}\n\n{table(HEAD, rows)}")
    for name, family in FAMILIES.items():
        rows = rows_of(family, "model.")
        parts.append(f"### `model` of the family {name}\n\n{family.__doc__}\n\n{table(HEAD, rows)}")
    return "\n\n".join(parts)


def kernels() -> str:
    """Every implementation of every operation with what it declares."""
    return table(
        (
            "operation",
            "implementation",
            "made of",
            "runs on",
            "dtypes",
            "abilities",
            "deterministic",
            "saves",
        ),
        [
            (f"`{i.operation}`", f"`{i.name}`", i.source, *declared(i))
            for known in IMPLEMENTATIONS.values()
            for i in known
        ],
    )


def declared(implementation: Implementation) -> Iterator[str]:
    """The other columns of `kernels`."""
    places = sorted(implementation.archs or implementation.devices or ["any"])
    yield ", ".join([*places, *(f"{name} {versions}" for name, versions in implementation.packages.items())])
    dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in implementation.dtypes or ())
    yield ", ".join(dtypes) or "any"
    abilities = ", ".join(sorted(implementation.features)) or "-"
    yield "; ".join([abilities, *(f"not {' with '.join(sorted(some))}" for some in implementation.apart)])
    proven = {(True, True): "yes", (True, False): "forward"}.get(implementation.deterministic, "no")
    yield "by torch's switch" if implementation.by_switch else proven
    yield implementation.saves


def preferred() -> str:
    """What `auto` tries in turn."""
    rows = [
        (kind, f"`{operation}`", words, ", ".join(f"`{name}`" for name in (*names, EAGER)))
        for kind, operations in AUTO.items()
        for operation, names in operations.items()
        for words, names in (*_cases(kind, operation), ("-", names))
    ]
    return table(("device", "operation", "for", "in turn"), rows)


def _cases(kind: str, operation: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(case.words, case.order) for case in CASES.get((kind, operation), ())]


def benchmarks() -> str:
    """Every measured side of `benchmarks/bench_model.jsonl`, in the order in which they were measured."""
    lines = record.read_current(ROOT / RESULTS)
    rows = [
        (line["date"][:10], (line["commit"] or "-")[:7], line["card"]["name"], *row_of(line))
        for line in lines
    ]
    return table(("date", "commit", "card", *COLUMNS), rows) if rows else NOTHING


def speed() -> str:
    """Of each comparison the newest line, both sides in one row."""
    rows = newest_rows(record.read_current(ROOT / RESULTS))
    return table(NEWEST_COLUMNS, rows) if rows else NOTHING


def operations() -> str:
    """Of each script of operations the newest line of each side and case."""
    parts = []
    for name in OPERATIONS:
        lines = op_record.newest(op_record.read_current(ROOT / f"benchmarks/bench_{name}.jsonl"))
        rows = [
            (line["date"][:10], (line["commit"] or "-")[:7], line["card"]["name"], *op_record.row_of(line))
            for line in lines
        ]
        if rows:
            parts.append(f"### {name}\n\n{table(('date', 'commit', 'card', *op_record.COLUMNS), rows)}")
    return "\n\n".join(parts) or NOTHING


HEAD = ("key", "takes", "default", "meaning")


def rows_of(cls: Any, prefix: str) -> Iterator[tuple[str, ...]]:
    """Key, type or names, default and sentence of each field of a dataclass and of those inside it."""
    hints, sentences = get_type_hints(cls), sentences_of(cls)
    for item in fields(cls):
        key, hint = prefix + item.name, hints[item.name]
        if is_dataclass(hint):
            yield from rows_of(hint, f"{key}.") if prefix else ()
            continue
        default = item.default if item.default_factory is MISSING else item.default_factory()
        yield f"`{key}`", takes(hint, item.metadata), f"`{shown(default)}`", sentences[item.name]


def takes(hint: Any, metadata: Mapping[str, Any]) -> str:
    """The names of a closed set, else the type."""
    if "choices" in metadata:
        return " ".join(f"`{name}`" for name in metadata["choices"])
    kind = str(hint) if isinstance(hint, GenericAlias | UnionType) else hint.__name__
    kind = kind.replace(" | None", " or null")
    return kind.replace("str", "duration") if metadata.get("duration") else kind


def sentences_of(cls: Any) -> dict[str, str]:
    """Field → sentence of a dataclass and its bases; a base's sentence holds where the class gives none."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        source = next(path for path in SCHEMA if f"class {base.__name__}" in path.read_text(encoding="utf-8"))
        found |= field_sentences(source.read_text(encoding="utf-8"), base.__name__)
    return found


def shown(value: Any) -> str:
    """A default as one types it."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "kernels": kernels,
    "preferred": preferred,
    "exit-codes": exit_codes,
    "environment": environment,
    "environment-omitted": environment_omitted,
    "options": options,
    "benchmarks": benchmarks,
    "speed": speed,
    "operations": operations,
}
"""Name of a block → what makes it."""


if __name__ == "__main__":
    sys.exit(main())
