"""Token ids of a conversation, and the loss mask of exactly the tokens that the assistant generated.

Works with any chat template, with or without `{% generation %}`: answers are located by comparing renderings, and the
pieces between their borders are tokenised. Token offsets are not used: `trim_offsets` (Llama 3) shifts them.

If the ids that the target generated are known, an answer is not tokenised again: the ids are put after their own
prompt. They then include whatever the template writes between the prompt and an answer (a space, an empty <think>
block), and an answer that was cut short has no end token that would carry loss.

A template may rewrite an answer once later turns follow (Qwen3 removes its thoughts). The target then reads another
text than it generated: such turns stay, without loss, as `unsaid_turns`. So do answers of weight 0.

Thoughts in a separate field of a turn are passed to the template under the name that it reads, or in the content
between `<think>` and `</think>` if the template expects them there.

For the assistant turn i of a conversation whose full rendering is F:

1. its start is where the generation prompt ends: render(turns before i, add_generation_prompt) is a prefix of F;
   templates that write history differently (a generation prompt with an opened <think>, a system prompt that moves to
   the last user turn) fall back to where the content itself starts, or the template's lead before it;
2. its content's end is found with a marker: render again with the content replaced by the marker; what follows the
   marker there is what follows the content in F. So a content that the template trims or strips of its thoughts is
   still found;
3. its end is the first special token after the content, within the length of the turn's own ending
   (`<|im_end|>`, but not the newline after it). A template without an end token carries the content alone.

In a turn that calls tools the marker stands for the functions' names, and the call's own ending is part of the turn's.

This takes three renderings of the conversation for each answer. Of many answers only the two at each end are located
so; the text around the others is read off renderings in which markers replace all contents together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, chain, groupby, pairwise, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from draftsmith.data.sources.conversation import Conversation, Tool, Turn
from draftsmith.data.tokens.bounded import EndlessTemplate, bounded
from draftsmith.data.tokens.tool_calls import CallForm, call_form, common_end
from draftsmith.errors import UserError
from draftsmith.recipes.schema import DataRecipe

if TYPE_CHECKING:  # torch, which the processes that tokenise do not need
    from transformers import GenerationConfig

MARKER = "Xq7AnswerMarkerXq7"
AT_EACH_END = 2  # answers
MOST_RENDERED_ONE_BY_ONE = 256  # answers, of a template that writes its history in several ways
PROBE = (Turn("user", "Say hi"), Turn("assistant", "Hello"))
THOUGHTS = "Xq7ThoughtsXq7"
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")  # as templates call it
THOUGHTS_IN_CONTENT = "<think>\n{thoughts}\n</think>\n\n{content}"
Tools = tuple[Tool, ...]
AnswerIds = list[list[int] | None]
ANSWERS_AT_FIRST = 16  # tried whole; twice as many each time that they fit
END_TOKENS = 16  # more than any template puts after an answer
COPIED_TOKENS = 12  # a run of this many tokens that occurred before in the answer is a copy
CHARACTERS_ALWAYS_READ = 1 << 20
LOOK_BACK_CHARACTERS = 1000
OPENED_WITHIN_TOKENS = 2  # a prompt that ends with "<think>\n" makes the answer begin with thoughts


class TemplateProblem(UserError):
    """The chat template cannot be followed through this conversation; others may pass."""


class TemplateRefusal(TemplateProblem):
    """The chat template raised, as many do on a system turn."""


@dataclass(frozen=True)
class Span:
    """Character positions of an assistant turn in a rendering; `end` is after its end token, if it has one."""

    start: int
    content_end: int
    end: int


@dataclass(frozen=True)
class TokenizedConversation:
    """A tokenised conversation.

    loss_mask: 1 at tokens of assistant turns, their end tokens included, otherwise 0. unsaid_turns: assistant turns
    that the template rewrites in the history, which carry no loss. answer_ends_tokens: number of tokens up to the end
    of each answer.
    """

    input_ids: list[int]
    loss_mask: list[int]
    unsaid_turns: tuple[int, ...] = ()
    answer_ends_tokens: tuple[int, ...] = ()

    def answers(self) -> list[list[int]]:
        """The ids of each assistant turn: the runs of ones."""
        runs = groupby(zip(self.loss_mask, self.input_ids, strict=True), key=itemgetter(0))
        return [[token_id for _, token_id in run] for carries_loss, run in runs if carries_loss]

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """Where each run of ones begins and ends."""
        end = 0
        for carries_loss, run in groupby(self.loss_mask):
            start, end = end, end + len(list(run))
            if carries_loss:
                yield start, end

    def cut_to(self, length_tokens: int) -> "TokenizedConversation":
        """Keep the first tokens; there is no label after them."""
        ends = tuple(end for end in self.answer_ends_tokens if end <= length_tokens)
        return TokenizedConversation(self.input_ids[:length_tokens], self.loss_mask[:length_tokens], (), ends)

    def without_copies(self) -> "TokenizedConversation":
        """Return the conversation without loss on tokens that an answer copies from itself, see `copies_in`."""
        mask = list(self.loss_mask)
        for start, end in self._bounds():
            mask[start:end] = [int(not copy) for copy in copies_in(self.input_ids[start:end])]
        return replace(self, loss_mask=mask)

    def with_copies(self) -> "TokenizedConversation":
        """Undo `without_copies`: put loss back on copies between two parts of an answer.

        A copy at the end of an answer cannot be recognised and stays without loss.
        """
        mask = list(self.loss_mask)
        places = [place for place, carries_loss in enumerate(mask) if carries_loss]
        begin = places[0] if places else 0
        for end, after in pairwise(places):
            if after == end + 1:
                continue
            if all(copies_in(self.input_ids[begin : after + COPIED_TOKENS])[end + 1 - begin : after - begin]):
                mask[end + 1 : after] = [1] * (after - end - 1)
            else:
                begin = after
        return replace(self, loss_mask=mask)

    def without_reasoning(self, opening: int, closing: int) -> "TokenizedConversation":
        """The same tokens without loss on thoughts, and on the tokens around them.

        Args:
            opening: The id of the token with which thoughts begin, in an answer or at the end of its prompt.
            closing: The one with which they end. Thoughts that were cut short reach to the end of their answer.
        """
        mask = list(self.loss_mask)
        for start, end in self._bounds():
            before = self.input_ids[max(0, start - OPENED_WITHIN_TOKENS) : start]
            thinks = opening in before and closing not in before
            for place in range(start, end):
                token_id = self.input_ids[place]
                thinks = thinks or token_id == opening
                mask[place] = int(not thinks)
                thinks = thinks and token_id != closing
        return replace(self, loss_mask=mask)

    def with_last_answer_only(self) -> "TokenizedConversation":
        """The same tokens with loss on the last run of ones alone."""
        end = len(self.loss_mask) - self.loss_mask[::-1].index(1)
        start = next((t + 1 for t in range(end - 1, -1, -1) if not self.loss_mask[t]), 0)
        mask = [0] * start + self.loss_mask[start:]
        return replace(self, loss_mask=mask)


def copies_in(answer: list[int]) -> list[bool]:
    """Return for each token whether it is in a copy: a run of `COPIED_TOKENS` that also occurs earlier in the answer.

    Both runs may overlap, so that of a short loop only the first pass is no copy. The first tokens never are a copy.
    """
    copied = [False] * len(answer)
    seen: set[tuple[int, ...]] = set()
    for start in range(len(answer) - COPIED_TOKENS + 1):
        run = tuple(answer[start : start + COPIED_TOKENS])
        if run in seen:
            copied[start : start + COPIED_TOKENS] = [True] * COPIED_TOKENS
        seen.add(run)
    return copied


def reasoning_ids(tokenizer: Any, data: DataRecipe) -> tuple[int, int] | None:
    """The ids of the tokens that begin and end thoughts; None if thoughts are learned.

    Raises:
        UserError: One of them is not a token of this vocabulary.
    """
    if data.reasoning == "learn":
        return None
    opening, closing = (tokenizer.get_vocab().get(token) for token in data.reasoning_tokens)
    if opening is None or closing is None:
        missing = data.reasoning_tokens[opening is not None]
        raise UserError(
            f"the target's tokenizer has no token {missing}, so that thoughts cannot be separated from answers: set "
            "data.reasoning_tokens to the two that it thinks between, or data.reasoning=learn if it does not think"
        )
    return opening, closing


def prompt_token_ids(tokenizer: Any, turns: tuple[Turn, ...] | list[Turn], tools: Tools = ()) -> list[int]:
    """Ids of the prompt that asks the target for the next assistant turn. No BOS is added beyond the template's own."""
    return token_ids(tokenizer, render(tokenizer, tuple(turns), add_generation_prompt=True, tools=tools))


