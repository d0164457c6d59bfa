"""Without --max-seq-len the limit of tokens is one that the model can have, or already has."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from common import CONFIGS, make_tokenizer
from reward_models import save_tiny
from rewardlab.artifact.base import open_base, settle_rendering
from rewardlab.artifact.load import load
from rewardlab.core.errors import ConfigError
from rewardlab.model.config import BackboneConfig
from rewardlab.training.notices import continued_notices
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig
from runs import config_for


def limit_of(model, **changes) -> int:
    config = RewardTrainerConfig.of(model=str(model), dataset=("d",), **changes)
    return int(settle_rendering(config.model, config.data.rendering)["max_seq_len"])


def test_a_reward_model_that_goes_on_keeps_its_own_limit(tmp_path, log):
    folder = save_tiny(tmp_path / "rm")
    own = load(folder, check=False).renderer.spec.max_length
    assert own != 512, "the positions of the model"
    assert limit_of(folder) == own
    assert f"length: up to {own} tokens, as the reward model was trained" in log.text
    assert (limit_of(folder, max_seq_len=200), limit_of(folder, max_seq_len="model")) == (200, 512)
    config = RewardTrainerConfig.of(model=str(folder), dataset=("d",), max_seq_len=limit_of(folder))
    assert continued_notices(config, open_base(config.model, config.data.rendering)) == []


@pytest.mark.parametrize(("positions", "limit"), [(512, 512), (1024, 1024), (4096, 1024)])
def test_another_model_has_the_usual_limit_or_its_positions(tmp_path, positions, limit, log):
    config = CONFIGS["llama"]()
    config.max_position_embeddings = positions
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert limit_of(tmp_path) == limit
    assert ("the positions of the model" in log.text) == (positions < 1024)
    wanted = RewardTrainerConfig.of(model="m", dataset=("d",), max_seq_len=positions + 1)
    with pytest.raises(ConfigError, match=rf"above the {positions} positions of this model\. Use at most"):
        open_base(BackboneConfig(model=str(tmp_path)), wanted.data.rendering)


@pytest.mark.slow
def test_a_run_goes_on_from_a_folder_without_naming_its_limit(base_model, pairs_file, tmp_path, log):
    first = train(config_for(base_model, pairs_file, tmp_path / "first", steps=2, max_seq_len=96))
    again = train(config_for(first.model, pairs_file, tmp_path / "again", steps=2, max_seq_len="auto"))
    assert load(again.model).renderer.spec.max_length == 96
    assert "goes on with other settings" not in log.text
    resumed = train(config_for(first.model, pairs_file, tmp_path / "again", steps=2, max_seq_len="auto", resume="auto"))
    assert resumed.model == again.model
