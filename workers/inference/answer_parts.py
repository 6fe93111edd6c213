"""Puts small parts of an answer together, so that fewer are stored."""

from collections.abc import Sequence

from app.contract.inference import AnswerPart, ChoiceDelta


def merged_parts(parts: Sequence[AnswerPart]) -> AnswerPart:
    """Merges consecutive parts of an answer into one part, with one delta for each choice."""
    deltas: dict[int, ChoiceDelta] = {}
    for part in parts:
        for delta in part.deltas:
            before = deltas.get(delta.index)
            deltas[delta.index] = delta if before is None else _sum(before, delta)
    return AnswerPart(deltas=tuple(deltas.values()), usage=parts[-1].usage, error=parts[-1].error)


def _sum(first: ChoiceDelta, second: ChoiceDelta) -> ChoiceDelta:
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (*(first.logprobs or ()), *(second.logprobs or ()))
    return ChoiceDelta(
        index=first.index,
        text=first.text + second.text,
        logprobs=logprobs,
        finish_reason=second.finish_reason or first.finish_reason,
    )