def tokenize_conversation(
    tokenizer: Any, conversation: Conversation, answer_ids: AnswerIds | None = None
) -> TokenizedConversation:
    """Tokenise a conversation with the chat template, and compute its loss mask.

    Args:
        tokenizer: The target's, with a chat template.
        conversation: The conversation.
        answer_ids: For each assistant turn the ids that the target generated, with the end token unless the answer was
            cut short; None for a turn that must be tokenised. A conversation whose last answer has ids ends with these,
            whatever the template would write after it.

    Raises:
        UserError: The tokenizer has no chat template, or `answer_ids` does not fit this conversation.
        TemplateProblem: The template rejects this conversation or hides an answer, or the mask would be empty or full.
    """
    turns, tools, given = conversation.turns, conversation.tools, _ids_by_turn(conversation, answer_ids)
    last = len(turns) - 1
    # If the last answer has ids, they are put after its prompt, so the answer itself is not rendered.
    asking = last in given
    shown = turns[:-1] if asking else turns
    text = render(tokenizer, shown, add_generation_prompt=asking, tools=tools)
    if not asking:
        _check_last_answer_is_whole(turns, text)
    special = special_ids(tokenizer)
    spans = find_spans(tokenizer, shown, text, special, asking, tools)
    borders = []
    for index, span in spans.items():
        is_cut_short = index in given and given[index][-1] not in special
        borders += [span.start, span.content_end if is_cut_short else span.end]
    pieces = _pieces(tokenizer, text, borders)  # before an answer, the answer, before the next one, ...
    marked = None if given else _generation_mask(tokenizer, conversation, list(chain(*pieces)))
    input_ids: list[int] = []
    loss_mask: list[int] = []
    unsaid: list[int] = []
    learned: list[int] = []
    ends: list[int] = []
    for number, index in enumerate(spans):
        before, rendered = pieces[2 * number : 2 * number + 2]
        answer = given.get(index, rendered)
        input_ids += before
        loss_mask += [0] * len(before)
        start = len(input_ids)
        # What the target reads of an answer that the template rewrites is not what it said: without loss.
        if answer is not rendered:
            is_rewritten = not _same_words(tokenizer, answer, rendered)
        else:
            is_rewritten = index != last and not _is_whole(turns[index], text[spans[index].start : spans[index].end])
        if is_rewritten:
            unsaid += [index] * turns[index].weight
            input_ids += rendered
            loss_mask += [0] * len(rendered)
            ends.append(len(input_ids))
            continue
        input_ids += answer
        ends.append(len(input_ids))
        silent = 0 if marked is None else _first_marked(marked, start, len(input_ids), number + 1) - start
        loss_mask += [0] * silent + [turns[index].weight] * (len(answer) - silent)
        learned += [index] * turns[index].weight
    final = given[last] if asking else []
    input_ids += pieces[-1] + final
    loss_mask += [0] * len(pieces[-1]) + [turns[last].weight] * len(final)
    learned += [last] * turns[last].weight * asking
    ends += [len(input_ids)] if asking else []
    if learned:  # else its answers are of weight 0, or are learned in separate rows
        _check_mask(loss_mask, conversation)
    tokenized = TokenizedConversation(input_ids, loss_mask, tuple(unsaid), tuple(ends))
    if (
        turns[last].role == "assistant"
        and not asking
        and _has_another_prompt(tokenizer, conversation, text, spans[last])
    ):
        # Once more, the last answer's ids given now, so that it comes after the prompt that asks for it.
        earlier = [None] * (len(spans) - 1) if answer_ids is None else answer_ids[:-1]
        said = tokenized.answers()[-1] if turns[last].weight else pieces[-2]
        return tokenize_conversation(tokenizer, conversation, [*earlier, said])
    return tokenized


