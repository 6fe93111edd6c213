"""What kind of body a request says that it has."""

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers

_UTF_8 = ("utf-8", "utf8")


def is_multipart(headers: Headers) -> bool:
    """Whether it is a form with files; media types are case-insensitive (RFC 9110, section 8.3.1)."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"


def names_a_charset(headers: Headers) -> bool:
    """Whether a form says that it is in something else than UTF-8, as no client's is. Parsing would use any
    codec that Python knows, and some take time with the square of the text (idna, punycode)."""
    _, options = parse_options_header(headers.get("content-type", ""))
    charset = options.get(b"charset")
    return charset is not None and charset.decode("latin-1").lower() not in _UTF_8
