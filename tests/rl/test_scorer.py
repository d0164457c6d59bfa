"""Scores of rollouts: the same from a folder, a server and `rewardlab.load`, in order, finite or an error that names
the rollout."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reward_models import save_tiny, served
from rewardlab.analysis.ensembles import Scale
from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.core.types import Message
from rewardlab.data.chat import to_messages
from rewardlab.rl import Noise, RewardScorer, Rollout, RolloutError, ScorerConfig
from rollouts_scored import NEAR, TALKS, Told, details, scores, talk

pytest_plugins = ["reward_fixtures"]


@pytest.fixture(scope="module")
def texts_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained on bare texts."""
    return save_tiny(tmp_path_factory.mktemp("scorer") / "concat", chat_template="concat")


@pytest.mark.slow
def test_folder_server_and_load_give_the_same_scores_in_order(folder: Path, url: str) -> None:
    import rewardlab

    expected = rewardlab.load(folder).score(TALKS)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(scores(folder, TALKS), expected, atol=NEAR)
    np.testing.assert_allclose(scores(url, TALKS), expected, atol=NEAR)
    order = np.random.default_rng(0).permutation(len(TALKS))
    np.testing.assert_allclose(scores(folder, [TALKS[n] for n in order]), np.array(expected)[order], atol=NEAR)


@pytest.mark.slow
def test_every_form_of_a_rollout_has_the_score_of_its_conversation(folder: Path) -> None:
    import rewardlab

    loaded = rewardlab.load(folder)
    (expected,) = loaded.score([talk("Why?", "So.")])
    question, answer = Message("user", "Why?"), Message("assistant", "So.")
    tokens = loaded.renderer.token_ids((question, answer)).tolist()
    forms: list[Any] = [
        talk("Why?", "So."),
        (question, answer),
        ([{"role": "user", "content": "Why?"}], "So."),
        ([question], [{"role": "assistant", "content": "So."}]),
        ("Why?", "So."),
        Rollout(name="mine", conversation=(question, answer)),
        Rollout(name="tokens", rendered=tuple(tokens)),
    ]
    found = scores(folder, forms, text_as="turns")
    np.testing.assert_allclose(found, [expected] * len(forms), atol=NEAR)
    for made in (talk("Why?", "So."), tokens, loaded.renderer.tokenizer.decode(tokens), forms[5]):
        (one,) = scores(folder, [object()], render_fn=lambda _, made=made: made)
        assert one == pytest.approx(expected, abs=NEAR)


def test_rendered_text_reaches_a_server_as_tokens_of_the_folder_that_is_served(folder: Path, url: str) -> None:
    import rewardlab

    loaded = rewardlab.load(folder)
    text = loaded.renderer.tokenizer.decode(
        loaded.renderer.token_ids((Message("user", "Why?"), Message("assistant", "So.")))
    )
    (expected,) = loaded.score([talk("Why?", "So.")])
    (got,) = scores(url, [("", text)], text_as="rendered", client={"artifact": folder})
    assert got == pytest.approx(expected, abs=NEAR)
    with pytest.raises(ConfigError, match=r"rollout 0 is rendered text\. Give client=\{'artifact': FOLDER\}"):
        scores(url, [("", text)], text_as="rendered")