def tokenize_shortened(
    tokenizer: Any, conversation: Conversation, max_length_tokens: int, answer_ids: AnswerIds | None = None
) -> tuple[TokenizedConversation, int] | None:
    """Tokenise as `tokenize_conversation`, after dropping last turns until the conversation fits.

    The shortened conversation still ends with an assistant turn.

    Returns:
        The tokens and the number of dropped turns; None if the turns up to the first answer with loss do not fit.
    """
    turns = conversation.turns
    _ids_by_turn(conversation, answer_ids)
    ends = _ends_in_reach(tokenizer, turns, max_length_tokens)
    if not ends:
        return None
    taken = ANSWERS_AT_FIRST
    while True:
        tried, taken = ends[:taken], 2 * taken
        try:
            longest = tokenize_conversation(tokenizer, *up_to_turn(conversation, tried[-1], answer_ids))
        except TemplateProblem:  # of an end that may be no end
            if tried == ends:
                raise
            continue
        history_tokens = longest.answer_ends_tokens[:-1]
        if tried == ends or (history_tokens and history_tokens[-1] > max_length_tokens):
            break
    for end, tokens in reversed(list(zip(tried, longest.answer_ends_tokens, strict=True))):
        if not any(turn.role == "assistant" and turn.weight for turn in turns[:end]):
            break
        if tokens > max_length_tokens + END_TOKENS:  # thoughts may make it longer at the end, nothing makes it shorter
            continue
        whole = end == tried[-1]
        shortened = longest if whole else tokenize_conversation(tokenizer, *up_to_turn(conversation, end, answer_ids))
        if len(shortened.input_ids) <= max_length_tokens:
            return shortened, len(turns) - end
    return None


