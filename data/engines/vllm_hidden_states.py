"""vLLM's connector that writes a served target's hidden states, for training on them (`train/features/served.py`).

`draftsmith serve RECIPE --features` prints the command; vLLM loads this file if draftsmith is installed too.
It is vLLM's own example connector (vLLM 0.32 and later, `example_hidden_states_connector.py`), but:

* It runs on devices without CUDA, where the copy out of the cache is an ordinary one.
* A file gets its name once it is whole. Where it cannot be written, `NAME.failed` holds the reason in its place: an
  answer's file follows the answer, and a client that waits sees one of the two. No locks are needed, which shared file
  systems of several nodes lack.
* A request that ended before all of its tokens were computed writes nothing, in place of wrong rows.
* `min_free_bytes` of the disk stay free.

Shapes: S tokens, L layers, D hidden; a file holds `hidden_states` [S, L, D], `token_ids` [S] and `layers` [L], the ids
of the layers that vLLM was started with.
"""

import os
import shutil
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)

PARTIAL, FAILED = ".partial", ".failed"  # suffixes behind the name of a file


class _Copied:
    """Stand-in for the CUDA event of a copy that has ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """vLLM connector that writes the hidden states of each request to a file, see the module's docstring."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._min_free_bytes = int(self._kv_transfer_config.get_from_extra_config("min_free_bytes", 0))
        started_with = vllm_config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
        self._layers = torch.tensor(sorted(set(started_with)))  # as the target's model orders them

    # ---- in the scheduler ----

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Schedule the file of a finished request, unless it ended before all of its tokens were computed."""
        delayed, answered = super().request_finished(request, block_ids)
        planned = self._pending_saves.get(request.request_id)
        if planned is not None and request.num_computed_tokens < len(planned.token_ids):
            del self._pending_saves[request.request_id]
            return False, None
        return delayed, answered

    # ---- in the workers, of which the first one writes ----

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        if self._kv_cache.device.type == "cuda":
            super()._submit_async_write(pending)
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks.unsqueeze(1) * self._block_size + torch.arange(self._block_size)).flatten()
        length = len(pending.token_ids)
        # Indexing copies, so that vLLM may use the blocks again.
        hidden = extract_from_kv_cache(self._kv_cache, slots[:length], length).contiguous()
        tensors = {"hidden_states": hidden, "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        future = self._executor.submit(self._write_tensors, tensors, _Copied(), pending.filename, lock)
        self._req_copy_events[pending.req_id] = _Copied()
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _write_tensors(self, tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        """Write a file whole, or the reason why not."""
        try:
            event.synchronize()
            tensors = {**tensors, "layers": self._layers}
            free = shutil.disk_usage(os.path.dirname(filename)).free
            needed = sum(tensor.nbytes for tensor in tensors.values()) + self._min_free_bytes
            if free < needed:
                raise OSError(f"{free} bytes are free on the disk, and {needed} are needed")
            save_file(tensors, filename + PARTIAL)
            os.replace(filename + PARTIAL, filename)
        except BaseException as error:
            with open(filename + FAILED, "w", encoding="utf-8") as stream:
                stream.write(f"{type(error).__name__}: {error}")
            raise
        finally:
            if os.path.exists(filename + PARTIAL):
                os.remove(filename + PARTIAL)
            if lock_fd is not None:
                os.close(lock_fd)
