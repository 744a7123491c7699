"""A thousand requests to a learning server, while it and its learner are killed: none lost, none wrong."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from support.tiny_runs import recipe_file, untrained_run

from draftsmith.data.engines.server_process import free_port
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.files import open_records
from draftsmith.data.sources.record_reader import parse_conversation
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.eval.speculative_decoder import SpeculativeDecoder
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.conversations import SourceRecipe
from draftsmith.serve.learning import Learned

REQUESTS, QUESTIONS, NEW_TOKENS, CLIENTS = 1000, 200, 32, 4
SERVER_KILLS, LEARNER_KILLS, BETWEEN_S = 3, 5, 12.0


class KilledServer:
    """A `draftsmith serve --learn` process that is restarted after every kill."""

    def __init__(self, file: str) -> None:
        self.port = free_port()
        options = ["--learn", "--learn-minutes", "0.1", "--port", str(self.port)]
        self._command = [sys.executable, "-m", "draftsmith.cli.main", "serve", file, *options]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def kill_learner(self) -> bool:
        """Kill the learner; return whether there was one."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children():
                if "spawn_main" in " ".join(child.cmdline()):
                    os.kill(child.pid, signal.SIGKILL)
                    return True
        return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[KilledServer, Any]]:
    method = {"name": "tree", "tree": "best_first", "nodes": 6, "branch": 3}
    recipe = untrained_run(tmp_path, methods=[method], compile=False)
    started = KilledServer(recipe_file(recipe))
    yield started, recipe
    started.kill()


@pytest.mark.nightly
def test_a_thousand_requests_with_kills(server: tuple[KilledServer, Any]) -> None:
    process, recipe = server
    target, tokenizer = load_target(recipe.target)
    records = (parse_conversation(record, where) for where, record in open_records(SourceRecipe(), "all"))
    questions = [next(records).turns[0].content for _ in range(QUESTIONS)]
    with SpeculativeDecoder(target, tokenizer) as decoder:
        expected = [decoder.ask(question, NEW_TOKENS).ids for question in questions]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{process.port}/v1", api_key="-", max_retries=0, timeout=60)

    def ask(number: int) -> str:
        messages: Any = [{"role": "user", "content": questions[number % QUESTIONS]}]
        while True:  # as a client does when its server is gone
            with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError, openai.APITimeoutError):
                said = client.chat.completions.create(
                    model="any", messages=messages, temperature=0, max_tokens=NEW_TOKENS
                )
                return str(said.choices[0].message.content)
            time.sleep(0.2)

    done, killed = threading.Event(), {"server": 0, "learner": 0}

    def kills() -> None:
        order = ["server"] * SERVER_KILLS + ["learner"] * LEARNER_KILLS
        random.Random(3).shuffle(order)
        for what in order:
            if done.wait(BETWEEN_S):
                return
            if what == "server":
                process.kill()
                process.start()
                killed["server"] += 1
            else:
                killed["learner"] += process.kill_learner()

    killing = threading.Thread(target=kills)
    killing.start()
    asked = 0
    with ThreadPoolExecutor(CLIENTS) as pool:
        while asked < REQUESTS or killing.is_alive():
            numbers = range(asked, asked + 4 * CLIENTS)
            for number, text in zip(numbers, pool.map(ask, numbers), strict=True):
                assert text == texts[number % QUESTIONS]
            asked += len(numbers)
    done.set()
    killing.join()
    print(f"{asked} requests, {killed}")
    assert asked >= REQUESTS
    assert killed["server"] == SERVER_KILLS
    assert killed["learner"] >= 1
    learned = Learned(recipe, 4000)
    kept = {(tuple(answer.prompt_ids), tuple(answer.ids)) for answer in learned.answers()}
    prompts = [prompt_token_ids(tokenizer, [Turn("user", question)]) for question in questions]
    served = {(tuple(prompt), tuple(ids)) for prompt, ids in zip(prompts, expected, strict=True) if len(ids) > 1}
    assert served <= kept  # each was answered more than once, and served answers are on disk
    assert learned.serving().is_dir()