def _ends_in_reach(tokenizer: Any, turns: tuple[Turn, ...], max_length_tokens: int) -> list[int]:
    """The numbers of turns that end with an answer, as long as their text may fit at all."""
    most_characters = max(CHARACTERS_ALWAYS_READ, max_length_tokens * longest_token_characters(tokenizer))
    characters = accumulate(len(turn.content) for turn in turns)
    in_reach = takewhile(lambda turn: turn[0] <= most_characters, zip(characters, turns, strict=True))
    return [number for number, (_, turn) in enumerate(in_reach, start=1) if turn.role == "assistant"]


def up_to_turn(
    conversation: Conversation, end: int, answer_ids: AnswerIds | None
) -> tuple[Conversation, AnswerIds | None]:
    """The first `end` turns, and the ids of the answers among them."""
    turns = conversation.turns[:end]
    answers = sum(turn.role == "assistant" for turn in turns)
    return replace(conversation, turns=turns), None if answer_ids is None else answer_ids[:answers]


def _check_last_answer_is_whole(turns: tuple[Turn, ...], text: str) -> None:
    """Reject templates that drop part of the last answer. Earlier answers may lose their thoughts, as at inference.

    Raises:
        TemplateProblem: Part of the last answer is missing.
    """
    last = next((turn for turn in reversed(turns) if turn.role == "assistant"), Turn("assistant", ""))
    if not _is_whole(last, text):
        raise TemplateProblem(
            "the target's chat template leaves out part of the last answer (a <think> block, most likely), so that a "
            "drafter would never see it: set a tokenizer.chat_template that keeps it"
        )


def _is_whole(turn: Turn, text: str) -> bool:
    """Return whether all that a turn says is in the text, white space aside."""
    shown = "".join(text.split())
    return all("".join(said.split()) in shown for said in (turn.content, turn.reasoning_content, *turn.called))


def _ids_by_turn(conversation: Conversation, answer_ids: AnswerIds | None) -> dict[int, list[int]]:
    """The ids that are given, by the index of their turn."""
    if answer_ids is None:
        return {}
    answers = [index for index, turn in enumerate(conversation.turns) if turn.role == "assistant"]
    if len(answers) != len(answer_ids) or [] in answer_ids:
        raise UserError(
            f"conversation {conversation.id} has {len(answers)} assistant turns, and its answer_ids are "
            f"{len(answer_ids)}, {answer_ids.count([])} of them empty: distil it again"
        )
    return {index: ids for index, ids in zip(answers, answer_ids, strict=True) if ids is not None}


def _has_another_prompt(tokenizer: Any, conversation: Conversation, text: str, span: Span) -> bool:
    """Return whether the text before the last answer differs from the prompt that generates it.

    Mistral's templates write the system prompt in the last turn if it is the user's, and nowhere otherwise. A prompt
    that extends into the answer (an opened <think>) does not count as a difference.
    """
    prompt = render(tokenizer, conversation.turns[:-1], add_generation_prompt=True, tools=conversation.tools)
    return not text.startswith(prompt) and not prompt.startswith(text[: span.start])


def _pieces(tokenizer: Any, text: str, borders: list[int]) -> list[list[int]]:
    """Tokenise the pieces of `text` between the borders (ascending), each as a continuation of the text before it."""
    bounds = [0, *borders, len(text)]
    pieces = [token_ids(tokenizer, text[start:end]) if end > start else [] for start, end in pairwise(bounds)]
    if list(chain(*pieces)) == token_ids(tokenizer, text):
        return pieces
    # A token would extend across a border, or a piece gets another beginning by itself (SentencePiece's first space).
    continued = [_continuation(tokenizer, text, start, end) for start, end in pairwise(bounds)]
    return [alone if ids is None else ids for ids, alone in zip(continued, pieces, strict=True)]


