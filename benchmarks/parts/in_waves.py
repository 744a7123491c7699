"""Turn-by-turn waves, as self-distillation is often written: nobody's next turn is asked before everybody's answer."""

from draftsmith.data.engines.engine import Engine, Outcome, Request


class InWaves:
    """An `Engine` that hands no answer over before it has them all."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._in_flight = 0
        self.concurrency = engine.concurrency
        self.max_length_tokens = engine.max_length_tokens

    def submit(self, request: Request) -> None:
        self._in_flight += 1
        self._engine.submit(request)

    def collect(self) -> list[tuple[str, Outcome]]:
        outcomes: list[tuple[str, Outcome]] = []
        while len(outcomes) < self._in_flight:
            outcomes += self._engine.collect()
        self._in_flight = 0
        return outcomes

    def close(self) -> None:
        self._engine.close()
