"""The average of reward models: its weights, its scores, and what cannot be averaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from command_line import refusal
from common import make_model, make_tokenizer
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.files import sha256_file
from rewardlab.core.spec import SPEC_FILE, read_spec
from rewardlab.data.chat import load_tokenizer
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.model.reward import RewardModel
from rewardlab.serve.verifying.folder import verify


@pytest.fixture(autouse=True)
def verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is quick; one test asks a clean process."""
    monkeypatch.setattr("rewardlab.serve.folders.average.verify_in_clean_process", verify)


def redraw(model: RewardModel, number: int) -> None:
    """Draw all matrices anew, but for the head."""
    generator = torch.Generator().manual_seed(number)
    head = model.head.weight.detach().clone()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.std())
        model.head.weight.copy_(head)


def member(
    folder: Path,
    number: int,
    *,
    beta: float = 1.0,
    length: int = 256,
    family: str = "llama",
    sign: float = 1.0,
    is_other: bool = False,
) -> Path:
    """Save a model that moved a little way from the same start, by a step of its own; `sign` is that of its scores."""
    model = make_model(family)
    if is_other:
        redraw(model, number)
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator) * weight.std()
        model.head.weight *= sign
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=length))
    save_reward_model(folder, model, renderer, beta=beta, save_dtype=torch.float32, provenance={})
    return folder


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("members")
    return [member(home / name, number) for number, name in enumerate("abc")]


def test_a_model_and_one_that_went_on_from_it_are_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The first was trained as a plain transcript with a system prompt, and the second has both from its tokenizer.
    plain, after = tmp_path / "plain", tmp_path / "after"
    rendering = RenderingConfig(max_seq_len=256, chat_template="plain", system_prompt="Be brief.")
    first = build_renderer(make_tokenizer(None), rendering)
    model = make_model()
    save_reward_model(plain, model, first, beta=1.0, save_dtype=torch.float32, provenance={})
    second = build_renderer(load_tokenizer(str(plain)), RenderingConfig(max_seq_len=256, special_tokens_in_text="text"))
    save_reward_model(after, model, second, beta=1.0, save_dtype=torch.float32, provenance={})
    assert (first.spec.template_source, second.spec.template_source) == ("plain", "tokenizer")
    main(["average", str(plain), str(after), "--output-dir", str(tmp_path / "both")])
    assert "verified" in capsys.readouterr().out


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("weights", [(), (3.0, 1.0, 4.0)])
def test_every_weight_is_the_mean_of_the_members(members, tmp_path, capsys, weights):
    out = tmp_path / "out"
    flags = ["--weights", *map(str, weights)] if weights else []
    main(["average", *map(str, members), "--output-dir", str(out), *flags])
    shares = [weight / sum(weights or (1, 1, 1)) for weight in weights or (1, 1, 1)]
    parts = [weights_of(folder) for folder in members]
    made = weights_of(out)
    assert made.keys() == parts[0].keys()
    for name, weight in made.items():
        wanted = sum(share * part[name].double() for share, part in zip(shares, parts, strict=True))
        torch.testing.assert_close(weight.double(), wanted, rtol=0, atol=1e-7 * float(wanted.abs().max()))
    spec = read_spec(out)
    assert spec.provenance["average"] == [
        {"folder": str(folder), "share": share, "spec_sha256": sha256_file(folder / SPEC_FILE)}
        for folder, share in zip(members, shares, strict=True)
    ]
    assert spec.renderer == read_spec(members[0]).renderer
    assert (spec.save_dtype, spec.rounding, spec.calibration) == ("float32", "none", None)
    verify(out)
    said = capsys.readouterr().out
    assert f"{out}: the average of 3 models in float32, verified" in said
    assert "point in different directions" not in said


def test_members_of_different_base_models_with_one_head_are_told(members, tmp_path, capsys):
    other = member(tmp_path / "other", 7, is_other=True)
    for first, is_told in ((members[1], False), (other, True)):
        main(["average", str(members[0]), str(first), "--output-dir", str(tmp_path / f"of-{first.name}")])
        said = " ".join(capsys.readouterr().out.split())
        assert ("did not begin from the same weights" in said) == is_told
        assert "point in different directions" not in said


