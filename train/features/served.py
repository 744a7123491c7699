"""The target's features from vLLM servers that serve it: `data.features.source: server`.

A training process loads the target's embedding, final norm and LM head, which drafters always read. It requests the
hidden states of each row (tokenized example) from the servers shortly before the row is trained on. The servers run
wherever the target fits, with their own tensor parallelism, quantisation and kernels; they write each row into a folder
that both sides share (`data/engines/vllm_hidden_states.py`), and the reader deletes it.

Every file is checked: its layers, the tokens that were sent, its shape and dtype, and that values are finite. At the
start each server is checked on one row: its most likely tokens must be those of our norm and head on its last hidden
states. If a server cannot answer, the request is repeated for `timeout_s`, at each server in turn; then training stops,
and the same command resumes it. No row is ever skipped or replaced.

With `keep` the rows are written into the run's feature files as they come (`cache.py`). Later epochs, and trainings
with `source: offline`, read them; `draftsmith features` fills these files before the training. Rows whose answers were
distilled with `data.distill.features` are stored from the start (`data/engines/answer_features.py`).

Shapes: S tokens of a row, L served layers, D hidden, F = D times the number of layers that the drafter reads.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import torch
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.data.distill.token_dataset import row_lengths
from draftsmith.data.engines.answer_features import Unavailable, await_file, row_file
from draftsmith.data.engines.engine import SERVED_NAME
from draftsmith.errors import UserError, reason
from draftsmith.models.target.features import FINAL_FEATURES, final_norm
from draftsmith.models.target.loading import weights_hash
from draftsmith.models.target.view import target_value
from draftsmith.recipes.run_folder import RunFolder, is_first_process, target_settings
from draftsmith.recipes.schema import Recipe
from draftsmith.train.features.cache import FeatureCache, FeatureIndex, feature_settings

START_IT = "start the server by the command that `draftsmith serve RECIPE --features` prints"
LONGEST_BACKOFF_S = 30.0
CONNECT_TIMEOUT_S = 10.0
# Of a request's file, whose name begins with the id that vLLM gives the request; the age of one that nobody has read.
REQUEST_FILES, ORPHAN_AGE_S = "cmpl-*.safetensors*", 3600.0
PROOF_TOKENS = 32
# How far below our largest logit the server's most likely token may be, as a share of the largest logit's height.
TIES_FRAC = {torch.float32: 1e-3}
TIES_FRAC_HALF = 3e-2


def served_layers(layers: tuple[int, ...], num_target_layers: int) -> tuple[int, ...]:
    """Return the ids of the layers that the servers extract, ascending: `layers`, and always the last one.

    Layer -1, the final features, is the last layer's output after our copy of the target's final norm.
    """
    return tuple(sorted({num_target_layers, *layers} - {FINAL_FEATURES}))


def open_served(
    recipe: Recipe, tokens: Dataset, tokens_hash: str, target: PreTrainedModel, layers: tuple[int, ...]
) -> "ServedFeatures":
    """Open the features that servers send during training; with `keep` also the files in which they are stored.

    Raises:
        UserError: The folder holds features of other settings, the disk is too small for them, or a server does
            not answer, or serves another target or other layers.
    """
    kept, folder = None, RunFolder(recipe).features
    if recipe.data.features.server.keep:
        settings, index = feature_settings(recipe, tokens_hash), FeatureIndex.read(folder)
        if index is None:
            hidden_size = target_value(target.config, "hidden_size")
            index = FeatureIndex.plan(layers, hidden_size, settings, row_lengths(tokens))
            index.check_disk_space(folder)
            folder.mkdir(parents=True, exist_ok=True)
            if is_first_process():
                index.write(folder)
        index.check_matches(folder, settings, layers, filled=bool(index.missing(folder)))
        kept = FeatureCache(folder, index, layers)
    served = ServedFeatures(recipe, tokens, target, layers, kept)
    if is_first_process():
        served.sweep()
    served.check_servers()
    return served


class ServedFeatures:
    """The target's features from vLLM servers, row by row; read like a `FeatureCache`.

    Args:
        recipe: Recipe whose `data.features` has the servers and settings.
        tokens: The run's tokenized examples; their row numbers are those of `ask`, `read` and `fetch`.
        target: The target, with at least its embedding, final norm and LM head.
        layers: Ids of the layers to read, in this order.
        kept: Files into which rows are written, and from which written rows are read; None: rows are not stored.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokens: Dataset,
        target: PreTrainedModel,
        layers: tuple[int, ...],
        kept: FeatureCache | None = None,
    ) -> None:
        self._chosen, self._kept = recipe.data.features, kept
        self._tokens = tokens.with_format("numpy", columns=["input_ids"])
        self._target, self._norm = target, final_norm(target)
        self._hidden_size = target_value(target.config, "hidden_size")
        self._last = target_value(target.config, "num_hidden_layers")
        self._layers, self._served = layers, served_layers(layers, self._last)
        # The hidden states of distilled answers depend on target and served layers.
        settings = [target_settings(recipe), weights_hash(recipe.target), self._served]
        digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        self.answers = RunFolder(recipe).features / f"answers-{digest[:16]}"
        self._pool: ThreadPoolExecutor | None = None
        self._client: Any = None  # an `httpx2.Client` that the threads of the pool share
        self._asked: dict[int, Future[Tensor]] = {}

    @property
    def width(self) -> int:
        """Return F, the number of features of one token: the hidden size times the number of layers."""
        return len(self._layers) * self._hidden_size

    @property
    def urls(self) -> list[str]:
        return self._chosen.server.urls

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self._chosen.dtype)

    def ask(self, rows: Sequence[int]) -> None:
        """Request rows from the servers before they are read, at most `data.features.server.in_flight` concurrently."""
        if self._pool is None:  # in each worker of a data loader its own
            workers = torch.utils.data.get_worker_info()
            self._pool = ThreadPoolExecutor(
                max(1, self._chosen.server.in_flight // (workers.num_workers if workers else 1))
            )
            self._client = self._new_client()
        for row in rows:
            if row not in self._asked and (self._kept is None or not self._kept.has(row)):
                self._asked[row] = self._pool.submit(self.fetch, row)

    @torch.no_grad()
    def read(self, rows: Sequence[int], out_sf: Tensor) -> None:
        """Copy the features of these rows, one after the other, to the start of `out_sf` [S, F].

        Raises:
            UserError: No server gives the features, or a server's answer is wrong or damaged.
        """
        self.ask(rows)
        done = 0
        for row in rows:
            length = len(self._tokens[row]["input_ids"])
            out_rf = out_sf[done : done + length]
            done += length
            if self._kept is not None and self._kept.has(row):
                self._kept.read([row], out_rf)
                continue
            hidden_sld = self._asked.pop(row).result()
            for layer, part_sd in zip(self._layers, out_rf.chunk(len(self._layers), dim=-1), strict=True):
                part_sd.copy_(self._features(layer, hidden_sld))
            if self._kept is not None:
                self._kept.write(row, out_rf)
                row_file(self.answers, self._ids(row)).unlink(missing_ok=True)

    def _ids(self, row: int) -> list[int]:
        return self._tokens[row]["input_ids"].tolist()

    def _is_distilled(self, row: int) -> bool:
        return self.answers.is_dir() and row_file(self.answers, self._ids(row)).is_file()

    def fetch(self, row: int) -> Tensor:
        """Return a row's hidden states [S, L, D] of the L served layers, as stored in distilling or from a server.

        Raises:
            UserError: No server answered within `timeout_s`, or a server refuses the row or its answer is wrong.
        """
        ids, urls = self._ids(row), self._chosen.server.urls
        if (file := row_file(self.answers, ids)).is_file():
            return self._load(file, ids)
        begin_s, attempt = time.monotonic(), 0
        while True:
            url = urls[(row + attempt) % len(urls)]
            try:
                return self._fetch(url, ids)[0]
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

    def check_servers(self) -> None:
        """Check by one row that each server serves this target, layers and dtype; skipped if all rows are stored.

        Raises:
            UserError: A server does not answer, or serves another target or other layers.
        """
        rows = range(len(self._tokens))
        if all((self._kept is not None and self._kept.has(row)) or self._is_distilled(row) for row in rows):
            return
        ids = next((ids for row in rows if len(ids := self._ids(row)) > 1), self._ids(0))[:PROOF_TOKENS]
        with self._new_client() as self._client:
            for url in self._chosen.server.urls:
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
        final_sd = self._features(FINAL_FEATURES, hidden_sld).to(weight.device, weight.dtype)
        logits_sv = self._target.get_output_embeddings()(final_sd).float()
        ties = TIES_FRAC.get(hidden_sld.dtype, TIES_FRAC_HALF)
        for place, said in enumerate(prompt_logprobs[1:]):
            likely = next((int(token) for token, value in (said or {}).items() if value.get("rank") == 1), None)
            logits_v = logits_sv[place]
            height = logits_v.max() - logits_v.mean()
            if likely is None or likely >= len(logits_v) or logits_v.max() - logits_v[likely] > ties * height:
                raise UserError(
                    f"{url} of data.features.server.urls serves another target than target.model, or extracts other "
                    f"layers than {list(self._served)}: after {place + 1} tokens its most likely next token is "
                    f"{likely}, and our LM head's on its hidden states {int(logits_v.argmax())}: {START_IT}"
                )

    def sweep(self) -> None:
        """Delete requests' unread files over an hour old in the servers' folder, such as those of aborted ones."""
        folder, now_s = Path(self._chosen.server.folder), time.time()
        for file in folder.glob(REQUEST_FILES):
            try:
                if now_s - file.stat().st_mtime > ORPHAN_AGE_S:
                    file.unlink()
            except FileNotFoundError:  # another process was faster
                continue

    def finish(self) -> None:
        """Complete the stored feature files after training; call it in one process only."""
        if self._kept is not None and self._kept.finish_all():
            shutil.rmtree(self.answers, ignore_errors=True)

    def _features(self, layer: int, hidden_sld: Tensor) -> Tensor:
        """Return one layer's features [S, D] of served hidden states; those of layer -1 are normed here."""
        if layer != FINAL_FEATURES:
            return hidden_sld[:, self._served.index(layer)]
        weight = next(self._norm.parameters())
        return self._norm(hidden_sld[:, self._served.index(self._last)].to(weight.device, weight.dtype)).cpu()

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
            return self._load(file, ids), choice
        finally:
            file.unlink(missing_ok=True)

    def _load(self, file: Path, ids: list[int]) -> Tensor:
        """Return the hidden states [S, L, D] in a file, without the last token's if it is of an answer.

        Raises:
            UserError: The file is not what a server of this target writes for these tokens.
        """
        try:
            tensors = load(file.read_bytes())
            hidden_sld, read_ids = tensors["hidden_states"], tensors["token_ids"].tolist()
            layers = tensors["layers"].tolist()
        except (SafetensorError, KeyError) as error:
            raise UserError(f"{file}, written by a server of features, is damaged ({reason(error)})") from None
        if file.parent == self.answers:
            # The last token's states are read by no drafter; another's stand in for them.
            hidden_sld = torch.cat([hidden_sld[: len(ids)], hidden_sld[-1:]])[: len(ids)]
            read_ids = [*read_ids[: len(ids)], ids[-1]][: len(ids)]
        expected = (len(ids), len(self._served), self._hidden_size)
        wrong = (
            ("" if layers == list(self._served) else f"the layers {layers}, not {list(self._served)}")
            or ("other tokens than were sent" if read_ids != ids else "")
            or ("" if hidden_sld.shape == expected else f"the shape {list(hidden_sld.shape)}, not {list(expected)}")
            or ("" if hidden_sld.dtype == self._target.dtype else f"{hidden_sld.dtype}, not {self._target.dtype}")
            or ("" if hidden_sld.isfinite().all() else "values that are not finite")
        )
        if wrong:
            raise UserError(f"{file}, written by a server of features, has {wrong}: {START_IT}")
        return hidden_sld

    def __getstate__(self) -> dict[str, Any]:
        """Leave out threads and connections: each worker of a data loader has its own."""
        return {**self.__dict__, "_pool": None, "_client": None, "_asked": {}}
