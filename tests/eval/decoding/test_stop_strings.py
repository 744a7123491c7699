"""Stop strings cut at the token that completes one, for any split into tokens and rounds."""

import itertools
from typing import Any

import pytest
from support.scripted import Scripted
from support.tiny_models import smallest_llama
from support.tiny_tokenizers import CHATML, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.decoding.stop_strings import StopMatcher
from draftsmith.models.sampling import Sampling

GREEDY = Sampling()
PROMPT = [1, 2, 3]
V = 11


class PieceTokenizer:
    """Tokenizer whose token i is PIECES[i]."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[token] for token in ids)


def cut(tokenizer: Any, ids: list[int], *stop: str) -> tuple[int | None, str | None]:
    """Return the number of kept tokens and the text; both None if nothing stops."""
    matcher = StopMatcher(stop, tokenizer)
    for index, token in enumerate(ids):
        if matcher.completes(token):
            return index + 1, matcher.text_before
    return None, matcher.text_before


def test_cuts_by_hand() -> None:
    tokenizer = PieceTokenizer(["Hello", "\n", "\n\n", "Q", ": x", "}\n\nfoo"])
    assert cut(tokenizer, [0, 1, 1, 3], "\n\n") == (3, "Hello")  # across two tokens
    assert cut(tokenizer, [0, 2, 3], "\n\n") == (2, "Hello")  # a whole token
    assert cut(tokenizer, [0, 5, 3], "\n\n") == (2, "Hello}")  # inside a token
    assert cut(tokenizer, [0, 1, 3, 4], "\nQ:") == (4, "Hello")  # three tokens, with text after it
    assert cut(tokenizer, [0, 5], "foo", "}\n") == (2, "Hello")  # the first one in the text, not in the list
    assert cut(tokenizer, [0, 1, 3, 1], "\n\n", "z") == (None, None)
    assert cut(tokenizer, [0], "Hello") == (1, "")
    assert cut(tokenizer, [3, 3, 3], "QQ") == (2, "")


def byte_level() -> Any:
    return tiny_tokenizer(CHATML)


def byte_fallback() -> Any:
    """Build one like Llama 2's: words with their space, bytes for unknown characters, no space at the start."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("▁", "a", "b", "c", ".", "▁a", "▁b", "▁c"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("▁", letter) for letter in "abc"], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", ["a b. 東京 c\n\na", "€ ab é\u0301 c b", "a\U0001f600\U0001f600b c"])
def test_cut_equals_decoding_the_whole_text_after_every_token(make: Any, text: str) -> None:
    """For every substring as the stop string the cut is the shortest prefix of tokens whose text holds it."""
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) > len(text.split())
    prefixes = [tokenizer.decode(ids[:count]) for count in range(1, len(ids) + 1)]
    for begin, end in itertools.combinations(range(len(text) + 1), 2):
        stop = text[begin:end]
        wanted = next(count for count, prefix in enumerate(prefixes, start=1) if stop in prefix)
        assert cut(tokenizer, ids, stop) == (wanted, text[: text.index(stop)]), stop
    assert cut(tokenizer, ids, text + "!") == (None, None)


def test_special_tokens_do_not_match() -> None:
    tokenizer = byte_level()
    eot = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [*tokenizer.encode("Hello there", add_special_tokens=False), eot, *tokenizer.encode("Say")]
    assert cut(tokenizer, ids, "<|im_end|>") == (None, None)
    assert cut(tokenizer, ids, "thereS")[1] == "Hello "


def test_stop_within_an_accepted_path_and_across_rounds() -> None:
    """All drafts are right, so rounds commit tokens 1-5, 6-10, ... (token 0 is the prefill's)."""
    pieces = PieceTokenizer([f"<{token}>" for token in range(V)])
    with TargetSession(smallest_llama(1, V), 48) as session:
        answer = generate(session, Autoregressive(), PROMPT, GREEDY, 24).ids
        for first, last, accept_lengths, draft_lengths in (
            (7, 8, [5, 3], [4, 3]),
            (5, 7, [5, 2], [4, 2]),
            (0, 0, [], []),
        ):
            stop = StopMatcher((pieces.decode(answer[first : last + 1]),), pieces)
            out = generate(session, Scripted(answer, None), PROMPT, GREEDY, 24, (), None, stop)
            assert (out.ids, out.text) == (answer[: last + 1], pieces.decode(answer[:first]))
            assert (out.accept_lengths, out.draft_lengths) == (accept_lengths, draft_lengths)
