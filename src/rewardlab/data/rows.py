"""Read the values of a row: prompts, replies and numbers, or the named cause why they cannot be used.

Every function takes a value as JSON, CSV or Parquet give it, and raises `UnusableRowError` with a cause of `CAUSES` if
it is not what the schema expects.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rewardlab.core.files import to_float
from rewardlab.core.terminal import brief, listed
from rewardlab.core.types import Conversation, Message

Row = Mapping[str, object]

MAX_CHARACTERS: Final = 8_000_000
MAX_TURNS: Final = 2_000
MAX_REPLIES: Final = 256
"""Limits on a row, so that none stalls a run: characters of text (in JSON Lines, of the line), turns of a prompt or a
reply, and replies that are compared."""

CAUSES: Mapping[str, str] = {
    "missing_field": "a column that the schema or a flag needs is absent or null",
    "reply_not_text": "a reply is neither text nor a list of messages",
    "empty_reply": "a reply ends in a turn without text",
    "identical_replies": "the replies to compare are the same text",
    "empty_prompt": "the prompt has no text outside its system turn",
    "prompt_differs": "the two sides do not continue the same prompt",
    "context_differs": "the prompt has other turns than the columns system or history say, or lacks earlier ones",
    "bad_label": "the label is not a number from 0 to 1; --map-label says what other values mean",
    "bad_strength": "the strength is not a finite number of at least 0 (from 0.5 to 1 with --strength-as soft)",
    "missing_strength": "--strength-as asks for a strength and the row has none",
    "zero_weight": "the strength is 0 or nearly, which --strength-as weight makes a weight of 0",
    "bad_margin": "the margin is not a finite number of at least 0",
    "bad_roles": "a turn has an unknown role, no text, or tool calls, reasoning or a refusal beside its text, or a "
    "reply does not begin and end with an assistant turn",
    "media": "a turn or a row has images, sound, video or other parts beside its text, which no model here reads",
    "tools": "the row has definitions of tools, which no prompt here holds",
    "bad_unicode": "a text has half a surrogate pair, which no tokenizer can read",
    "bad_comparison": "a comparison does not name two of the replies, or is not a mapping",
    "bad_scores": "the scores or the ranking do not fit the replies",
    "not_a_transcript": "a transcript does not begin with a Human turn and end with an Assistant turn",
    "no_prompt": "chosen and rejected are plain texts and there is no prompt; --prompt-column names yours",
    "no_comparison": "no two replies are left of which one is better",
    "tied_ranking": "replies with equal scores, and Plackett-Luce needs a strict ranking",
    "soft_ranking": "a comparison has a margin or a label other than 0 and 1, which Plackett-Luce cannot use",
    "unmapped_label": "--map-label does not name the value of the label",
    "low_score_ratio": "the votes differ by less than --min-score-ratio",
    "over_post_cap": "its post has more judgements than --max-per-post allows",
    "incomplete_pair": "a pair without exactly one chosen and one rejected row",
    "not_json": "the line is not a JSON object, or has a key twice (reading for training ends there)",
    "row_too_long": f"the row has more than {MAX_CHARACTERS:,} characters",
    "too_many_turns": f"a prompt or a reply has more than {MAX_TURNS:,} turns",
    "too_many_replies": f"more than {MAX_REPLIES} replies are to be compared; --max-replies draws fewer",
}
"""Why a row was dropped: a name for counts, and its meaning in one line."""

FILTERS = ("low_score_ratio", "over_post_cap")
"""Causes that a flag asks for. Rows dropped for them do not count towards `--max-drop-fraction`."""

NOTHING: Final = ("", "nan", "none", "null")
"""Cells of a table that hold no media."""
MEDIA: Final = ("images", "image", "audio", "audios", "video", "videos")
"""Names under which messages hold content that is not text."""
BESIDE_CONTENT: Final = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "refusal")
"""Names under which messages hold what the model wrote besides their content."""
ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
SHAREGPT_ROLES = {**ROLES, "human": "user", "gpt": "assistant"}
SHOWN_CHARACTERS = 60
MOST_COLUMNS: Final = 24
"""Columns that a message names."""
LONGEST_LABEL: Final = 40
"""Characters of a label that `--map-label` would name; longer texts are none."""
_REPLY_MARK = "\n\nAssistant:"
_OBJECTS = re.compile(r"\s*\[\s*\{")
"""How a list of objects begins as text."""
_TRANSCRIPT_TURN = re.compile(r"\n\n(Human|Assistant):")


class UnusableRowError(Exception):
    """A row cannot be used. It is dropped and counted by cause, so this error never reaches the user."""

    def __init__(self, cause: str, detail: str, *, label: str = "") -> None:
        assert cause in CAUSES, cause
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail
        self.label = label
        """The label that has no meaning, as `--map-label` takes it."""


class UnreadRow(dict[str, object]):
    """Stands for a row whose line is too long to be read. It has no columns."""


class CappedRow(dict[str, object]):
    """A row beyond the number that `--max-per-post` allows."""


def require_bounded(row: Row) -> None:
    """Raise UnusableRowError for a row of more than `MAX_CHARACTERS`, or one whose line had more and was not read."""
    # Not recursive, since a row may be nested deeper than Python can recurse.
    waiting: list[object] = [row]
    size = MAX_CHARACTERS + 1 if isinstance(row, UnreadRow) else 0
    while waiting and size <= MAX_CHARACTERS:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value
    if size > MAX_CHARACTERS:
        raise UnusableRowError("row_too_long", f"more than {MAX_CHARACTERS:,} characters")


def require_few_turns(number: int) -> None:
    """Raise UnusableRowError for more than `MAX_TURNS` turns."""
    if number > MAX_TURNS:
        raise UnusableRowError("too_many_turns", f"{number:,} turns, at most {MAX_TURNS:,} are read")


def parse_transcript(text: str) -> Conversation:
    """Return the turns of a Human/Assistant transcript, each stripped of surrounding white space.

    Raises UnusableRowError if the text has no such turns, or does not begin with Human and end with Assistant.
    """
    before, *pieces = _TRANSCRIPT_TURN.split("\n\n" + text.lstrip())
    if not pieces:
        hint = " (if these are messages, store them as a list, not as text)" if text.lstrip().startswith("[{") else ""
        raise UnusableRowError("no_prompt", f"a text without Human and Assistant turns: {show(text)}{hint}")
    speakers, texts = pieces[::2], pieces[1::2]
    require_few_turns(len(speakers))
    if before.strip() or speakers[0] != "Human" or speakers[-1] != "Assistant":
        raise UnusableRowError(
            "not_a_transcript", f"begins with {show(text.lstrip()[:20])}, its last turn is by {speakers[-1]}"
        )
    roles = {"Human": "user", "Assistant": "assistant"}
    return tuple(_message(roles[who], said.strip()) for who, said in zip(speakers, texts, strict=True))


def is_open_transcript(value: object) -> bool:
    """Return whether a prompt is a transcript whose reply is missing: it begins with `Human:` and ends with
    `Assistant:`."""
    return isinstance(value, str) and value.lstrip().startswith("Human:") and value.rstrip().endswith("\n\nAssistant:")


def split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return (prompt, reply, other reply) of two whole transcripts, such that `prompt + reply` is exactly the text.

    The prompt ends after the last `Assistant:` that both have in common.

    Raises UnusableRowError if there is none.
    """
    pairs = enumerate(zip(chosen, rejected, strict=False))
    num_shared = next((n for n, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    end = chosen[:num_shared].rfind(_REPLY_MARK)
    if end < 0:
        raise UnusableRowError("no_prompt", f"the texts share no Assistant turn: {show(chosen)}")
    end += len(_REPLY_MARK)
    return chosen[:end], chosen[end:], rejected[end:]


def read_prompt(value: object, *, bare: bool = False) -> Conversation:
    """Return the turns of a prompt: one user turn for a text, several for an open transcript or a list of messages.

    With `bare`, a transcript stays one text. Raises UnusableRowError if the prompt is of another type or has no text.
    """
    if not bare and is_open_transcript(value):
        return require_text(parse_transcript(str(value))[:-1])
    if isinstance(value, str):
        return require_text((_message("user", value),))
    if isinstance(value, (list, tuple)):
        return require_text(_turns(value))
    raise UnusableRowError("bad_roles", f"the prompt is {show(value)}, wanted text or a list of messages")


def require_text(prompt: Conversation) -> Conversation:
    """Return the prompt. Raises UnusableRowError if it has no text outside its system turns."""
    if not any(turn.content.strip() for turn in prompt if turn.role != "system"):
        raise UnusableRowError("empty_prompt", f"{len(prompt)} turns without text")
    return prompt


def read_reply(
    value: object, prompt: Conversation, *, own: Conversation | None = None, after: object = None
) -> Conversation:
    """Return the turns of a reply: one assistant turn for a text or a single message. A list of messages is the reply
    alone, or prompt and reply.

    `own` is the prompt without what other columns put before it, if they do: a reply may repeat either. `after` is the
    prompt as the row has it. If that is a transcript, the reply is stripped like the turns of one. A text that repeats
    the whole transcript, read as turns or left as one text, is the reply after it.

    Raises UnusableRowError if the value is not a reply to this prompt.
    """
    own = prompt if own is None else own
    if isinstance(value, str):
        asked = own[0].content if after is None and len(own) == 1 else after
        if is_open_transcript(asked):
            value = _after_transcript(value, str(asked))
        if is_open_transcript(after):
            value = value.strip()
        return require_reply((_message("assistant", value),))
    turns = read_conversation([value] if is_message(value) else value)
    begun = next((known for known in (prompt, own) if turns[: len(known)] == known), None)
    if begun is not None:
        turns = turns[len(begun) :]
    elif turns[0].role != "assistant":
        raise UnusableRowError(
            "prompt_differs", f"a conversation that begins with {show(turns[0])} does not continue the prompt"
        )
    return require_reply(turns)


def _after_transcript(text: str, transcript: str) -> str:
    """Return what follows the transcript if the text begins with it, white space around both aside; else the text."""
    if text.startswith(transcript):
        return text[len(transcript) :]
    begun, head = text.lstrip(), transcript.strip()
    return begun[len(head) :] if begun.startswith(head) else text


def is_message(value: object) -> bool:
    """Return whether a value is a single message, with a role or, as in ShareGPT, with `from`."""
    return isinstance(value, Mapping) and not {"role", "from"}.isdisjoint(value)


def require_reply(turns: Conversation) -> Conversation:
    """Return the turns. Raises UnusableRowError unless they begin and end with the assistant, and the last has text."""
    if not turns:
        raise UnusableRowError("empty_reply", "no turn after the prompt")
    if turns[0].role != "assistant" or turns[-1].role != "assistant":
        raise UnusableRowError(
            "bad_roles",
            f"a reply goes from {a_turn(turns[0].role)} to {a_turn(turns[-1].role)}, wanted assistant turns",
        )
    if not turns[-1].content.strip():
        raise UnusableRowError("empty_reply", f"the last turn is {show(turns[-1].content)}")
    return turns


def read_conversation(value: object) -> Conversation:
    """Return a list of messages as turns. Raises UnusableRowError if it is not a list or is empty."""
    if not isinstance(value, (list, tuple)):
        raise UnusableRowError("reply_not_text", f"got {show(value)}, wanted text or a list of messages")
    if not value:
        raise UnusableRowError("empty_reply", "a list without messages")
    if all(isinstance(entry, str) for entry in value):
        raise UnusableRowError(
            "bad_roles",
            f"got a list of texts, {show(value)}, wanted one reply; several to a prompt go into `responses` with "
            f"`scores`, or into `replies` with `comparisons`",
        )
    return _turns(value)


def _turns(entries: Sequence[object]) -> Conversation:
    """Return messages from mappings with role and content, or with from and value as in ShareGPT."""
    require_few_turns(len(entries))
    turns = []
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise UnusableRowError("bad_roles", f"a turn is {show(entry)}, wanted role and content")
        if beside := beside_content(entry):
            # The text beside a tool call is only half of the turn. Scoring it alone would judge something else.
            raise UnusableRowError(
                "bad_roles",
                f"a turn with {beside}, of which the content alone would be judged: write it into the content, as the "
                f"policy writes it, or take the key out",
            )
        if media := media_of(entry):
            raise UnusableRowError("media", f"a turn with {media}, of which the text alone would be judged")
        role, content, roles = said_by(entry)
        if not isinstance(role, str) or role not in roles:
            raise UnusableRowError("bad_roles", f"unknown role {show(role)}, wanted one of {', '.join(roles)}")
        content = joined_parts(content)
        if not isinstance(content, str):
            raise UnusableRowError("bad_roles", f"{a_turn(role)} has content {show(content)}, wanted text")
        turns.append(_message(roles[role], content))
    return tuple(turns)


def said_by(entry: Mapping[str, object]) -> tuple[object, object, Mapping[str, str]]:
    """Return (role, content, a known role -> what it is called here) of a message with role and content, or with from
    and value as in ShareGPT."""
    if "role" in entry:
        return entry["role"], entry.get("content"), ROLES
    return entry.get("from"), entry.get("value"), SHAREGPT_ROLES


def joined_parts(content: object) -> object:
    """Return the text of a content in text parts, `{"type": "text", "text": …}`, joined as chat templates join them:
    with nothing between. Anything else is returned as it is.

    Raises UnusableRowError for a part of another type, such as an image.
    """
    if not isinstance(content, (list, tuple)):
        return content
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(kind := part.get("type"), str):
            return content
        if kind != "text" or media_of(part):
            other = media_of(part) or kind
            raise UnusableRowError("media", f"a turn with a part of type {show(other)}, and text alone is read")
        if not isinstance(text := part.get("text"), str):
            return content
        texts.append(text)
    return "".join(texts) if texts else content


def beside_content(entry: Mapping[str, object]) -> str | None:
    """Return the name under which a message holds what the model wrote besides its content; None if it holds none."""
    return next((name for name in BESIDE_CONTENT if _is_any(entry.get(name))), None)


def media_of(entry: Mapping[str, object]) -> str | None:
    """Return the name under which a message or a row holds images, sound or video; None if it holds none."""
    return next((name for name in MEDIA if _holds(entry.get(name))), None)


def has_tools(row: Row) -> bool:
    """Return whether a row's `tools` defines tools, as a list of objects, which JSON, or Python in a CSV cell, may have
    written as text. Chat templates write them before the first turn; a list of words is something else."""
    tools = row.get("tools")
    if isinstance(tools, str):
        return _OBJECTS.match(tools) is not None
    return isinstance(tools, (list, tuple)) and any(isinstance(tool, Mapping) for tool in tools)


def require_no_tools(row: Row) -> None:
    """Raise UnusableRowError if `has_tools`."""
    if has_tools(row):
        raise UnusableRowError(
            "tools", f"tools is {show(row['tools'])}, which the prompt would lack; if it does, take the column out"
        )


def _holds(value: object) -> bool:
    """Return whether a value is more than nothing, as tables write that too: NaN, or a text for it."""
    if isinstance(value, str):
        return value.strip().lower() not in NOTHING
    return _is_any(value) and not (isinstance(value, float) and math.isnan(value))


def _is_any(value: object) -> bool:
    """Return whether a value is true; of an array, in place of a list, whether it has elements."""
    shape = getattr(value, "shape", None)
    return 0 not in shape if isinstance(shape, tuple) and shape else bool(value)


def a_turn(role: str) -> str:
    """Return a turn of this role in words: `a user turn`, `an assistant turn`."""
    return f"an {role} turn" if role == "assistant" else f"a {role} turn"


def _message(role: str, content: str) -> Message:
    """Return a message. Raises UnusableRowError for lone surrogates, which no tokenizer can read."""
    if place := _surrogate_in(content):
        raise UnusableRowError("bad_unicode", f"in {a_turn(role)}, at character {place}")
    return Message(role, content)


def read_number(row: Row, column: str, cause: str, *, low: float = 0.0, high: float = math.inf) -> float | None:
    """Return the finite number in a column; None if the column is absent or empty.

    Raises UnusableRowError with `cause` if it is not a number from `low` to `high`.
    """
    value = row.get(column)
    if is_absent(value):
        return None
    number = to_float(value)
    if not (math.isfinite(number) and low <= number <= high):
        wanted = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        label = label_word(value) if cause == "bad_label" else ""
        raise UnusableRowError(cause, f"{column} is {show(value)}, wanted a finite number {wanted}", label=label)
    return number


def label_word(value: object) -> str:
    """Return a label as `--map-label` takes it; an empty text for a list, for one that is longer, and for one that no
    command line can hold."""
    if isinstance(value, bool):
        return str(value).lower()
    number = to_float(value)
    word = value.strip() if isinstance(value, str) else f"{number:g}" if math.isfinite(number) else ""
    return word if len(word) <= LONGEST_LABEL and not _surrogate_in(word) and "\0" not in word else ""


def _surrogate_in(text: str) -> int:
    """Return the place, from 1, of the first half of a surrogate pair in a text, which no tokenizer and no file of text
    can hold; 0 if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start + 1
    return 0


def read_integers(value: object) -> list[int] | None:
    """Return a list of whole numbers as integers; None if the value is anything else."""
    if not isinstance(value, (list, tuple)):
        return None
    numbers = [to_float(entry) for entry in value]
    return [int(number) for number in numbers] if all(number.is_integer() for number in numbers) else None


def is_absent(value: object) -> bool:
    """Return whether a value is null or an empty cell of a CSV file."""
    return value is None or value == ""


def read_name(value: object) -> str:
    """Return a name, such as an annotator's, as text that can be written: half a surrogate pair is escaped."""
    text = show(value) if isinstance(value, (list, tuple, Mapping)) else str(value)
    return text.encode("utf-8", "backslashreplace").decode()


def text_key(reply: Conversation) -> tuple[tuple[str, str], ...]:
    """Return a key that is equal for replies that differ only in the white space around their turns."""
    return tuple((turn.role, turn.content.strip()) for turn in reply)


def columns_shown(names: Iterable[object]) -> str:
    """Return the names of columns for a message. Where a table has no header, each is a whole text of its first row."""
    return listed([brief(name) for name in names], MOST_COLUMNS)


def show(value: object) -> str:
    """Return a value as one short line for a message."""
    if isinstance(value, Message):
        value = f"{value.role}: {value.content}"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} nested too deep to show"
    # Lone surrogates are replaced, since printing them fails.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
