"""Every error of huggingface_hub becomes one sentence with the way out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from support.fake_hub import refused

from draftsmith.errors import UserError
from draftsmith.hub import hub_errors


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (refused(401), "the Hub refuses the token (HTTP 401)"),
        (refused(403), "the token may not do that in me/x (HTTP 403)"),
        (refused(409), "me/x is being changed by somebody else"),
        (refused(429), "the Hub asks for a pause (HTTP 429)"),
        (refused(503), "the Hub fails (HTTP 503)"),
        (refused(418), "the Hub refuses (HTTP 418: 418 for"),
        (refused(404, RepositoryNotFoundError), "the Hub shows no repository me/x to this token"),
        (refused(404, RevisionNotFoundError), "me/x has no such revision"),
        (refused(403, GatedRepoError), "me/x is gated: ask for access"),
        # messages of hf_xet
        (RuntimeError("Data processing error: HTTP status client error (403 Forbidden) for url"), "(HTTP 403)"),
        (RuntimeError("Network error: error sending request for url"), "failed or broke off (RuntimeError)"),
        (httpx2.ReadTimeout("slow"), "failed or broke off (ReadTimeout)"),
        (ValueError("of\nanother kind"), "tried: of another kind"),
    ],
)
def test_hub_errors_become_sentences(error: Exception, sentence: str) -> None:
    with pytest.raises(UserError) as caught, hub_errors("tried", "me/x"):
        raise error
    assert str(caught.value).startswith("tried: ")
    assert sentence in str(caught.value)


def test_full_disk_is_not_reported_as_a_hub_error() -> None:
    with pytest.raises(RuntimeError, match="wrapped"), hub_errors("tried", "me/x"):
        raise RuntimeError("wrapped") from OSError(28, "No space left on device", "a")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: HfApi("http://127.0.0.1:9").whoami(), "there is no token: run `hf auth login`"),
        (lambda: HfApi("http://127.0.0.1:9").model_info("me/x"), "failed or broke off (ConnectError)"),
    ],
)
def test_errors_raised_by_huggingface_hub(
    call: Callable[[], Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.utils.close_session()
    with pytest.raises(UserError) as caught, hub_errors("tried", "me/x"):
        call()
    assert sentence in str(caught.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.utils.close_session()
    with pytest.raises(UserError, match="HF_HUB_OFFLINE keeps this machine off"), hub_errors("tried", "me/x"):
        HfApi("http://127.0.0.1:9").model_info("me/x")
    huggingface_hub.utils.close_session()
