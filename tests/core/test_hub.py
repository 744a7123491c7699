"""Every error of huggingface_hub becomes one sentence with the way out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from support.fake_hub import refused

from draftsmith.errors import UserError
from draftsmith.hub import hub_errors


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            refused(403),
            "HfHubHTTPError for me/x: 403 for https://hub.test; if the Hub refused, check",
        ),
        (refused(404, RepositoryNotFoundError), "RepositoryNotFoundError for me/x: 404 for https://hub.test; "),
        (httpx2.ReadTimeout("slow"), "ReadTimeout for me/x: slow; "),
        (ValueError("of\nanother kind"), "ValueError for me/x: of another kind; "),
    ],
)
def test_hub_errors_become_sentences(error: Exception, sentence: str) -> None:
    with pytest.raises(UserError) as caught, hub_errors("tried", "me/x"):
        raise error
    assert str(caught.value).startswith(f"tried: {sentence}")
    assert str(caught.value).endswith("otherwise run the same command again to continue")


def test_full_disk_is_not_reported_as_a_hub_error() -> None:
    with pytest.raises(RuntimeError, match="wrapped"), hub_errors("tried", "me/x"):
        raise RuntimeError("wrapped") from OSError(28, "No space left on device", "a")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: HfApi("http://127.0.0.1:9").whoami(), "`hf auth login`"),
        (lambda: HfApi("http://127.0.0.1:9").model_info("me/x"), "ConnectError for me/x"),
    ],
)
def test_errors_raised_by_huggingface_hub(
    call: Callable[[], Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own messages have the ways out, such as the variable to unset."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.utils.close_session()
    with pytest.raises(UserError) as caught, hub_errors("tried", "me/x"):
        call()
    assert sentence in str(caught.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.utils.close_session()
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"), hub_errors("tried", "me/x"):
        HfApi("http://127.0.0.1:9").model_info("me/x")
    huggingface_hub.utils.close_session()
