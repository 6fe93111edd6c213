"""What kind of body a request says that it has."""

from starlette.datastructures import Headers


def is_multipart(headers: Headers) -> bool:
    """Whether it is a form with files; media types are case-insensitive (RFC 9110, section 8.3.1)."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"
