"""Every error of huggingface_hub becomes one sentence with the way out."""

import httpx2
import pytest
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
