"""The renderer of a foreign model, which the user chooses; it is never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from rewardlab.artifact.foreign.config import ImportConfig
from rewardlab.core.errors import ConfigError
from rewardlab.core.types import Message
from rewardlab.core.values import require
from rewardlab.data.chat import Renderer
from rewardlab.data.config import RenderingConfig
from rewardlab.data.template_files import WORDS, read_template
from rewardlab.data.templates import build_renderer

STRIPPED: Final = (
    "{% if not add_generation_prompt %}{% set rendered = rendered.rstrip('\\n') %}"
    "{% if not rendered.endswith(EOS) %}{% set rendered = rendered + ' ' + EOS %}{% endif %}{% endif %}{{ rendered }}"
)
"""The template code of `--eos strip`, which ends the text `rendered` as OpenRLHF does, so that its EOS is the last
token that it reads. A blank is put before an EOS that is added."""
EXPLAINED: Final = (
    "Say with --chat-template how its training data were rendered: the name of a FILE with the Jinja text of the "
    "template; plain, a transcript of turns (Human: … Assistant: …) that ends in EOS; or concat, the texts one after "
    "the other and EOS."
)


def foreign_renderer(
    tokenizer: Any, folder: Path, settings: ImportConfig, *, max_seq_len: int, end_known: bool
) -> Renderer:
    """Return the renderer of the model in `folder` with this tokenizer, for conversations of at most `max_seq_len`
    tokens.

    `end_known` says that the project that trained it reads the score where its template ends.

    Raises ConfigError if the choice leaves the rendering open or contradicts the tokenizer; RenderError if the template
    cannot be used.
    """
    wanted = _template(tokenizer, settings.chat_template, folder)
    config = RenderingConfig(
        max_seq_len=max_seq_len,
        chat_template=wanted,
        template_arguments=settings.template_arguments,
        system_prompt=settings.system_prompt,
        special_tokens_in_text=settings.special_tokens_in_text,
    )
    if wanted != "template":
        require(
            settings.bos == "auto" and settings.eos in ("auto", "template"),
            f"--bos and --eos: --chat-template {wanted} begins as the tokenizer does and ends in EOS. Leave them out.",
        )
        return build_renderer(tokenizer, config)
    own = str(tokenizer.chat_template)
    draft = build_renderer(tokenizer, config)
    if settings.eos == "auto" and not end_known:
        _require_end(draft, folder)
    tokenizer.chat_template = _with_bos(draft, settings, _with_eos(draft, settings, own), folder)
    return build_renderer(tokenizer, config)


def _template(tokenizer: Any, wanted: str, folder: Path) -> Literal["template", "plain", "concat"]:
    """Give the tokenizer the template of a file, if one is named; return how it is rendered."""
    own = tokenizer.chat_template
    if isinstance(own, dict):
        # Of several named templates, engines use the one called `default` unless a request names another.
        own = tokenizer.chat_template = own.get("default")
    if wanted in ("plain", "concat"):
        return "plain" if wanted == "plain" else "concat"
    if wanted not in WORDS:
        tokenizer.chat_template = _read(Path(wanted))
    elif not own:
        raise ConfigError(f"{folder}: its tokenizer has no chat template. {EXPLAINED}")
    return "template"


def _read(file: Path) -> str:
    """Return the text of a template. Raises ConfigError if there is no such file, or if it is not a template."""
    if not file.is_file():
        raise ConfigError(f"--chat-template {file}: neither one of {', '.join(WORDS)} nor a file. {EXPLAINED}")
    return read_template(file)


def _with_bos(draft: Renderer, settings: ImportConfig, template: str, folder: Path) -> str:
    """Return the template, with a BOS in front if the settings want one.

    Raises ConfigError if it is unclear whether there should be one: the tokenizer puts one in front of every text, but
    the template, whose rendering is tokenised without additions, writes none.
    """
    tokenizer, written = draft.tokenizer, draft.spec.num_bos
    bos = tokenizer.bos_token
    adds = bos is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if settings.bos == "auto" and adds and not written:
        raise ConfigError(
            f"{folder}: its tokenizer puts {bos} in front of every text, and its template writes none. It depends on "
            f"the code that trained it whether there was one: say --bos template where the template's tokens were "
            f"taken as they are (apply_chat_template, TRL), --bos add where the rendered text was tokenised once more."
        )
    if settings.bos != "add":
        return template
    require(bos is not None, "--bos add: this tokenizer has no BOS token. Leave it out.")
    require(not written, f"--bos add: the template begins with {bos} already, and a second one would change the score.")
    return f"{{{{ {bos!r} }}}}{template}"


def _require_end(draft: Renderer, folder: Path) -> None:
    """Raise ConfigError if renderings do not end in EOS, so that projects read their score at different tokens."""
    eos = draft.tokenizer.eos_token
    text = draft.text((Message("user", "Hello"), Message("assistant", "Yes")))
    if not eos or text.endswith(eos):
        return
    _, found, behind = text.rpartition(eos)
    what = f"write {behind!r} behind the last EOS ({eos})" if found else f"end in {text[-12:]!r} and not in EOS ({eos})"
    raise ConfigError(
        f"{folder}: renderings by its template {what}, and it depends on the code that trained it which token the "
        f"score is read at. Say --eos strip for OpenRLHF, which takes line breaks at the end away and adds an EOS "
        f"where there is none; --eos template where the score is read at the template's last token; --eos add for an "
        f"EOS behind that. LLaMA-Factory and ms-swift changed this between their versions (docs/importing.md "
        f"in rewardlab's repository)."
    )


def _with_eos(draft: Renderer, settings: ImportConfig, template: str) -> str:
    """Return the template with the end that the settings want."""
    if settings.eos not in ("add", "strip"):
        return template
    eos = draft.tokenizer.eos_token
    require(eos is not None, f"--eos {settings.eos}: this tokenizer has no EOS token. Leave it out.")
    # Jinja drops one line break at the end of a template, but not if something follows it: remove it here.
    template = template.removesuffix("\n")
    if settings.eos == "strip":
        # The line break is that of the tag, which takes one away. The + keeps the blanks before the last tag.
        return f"{{% set rendered %}}\n{template}{{%+ endset %}}{STRIPPED.replace('EOS', repr(eos))}"
    require(
        draft.spec.final_token_id != draft.tokenizer.eos_token_id,
        f"--eos add: renderings end in {eos} already. Leave it out.",
    )
    return f"{template}{{% if not add_generation_prompt %}}{{{{ {eos!r} }}}}{{% endif %}}"
