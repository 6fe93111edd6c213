"""Why there is no export."""


class NotExported(Exception):
    """The model cannot be exported as requested, or the export does not agree with it; the message says
    why."""