def _continuation(tokenizer: Any, text: str, start: int, end: int) -> list[int] | None:
    """Tokenise `text[start:end]` as a continuation of the text before; None if a token would extend across `start`."""
    seen = max(0, start - LOOK_BACK_CHARACTERS)  # tokens do not depend on text farther away
    before, through = token_ids(tokenizer, text[seen:start]), token_ids(tokenizer, text[seen:end])
    return through[len(before) :] if through[: len(before)] == before else None


def _same_words(tokenizer: Any, left: list[int], right: list[int]) -> bool:
    """Whether both read the same, special tokens and white space aside."""
    words = (
        tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in (left, right)
    )
    return len({"".join(text.split()) for text in words}) == 1


def _generation_mask(tokenizer: Any, conversation: Conversation, input_ids: list[int]) -> list[int] | None:
    """The mask that a template with `{% generation %}` gives itself; None without that mark.

    Only its beginnings are believed: transformers leaves out the later tokens of a character of several tokens (an
    emoji), and many templates leave out the end token.
    """
    template = tokenizer.get_chat_template()
    if "generation %}" not in template.replace("-%}", " %}").replace("  %}", " %}").replace("endgeneration", ""):
        return None
    encoded = tokenizer.apply_chat_template(
        _messages(tokenizer, conversation.turns),
        tools=list(conversation.tools) or None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return list(encoded["assistant_masks"]) if list(encoded["input_ids"]) == input_ids else None


def _first_marked(marked: list[int], start: int, content_end: int, number: int) -> int:
    """Return the first token of an answer that the template marks as generated.

    The template may exclude text that it inserts before an answer, such as an empty <think> block.

    Raises:
        TemplateProblem: It marks no token of this answer.
    """
    first = next((t for t in range(start, content_end) if marked[t]), None)
    if first is None:
        raise TemplateProblem(
            f"the chat template's {{% generation %}} marks no token of assistant turn {number}: "
            "correct or remove the mark in tokenizer.chat_template"
        )
    return first


@lru_cache(maxsize=8)
def longest_token_characters(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()))


@lru_cache(maxsize=8)
def special_ids(tokenizer: Any) -> frozenset[int]:
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def _check_mask(loss_mask: list[int], conversation: Conversation) -> None:
    if any(loss_mask) and not all(loss_mask):
        return
    kind = "no token" if not any(loss_mask) else "every token"
    raise TemplateProblem(
        f"conversation {conversation.id}: the chat template makes {kind} an assistant token, "
        "so the loss mask is useless: correct tokenizer.chat_template"
    )


def answer_end_ids(generation_config: "GenerationConfig", tokenizer: Any) -> list[int]:
    """Every token that ends an answer: the eos tokens of model and tokenizer, and the one that the template writes.

    Raises:
        UserError: There is none, or the chat template cannot be used.
    """
    of_model = generation_config.eos_token_id
    of_model = of_model if isinstance(of_model, list) else [of_model]
    end_ids = sorted({*of_model, tokenizer.eos_token_id, template_end_token(tokenizer)} - {None})
    if not end_ids:
        raise UserError(
            "the target has no end-of-sequence token (generation_config, tokenizer and chat template name none): "
            "set tokenizer.eos_token and save the tokenizer in the model's folder"
        )
    return end_ids


def template_end_token(tokenizer: Any) -> int | None:
    """The token that ends an assistant turn in this template, or None where the template has none.

    It need not be among the model's eos tokens (a base model given a ChatML template): generation must stop at it too.
    """
    last = tokenize_conversation(tokenizer, Conversation("probe", PROBE)).answers()[-1][-1]
    return last if last in special_ids(tokenizer) else None


# ---- where the answers are in what the template renders ----


