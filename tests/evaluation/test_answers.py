"""Answers that are kept in a file: what was written whole is known again, and a file of others is left as it is."""

from __future__ import annotations

import pytest

from phalanx.base.errors import DataError
from phalanx.evaluation.answers import AnswerFile


def test_answers_are_known_again_and_a_line_that_was_cut_is_dropped(tmp_path):
    path = tmp_path / "a.jsonl"
    with AnswerFile(path) as file:
        file.add("one", [1.5, True])
        file.add("two", [7])
    written = path.read_bytes()
    whole = written.index(b"\n") + 1
    for kept in range(whole, len(written)):
        path.write_bytes(written[:kept])
        with AnswerFile(path) as file:
            assert len(file) == 1 and file["one"] == [1.5, True]
        assert path.read_bytes() == written[:whole]


@pytest.mark.parametrize("data", [b"hello", b"hello\n", b'{"prompt": "a"}', b'{"key": "one", "answer": 1}\nhello'])
def test_a_file_of_others_is_left_as_it_is(tmp_path, data):
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(DataError, match="not an answer that was kept; name another file"):
        AnswerFile(path)
    assert path.read_bytes() == data
