"""Shell completion through the command that a shell runs (HELP-2)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from src.command_line import main
from src.completion import specs
from src.help import options
from src.mesh_spec import is_spec

Complete = Callable[..., list[str]]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Complete:
    """Candidates for a command line, as a shell asks for them."""

    def ask(words: str, shell: str = "bash") -> list[str]:
        monkeypatch.setenv("COMP_LINE", f"python train.py {words}")
        assert main(["-sc", f"query={shell}"]) == 0
        return capsys.readouterr().out.rstrip("\n").split("\n" if shell == "fish" else " ")

    return ask


def test_groups_sizes_and_keys(complete: Complete) -> None:
    """HELP-2: every group by name, each option of one with the sizes of a family, keys of a section."""
    assert {"model=", "optimizer=", "mesh=", "seed="} <= set(complete(""))
    assert complete("optimi") == ["optimizer.", "optimizer="]
    assert complete("model=") == sorted(f"model={name}" for name in options("model"))
    assert "model=deepseek_v2/lite" in complete("seed=1 model=deepseek_v2/")
    assert "optimizer.lr=" in complete("optimizer.")
    assert complete("seed=1 optimizer=s") == ["optimizer=sgd"]
    assert not [name for name in complete("") if name.startswith(("schema", "site"))]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_mesh_specs(complete: Complete, shell: str) -> None:
    """HELP-2: files and specs; a started axis is finished, a whole spec may go on; also inside a sweep."""
    first = complete("mesh=", shell)
    assert {"mesh=auto", "mesh=single", "mesh=ep4", "mesh=pp2"} <= set(first)
    assert complete("mesh=pp2e", shell) == ["mesh=pp2ep16", "mesh=pp2ep2", "mesh=pp2ep4", "mesh=pp2ep8"]
    assert {"mesh=pp2", "mesh=pp2ep2", "mesh=pp2dp4"} <= set(complete("mesh=pp2", shell))
    assert "mesh=single,pp2ep2" in complete("-m seed=0,1 mesh=single,pp2e", shell)


@pytest.mark.parametrize("typed", ["", "p", "pp", "pp2", "pp2e", "pp1", "rep2dp2", "ep8"])
def test_what_is_offered_is_a_spec(typed: str) -> None:
    """HELP-2, CFG-8: candidates begin with what was typed and follow the grammar."""
    assert specs(typed)
    assert all(is_spec(name) and name.startswith(typed) for name in specs(typed))


@pytest.mark.parametrize("typed", ["x", "pp2x", "pp2pp2", "2", "tp"])
def test_what_is_no_spec_is_not_completed(typed: str) -> None:
    """HELP-2: no candidate for what cannot become a mesh."""
    assert specs(typed) == []


@pytest.mark.parametrize("words", [[], ["query=tcsh"], ["query=bash", "seed=1"], ["ask=bash"]])
def test_bad_questions(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """HELP-2, EXIT: refused with 2 and what to type."""
    assert main(["-sc", *words]) == 2
    assert "-sc install=SHELL" in capsys.readouterr().err


def test_install(capsys: pytest.CaptureFixture[str]) -> None:
    """HELP-2: Hydra's script, and nothing else, for the shell to evaluate."""
    assert main(["-sc", "install=bash"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("export _HYDRA_OLD_COMP")
    assert "-sc query=bash" in text