def render(tokenizer: Any, turns: tuple[Turn, ...], add_generation_prompt: bool = False, tools: Tools = ()) -> str:
    """The conversation as the template writes it.

    Raises:
        UserError: There is no template.
        TemplateRefusal: It raises, or it knows nothing of tools.
        EndlessTemplate: It does not end.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"the target's tokenizer ({tokenizer.name_or_path or 'unnamed'}) has no chat template: "
            "use an instruct model, or set tokenizer.chat_template and save the tokenizer in the model's folder"
        )
    way_out = "remove such turns, or set data.conversations.skip_invalid=true to skip and count them"
    if tools and template_calls(tokenizer) is None:
        raise TemplateRefusal(
            f"the target's chat template does not write tools, their calls or their results, which conversations have: "
            f"{way_out}"
        )
    try:
        return _written(tokenizer, Conversation("", turns, tools=tools), add_generation_prompt)
    except (EndlessTemplate, TemplateProblem):
        raise
    except Exception as error:  # of any kind: templates are programs
        roles = ", ".join([turn.role for turn in turns[:4]] + ["..."] * (len(turns) > 4))
        raise TemplateRefusal(
            f"the target's chat template refuses a conversation with the roles {roles}: {error}; {way_out}"
        ) from None


def _written(tokenizer: Any, conversation: Conversation, asking: bool) -> str:
    messages, tools = _messages(tokenizer, conversation.turns), list(conversation.tools) or None
    return bounded(
        lambda: tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=asking)
    )


def _messages(tokenizer: Any, turns: tuple[Turn, ...]) -> list[dict[str, Any]]:
    """Return the turns as messages, thoughts where the template looks for them.

    Raises:
        TemplateProblem: It looks for thoughts nowhere.
    """
    messages = [turn.message for turn in turns]
    if not any(turn.reasoning_content for turn in turns):
        return messages
    field = thoughts_field(tokenizer)
    for message in messages:
        thoughts = message.pop("reasoning_content", "")
        if thoughts:
            message |= _thinking(field, thoughts, message["content"])
    return messages


def thoughts_field(tokenizer: Any) -> str:
    """Return the field of a message in which the template looks for thoughts.

    Raises:
        TemplateProblem: It does not even write those of the last answer.
    """
    field = _thoughts_field(tokenizer, str(tokenizer.chat_template))
    if field is None:
        raise TemplateProblem(
            "the target's chat template does not write the thoughts that conversations have as `reasoning_content`: "
            "write them into `content` between the tokens that the target thinks between, or remove the field"
        )
    return field


def _thinking(field: str, thoughts: str, content: str) -> dict[str, str]:
    """Return the fields of a message that hold these thoughts and this content."""
    if field == "content":
        return {"content": THOUGHTS_IN_CONTENT.format(thoughts=thoughts.strip("\n"), content=content)}
    return {field: thoughts, "content": content}


@lru_cache(maxsize=8)
def _thoughts_field(tokenizer: Any, template: str) -> str | None:
    """Find the field of `thoughts_field`; None if there is none."""
    asked, answer = (turn.message for turn in PROBE)
    fields = [field for field in THOUGHT_FIELDS if field in template] + ["content"] * ("</think>" in template)
    for field in fields:
        thinking = answer | _thinking(field, THOUGHTS, answer["content"])
        try:
            if THOUGHTS in str(bounded(partial(tokenizer.apply_chat_template, [asked, thinking], tokenize=False))):
                return field
        except Exception:  # of any kind: templates are programs
            continue
    return None


def joined_thoughts(tokenizer: Any, thoughts: str, content: str) -> str | None:
    """Return an answer with its thoughts as the target generates both, which a server gave apart.

    Returns:
        The text that the template writes after the prompt, its end token left out; None if the template does not write
        thoughts, or writes another prompt before them.
    """
    probe = (*PROBE[:1], replace(PROBE[1], reasoning_content=THOUGHTS))
    try:
        prompt = render(tokenizer, probe[:1], add_generation_prompt=True)
        text = render(tokenizer, probe)
    except TemplateProblem:
        return None
    before, _, rest = text.removeprefix(prompt).partition(THOUGHTS)
    between, found, _ = rest.partition(PROBE[1].content)
    return before + thoughts.strip("\n") + between + content if found and text.startswith(prompt) else None


def missing_header_sentence(tokenizer: Any) -> str:
    """Return a warning if the template writes the header of an answer in no generation prompt, else nothing."""
    asked = render(tokenizer, PROBE[:1])
    header = template_answer_lead(tokenizer).strip()
    if not header or render(tokenizer, PROBE[:1], add_generation_prompt=True) != asked:
        return ""
    return (
        f"the chat template writes the header of an answer ({header.splitlines()[0]}) in no generation prompt, so that "
        "the header carries loss and prompts end without it: set target.chat_template to one that writes it "
        "where add_generation_prompt is true"
    )


def template_calls(tokenizer: Any) -> CallForm | None:
    """How the template writes calls of tools; None if it does not write tools, calls and results."""
    return _template_calls(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _template_calls(tokenizer: Any, template: str) -> CallForm | None:
    return call_form(partial(_written, tokenizer))


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of rendered text: the template has written the BOS, if there is one.

    Raises:
        UserError: It holds half a surrogate pair, as bytes that are no UTF-8 become on a command line.
    """
    try:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    except TypeError:
        if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
            raise
        raise UserError("a text to be tokenised is no UTF-8 (it holds half a surrogate pair): convert it") from None


