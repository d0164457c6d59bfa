"""Score files and serve from their command lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rewardlab.arguments import (
    ScoreArguments,
    ServeArguments,
)
from rewardlab.commands.parsing import parse_command
from rewardlab.console import say
from rewardlab.core.folders import require_writable_folder
from rewardlab.core.signals import ended_by_signals
from rewardlab.core.terminal import plural

SHARED_BY_SCORE = (
    "precision",
    "compute",
    "processes",
    "overwrite",
    "restart",
    "output_as",
    "on_error",
    "overlong",
    "pick",
)
"""Settings of `rewardlab score` that have the same names in `ScoreSettings`."""


def score(arguments: Sequence[str]) -> None:
    """Score a file.

    Raises ConfigError, DataError, ArtifactError or EndpointError as scoring does, and RunInterrupted if a signal ends
    it; the same command then resumes it.
    """
    settings = parse_command(ScoreArguments, arguments, "score")
    require_writable_folder(settings.output.parent, "--output")
    from rewardlab.data.readers import require_rows

    # Checked before torch is imported, so that a mistyped file name is reported at once.
    require_rows(settings.input)
    with ended_by_signals("The same command goes on from what is scored."):
        _score_rows(settings)


def _score_rows(asked: ScoreArguments) -> None:
    """Score a file. Raises DataError, after its output is written, if too many replies have no score."""
    from rewardlab.serve.file_scoring.file import ScoreSettings, score_file

    settings = ScoreSettings(
        token_budget=asked.micro_token_budget,
        **{name: getattr(asked, name) for name in SHARED_BY_SCORE},
    )
    kind = "" if asked.output_as == "raw" else f" ({asked.output_as})"
    if asked.ensemble:
        from rewardlab.analysis.ensembles import Combination
        from rewardlab.serve.file_scoring.ensemble import score_ensemble

        members = f"{len(asked.ensemble)}" if len(asked.ensemble) > 1 else "bootstrap heads"
        kind = f" (ensemble {asked.ensemble_as} of {members}, in standard deviations)"
        combination = Combination(how=asked.ensemble_as, penalty=asked.ensemble_penalty)
        result = score_ensemble(asked.ensemble, asked.input, asked.output, settings, combination=combination)
    elif asked.backend == "local":
        result = score_file(asked.model, asked.input, asked.output, settings)
    else:
        from rewardlab.serve.file_scoring.servers import Server, score_remotely

        kind += f" by {asked.url}"
        server = Server(
            url=asked.url,
            backend=asked.backend,
            folder=asked.model,
            model=asked.served_model_name,
            token_env=asked.token_env,
            concurrency=asked.concurrency,
        )
        result = score_remotely(server, asked.input, asked.output, settings)
    left = f", {result.unscored} not (the file says why)" if result.unscored else ""
    say(f"{result.scored} {plural(result.scored, 'reply')} scored{kind}{left}: {asked.output}")
    if result.first_cause is not None and result.error_fraction <= asked.max_error_fraction:
        say(f"the first without a score: {result.first_cause}")
    if result.cut:
        say(
            f"in {result.cut} {plural(result.cut, 'row')} a prompt was cut to the model's length limit "
            f"(`truncated_tokens`; --overlong)"
        )
    if result.shortened:
        say(
            f"in {result.shortened} {plural(result.shortened, 'row')} a reply lost its middle to the "
            f"model's length limit "
            f"(`truncated_reply_tokens`; --overlong)"
        )
    if asked.pick == "best" and result.tied:
        say(f"in {result.tied} {plural(result.tied, 'row')} several replies are the best; the first of them is written")
    result.require_few_errors(asked.max_error_fraction, asked.output)


def serve(arguments: Sequence[str]) -> None:
    settings = parse_command(ServeArguments, arguments, "serve")
    from rewardlab.serve.server import serve

    status = serve(settings.models, settings.serving, limits=settings.limits, compute=settings.compute, say=say)
    if status != 0:
        sys.exit(status)
