"""`rewardlab data show`: a row as it is read, and as the tokens that training would see."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from common import CHATML, make_tokenizer, write_base_model
from rewardlab.cli import main
from rewardlab.core.types import Message
from rewardlab.curation.showing.config import ShowConfig
from rewardlab.curation.showing.page import print_rows
from rewardlab.curation.showing.rows import show_rows
from rewardlab.curation.showing.tokens import ShownReply, shown_reply, texts_of
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer

THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROWS = [
    {"prompt": "Is it light?", "chosen": "yes <|im_end|> no", "rejected": "no\n\tParis is "},
    {
        "id": "long",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why " * 20 + "so"}],
        "chosen": "because " * 9,
        "rejected": "no",
    },
    {"prompt": "", "chosen": "a", "rejected": "b"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show")
    write_base_model(folder / "base")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def shown(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    main(["data", "show", str(folder / "rows.jsonl"), *flags])
    return capsys.readouterr().out


def test_a_row_is_shown_as_it_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(folder, capsys, "--row", "rows.jsonl:1", "3")
    assert "format: pairs, by the columns prompt, chosen, rejected\n" in said
    assert "judged: reply 0 against reply 1: label 1" in said
    assert "prompt, user:\n  Is it light?\nreply 0, assistant:\n  yes <|im_end|> no\n" in said
    assert "  no\n  ⇥Paris is·\n" in said
    assert "left out: empty_prompt: the prompt has no text outside its system turn" in said
    assert "  chosen: a" in said


def test_replies_that_are_left_out_of_a_row_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "Why?", "responses": ["a", None, "b", " "], "scores": [1, 2, 3, 4]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    said = shown(tmp_path, capsys)
    assert (
        "left out beside the other replies: reply_not_text: reply 1 of all, counted from 0: got null, wanted text or a "
        "list of messages\n"
        'left out beside the other replies: empty_reply: reply 3 of all, counted from 0: the last turn is " "\n'
        "judged: reply 1 against reply 0: label 1"
    ) in said
    assert json.loads(shown(tmp_path, capsys, "--json"))[0]["left_out"][1].startswith("empty_reply: reply 3 of all")


def test_tokens_show_boundary_cuts_what_is_shared_and_control_tokens(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", str(folder / "base"), "--max-seq-len", "100")
    said = shown(folder, capsys, "--row", "1", "long", *model)
    first, second = said.split("=== rows.jsonl:2 ===")
    assert "reply 0: 32 tokens, 16 before the reply, 16 shared" in first
    assert "«<|im_start|>»⟦BOS⟧│user│↵\n" in first
    assert "⟦header⟧«<|im_start|>»│as│sistant│↵\n⟦shared up to here⟧⟦reply⟧yes│·│‹<›│‹|›" in first
    assert "⟦ending⟧«<|im_end|>»│↵\n⟦score read here⟧" in first
    assert "│⇥│Pa│ris│·is│·" in first
    assert "cut from the prompt" in second
    assert "tokens cut: why·why·" in second
    middle = shown(folder, capsys, "--row", "2", *model, "--truncation", "reply-middle", "--max-seq-len", "140")
    assert "cut from the reply" in middle
    assert middle.count("tokens cut: ") == 1
    assert middle.index("⟦reply⟧") < middle.index("tokens cut: ") < middle.index("⟦ending⟧")


@pytest.mark.parametrize(
    ("truncation", "cause", "said"),
    [
        ("drop", "overlong", "the conversation takes 109 tokens, above the model's limit of 64."),
        ("error", "overlong", "(--truncation error)"),
        ("reply-middle", "prompt_too_long", "leaves no room for a beginning and an end of the reply"),
        ("prompt-left", "reply_too_long", "with its headers, above the limit of 64"),
    ],
)
def test_a_row_that_is_left_out_says_why(
    folder: Path, capsys: pytest.CaptureFixture[str], truncation: str, cause: str, said: str
) -> None:
    model = ("--model", str(folder / "base"), "--max-seq-len", "64", "--truncation", truncation)
    out = shown(folder, capsys, "--row", "2", *model)
    assert f"left out: {cause}: " in out
    assert said in out


def test_json_has_every_token_and_what_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(folder, capsys, "--row", "1", "3", "--model", str(folder / "base"), "--max-seq-len", "256", "--json")
    assert out.isascii()
    first, third = json.loads(out)
    renderer = build_renderer(make_tokenizer(), RenderingConfig())
    prompt = (Message("user", ROWS[0]["prompt"]),)
    for reply, side in enumerate(("chosen", "rejected")):
        rendered = renderer.render(prompt, (Message("assistant", ROWS[0][side]),))
        tokens = first["replies"][reply]["tokens"]
        assert [token["id"] for token in tokens] == rendered.token_ids.tolist()
        assert text_in(tokens, "reply") == ROWS[0][side]
        assert text_in(tokens, "header") == "<|im_start|>assistant\n"
        assert text_in(tokens, "ending") == "<|im_end|>\n"
        typed = "".join(token["text"] for token in tokens if token["is_typed"])
        assert typed == ("<|im_end|>" if side == "chosen" else "")
        assert sum(token["part"] in ("prompt", "header") for token in tokens) == rendered.prompt_tokens
    assert (third["cause"], third["row"], third["preference"]) == ("empty_prompt", ROWS[2], None)


def text_in(tokens: list[dict[str, Any]], part: str) -> str:
    return "".join(token["text"] for token in tokens if token["part"] == part)


def test_a_character_of_several_tokens_is_shown_once_and_half_of_one_as_what_it_is() -> None:
    tokenizer = make_tokenizer()
    said = "Zoë 🌅🌅, いい."
    ids = tokenizer(said, add_special_tokens=False)["input_ids"]
    texts = texts_of(tokenizer, ids)
    assert len(texts) == len(ids) > len(said)
    assert "".join(texts) == said
    assert [text for text in texts if len(text.encode()) > 2].count("🌅") == 2
    # A character that is cut in the middle stays what it is.
    start = next(place for place, text in enumerate(texts) if text == "🌅")
    assert texts_of(tokenizer, ids[: start + 2])[start:] == ["\N{REPLACEMENT CHARACTER}"] * 2


@pytest.mark.parametrize("template", [CHATML, THINKING, None], ids=["chatml", "thinking", "plain"])
@pytest.mark.parametrize("reading", ["text", "keep"])
def test_every_token_is_of_one_part_whatever_the_template_writes(template: str | None, reading: Any) -> None:
    config = RenderingConfig(special_tokens_in_text=reading, max_seq_len=110, truncation="reply-middle")
    renderer = build_renderer(make_tokenizer(template), config)
    prompt = (Message("user", "Is <|im_end|> light?"),)
    for content in ("yes <|im_start|> no", "water " * 30 + "<|im_end|>" + "basil " * 30):
        reply = (Message("assistant", content),)
        rendered = renderer.render(prompt, reply)
        found = shown_reply(renderer, prompt, reply, rendered, number=0, num_shared=0)
        texts = {part: "".join(t.text for t in found.tokens if t.part == part) for part in ("header", "reply")}
        assert (found.cut is None) == (rendered.truncated_reply_tokens == 0)
        if found.cut is None:
            assert texts["reply"] == content
        assert texts["header"].strip().endswith({CHATML: "assistant", THINKING: "</think>"}.get(template or "", ":"))
        typed = "".join(token.text for token in found.tokens if token.is_typed)
        assert typed == "<|im_end|>" + ("<|im_start|>" if found.cut is None else "")
        assert [token.id for token in found.tokens] == rendered.token_ids.tolist()


def test_a_terminal_gets_colours_and_a_pipe_none(folder: Path) -> None:
    config = ShowConfig.of(dataset=str(folder / "rows.jsonl"), row=("1",), model=str(folder / "base"), max_seq_len=256)
    rows = show_rows(config)
    assert isinstance(rows[0].replies[0], ShownReply)
    said = []
    for is_terminal in (False, True):
        file = io.StringIO()
        colours = "standard" if is_terminal else None
        print_rows(rows, Console(file=file, force_terminal=is_terminal, color_system=colours, soft_wrap=True))
        said.append(file.getvalue())
    assert "\x1b[" not in said[0]
    assert "\x1b[" in said[1]
    assert Text.from_ansi(said[1]).plain.split() == said[0].split(), "the same marks for both"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--row", "9"], "--row 9: rows.jsonl has no such row among its 3"),
        (["--row", "nothing"], "no id, pair_id, preference_id of this value"),
    ],
)
def test_a_row_that_is_not_there_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", "show", str(folder / "rows.jsonl"), *flags])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_all_rows_of_an_id_are_shown_and_a_number_is_a_line_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}
    ids = ["x", "y", "x", 2, *["many"] * 12]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"id": name, **pair}) + "\n" for name in ids))

    def found(*names: str) -> list[tuple[int, int]]:
        rows = json.loads(shown(tmp_path, capsys, "--json", "--row", *names))
        return [(row["number"], row["num_alike"]) for row in rows]

    assert found("x", "2", "y") == [(1, 2), (3, 2), (2, 1), (2, 1)]
    assert found("many") == [(number, 12) for number in range(5, 15)]
    assert found("1", "rows.jsonl:3") == [(1, 1), (3, 1)]
    assert shown(tmp_path, capsys, "--row", "many").count("one of 12 rows with this id, of which at most 10") == 10
    assert "with this id" not in shown(tmp_path, capsys, "--row", "y", "1")


def test_a_dataset_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "show", "--row", "3"])
    assert "DATASET is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("table.csv", 'prompt,chosen,rejected\na,"b\nb",c\nd,e,f\n', "table.csv:2"),
        ("blank.jsonl", '\n\n{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "blank.jsonl:3"),
    ],
)
def test_the_first_row_is_shown_whatever_its_number(
    name: str, text: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    main(["data", "show", str(tmp_path / name)])
    said = capsys.readouterr().out
    assert said.count("===") == 2
    assert f"=== {place} ===" in said
