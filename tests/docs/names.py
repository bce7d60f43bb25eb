"""Paths, keys and symbols in Markdown, and which of them do not exist (DOC-4)."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from src.compose import config_loader
from src.config import Config
from src.errors import Problem
from src.fields import Schema, schema_of
from src.mesh_spec import is_spec
from src.models.schema import FAMILIES
from src.overrides import Groups, check_groups, check_value, is_choice, parse
from tests.docs.commands import ROOT, commands
from tests.docs.markdown import Document

ELSEWHERE = {"torchrun", "srun", "main", "ruff", "mypy"}
"""Names of others that our code does not contain: programs and branches."""
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OVERRIDE = re.compile(r"[+~]{0,2}[a-z_][A-Za-z0-9_./@]*=\S+")
PATH = re.compile(
    r"[~$]?[\w.<>*-]*(/[\w.<>*-]+)+/?|[\w*-]+\.(py|md|yaml|yml|json|jsonl|toml|cff|log|png|diff|lock|safetensors)"
)
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
AT_RUN_TIME = re.compile(
    r"(\./)?(RUN|CHECKPOINT|runs|data|<paths\.\w+>|attempts|checkpoints|\$XDG_\w+|~)(/|$)"
)
"""Places that exist only once something ran, or on the user's machine."""


@dataclass(frozen=True)
class Code:
    """What the project's own files contain."""

    files: frozenset[str]
    """Tracked and new files and their folders, relative to the checkout."""
    words: frozenset[str]
    """Every word in code and config, prose and these tests left out."""
    members: dict[str, set[str]] = field(default_factory=dict)
    """Class or module, by its own and by its dotted name → what it defines."""
    external: set[str] = field(default_factory=set)
    """Top-level packages of others that our code imports."""


@cache
def read_code() -> Code:
    """Index the checkout as it is now, uncommitted files included."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    files = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    folders = {str(parent) for name in files for parent in Path(name).parents}
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in files
        if not name.startswith("tests/docs/")
        and (name.endswith((".py", ".yaml", ".toml", ".cff")) or name == ".ci/run")
    }
    code = Code(
        frozenset([*files, *folders]),
        frozenset(word for text in texts.values() for word in WORD.findall(text)),
    )
    for name, text in texts.items():
        if name.endswith(".py"):
            _index(code, name, ast.parse(text))
    return code


def _index(code: Code, name: str, tree: ast.Module) -> None:
    """Add a module's definitions and imports."""
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    code.members[module] = set(_defined(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for known in (node.name, f"{module}.{node.name}"):
                code.members.setdefault(known, set()).update(_defined(node))
        elif isinstance(node, ast.Import):
            code.external.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("src"):
            code.external.add(node.module.partition(".")[0])


def _defined(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.ClassDef):
            yield item.name
        elif isinstance(item, ast.Assign | ast.AnnAssign):
            targets = item.targets if isinstance(item, ast.Assign) else [item.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


@cache
def schemas() -> tuple[Schema, ...]:
    """The schema with each family."""
    return tuple(schema_of(family) for family in FAMILIES)


def problems(document: Document) -> list[str]:
    """Each word of a code span that looks like ours and is not there, and each dead link."""
    in_commands = {command.place for command in commands(document)}
    found = []
    for link in document.links:
        target = link.text.partition("#")[0]
        if target and "://" not in target and not (document.path.parent / target).exists():
            found.append(f"{document.at(link.line)}: link to {target}, which does not exist")
    overrides: dict[str, str] = {}
    for span in document.spans:
        place = document.at(span.line)
        if place in in_commands and " " in span.text:
            continue
        for word in map(_bare, span.text.split()):
            if OVERRIDE.fullmatch(word):
                overrides.setdefault(word, place)
            elif not exists(word, document.path.parent):
                found.append(f"{place}: `{word}` does not exist")
    return found + [
        f"{overrides[line]}: `{line}`: {problem}" for line, problem in check_overrides(list(overrides))
    ]


def _bare(word: str) -> str:
    """A word without what surrounds it; a list that an override ends in stays whole."""
    bare = word.strip("'\"()[]{},;:…").removesuffix("()")
    return f"{bare}]" if "=[" in bare else bare


def check_overrides(lines: list[str]) -> list[tuple[str, Problem]]:
    """What is wrong with each override, taken alone; a reserved option exists, to be refused."""
    found: list[tuple[str, Problem]] = []
    with config_loader() as loader:
        groups = Groups(loader)
        for line in lines:
            typed, wrong = parse(line, OverridesParser.create())
            for item in (item for item in typed if not item.is_hydra):
                if is_choice(item, groups):
                    wrong += check_groups([item], groups, multirun=True)[1]
                else:
                    wrong += min((check_value(item, schema, True) for schema in schemas()), key=len)
            found += [(line, problem) for problem in wrong if problem.rule != "reserved"]
    return found


def exists(word: str, folder: Path) -> bool:
    """Whether a word of a code span is no name of ours, or is one that exists."""
    if not WORD.search(word) or word.startswith("<!--") or word in ELSEWHERE:
        return True
    if word in options():
        return True
    if re.fullmatch(r"--[a-z-]+|-[a-z]{1,2}", word):
        return _is_option(word)
    if AT_RUN_TIME.match(word):
        return all(_is_written(part) for part in re.split(r"/", word)[1:])
    if PATH.fullmatch(word):
        return (
            _is_file(word, folder)
            or (DOTTED.fullmatch(word) is not None and _is_dotted(word))
            or _is_written(word)
        )
    if DOTTED.fullmatch(word):
        return _is_dotted(word)
    name = word.lstrip("$@.")
    return all(part in read_code().words or _is_key(part) or is_spec(part) for part in WORD.findall(name))


def _is_file(word: str, folder: Path) -> bool:
    """A path from the checkout's root or the document's folder; `*` and `<...>` stand for anything."""
    pattern = re.sub(r"<[^>]*>", "*", word.rstrip("/")).removeprefix("./")
    if "*" in pattern:
        return any(True for _ in ROOT.glob(pattern))
    return pattern in read_code().files or (folder / pattern).exists()


def _is_written(part: str) -> bool:
    """Whether the fixed words of a name of a run's file stand in the code."""
    fixed = re.sub(r"<[^>]*>|\*|\d+|NAME|RUN", " ", part)
    return all(
        word in read_code().words or word.strip("_") in read_code().words for word in WORD.findall(fixed)
    )


def _is_dotted(word: str) -> bool:
    """A key, a module, a module's name, a class's member, or something of a package that our code imports."""
    code = read_code()
    owner, _, name = word.rpartition(".")
    if _is_key(word) or word in code.members or name in code.members.get(owner, set()):
        return True
    return word.partition(".")[0] in code.external - {"src", "tests", "scripts", "hydra_plugins"}


@cache
def options() -> frozenset[str]:
    """The options of all groups, such as `deepseek_v2/lite`."""
    with config_loader() as loader:
        groups = Groups(loader)
        return frozenset(option for name in groups.names for option in groups.options(name))


def _is_key(word: str) -> bool:
    """A key or section of the schema, or an entry of one of its free mappings."""
    known = schemas()
    return any(word in schema.sections or schema.leaf(word) is not None for schema in known) or hasattr(
        Config, word
    )


def _is_option(word: str) -> bool:
    """A flag that some parser of ours declares, or pytest's and pip's few that the documents use."""
    declaring = ("src/command_line.py", "src/bench/op_script.py", "pyproject.toml")
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in declaring)
    scripts = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("scripts/*.py"))
    return f'"{word}"' in text + scripts or word in ("-m", "-e", "-x", "-k")