def template_answer_lead(tokenizer: Any) -> str:
    """Return the text that the template writes between the generation prompt and an answer, as the space of Llama 2.

    The target generates it too; it must be removed from the answer before the template adds it again.
    """
    prompt = render(tokenizer, PROBE[:1], add_generation_prompt=True)
    text = render(tokenizer, PROBE)
    answer = text.rfind(PROBE[1].content)
    return text[len(prompt) : answer] if answer >= 0 and text.startswith(prompt) else ""


def find_spans(
    tokenizer: Any,
    turns: tuple[Turn, ...],
    text: str,
    special: frozenset[int],
    asking: bool = False,
    tools: Tools = (),
) -> dict[int, Span]:
    """Find each assistant turn in the rendering `text`, by its index; in time linear in the text.

    Args, Raises: As `find_span`; TemplateProblem too for a long conversation whose turns the template writes unalike.
    """
    answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    between = answers[AT_EACH_END:-AT_EACH_END]
    one_by_one = answers if not between else answers[:AT_EACH_END] + answers[-AT_EACH_END:]
    span_of = partial(find_span, tokenizer, turns, text=text, special=special, asking=asking, tools=tools)
    spans = {index: span_of(index) for index in one_by_one}
    if between:
        plain = not tools and not any(
            turn.role == "tool" or turn.tool_calls or turn.reasoning_content for turn in turns
        )
        found = _spans_between(tokenizer, turns, answers, text, spans, asking) if plain else {}
        if not found and len(answers) > MOST_RENDERED_ONE_BY_ONE:
            raise TemplateProblem(
                f"the target's chat template does not write all {len(answers)} answers of a conversation in the same "
                f"way, and more than {MOST_RENDERED_ONE_BY_ONE} cannot be located one by one: use shorter "
                "conversations, or correct tokenizer.chat_template"
            )
        spans |= found or {index: span_of(index) for index in between}
    return {index: spans[index] for index in answers}


def _spans_between(
    tokenizer: Any, turns: tuple[Turn, ...], answers: list[int], text: str, spans: dict[int, Span], asking: bool
) -> dict[int, Span]:
    """Locate the answers between those at both ends, whose spans are known.

    Empty if the template does not write all answers in the same way. `around[n]` is the text between the answers n - 1
    and n, questions included.
    """
    around = _around_markers(tokenizer, turns, ("assistant",), asking)
    without_contents = _around_markers(tokenizer, turns, ("assistant", "user"), asking)
    first, model, last = spans[answers[0]], spans[answers[1]], answers[-AT_EACH_END]
    if not around or not without_contents or not text.startswith(around[1], first.content_end):
        return {}
    systems = len(turns) + 1 - len(without_contents)
    headers = {without_contents[index - systems] for index in answers[1:-1]}  # between a question and its answer
    asked = (*turns[: answers[1] - 1], Turn("user", MARKER))
    opened = render(tokenizer, asked, add_generation_prompt=True).rpartition(MARKER)[2].removeprefix(max(headers))
    begin = first.content_end + len(around[1])  # of the content
    if len(headers) > 1 or begin < model.start:
        return {}
    lead, ending = begin - model.start, text[model.content_end : model.end]
    found: dict[int, Span] = {}
    content_end = model.content_end
    for number, index in enumerate(answers[2 : 1 - AT_EACH_END], start=2):
        before, after = around[number : number + 2]
        if not (text.startswith(before, content_end) and after.startswith(ending)):
            return {}
        begin = content_end + len(before)
        if opened and text.startswith(opened, begin):  # the answer may continue an opening in its prompt
            return {}
        content_end = _content_end(text, begin, turns[index].content, after)
        found[index] = Span(begin - lead, content_end, content_end + len(ending))
        if content_end < begin:
            return {}
    return found if found.pop(last) == spans[last] else {}


def _around_markers(tokenizer: Any, turns: tuple[Turn, ...], roles: tuple[str, ...], asking: bool) -> list[str]:
    """Return the texts that the template writes around the contents of these roles; empty if they cannot be split."""
    marked = tuple(Turn(turn.role, MARKER) if turn.role in roles else turn for turn in turns)
    around = render(tokenizer, marked, asking).split(MARKER)
    return around if len(around) == 1 + sum(turn.role in roles for turn in turns) else []


def _content_end(text: str, begin: int, content: str, after: str) -> int:
    """Return the end of the content that starts at `begin`, unchanged, trimmed or without thoughts; -1 if unclear."""
    for shown in (content, content.strip()):
        if text.startswith(shown + after, begin):
            return begin + len(shown)
    end = text.find(after, begin)
    shown = "".join(text[begin:end].split())
    return -1 if after in content or shown not in "".join(content.split()) else end


