"""The target's features from vLLM servers that serve it: `data.features.source: server`.

A training process loads the target's embedding, final norm and LM head, which drafters always read. It requests the
hidden states of each row (tokenized example) from the servers shortly before the row is trained on. The servers run
wherever the target fits, with their own tensor parallelism, quantisation and kernels; they write each row into a folder
that both sides share (`data/engines/vllm_hidden_states.py`), and the reader deletes it.

Every file is checked: its layers, the tokens that were sent, its shape and dtype, and that values are finite. At the
start each server is checked on one row: its most likely tokens must be those of our norm and head on its last hidden
states. If a server cannot answer, the request is repeated for `timeout_s`, at each server in turn; then training stops,
and the same command resumes it. No row is ever skipped or replaced.

With `keep` the rows are stored in the run's folder as they come (`stored.py`). Later epochs, and trainings with
`source: offline`, read them; `draftsmith features` stores them before the training. Rows whose answers were distilled
with `data.distill.features` are stored from the start (`data/engines/answer_features.py`).

Shapes: S tokens of a row, L layers, D hidden.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.data.engines.answer_features import Unavailable, await_file, row_file
from draftsmith.data.engines.engine import SERVED_NAME
from draftsmith.errors import UserError, reason
from draftsmith.models.target.features import FINAL_FEATURES
from draftsmith.recipes.run_folder import is_first_process
from draftsmith.recipes.schema import Recipe
from draftsmith.train.features.stored import WRITE_AGAIN, StoredFeatures

START_IT = "start the server by the command that `draftsmith serve RECIPE --features` prints"
LONGEST_BACKOFF_S = 30.0
CONNECT_TIMEOUT_S = 10.0
# Of a request's file, whose name begins with the id that vLLM gives the request; the age of one that nobody has read.
REQUEST_FILES, ORPHAN_AGE_S = "cmpl-*.safetensors*", 3600.0
PROOF_TOKENS = 32
# How far below our largest logit the server's most likely token may be, as a share of the largest logit's height.
TIES_FRAC = {torch.float32: 1e-3}
TIES_FRAC_HALF = 3e-2


def open_features(recipe: Recipe, tokens: Dataset, target: PreTrainedModel, layers: tuple[int, ...]) -> StoredFeatures:
    """Open the features that a training reads: from disk, or from servers.

    Raises:
        UserError: Rows are missing on disk, the disk is too small for those that are to be kept, or a server does not
            answer, or serves another target or other layers.
    """
    if recipe.data.features.source == "offline":
        stored = StoredFeatures(recipe, tokens, target, layers)
        stored.check_complete()
        return stored
    served = ServedFeatures(recipe, tokens, target, layers)
    missing = served.missing()
    if recipe.data.features.server.keep:
        served.check_disk_space(missing)
    if is_first_process():
        served.sweep()
    served.check_servers(missing)
    return served


class ServedFeatures(StoredFeatures):
    """The target's features from vLLM servers, row by row; rows that are stored are read from disk.

    The target needs at least its embedding, final norm and LM head.
    """

    def __init__(self, recipe: Recipe, tokens: Dataset, target: PreTrainedModel, layers: tuple[int, ...]) -> None:
        super().__init__(recipe, tokens, target, layers)
        self.urls = recipe.data.features.server.urls
        self._pool: ThreadPoolExecutor | None = None
        self._client: Any = None  # an `httpx2.Client` that the threads of the pool share
        self._asked: dict[int, Future[Tensor]] = {}

    def ask(self, rows: Sequence[int]) -> None:
        """Request rows from the servers before they are read, at most `data.features.server.in_flight` concurrently."""
        if self._pool is None:  # in each worker of a data loader its own
            workers = torch.utils.data.get_worker_info()
            self._pool = ThreadPoolExecutor(
                max(1, self._chosen.server.in_flight // (workers.num_workers if workers else 1))
            )
            self._client = self._new_client()
        for row in rows:
            if row not in self._asked:
                self._asked[row] = self._pool.submit(self.fetch, row)

    def take(self, row: int) -> Tensor:
        """Return the features [S, L, D] of a row, which is stored if `data.features.server.keep` is set.

        Raises:
            UserError: No server gives the features, or a server's answer is wrong or damaged.
        """
        self.ask([row])
        features_sld = self._asked.pop(row).result()
        if self._chosen.server.keep and not row_file(self.folder, self.ids(row)).is_file():
            self.store(row, features_sld)
        return features_sld

    def fetch(self, row: int) -> Tensor:
        """Return a row's features [S, L, D] from disk or from a server.

        Raises:
            UserError: No server answered within `timeout_s`, or a server refuses the row or its answer is wrong.
        """
        ids, urls = self.ids(row), self.urls
        if (file := row_file(self.folder, ids)).is_file():
            return self.select(*self.load(file, ids, WRITE_AGAIN))
        begin_s, attempt = time.monotonic(), 0
        while True:
            url = urls[(row + attempt) % len(urls)]
            try:
                return self.select(self._fetch(url, ids)[0], self.served)
            except (Unavailable, httpx2.TransportError) as error:
                if time.monotonic() - begin_s > self._chosen.server.timeout_s:
                    raise UserError(
                        f"no server of data.features.server.urls gives features; the last one tried, {url}, failed "
                        f"({reason(error)}): start it again, then run the same command, which resumes"
                    ) from None
                if attempt == 0:
                    print(f"waiting for features from {url}: {reason(error)}", flush=True)
            time.sleep(min(2.0**attempt, LONGEST_BACKOFF_S))
            attempt += 1

    def check_servers(self, missing: Sequence[int]) -> None:
        """Check by one row that each server serves this target, layers and dtype; skipped if no rows are missing.

        Raises:
            UserError: A server does not answer, or serves another target or other layers.
        """
        if not missing:
            return
        ids = next((ids for row in missing if len(ids := self.ids(row)) > 1), self.ids(0))[:PROOF_TOKENS]
        with self._new_client() as self._client:
            for url in self.urls:
                try:
                    hidden_sld, choice = self._fetch(url, ids, prompt_logprobs=1)
                except (Unavailable, httpx2.TransportError) as error:
                    raise UserError(
                        f"{url} of data.features.server.urls gives no features ({reason(error)}): {START_IT}"
                    ) from None
                self._check_same_target(url, hidden_sld, choice.get("prompt_logprobs") or [])
        self._client = None  # not shared with the data loader's workers

    @torch.no_grad()
    def _check_same_target(self, url: str, hidden_sld: Tensor, prompt_logprobs: list[Any]) -> None:
        weight = self._target.get_output_embeddings().weight
        final_sd = self.select_layer(FINAL_FEATURES, hidden_sld, self.served).to(weight.device, weight.dtype)
        logits_sv = self._target.get_output_embeddings()(final_sd).float()
        ties = TIES_FRAC.get(hidden_sld.dtype, TIES_FRAC_HALF)
        for place, said in enumerate(prompt_logprobs[1:]):
            likely = next((int(token) for token, value in (said or {}).items() if value.get("rank") == 1), None)
            logits_v = logits_sv[place]
            height = logits_v.max() - logits_v.mean()
            if likely is None or likely >= len(logits_v) or logits_v.max() - logits_v[likely] > ties * height:
                raise UserError(
                    f"{url} of data.features.server.urls serves another target than target.model, or extracts other "
                    f"layers than {list(self.served)}: after {place + 1} tokens its most likely next token is "
                    f"{likely}, and our LM head's on its hidden states {int(logits_v.argmax())}: {START_IT}"
                )

    def sweep(self) -> None:
        """Delete incomplete files, and in the servers' folder unread ones over an hour old, as of aborted requests."""
        super().sweep()
        folder, now_s = Path(self._chosen.server.folder), time.time()
        for file in folder.glob(REQUEST_FILES):
            try:
                if now_s - file.stat().st_mtime > ORPHAN_AGE_S:
                    file.unlink()
            except FileNotFoundError:  # another process was faster
                continue

    def _new_client(self) -> httpx2.Client:
        """Return a client that waits for each of the servers for its share of `timeout_s`."""
        asked = self._chosen.server
        timeout = httpx2.Timeout(asked.timeout_s / len(asked.urls), connect=CONNECT_TIMEOUT_S)
        return httpx2.Client(timeout=timeout, trust_env=False, limits=httpx2.Limits(max_connections=None))

    def _fetch(self, url: str, ids: list[int], **options: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the hidden states [S, L, D] of these tokens from one server, and its answer."""
        body = {"model": SERVED_NAME, "prompt": ids, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        response = self._client.post(f"{url.rstrip('/').removesuffix('/v1')}/v1/completions", json={**body, **options})
        if 400 <= response.status_code < 500:
            raise UserError(
                f"{url} of data.features.server.urls refuses a row of {len(ids)} tokens (HTTP {response.status_code}: "
                f"{reason(ValueError(response.text))}): its --max-model-len must be at least {len(ids) + 1}"
            )
        if response.status_code != 200:
            raise Unavailable(f"HTTP {response.status_code}")
        try:
            answer = response.json()
            choice, params = answer["choices"][0], answer.get("kv_transfer_params") or {}
            read_ids, path = choice.get("prompt_token_ids"), params.get("hidden_states_path")
        except (ValueError, KeyError, IndexError, AttributeError, TypeError):
            raise UserError(
                f"{url} of data.features.server.urls does not answer like vLLM: give a vLLM server's URL"
            ) from None
        if read_ids != ids:
            raise UserError(
                f"{url} of data.features.server.urls read other tokens than it was sent: give a vLLM server's URL"
            )
        if not isinstance(path, str):
            raise UserError(f"{url} of data.features.server.urls writes no hidden states: {START_IT}")
        file = Path(self._chosen.server.folder) / Path(path).name
        await_file(file)
        try:
            return self.load(file, ids, START_IT)[0], choice
        finally:
            file.unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out threads and connections: each worker of a data loader has its own."""
        return {**self.__dict__, "_pool": None, "_client": None, "_asked": {}}
