"""Chat templates that settings name, and arguments for them. A name is read once, and stands for its text from then on:
configurations that are saved hold the text, so they do not depend on the file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rewardlab.core.config import HASH_DIGITS
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_json, sha256_text
from rewardlab.core.terminal import short
from rewardlab.core.values import did_you_mean

WORDS: Final = ("auto", "template", "plain", "concat")
"""What `--chat-template` may be besides a template: the tokenizer's (or a plain transcript, if it has none), a plain
transcript, and texts as they are."""
FILE: Final = "chat_template.jinja"
"""The file in which the folder of a tokenizer has its template; older ones have it in `CONFIG`."""
CONFIG: Final = "tokenizer_config.json"
MAX_TEMPLATE: Final = 1 << 20
"""Largest template in bytes, as in a reward-model folder."""
REMEDY: Final = "Name the file with the Jinja text of a template, such as the chat_template.jinja of a chat model."
PASSED: Final = ("messages", "add_generation_prompt")
"""Names that every rendering gives a template; no argument may take their places."""
WORDY: Final = ("true", "false", "none", "null", "yes", "no", "on", "off")
"""Texts that were probably meant as one of JSON's true, false and null."""


def is_template(value: str) -> bool:
    """Return whether a value of `--chat-template` is the text of a template itself."""
    return "{{" in value or "{%" in value


def require_template(value: str) -> None:
    """Raise ConfigError unless the value is a word, a text, or a name that may be a template's. Opens no file."""
    if value in WORDS or is_template(value) or value.endswith(".jinja") or file_of(value) is not None:
        return
    raise ConfigError(
        f"--chat-template {short(value) or repr(value)}: neither one of {', '.join(WORDS)} nor a file of a template."
        f"{did_you_mean(value, WORDS) or f' {REMEDY}'}"
    )


def file_of(value: str) -> Path | None:
    """Return the file that `template_of` reads for a value; None if it reads none, or if none is there."""
    if value in WORDS or is_template(value):
        return None
    path = Path(value)
    try:
        places = (path / FILE, path / CONFIG) if path.is_dir() else (path,)
        return next((place for place in places if place.is_file()), None)
    except OSError:  # a name that is too long for the file system
        return None


def template_of(value: str) -> str:
    """Return what a value of `--chat-template` stands for: itself if it is a word, else the text of the template.

    The value may be that text, a file with it, or the folder of a tokenizer. Raises ConfigError if there is none, or if
    it cannot be a chat template.
    """
    if value in WORDS:
        return value
    if is_template(value):
        return _usable(value, "--chat-template")
    return read_template(Path(value))


def read_template(path: Path) -> str:
    """Return the text of a template, from its file or from the folder of a tokenizer.

    Raises ConfigError if there is none, or if it cannot be a chat template.
    """
    where, file = f"--chat-template {path}", file_of(str(path))
    if file is None:
        try:
            is_folder = path.is_dir()
        except OSError as error:
            raise ConfigError(f"{where}: {error.strerror or error}. {REMEDY}") from error
        what = f"this folder has no template, in {FILE} or in {CONFIG}" if is_folder else "there is no such file"
        raise ConfigError(f"{where}: {what}. {REMEDY}")
    return _usable(_of_config(file, where) if file.name == CONFIG else _text_of(file, where), where)


def _text_of(file: Path, where: str) -> str:
    if file.stat().st_size > MAX_TEMPLATE:
        raise ConfigError(f"{where}: it has more than {MAX_TEMPLATE} bytes, which no template has. {REMEDY}")
    try:
        # A mark of the byte order would become the first token of every rendering.
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: it is not a text in UTF-8 ({error.reason}). {REMEDY}") from error
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror or error}).") from error


def _of_config(file: Path, where: str) -> str:
    """Return the template in the configuration of a tokenizer. Of several, engines use the one called `default`."""
    try:
        values = read_json(file)
    except DataError as error:
        raise ConfigError(f"{where}: {error}") from error
    found: Any = values.get("chat_template") if isinstance(values, dict) else None
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise ConfigError(f"{where}: there is no template in {CONFIG}. {REMEDY}")
    return found


def _usable(text: str, where: str) -> str:
    """Return the text if it can be a chat template; what else is wrong with it shows when it is tried out."""
    import jinja2

    if not text.strip():
        raise ConfigError(f"{where}: it is empty. {REMEDY}")
    if "messages" not in text:
        raise ConfigError(f"{where}: it does not mention `messages`, so it is not a chat template. {REMEDY}")
    if not is_template(text):
        raise ConfigError(f"{where}: it has neither {{{{ … }}}} nor {{% … %}}, so it is not a chat template. {REMEDY}")
    # A tag of transformers, which marks replies and writes nothing.
    bare = re.sub(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}", "", text)
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(bare)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{where}: line {error.lineno} is not Jinja: {error.message} Mend it, or name another template."
        ) from error
    return text


def shown(value: str) -> str:
    """Return a value of `--chat-template` for a message: a text by its hash."""
    return f"(a template, SHA-256 {sha256_text(value)[:HASH_DIGITS]})" if is_template(value) else short(value)


def parse_arguments(words: Sequence[str], *, flag: str = "--template-arguments") -> dict[str, object]:
    """Return name -> value of words such as `enable_thinking=false`: what JSON has besides lists and mappings. A single
    word is a text without quotes, too.

    Raises ConfigError for a word of another form, and for a name given twice.
    """
    found: dict[str, object] = {}
    for word in words:
        name, mark, text = word.partition("=")
        said = f"{flag} {short(word)}"
        if not mark or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError(f"{said}: wanted NAME=VALUE, such as enable_thinking=false.")
        if name in PASSED:
            raise ConfigError(f"{said}: every rendering gives {name} itself. Leave it out.")
        if name in found:
            raise ConfigError(f"{said}: this name is given twice. Keep one.")
        found[name] = _scalar(text, said)
    return found


def _scalar(text: str, said: str) -> object:
    wanted = f"{said}: wanted true, false, null, a number or a text as value"
    try:
        value = json.loads(text, parse_constant=lambda _: [])
    except (ValueError, RecursionError):
        if text.lower() in WORDY:
            raise ConfigError(f"{wanted}. Write true, false or null, or a text in double quotes.") from None
        if not re.fullmatch(r"[A-Za-z][\w.-]*", text):
            raise ConfigError(f"{wanted}. Put a text in double quotes.") from None
        return text
    if isinstance(value, (list, dict)):
        raise ConfigError(f"{wanted}. Lists, mappings, NaN and Infinity cannot be written into a template.")
    return value
