"""The objects of one run, passed explicitly: what the loop owns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from src.config import Config
from src.trainer.backends.base import Backend
from src.trainer.data.corpus import Data
from src.trainer.health import Health
from src.trainer.optimizer import Optimizer
from src.trainer.repairs import Repairs
from src.trainer.runtime import Runtime
from src.trainer.stop import Agreement, StopRequest


@dataclass
class Run:
    """A run in one rank."""

    config: Config
    directory: Path
    attempt: int
    runtime: Runtime
    data: Data
    backend: Backend
    optimizer: Optimizer
    stop: StopRequest
    health: Health
    repairs: Repairs
    agreement: Agreement = field(default_factory=Agreement)
    step: int = 0
    """Optimizer steps finished."""
    tokens_total: int = 0
    """Distinct training tokens seen, up to the last flush."""
