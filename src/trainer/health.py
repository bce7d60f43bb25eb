"""Whether a step's update may be applied, decided on the device and equal on all ranks (ENG-27).

Nothing here waits for the device or talks to other ranks: norm and loss come reduced over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from src.config import Config
from src.errors import UserError

REASONS = (None, "nonfinite", "loss_spike", "norm_spike", "halted")
"""Why an update was skipped; the device holds the index."""
APPLIED, NONFINITE, LOSS_SPIKE, NORM_SPIKE, HALTED = range(len(REASONS))


class Health:
    """What earlier steps say of the next one."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._stops, self._max_skips = config.nonfinite == "stop", config.max_skips
        self._deviations, window = config.spike.deviations, config.spike.window
        self._recent_2W = torch.full((2, window), torch.nan, dtype=torch.float64, device=device)
        self._skips = torch.zeros((), dtype=torch.int64, device=device)
        self.halted = torch.zeros((), dtype=torch.bool, device=device)
        """Device flag: no update is applied any more, and the run must end at the next flush."""

    def judge(self, norm: Tensor, loss: Tensor) -> Tensor:
        """int64 device scalar: index into `REASONS`, above 0 if the update must not be applied.

        Args:
            norm: global gradient norm before clipping, not finite if the loss is not.
            loss: global loss.

        Under `nonfinite=stop` the first step that is not finite halts the run; else, and for spikes, the one
        after `max_skips` skipped in a row does. Once halted nothing is applied any more, so that the state is
        that before the bad step when the next flush ends the run.
        """
        is_bad = ~torch.isfinite(norm)
        reason = torch.where(is_bad, NONFINITE, APPLIED)
        if self._deviations is not None:
            reason = torch.where(is_bad, NONFINITE, self._spike(norm, loss, self._deviations))
        self._skips = torch.where(reason > 0, self._skips + 1, 0)
        self.halted = self.halted | (self._skips > self._max_skips) | (is_bad & self._stops)
        reason = torch.where(self.halted & (reason == APPLIED), HALTED, reason)
        if self._deviations is not None:
            self._remember(norm, loss, reason == APPLIED)
        return reason

    def _spike(self, norm: Tensor, loss: Tensor, deviations: float) -> Tensor:
        """Which of both is too far above the window, if any; nothing is above one that is not full: NaN."""
        limit_2 = self._recent_2W.mean(1) + deviations * self._recent_2W.std(1)
        loss_is_high, norm_is_high = (torch.stack([loss, norm]).double() > limit_2).unbind()
        return torch.where(loss_is_high, LOSS_SPIKE, torch.where(norm_is_high, NORM_SPIKE, APPLIED))

    def _remember(self, norm: Tensor, loss: Tensor, is_applied: Tensor) -> None:
        """The newest step stands last, so that a resumed run sums in the same order."""
        new_21 = torch.stack([loss, norm]).double()[:, None]
        moved_2W = torch.cat([self._recent_2W[:, 1:], new_21], 1)
        self._recent_2W = torch.where(is_applied, moved_2W, self._recent_2W)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON takes it; reads the device."""
        losses, norms = self._recent_2W[:, ~self._recent_2W[0].isnan()].tolist()
        return {"skips_in_a_row": int(self._skips.item()), "recent_losses": losses, "recent_norms": norms}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave, of another window too; an older checkpoint leaves all as it is."""
        if "recent_losses" not in state:
            return
        self._skips.fill_(state["skips_in_a_row"])
        window = self._recent_2W.shape[1]
        recent = torch.tensor([state["recent_losses"], state["recent_norms"]], dtype=torch.float64)
        recent = recent[:, -window:]
        self._recent_2W[:, window - recent.shape[1] :] = recent.to(self._recent_2W.device)


def refusal(config: Config, lines: Sequence[Mapping[str, Any]]) -> UserError:
    """Why a halted run ends, from the metrics of its last steps (exit 7)."""
    causes = []
    for words, reasons in (
        ("loss or gradient not finite", (REASONS[NONFINITE],)),
        (
            f"loss or gradient norm more than {config.spike.deviations} deviations above its window",
            (REASONS[LOSS_SPIKE], REASONS[NORM_SPIKE]),
        ),
    ):
        steps = ", ".join(str(line["step"]) for line in lines if line["skip_reason"] in reasons)
        causes += [f"{words} at step {steps}"] if steps else []
    fix = "nonfinite=skip leaves such steps out, a lower optimizer.lr often avoids them"
    if config.nonfinite == "skip" or not any(line["skip_reason"] == REASONS[NONFINITE] for line in lines):
        fix = f"more than max_skips={config.max_skips} in a row; a lower optimizer.lr often avoids them"
    return UserError(f"{' and '.join(causes)}; the weights are those before it. {fix}", code=7)
