"""The folder of an evaluation: who may write to it, and its files, which take the place of earlier ones all at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rewardlab.core.errors import ConfigError
from rewardlab.core.placing import placing
from rewardlab.core.run_folder import (
    EVALUATED,
    EVALUATION_FILES,
    OWN,
    holds_run,
    manifest_keys,
    only_writer,
    settle_if_free,
)


@contextmanager
def placing_evaluation(
    folder: Path, inputs: Iterable[str], *, overwrite: bool, rooms: Sequence[str] = ()
) -> Iterator[Path]:
    """Lock a folder and those in it for single models (`rooms`), and yield an empty one for the files of an evaluation.

    They take their place, with all files of an earlier one gone, when the block ends without an error (see `placing`).
    Folders of other models that an earlier command judged stay: each is a separate evaluation.

    Raises as `only_writer` and `claim_evaluation` do.
    """
    places, inputs = [folder, *(folder / room for room in rooms)], list(inputs)
    with ExitStack() as held:
        held.enter_context(only_writer(folder))
        for place in places:  # before a folder is made in one that is not free
            if place != folder:
                settle_if_free(place)
            claim_evaluation(place, inputs, overwrite=overwrite)
        for place in places[1:]:
            held.enter_context(only_writer(place))
            claim_evaluation(place, inputs, overwrite=overwrite)
        earlier = [str((place / name).relative_to(folder)) for place in places for name in EVALUATION_FILES]
        new = held.enter_context(placing(folder, lambda: earlier))
        for room in rooms:
            (new / room).mkdir()
        yield new


def claim_evaluation(folder: Path, inputs: Iterable[str], *, overwrite: bool) -> None:
    """Raise ConfigError unless `rewardlab eval` or `calibrate` may write to `folder`, which this process has locked
    (`only_writer`).

    `inputs` are the names of what the evaluation reads: it must not replace any of them.
    """
    name, parent = folder.absolute().name, folder.absolute().parent
    # `--output-dir RUN/evals` or `RUN/step_10` would mix the evaluation with the files of the run around it.
    of_a_run = name in OWN or re.fullmatch(r"step_\d+", name)
    for place in (folder, parent) if of_a_run else (folder,):
        if holds_run(place):
            raise ConfigError(
                f"--output-dir {folder}: {place} holds a run, with files of its own. Choose another folder."
            )
    there = [name for name in EVALUATION_FILES if (folder / name).exists()]
    own = {(folder / name).resolve() for name in there}
    for name in inputs:
        if Path(name).exists() and Path(name).resolve() in own:
            raise ConfigError(f"{name} is a file that --output-dir {folder} would replace. Choose another folder.")
    if folders := [name for name in there if (folder / name).is_dir()]:
        raise ConfigError(
            f"{folder / folders[0]} is a folder, and has the name of a file that an evaluation writes. Move it away, "
            f"or choose another --output-dir."
        )
    if there and not manifest_keys(folder) >= EVALUATED:
        raise ConfigError(
            f"{folder} holds {', '.join(there)}, which `rewardlab eval` did not write. Choose another "
            f"--output-dir, or move them away."
        )
    if there and not overwrite:
        raise ConfigError(
            f"{folder} already holds an evaluation ({', '.join(there)}). Choose another --output-dir, or replace it "
            f"with --overwrite."
        )
