"""The requests that an engine has received and not prepared yet: keys take turns."""

from collections import deque

from workers.inference.protocol import AnswerOrder


class AnswerQueue:
    """Requests in the order in which they are to be prepared: one of each key in turn, the oldest first."""

    def __init__(self) -> None:
        self._by_key: dict[str | None, deque[AnswerOrder]] = {}
        """The key whose turn is next comes first."""

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def add(self, order: AnswerOrder) -> None:
        self._by_key.setdefault(order.key_id, deque()).append(order)

    def take(self) -> AnswerOrder:
        """Removes and returns the next request; there must be one."""
        key_id = next(iter(self._by_key))
        own = self._by_key.pop(key_id)
        order = own.popleft()
        if own:
            self._by_key[key_id] = own
        return order

    def remove(self, request_id: str) -> None:
        """Removes a request, if it is still waiting."""
        for key_id, own in list(self._by_key.items()):
            kept = deque(each for each in own if each.id != request_id)
            if kept:
                self._by_key[key_id] = kept
            else:
                del self._by_key[key_id]