@pytest.mark.parametrize("where", ["folder", "url"])
def test_plain_texts_are_refused_until_it_is_said_how_they_are_read(where: str, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(where)
    with pytest.raises(ConfigError, match="trained with a chat template.*'turns': .*; 'transcript': .*; 'rendered': "):
        scores(source, [("Why?", "So.")])


@pytest.mark.slow
def test_a_model_that_takes_texts_needs_no_word_on_how_they_are_read(texts_only: Path) -> None:
    import rewardlab

    expected = rewardlab.load(texts_only).score_replies("Why? ", ["So.", "No."])
    np.testing.assert_allclose(scores(texts_only, [("Why? ", "So."), ("Why? ", "No.")]), expected, atol=NEAR)
    with served(texts_only) as url:
        np.testing.assert_allclose(scores(url, [("Why? ", "So."), ("Why? ", "No.")]), expected, atol=NEAR)


@pytest.mark.slow
def test_a_transcript_is_split_into_its_turns_and_read_as_one_turn_if_so_asked(folder: Path) -> None:
    import rewardlab

    prompt = "\n\nHuman: Why?\n\nAssistant: So.\n\nHuman: And then?\n\nAssistant:"
    loaded = rewardlab.load(folder)
    assert scores(folder, [(prompt, "Rain.")], text_as="transcript") == pytest.approx(
        loaded.score_replies(prompt, ["Rain."]), abs=NEAR
    )
    assert scores(folder, [(prompt, "Rain.")], text_as="turns") == pytest.approx(
        loaded.score([talk(prompt, "Rain.")]), abs=NEAR
    )


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (None, "rollout 1: it is None; wanted a list of messages"),
        (3.0, "rollout 1: it is a float"),
        ("text", "rollout 1: it is a text of 4 characters"),
        ([], "rollout 1: it ends with nothing; wanted the assistant's reply"),
        ([{"role": "user", "content": "Why?"}], "rollout 1: it ends with a turn of the user"),
        ([{"role": "user"}], "rollout 1: a message needs a role and a text as content"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [1]}],
            "rollout 1: a message has tool_calls",
        ),
        (([], "So."), "rollout 1: the prompt has no messages"),
        ((talk("a", "b"), "c"), "rollout 1: the prompt ends with a turn of the assistant"),
        (([Message("user", "a")], 3), "rollout 1: the reply is a int"),
        ((5, "c"), "rollout 1: the prompt is a int"),
        (Rollout(name="r"), "rollout 1: it ends with nothing"),
        (Rollout(name="r", rendered=()), "rollout 1: its rendering is empty"),
    ],
)
def test_what_is_no_rollout_is_named(folder: Path, rollout: Any, said: str) -> None:
    with pytest.raises(RolloutError, match=said) as caught:
        scores(folder, [talk("Why?", "So."), rollout])
    assert caught.value.rollouts == (1,)


def test_a_single_rollout_is_not_taken_for_a_list(folder: Path) -> None:
    with pytest.raises(RolloutError, match="Put it into a list"):
        scores(folder, "Why?")


