"""The target's hidden states that a vLLM server writes next to an answer, kept for the training on that answer.

With `data.distill.features` a server started by `draftsmith serve RECIPE --features` gives an answer and the hidden
states of prompt and answer by one request. Those of a row of tokens are kept in a file named by a hash of the row's
ids, so that training finds them however its rows are ordered (`train/features/served.py`). An answer whose states do
not come is an answer like any other: training asks a server for its row.

The states of an answer's last token are not among them, as no forward has read it. No drafter reads those of a row's
last token, behind which there is nothing to predict.

Shapes: S tokens of a row.
"""

import hashlib
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from draftsmith.data.engines.engine import Completion, Request
from draftsmith.errors import reason

FAILED = ".failed"  # behind a file's name, see `data/engines/vllm_hidden_states.py`
# A file follows its answer: it is waited for so long, in steps that double up to the longest.
FILE_TIMEOUT_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 0.001, 0.05


class Unavailable(Exception):
    """A server cannot answer now; another one, or the same one later, may."""


def await_file(file: Path) -> None:
    """Wait until a server has written a file whole.

    Raises:
        Unavailable: The server could not write it, or it does not come.
    """
    begin_s, pause_s, failed = time.monotonic(), FIRST_PAUSE_S, file.with_name(file.name + FAILED)
    while not file.is_file():
        if failed.is_file():
            why = failed.read_text(encoding="utf-8")
            failed.unlink(missing_ok=True)
            raise Unavailable(f"it could not write {file}: {why}")
        if time.monotonic() - begin_s > FILE_TIMEOUT_S:
            raise Unavailable(f"{file} did not come: data.features.server.folder must be the server's own folder")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def row_file(folder: Path, ids_s: list[int]) -> Path:
    """Return the file for the hidden states of a row of tokens."""
    digest = hashlib.sha256(np.asarray(ids_s, dtype="<i8").tobytes()).hexdigest()
    return folder / f"{digest[:32]}.safetensors"


@dataclass
class AnswerFeatures:
    """Keeper of the hidden states that servers write next to their answers.

    served: the servers' folder. kept: the folder for the rows' files. max_length_tokens: of a row, longer ones are cut.
    keeps_cut: whether answers that were cut short are trained on. lost: why states did not come, by request.
    """

    served: Path
    kept: Path
    max_length_tokens: int
    keeps_cut: bool
    lost: list[str] = field(default_factory=list)
    _latest: dict[str, list[int]] = field(default_factory=dict)  # rows by conversation

    def take(self, name: str | None, request: Request, answer: Completion, is_trained_on: bool) -> None:
        """Move what a server wrote next to an answer into the row's file.

        A conversation's next row replaces the one that it begins with.

        Args:
            name: Path of the file on the server; None if it named none.
            is_trained_on: Else the file is only deleted.
        """
        try:
            if name is None:
                raise Unavailable("the server writes no hidden states")
            file = self.served / Path(name).name
            await_file(file)
            if not is_trained_on or answer.token_ids is None or not (self.keeps_cut or answer.finish_reason == "stop"):
                file.unlink()
                return
            ids = (request.prompt_ids + answer.token_ids)[: self.max_length_tokens]
            place = row_file(self.kept, ids)
            self.kept.mkdir(parents=True, exist_ok=True)
            partial = place.with_suffix(".partial")
            shutil.move(file, partial)  # to another disk, as a rule
            os.replace(partial, place)
        except (Unavailable, OSError) as error:
            self.lost.append(reason(error))
            return
        before = self._latest.get(request.key)
        if before is not None and len(before) < len(ids) and ids[: len(before)] == before:
            with suppress(FileNotFoundError):
                row_file(self.kept, before).unlink()
        self._latest[request.key] = ids
