"""The kind of body that a request declares."""

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers

_UTF_8 = ("utf-8", "utf8")


def is_multipart(headers: Headers) -> bool:
    """Whether it is a form with files; media types are case-insensitive (RFC 9110, section 8.3.1)."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"


def has_other_charset(headers: Headers) -> bool:
    """Whether a form declares a charset other than UTF-8, which no client does.

    Parsing would use any of Python's codecs, and some take quadratic time (idna, punycode).
    """
    _, options = parse_options_header(headers.get("content-type", ""))
    charset = options.get(b"charset")
    return charset is not None and charset.decode("latin-1").lower() not in _UTF_8
