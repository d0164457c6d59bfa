"""Settings of `rewardlab gold label`. Needs nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from rewardlab.core.config import require_between
from rewardlab.core.values import Section, require
from rewardlab.gold.engine import EngineConfig
from rewardlab.gold.files.inputs import InputConfig
from rewardlab.gold.files.parts import Shard
from rewardlab.gold.judging.config import JudgeConfig
from rewardlab.gold.scoring import ScoringConfig
from rewardlab.gold.settings import require_unset


@dataclass(frozen=True, kw_only=True)
class LabelConfig(Section):
    """What is labelled, by what, and where the scores go."""

    model: str = ""
    """The gold reward model: its folder, or a plain sequence-classification model of another project as a folder or a
    hub name (`organisation/name@revision`), which is imported. With `--backend vllm` it renders and proves what the
    server scores with; our own server needs none."""
    output: Path
    """The rows with `gold`, as JSON Lines; beside it the same name with .json: `[[r1, r2], …]`. Name either."""
    shard: str | None = None
    """Label one part of the rows: `3/16`, or `slurm` for the place of this task in its array."""
    max_error_fraction: float = 0.1
    """The command fails, after the output is written, if a larger share of the replies has no score."""
    overwrite: bool = False
    """Replace an output that was made of something else; scores that are still right are kept."""
    follow_input: bool = False
    """Go on where the rows have changed since, as after replies that failed were sampled: scores that are still
    right are kept. Without it another input is refused."""
    restart: bool = False
    """Discard what an interrupted run left."""
    rows: InputConfig = InputConfig()
    scoring: ScoringConfig = ScoringConfig()
    judge: JudgeConfig = JudgeConfig()
    workers: EngineConfig = EngineConfig()

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of its range."""
        require_between(self, max_error_fraction=(0, 1))
        backend = self.scoring.backend
        self.workers.require_local(self.scoring.backend)
        require(
            self.workers.engine == "process" or self.scoring.processes == 1,
            "--processes: only with --engine process. --ray-workers says how many score on Ray.",
        )
        require(
            bool(self.model) or backend in ("http", "chat"),
            "--model is missing: name the folder of the gold reward model, or its hub name; a server needs --backend "
            "and --url.",
        )
        require(
            not (self.model and backend == "chat"),
            "--model: a judge is named by its server (--served-model-name). Leave it out.",
        )
        if backend != "chat":
            require_unset(self.judge, *(field.name for field in fields(self.judge)), only="--backend chat")
        if self.shard not in (None, "slurm"):
            Shard.parse(str(self.shard))
