"""`rewardlab data` from its command line: finds the tool that is named, and calls it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rewardlab.commands.parsing import parse_command, run_tool
from rewardlab.console import print_report, say
from rewardlab.core.signals import BEGINS_ANEW, ended_by_signals
from rewardlab.core.terminal import number_of, plural
from rewardlab.core.together import together
from rewardlab.curation.auditing.config import AuditConfig
from rewardlab.curation.files.config import ConvertConfig, MixConfig, SplitConfig
from rewardlab.curation.inspecting.config import InspectConfig
from rewardlab.curation.mislabels.config import MislabelsConfig
from rewardlab.curation.showing.config import ShowConfig


def inspect(arguments: Sequence[str]) -> None:
    config = parse_command(InspectConfig, arguments, "data inspect")
    config.rows.require_named("inspect")
    from rewardlab.curation.inspecting.files import claim_files, write_files
    from rewardlab.curation.inspecting.run import inspect_datasets, sources_of
    from rewardlab.data.rows import CAUSES
    from rewardlab.report.inspection import inspection_report

    # Refuse a file that cannot be written before reading the rows.
    claim_files(config.inspection, sources_of(config))
    found = inspect_datasets(config)
    # Write files before printing: if a pipe such as `| head` closes the output early, no file is lost.
    written = write_files(found, config)
    for one in found:
        print_report(f"{inspection_report(one, CAUSES)}\n")
    say(*(f"wrote {path}" for path in written))


def audit(arguments: Sequence[str]) -> None:
    """Audit datasets. Exit status 1 if a check is above its limit."""
    config = parse_command(AuditConfig, arguments, "data audit")
    config.require_named("audit")
    from rewardlab.curation.auditing.fixing import claim_outputs, write_fixed
    from rewardlab.curation.auditing.report import audit_report
    from rewardlab.curation.auditing.run import audit_rows, sources_of

    sources = sources_of(config)
    outputs = claim_outputs(config, sources)
    audited = audit_rows(config)
    print_report(audit_report(audited.audit, num_examples=config.examples))
    with together():
        said = outputs.write(audited.audit)
        if config.fix:
            said += write_fixed(audited, config, outputs)
    if said:
        say("", *said)
    if audited.audit.failed:
        sys.stdout.flush()
        sys.exit(1)


def mislabels(arguments: Sequence[str]) -> None:
    config = parse_command(MislabelsConfig, arguments, "data mislabels")
    config.require_complete()
    from rewardlab.data.dataset_names import require_readable

    # Checked before torch is imported, so that a mistyped name is reported at once.
    require_readable(config.rows.dataset, config.rows.hf_split, config.rows.reading)
    from rewardlab.curation.mislabels.run import find_mislabels

    search = find_mislabels(config)
    print_report(search.text())
    say("", *search.written, f"ranked labels, texts to read and figures: {search.output_dir}")


def convert(arguments: Sequence[str]) -> None:
    config = parse_command(ConvertConfig, arguments, "data convert")
    from rewardlab.curation.files.converting import convert

    done = convert(config)
    say(f"wrote {done.output}: {number_of(done.rows, 'row')} from {number_of(done.preferences, 'preference')}")
    if done.joined is not None:
        say(
            f"  {number_of(done.joined.rows, 'row')} became {done.joined.joined_rows:,} by --join {config.join}; the "
            f"largest has {number_of(done.joined.largest, 'reply')}"
        )
        if done.joined.full:
            say(f"  begun since the row before had no room within the limits of a row: {done.joined.full:,}")
        if done.joined.joined_rows < done.joined.rows:
            say("  each row is one preference of --batch-size now, and of the loss without --kwise-weight comparison")
        if again := done.joined.judged_again:
            say(
                f"  {number_of(again, 'pair')} of replies {plural(again, 'has', 'have')} several judgements, which "
                f"agree in {done.joined.agreeing:,}: of several people, or copies?"
            )
        if done.joined.merged:
            say(f"  the same said of equal replies of a row, and so written once: {done.joined.merged:,}")
        if done.joined.rankings:
            say(f"  with a ranking of their own, and so left as they are: {done.joined.rankings:,}")
    if done.pairs is not None:
        told = {"left out": done.pairs.left_out, "hardened": done.pairs.hardened, "not kept": done.pairs.not_kept}
        say(
            f"  judgements {done.pairs.judgements:,}, of which {done.pairs.swapped:,} "
            f"{plural(done.pairs.swapped, 'was', 'were')} swapped, so that the better "
            f"reply comes first"
        )
        for what, counts in told.items():
            if counts:
                say(f"  {what}: {_listed(counts)}")


def split(arguments: Sequence[str]) -> None:
    config = parse_command(SplitConfig, arguments, "data split")
    from rewardlab.curation.files.splitting import split

    done = split(config)
    groups, largest = _counted(done.groups, "groups", "group"), _counted(done.groups, "largest_rows", "row")
    say(f"wrote {done.folder}: {groups}, the largest of {largest}")
    for name, facts in done.splits.items():
        say(
            f"  {name}: {_counted(facts, 'rows', 'row')} ({facts['share']:.4f}, wanted {facts['share_wanted']:g}), "
            f"{_counted(facts, 'prompts', 'prompt')}, {_counted(facts, 'groups', 'group')}"
        )
    for pair, shared in done.shared.items():
        say(f"  {pair.replace('_', ' ')}: shared {_listed(shared)}")
    say(f"Read it with --dataset {done.folder}, and --eval-split and --test-split for the others.")


def mix(arguments: Sequence[str]) -> None:
    config = parse_command(MixConfig, arguments, "data mix")
    from rewardlab.curation.files.mixing import mix

    done = mix(config)
    say(f"wrote {done.output}: {number_of(done.rows, 'row')}")


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())


def _counted(facts: Mapping[str, object], name: str, noun: str) -> str:
    count = facts[name]
    assert isinstance(count, int)
    return number_of(count, noun)


def show(arguments: Sequence[str]) -> None:
    """Print rows as the model reads them. Raises RewardlabError."""
    config = parse_command(ShowConfig, arguments, "data show")
    config.shown.require_named()
    from rewardlab.curation.showing.rows import show_rows

    rows = show_rows(config)
    if config.shown.json:
        # JSON in ASCII, so that no control character of the data reaches the terminal.
        print_report(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    from rewardlab.curation.showing.page import print_rows

    print_rows(rows)


TOOLS: Final[Mapping[str, Callable[[Sequence[str]], None]]] = {
    "inspect": inspect,
    "audit": audit,
    "mislabels": mislabels,
    "convert": convert,
    "split": split,
    "mix": mix,
    "show": show,
}


def data(arguments: Sequence[str]) -> None:
    """Run the tool that the first argument names.

    Raises ConfigError if no tool has that name, and RunInterrupted if a signal other than Ctrl-C ends it.
    """
    # A signal ends it as Ctrl-C does, so that no half of a file stays behind.
    with ended_by_signals(BEGINS_ANEW):
        run_tool("data", TOOLS, arguments, usage="DATASET ...")
