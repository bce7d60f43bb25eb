"""A rank imports optional packages only where a chosen option needs them (CFG-18)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = (
    "datasets",
    "tokenizers",
    "wandb",
    "submitit",
    "matplotlib",
    "rich",
    "transformers",
    "tensorboard",
)

TRAIN = """
import sys
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
from tests.trainer.small import lines, run_here, small_config

directory = Path(sys.argv[1])
config = small_config(directory, max_steps=2)
{change}
run_here(config, directory / "run")
assert len(lines(directory / "run")) == 2
assert not set({blocked!r}) & set(sys.modules)
"""


def train(tmp_path: Path, change: str) -> subprocess.CompletedProcess[str]:
    code = TRAIN.format(blocked=OPTIONAL, change=change)
    command = [sys.executable, "-c", code, str(tmp_path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_synthetic_data_trains_with_the_core_alone(tmp_path: Path) -> None:
    """CFG-18: `data=synthetic logger=none` needs torch, triton, numpy, hydra-core and omegaconf only."""
    done = train(tmp_path, "")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_block_bites(tmp_path: Path) -> None:
    """An import that is not allowed ends the same run, so the test above can fail."""
    done = train(tmp_path, "import tokenizers")
    assert "tokenizers is blocked" in done.stderr
