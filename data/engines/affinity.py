"""Who answered a conversation last: its next turn goes there again, where its prefix is still in the KV cache."""

from collections import OrderedDict
from typing import Generic, TypeVar

PlaceT = TypeVar("PlaceT")
REMEMBERED_PER_REQUEST = 8  # in flight


class Affinity(Generic[PlaceT]):
    """The last place of each conversation; of `concurrency` requests at once, the least recently used are forgotten."""

    def __init__(self, concurrency: int) -> None:
        self.capacity = REMEMBERED_PER_REQUEST * concurrency
        self._places: OrderedDict[str, PlaceT] = OrderedDict()

    def get(self, key: str) -> PlaceT | None:
        return self._places.get(key)

    def put(self, key: str, place: PlaceT) -> None:
        self._places[key] = place
        self._places.move_to_end(key)
        if len(self._places) > self.capacity:
            self._places.popitem(last=False)