def test_what_is_said_of_the_scores_is_so(members, tmp_path, capsys):
    turned = [member(tmp_path / name, number, sign=-1.0) for number, name in enumerate("ab")]
    signs = set()
    for pair in (members[:2], turned):
        out = tmp_path / f"out{len(signs)}"
        main(["average", *map(str, pair), "--output-dir", str(out)])
        own = torch.tensor([[canary.score for canary in read_spec(folder).canaries] for folder in (*pair, out)])
        wanted = own[:2].mean(0)
        away = own[2] - wanted
        signs.add(bool(away.max() > -away.min()))
        said = capsys.readouterr().out
        assert f"at most {float(away.abs().max()):.2g} from the average" in said
        assert f"(their standard deviation: {float(wanted.std()):.2g})" in said
    assert signs == {True, False}, "the largest distance is one upwards here and one downwards there"


def test_equal_models_average_to_themselves_bit_for_bit(members, tmp_path):
    copy = member(tmp_path / "copy", 0)
    again = member(tmp_path / "again", 0)
    main(["average", str(members[0]), str(copy), str(again), "--output-dir", str(tmp_path / "out")])
    mine = weights_of(members[0])
    assert all(torch.equal(weight, mine[name]) for name, weight in weights_of(tmp_path / "out").items())


def test_heads_drawn_apart_are_named(members, tmp_path, capsys):
    other = load(members[0])
    head = other.model.head.weight
    with torch.no_grad():
        head.copy_(torch.linalg.svd(head.detach(), full_matrices=True).Vh[1:2])
    save_reward_model(
        tmp_path / "other", other.model, other.renderer, beta=1.0, save_dtype=torch.float32, provenance={}
    )
    main(["average", str(members[0]), str(tmp_path / "other"), "--output-dir", str(tmp_path / "out")])
    assert "the heads of these models point in different directions" in capsys.readouterr().out


def test_what_cannot_be_averaged_is_refused(members, tmp_path, capsys):
    a, b, _ = map(str, members)
    out = str(tmp_path / "out")
    assert "needs two reward-model folders or more" in refusal(capsys, "average", a, "--output-dir", out)
    assert f"{a}: it is named twice" in refusal(capsys, "average", a, b, a, "--output-dir", out)
    said = refusal(capsys, "average", a, b, "--output-dir", out, "--weights", "1")
    assert "--weights: 1 numbers for 2 folders" in said
    for wrong, words in (("0", "has to be a positive number"), ("-1", "a positive number"), ("nan", "a finite number")):
        assert words in refusal(capsys, "average", a, b, "--output-dir", out, "--weights", "1", wrong)
    assert f"it is {a}, the folder that is read" in refusal(capsys, "average", a, b, "--output-dir", a, "--overwrite")
    others = {
        "--beta 2 and": member(tmp_path / "beta", 1, beta=2.0),
        "renders conversations otherwise than": member(tmp_path / "length", 1, length=128),
        "is another model than": member(tmp_path / "family", 1, family="qwen2"),
    }
    for words, folder in others.items():
        assert words in refusal(capsys, "average", a, str(folder), "--output-dir", out)
    assert not Path(out).exists()


def test_a_member_that_was_changed_is_refused(members, tmp_path, capsys):
    broken = member(tmp_path / "broken", 1)
    values = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(values | {"rms_norm_eps": 0.1}))
    assert "rms_norm_eps" in refusal(
        capsys, "average", str(members[0]), str(broken), "--output-dir", str(tmp_path / "o")
    )


@pytest.mark.slow
def test_rounded_members_are_named_and_a_clean_process_verifies(members, tmp_path, capsys, monkeypatch):
    monkeypatch.undo()
    half = tmp_path / "half"
    main(["export", str(members[1]), "--output-dir", str(half)])
    main(["average", str(members[0]), str(half), "--output-dir", str(tmp_path / "out")])
    assert f"{half}: these weights were rounded" in capsys.readouterr().out
    assert read_spec(tmp_path / "out").save_dtype == "float32"
