"""Word to torchrun of why a rank ended: it then stands at the end of torchrun's own report, below its traceback."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for the reason of a rank's end


def explain_end(text: str) -> None:
    """Leave `text` where torchrun reads it, in the form of torch.distributed.elastic's error files; elsewhere
    nothing happens."""
    name = os.environ.get(FILE)
    if not name:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    try:
        Path(name).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
    except OSError:
        return  # the text is on the rank's own output all the same