@pytest.mark.parametrize("where", ["folder", "url"])
def test_a_rollout_above_the_limit_is_an_error_that_names_it_or_is_cut_and_counted(
    where: str, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(where)
    long = talk("water " * 400, "So.")
    with pytest.raises(RolloutError, match=r"rollout 1 has no score by .*above the model's limit of 256") as caught:
        scores(source, [talk("Why?", "So."), long])
    assert caught.value.rollouts == (1,)
    short, cut = details(source, [talk("Why?", "So."), long], truncate=True)
    assert short.truncated_tokens == 0
    assert cut.truncated_tokens > 0
    assert cut.num_tokens == 256
    with pytest.raises(RolloutError, match=r"rollout 0 has no score by .*No turn is left to cut: send shorter replies"):
        scores(source, [talk("Why?", "water " * 400)], truncate=True)


def test_nothing_to_score_is_no_error(folder: Path) -> None:
    assert scores(folder, []) == []


@pytest.mark.slow
def test_the_noise_is_that_of_the_artifact_for_the_arithmetic_or_the_measured_one(folder: Path, url: str) -> None:
    async def noise(source: Any, **settings: Any) -> Noise:
        async with RewardScorer(source, **settings) as scorer:
            return await scorer.noise()

    assert asyncio.run(noise(folder)) == Noise(tolerance=1e-4, source="float32, by the artifact")
    assert asyncio.run(noise(folder, precision="bf16")) == Noise(tolerance=0.15, source="bfloat16, by the artifact")
    assert asyncio.run(noise(url)).tolerance == 1e-4
    assert asyncio.run(noise(url, noise_tolerance=0.02)) == Noise(tolerance=0.02, source="as given (noise_tolerance)")
    (one,) = details(folder, TALKS[:1])
    assert one.noise == pytest.approx(Noise(tolerance=1e-4, source="").between_scorings([one.score])[0])
    assert one.digest
    assert one.spread is None


@pytest.mark.slow
def test_an_ensemble_is_on_one_scale_and_its_lower_bound_is_below_its_mean(tmp_path: Path) -> None:
    import rewardlab

    scales = [(0.3, 2.0), (-1.0, 0.5), (0.0, 1.0)]
    members = [save_tiny(tmp_path / str(seed), seed=seed, scale=scale) for seed, scale in enumerate(scales)]
    scaled = np.array(
        [
            (np.array(rewardlab.load(member).score(TALKS)) - mean) / std
            for member, (mean, std) in zip(members, scales, strict=True)
        ]
    )
    spread = scaled.std(axis=0, ddof=1)
    for how, expected in (
        ("mean", scaled.mean(axis=0)),
        ("minimum", scaled.min(axis=0)),
        ("lower", scaled.mean(axis=0) - 0.5 * spread),
    ):
        found = details(members, TALKS, combination=how, penalty=0.5)
        np.testing.assert_allclose([one.score for one in found], expected, atol=10 * NEAR)
        np.testing.assert_allclose([one.spread for one in found], spread, atol=10 * NEAR)
        assert found[0].digest.count("+") == 2
    with served(members[1], others={"third": members[2]}) as url:
        for sources in ([members[0], url, members[2]], [members[0], f"{url}#model", f"{url}#third"]):
            np.testing.assert_allclose(scores(sources, TALKS), scaled.mean(axis=0), atol=10 * NEAR)
        with pytest.raises(ConfigError, match="has no 'fourth'; it has model, third"):
            scores(f"{url}#fourth", TALKS)


@pytest.mark.slow
def test_members_without_a_calibration_are_refused(folder: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=1, scale=(0.0, 1.0))
    with pytest.raises(ConfigError, match=r"rm: it has no calibration.*rewardlab calibrate"):
        scores([other, folder], TALKS)


def test_a_rendered_text_of_too_many_characters_is_an_error_that_names_it(folder: Path) -> None:
    good, bad = (Rollout(name=name, rendered=text) for name, text in (("short", "Why?"), ("long", "word " * 100_000)))
    with pytest.raises(RolloutError, match="long has no score .*500000 characters, too many for the model") as caught:
        scores(folder, [TALKS[0], bad])
    assert caught.value.rollouts == (1,)
    with pytest.raises(RolloutError, match="short has no score .* 1 more have no score either") as caught:
        scores(folder, [TALKS[0], good, bad])
    assert caught.value.rollouts == (1, 2)


@pytest.mark.parametrize("where", ["folder", "url"])
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (talk("Why?\ud800", "So."), "half a surrogate pair"),
        (talk("Why?", "So.\udfff"), "half a surrogate pair"),
        (Rollout(name="text", rendered="Why?\ud800"), "half a surrogate pair"),
        (Rollout(name="negative", rendered=(1, -1)), "wanted a text, or token ids from 0 up"),
        (Rollout(name="beyond", rendered=(1, 10**6)), "token id 1000000 is not one of the model's"),
        (Rollout(name="long", rendered=(5,) * 2000), "2000 tokens, above the model's limit"),
        (Rollout(name="end", rendered=(1, 2, 3)), "it ends in token 3 where every other ends in"),
    ],
)
def test_a_rollout_that_no_model_can_read_is_an_error_that_names_it(
    where: str, bad: Any, said: str, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(where)
    with pytest.raises(RolloutError, match=said) as caught:
        scores(source, [TALKS[0], bad])
    assert caught.value.rollouts == (1,)
    assert "rollout 1" in str(caught.value) or bad.name in str(caught.value)


@pytest.mark.parametrize("where", ["folder", "url"])
def test_a_rollout_that_holds_lists_in_place_of_tuples_is_read_as_one_that_does_not(
    where: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    import rewardlab

    loaded = rewardlab.load(folder)
    (expected,) = loaded.score([TALKS[0]])
    turns = to_messages(TALKS[0])
    given = []
    for field, value in (
        ("conversation", list(turns)),
        ("conversation", TALKS[0]),
        ("rendered", loaded.renderer.token_ids(turns).tolist()),
    ):
        one = Rollout(name="x")
        object.__setattr__(one, field, value)  # as a program without annotations makes it
        given.append(one)
    np.testing.assert_allclose(scores(request.getfixturevalue(where), given), [expected] * 3, atol=NEAR)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_score_that_is_missing_or_not_finite_is_an_error_that_names_the_rollout(told: Any, value: Any) -> None:
    told["a"] = Told("a", [0.5, value, 1.0, value])
    with pytest.raises(RolloutError, match=r"rollout 1 has no score by a: .*1 more") as caught:
        scores("a", TALKS[:4])
    assert caught.value.rollouts == (1, 3)


def test_a_score_too_few_is_an_error(told: Any) -> None:
    told["a"] = Told("a", [0.5])
    with pytest.raises(RolloutError, match="a: 1 score for 2 rollouts"):
        scores("a", TALKS[:2])


@pytest.mark.parametrize("how", ["mean", "minimum", "lower"])
def test_a_combination_moves_no_further_than_its_noise(told: Any, how: str) -> None:
    generator = np.random.default_rng(0)
    scale = Scale(mean=0.0, std=1.0)
    raw = generator.normal(size=(3, 4))
    names = ["a", "b", "c"]
    told |= {name: Told(name, list(row), scale) for name, row in zip(names, raw, strict=True)}
    settings = {"combination": how, "penalty": 2.0}
    before = details(names, TALKS[:4], **settings)
    bound = Noise(tolerance=0.01, source="").between_scorings
    for _ in range(100):
        moved = raw + generator.choice([-1, 1], size=raw.shape) * np.stack([bound(row) for row in raw])
        told |= {name: Told(name, list(row), scale) for name, row in zip(names, moved, strict=True)}
        after = details(names, TALKS[:4], **settings)
        for one, other in zip(before, after, strict=True):
            assert abs(one.score - other.score) <= one.noise * (1 + 1e-9)


def test_one_folder_cannot_speak_for_several_served_models() -> None:
    client = {"artifact": "rm-a"}
    with pytest.raises(ConfigError, match="one artifact cannot be the folder of several served models"):
        RewardScorer(["http://a:8000", "http://b:8000"], client=client)
    RewardScorer(["http://a:8000"], client=client)


def test_an_ensemble_whose_scales_could_change_is_refused() -> None:
    with pytest.raises(ConfigError, match="an ensemble does not follow swaps"):
        RewardScorer(["http://a:1", "http://b:1"], client={"on_swap": "follow"})


@pytest.mark.parametrize(
    ("source", "settings", "said"),
    [
        ([], {}, "got 0"),
        (["a", "a"], {}, "each named once"),
        ("a", {"tex_as": "turns"}, "unknown setting 'tex_as'.* text_as"),
        ("a", {"penalty": -1.0}, "penalty: at least 0"),
        ("a", {"noise_tolerance": 1.0}, "noise_tolerance: expected a number from 0 to 0.2"),
        ("http://127.0.0.1:1", {"client": {"truncate": True}}, "truncate is a setting of the scorer itself"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_at_once(source: Any, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RewardScorer(source, **settings)


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nowhere"):
        scores(tmp_path / "nowhere", TALKS[:1])


def test_settings_are_taken_from_a_config_and_replaced_by_name(folder: Path) -> None:
    scorer = RewardScorer(folder, ScorerConfig(text_as="turns", penalty=2.0), penalty=3.0)
    assert (scorer.config.text_as, scorer.config.penalty) == ("turns", 3.0)
