"""Bodies of type multipart/form-data (RFC 7578), as clients send files: whole, in memory."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser

from phalanx.base.dataclass import dataclass
from phalanx.server.errors import ApiError

MAX_PARTS = 64


@dataclass(frozen=True)
class FormPart:
    """A field of a form. filename: of a file; None: it is a text."""

    name: str
    data: bytes
    filename: str | None = None

    def text(self) -> str:
        """ApiError if it is a file, or no UTF-8."""
        if self.filename is not None:
            raise ApiError(400, f"{self.name}: must be a text, not a file.", param=self.name, code="invalid_value")
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise ApiError(400, f"{self.name}: is no UTF-8.", param=self.name, code="invalid_value") from None


def form_parts(data: bytes, content_type: str) -> list[FormPart]:
    """The fields of a body, in order. ApiError for one that cannot be read."""
    kind = Message()
    kind["content-type"] = content_type
    boundary = kind.get_param("boundary")
    if not isinstance(boundary, str) or not boundary:
        raise ApiError(400, "the form has no boundary in its content-type", code="invalid_form")
    before, *sections = (b"\r\n" + data).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if not sections or not sections[-1].startswith(b"--"):
        raise ApiError(400, "the form does not end with its boundary: it was cut short", code="invalid_form")
    if before.strip():
        raise ApiError(400, "the form does not begin with its boundary", code="invalid_form")
    if len(sections) > MAX_PARTS:
        raise ApiError(
            400, f"the form has {len(sections) - 1} fields; it may have {MAX_PARTS - 1}", code="invalid_form"
        )
    return [_part(section) for section in sections[:-1]]


def _part(section: bytes) -> FormPart:
    head, empty, body = section.partition(b"\r\n\r\n")
    headers = BytesHeaderParser().parsebytes(head.lstrip(b" \t\r\n"))
    name = headers.get_param("name", header="content-disposition")
    if headers.get_content_disposition() != "form-data" or not isinstance(name, str) or not empty:
        raise ApiError(400, "a field of the form has no name", code="invalid_form")
    return FormPart(name, body, headers.get_filename())
