"""The target's hidden states that a vLLM server writes next to an answer, kept for the training on that answer.

With `data.distill.features` a server started by `draftsmith serve RECIPE --features` gives an answer and the hidden
states of prompt and answer by one request. The states of a sequence are kept in a file named by a hash of its token
ids, so that training finds them in any order of its examples (`train/features/served.py`). An answer whose states are
missing is still used: training requests the states of its sequence from a server.

The states of an answer's last token are missing, as no forward has read it. No drafter needs them: nothing follows
that token.

Shapes: S tokens of a sequence.
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
    """Error of a server that cannot answer now; another server, or the same one later, may answer."""


def await_file(file: Path) -> None:
    """Wait until a server has written a file completely, for at most `FILE_TIMEOUT_S` seconds.

    Raises:
        Unavailable: The server could not write the file, or the file does not appear in time.
    """
    begin_s, pause_s, failed = time.monotonic(), FIRST_PAUSE_S, file.with_name(file.name + FAILED)
    while not file.is_file():
        if failed.is_file():
            why = failed.read_text(encoding="utf-8")
            failed.unlink(missing_ok=True)
            raise Unavailable(f"it could not write {file}: {why}")
        if time.monotonic() - begin_s > FILE_TIMEOUT_S:
            raise Unavailable(f"{file} did not appear: set data.features.server.folder to the server's own folder")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def row_file(folder: Path, ids_s: list[int]) -> Path:
    """Return the path of the file in `folder` for the hidden states of these token ids, named by a hash of the ids."""
    digest = hashlib.sha256(np.asarray(ids_s, dtype="<i8").tobytes()).hexdigest()
    return folder / f"{digest[:32]}.safetensors"


@dataclass
class AnswerFeatures:
    """Store of the hidden states that servers write next to their answers.

    served: folder that the servers write to. kept: folder for the states of each sequence. max_length_tokens: longer
    sequences are cut. keeps_cut: whether answers that were cut short are trained on. lost: why states are missing.
    """

    served: Path
    kept: Path
    max_length_tokens: int
    keeps_cut: bool
    lost: list[str] = field(default_factory=list)
    _latest: dict[str, list[int]] = field(default_factory=dict)  # rows by conversation

    def take(self, name: str | None, request: Request, answer: Completion, is_trained_on: bool) -> None:
        """Move the hidden states that a server wrote for an answer to the file of its sequence; add errors to `lost`.

        If the conversation's previous sequence is the beginning of this one, the file of the previous one is deleted.

        Args:
            name: Path of the file on the server; None if the server gave none.
            is_trained_on: If False, the server's file is only deleted.
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
