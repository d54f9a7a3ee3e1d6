"""Tells torchrun why a rank ended, so that it appears at the end of torchrun's own report, below its traceback."""

from __future__ import annotations

import os
import time
from pathlib import Path

FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for the reason of a rank's end


def explain_end(text: str) -> None:
    """Leave `text` where torchrun reads it, in the format of torch.distributed.elastic's error files; without torchrun,
    do nothing."""
    name = os.environ.get(FILE)
    if not name:
        return
    import json  # start-up time: only torchrun asks for it

    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    try:
        Path(name).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
    except OSError:
        return  # the text is on the rank's own output all the same
