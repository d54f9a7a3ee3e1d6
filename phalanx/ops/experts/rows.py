"""Which token each of the experts' rows holds: the plan by which tokens are gathered into rows and summed back."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True)
class ExpertRows:
    """(token, slot) pairs of the experts held here, sorted by expert and then by token; all int32 on the device."""

    source_R: Tensor
    """Token of each row; 0 in the padding."""
    slot_R: Tensor
    """Position of each row's pair in the T * K pairs; 0 in the padding."""
    row_TK: Tensor
    """The row of each pair; -1 where its expert is on another rank or there was no room."""
    ends_E: Tensor
    """One past the last row of each expert, at most the number of rows."""
    wanted: Tensor
    """() the number of rows that would have been needed. If it exceeds the rows that there are, some are missing and
    the result is wrong."""

    @property
    def valid_R(self) -> Tensor:
        """(R,) bool: not padding."""
        return torch.arange(len(self.source_R), device=self.source_R.device) < self.ends_E[-1]
