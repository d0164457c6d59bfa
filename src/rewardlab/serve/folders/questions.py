"""Questions on a terminal, whose answers are the settings for importing a foreign model that has no spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rewardlab.artifact.foreign.config import ImportConfig
from rewardlab.core.config import from_mapping
from rewardlab.core.errors import DataError
from rewardlab.core.files import read_json
from rewardlab.core.schema import read_object
from rewardlab.core.spec import SPEC_FILE
from rewardlab.data.chat import load_tokenizer
from rewardlab.model.files import DAMAGED_BASE

Ask = Callable[[str], str]
"""Shows a question and returns the answer, without the line break."""
IN_PLACE: Final = "in place"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers: how to import, and where to."""

    settings: ImportConfig
    target: Path | None
    """The new folder; None to put it in the place of the source, which is then renamed."""


def is_foreign(folder: Path) -> bool:
    """Return whether a folder holds a model but no spec of rewardlab. The folder of a run holds settings, not a
    model."""
    if (folder / SPEC_FILE).exists() or not (folder / "config.json").is_file():
        return False
    try:
        config = read_json(folder / "config.json")
    except DataError:
        return False
    return isinstance(config, dict) and "model_type" in config


def ask_for_rendering(folder: Path, ask: Ask) -> Answers:
    """Ask how the conversations of the model in `folder` are rendered, and where the reward model is to be written.

    An empty answer takes what stands in brackets; where nothing does, the question has to be answered. Raises
    ConfigError for an answer that cannot be used, and RenderError if there is no tokenizer.
    """
    tokenizer = load_tokenizer(str(folder))
    values: dict[str, object] = {"chat_template": _template(bool(tokenizer.chat_template), ask)}
    if values["chat_template"] not in ("plain", "concat"):
        answer = ask("Does a BOS stand in front of what the template writes? [template] or add: ")
        values["bos"] = answer or "template"
        values["eos"] = ask(
            "How does a rendering end: template (as the template ends it), add (an EOS behind that), or strip (line "
            "breaks taken away, then an EOS unless there is one: OpenRLHF)? [template, unless that is open]: "
        )
        values["eos"] = values["eos"] or "auto"
    if prompt := ask("System turn for conversations that have none [none]: "):
        values["system_prompt"] = prompt
    if _says_statistics(folder):
        values["normalize_reward"] = ask("It holds a mean and a std. Are scores normalised by them? yes or no: ")
    length = ask("Tokens that a conversation may have [as many as the model has positions]: ") or "model"
    values["max_seq_len"] = int(length) if length.isdecimal() else length
    settings = from_mapping(ImportConfig, values, where="the answers")
    place = ask(f"Where to: another folder, or [{IN_PLACE}] (the files of now move to {folder.name}.original): ")
    return Answers(settings=settings, target=None if place in ("", IN_PLACE) else Path(place))


def _template(there_is_one: bool, ask: Ask) -> str:
    """Ask for the template until there is an answer."""
    default = "[template], its tokenizer's own" if there_is_one else "its tokenizer has no template"
    question = (
        f"How were conversations rendered in training? ({default}; or plain, concat, or a FILE with a template): "
    )
    while True:
        answer = ask(question) or ("template" if there_is_one else "")
        if answer:
            return answer


def _says_statistics(folder: Path) -> bool:
    """Return whether the configuration holds a mean and a std, but does not say whether they are used."""
    config = read_object(folder / "config.json", DAMAGED_BASE)
    return {"mean", "std"} <= config.keys() and not isinstance(config.get("normalize_reward"), bool)
