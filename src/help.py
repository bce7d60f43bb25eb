"""`train.py --help`: commands, groups with their options, where to read on (HELP-1); Hydra is not needed."""

from __future__ import annotations

import ast
import itertools
import textwrap
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from src.config import Config
from src.mesh_spec import GRAMMAR

CONF = Path(__file__).resolve().parent.parent / "conf"

COMMANDS = (
    ("python train.py", "train the tiny DeepSeek-V2 on this machine's Python sources"),
    ("python train.py mesh=pp2ep2", "the same over two pipeline stages and two expert ranks"),
    ("python train.py experiment=probe_copy", "a named composition of conf/experiment"),
    ("python train.py -m seed=0,1,2 mesh=single,ep2 max_steps=20", "a sweep: six jobs, one table"),
    ("python train.py dry_run=true model=deepseek_v2/lite mesh=pp2ep4", "print the plan and stop"),
    ("python train.py optimizer.lr=1e-3 max_steps=300 run_name=mine", "set single keys"),
)

SENTENCES = {
    "model": "Architecture alone: a family, which is its tiny member, or family/size.",
    "experiment": "A named composition of all the others.",
}
"""Groups that no dataclass describes to a user; the others are described by theirs."""


def help_text() -> str:
    """All of the help, without markup."""
    commands = "\n".join(f"  {command}\n      {words}" for command, words in COMMANDS)
    groups = "\n".join(_group_text(name, words) for name, words in group_sentences().items())
    keys = "\n".join(_wrap(name, words) for name, words in key_sentences().items())
    return (
        "Manyhead trains mixture-of-experts language models, the same way on every mesh.\n\n"
        f"Commands\n{commands}\n\n"
        f"Groups: choose one option, as in optimizer=sgd\n{groups}\n\n"
        f"Keys of every run\n{keys}\n\n"
        "Read on\n"
        "  conf/README.md       every group and option in a sentence\n"
        "  src/config.py        with its parts, src/config_*.py: every key, its type, default and sentence\n"
        "  --cfg job            the composed config; --info defaults shows where it comes from"
    )


def group_sentences() -> dict[str, str]:
    """Group → its sentence, which is the docstring of its dataclass, in the order of the schema."""
    hints = get_type_hints(Config)
    sections = {item.name: hints[item.name] for item in fields(Config) if is_dataclass(hints[item.name])}
    known = {name: _first_line(cls.__doc__) for name, cls in sections.items() if (CONF / name).is_dir()}
    return {**known, **SENTENCES}


def options(group: str) -> list[str]:
    """Options of a group: its files, and the sizes in its folders."""
    files = sorted((CONF / group).rglob("*.yaml"))
    return [file.relative_to(CONF / group).with_suffix("").as_posix() for file in files]


def key_sentences() -> dict[str, str]:
    """The keys at the root of the schema, each with the sentence under it."""
    hints = get_type_hints(Config)
    plain = [item.name for item in fields(Config) if not is_dataclass(hints[item.name])]
    sentences = field_sentences((Path(__file__).parent / "config.py").read_text(encoding="utf-8"), "Config")
    return {name: sentences[name] for name in plain if name != "experiment"}


def field_sentences(source: str, cls: str) -> dict[str, str]:
    """Field → the string under it, in the source of a dataclass."""
    tree = ast.parse(source)
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
    found = {}
    for item, below in itertools.pairwise(body):
        text = getattr(getattr(below, "value", None), "value", None)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(text, str):
            found[item.target.id] = " ".join(text.split())
    return found


def _group_text(name: str, words: str) -> str:
    shown = GRAMMAR if name == "mesh" else ", ".join(options(name))
    return f"{_wrap(name, words)}\n{_wrap('', shown)}"


def _wrap(name: str, words: str) -> str:
    return textwrap.fill(words, 110, initial_indent=f"  {name:<19}", subsequent_indent=" " * 21)


def _first_line(doc: str | None) -> str:
    assert doc is not None
    return doc.strip().splitlines()[0]