def find_span(
    tokenizer: Any,
    turns: tuple[Turn, ...],
    index: int,
    text: str,
    special: frozenset[int],
    asking: bool = False,
    tools: Tools = (),
) -> Span:
    """Find assistant turn `index` in the rendering `text` (steps 1 to 3 of the module).

    Args:
        special: Ids among which an end token is.
        asking: `text` ends with a generation prompt.
        tools: Of the conversation.

    Raises:
        TemplateProblem: The template drops or rewrites what is needed to tell.
    """
    if turns[index].tool_calls:
        return _calling_span(tokenizer, turns, index, text, special, asking, tools)
    marked = replace(turns[index], content=MARKER)
    marked_turns = (*turns[:index], marked, *turns[index + 1 :])
    marked_text = render(tokenizer, marked_turns, asking, tools)
    before, _, after = marked_text.partition(MARKER)
    ending = render(tokenizer, marked_turns[: index + 1], tools=tools).partition(MARKER)[2]
    prompt = render(tokenizer, turns[:index], add_generation_prompt=True, tools=tools)
    if marked_text.count(MARKER) != 1 or not text.endswith(after):
        raise _dropped(index)
    if text.startswith(prompt):
        start = len(prompt)
    elif text.startswith(before):
        start = len(before.removesuffix(template_answer_lead(tokenizer)))
    else:
        raise _rewritten(index)
    content_end = max(start, len(text) - len(after))
    ending = text[content_end : content_end + len(ending)]
    tokens = tokenizer.convert_ids_to_tokens([each for each in token_ids(tokenizer, ending) if each in special])
    end_token = next(
        (token for token in tokens if token in ending), None
    )  # the token for what is unknown is in no text
    if end_token is None:
        return Span(start, content_end, content_end)
    return Span(start, content_end, content_end + ending.index(end_token) + len(end_token))


def _calling_span(
    tokenizer: Any,
    turns: tuple[Turn, ...],
    index: int,
    text: str,
    special: frozenset[int],
    asking: bool,
    tools: Tools,
) -> Span:
    """As `find_span`, of a turn that calls tools; its end is the last special token that ends calls and turn."""
    turn = turns[index]
    calls = tuple({**call, "function": {"name": MARKER, "arguments": {}}} for call in turn.tool_calls)
    marked_turns = (*turns[:index], replace(turn, tool_calls=calls), *turns[index + 1 :])
    marked_text = render(tokenizer, marked_turns, asking, tools)
    prompt = render(tokenizer, turns[:index], add_generation_prompt=True, tools=tools)
    if marked_text.count(MARKER) != len(calls):
        raise _dropped(index)
    before, after = marked_text.partition(MARKER)[0], common_end(marked_text.rpartition(MARKER)[2], text)
    ended, marked_end = (render(tokenizer, each[: index + 1], tools=tools) for each in (turns, marked_turns))
    ending = common_end(marked_end.rpartition(MARKER)[2], ended)
    # What the template writes between the generation prompt and the first name, as `template_answer_lead`.
    asked = render(tokenizer, PROBE[:1], add_generation_prompt=True, tools=tools)
    probe = render(tokenizer, (PROBE[0], marked_turns[index]), tools=tools)
    opening = probe.removeprefix(asked).partition(MARKER)[0] if probe.startswith(asked) else ""
    if text.startswith(prompt):
        start = len(prompt)
    elif opening and before.endswith(opening) and text.startswith(before):
        start = len(before) - len(opening)
    else:
        raise _rewritten(index)
    content_end = len(text) - len(after)
    ending = text[content_end : content_end + len(ending)]
    tokens = tokenizer.convert_ids_to_tokens([each for each in token_ids(tokenizer, ending) if each in special])
    end_token = next((token for token in reversed(tokens) if token in ending), None)
    end = content_end + (len(ending.rstrip()) if end_token is None else ending.rindex(end_token) + len(end_token))
    return Span(start, content_end, end)


def _dropped(index: int) -> TemplateProblem:
    return TemplateProblem(
        f"the target's chat template drops or rewrites turn {index + 1} of a conversation, so that the assistant's "
        "tokens cannot be located: correct tokenizer.chat_template"
    )


def _rewritten(index: int) -> TemplateProblem:
    return TemplateProblem(
        f"the target's chat template writes the text before turn {index + 1} differently once later turns follow, "
        "so that the assistant's tokens cannot be located: correct tokenizer.chat_template"
    )
