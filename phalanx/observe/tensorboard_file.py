"""TensorBoardFile: a run's numbers as an event file of TensorBoard, in the run's tb/ folder."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from phalanx.base.journal import Journal
from phalanx.base.records import Row, Sink, SinkStart


class _RecordSink:
    """What RecordWriter writes to: each record becomes one entry in a journal, so a full disk loses no record and no
    thread is needed."""

    def __init__(self, journal: Journal):
        self._journal = journal

    def write(self, record: bytes) -> None:
        self._journal.write(record)

    def flush(self) -> None:
        self._journal.flush()

    def close(self) -> None:
        self._journal.close()


class TensorBoardFile(Sink):
    """One event file for each start of the run. Its first event makes TensorBoard drop what earlier files contain after
    the run's step."""

    def __init__(self, start: SinkStart, config: Any):
        super().__init__(start, config)
        name = f"events.out.tfevents.{time.time_ns() / 1e9:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(_RecordSink(Journal(start.folder / "tb" / name, start.log.warn)))
        self._texts: dict[str, str] = {}
        self._add(Event(file_version="brain.Event:2"))
        self.rewind(start.step)

    def rewind(self, step: int) -> None:
        self._add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, row: Row) -> None:
        summary = Summary()
        for name, number in row.scalars().items():
            summary.value.add(tag=name, simple_value=number)
        for name, text in row.texts().items():
            if self._texts.get(name) != text:
                self._texts[name] = text
                shown = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
                summary.value.add(
                    tag=name, metadata=shown, tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()])
                )
        self._add(Event(step=row.step, summary=summary))

    def close(self) -> None:
        self._records.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
