"""How a run went and by what it was made: speed, settings, and where they come from."""

from __future__ import annotations

import math
from typing import Any, Final

from rewardlab.core.config import HASH_DIGITS
from rewardlab.core.files import encodable, sha256_text
from rewardlab.core.terminal import quoted, short, visible
from rewardlab.report.document import Block, Facts, Section
from rewardlab.report.folder import Record
from rewardlab.report.sections import duration

LONG: Final = 300
"""Characters above which a setting, such as the text of a chat template, is not shown whole."""


def speed_section(record: Record) -> Section:
    """Return the rates of the whole run and of the last row of metrics.csv that has them, and what they cost."""
    last: dict[str, float] = {}
    for row in record.rows:
        last.update(row)
    rates = {
        "comparisons per second": ("pairs_per_second", "{:,.2f}"),
        "tokens per second": ("tokens_per_second", "{:,.0f}"),
    }
    facts = {
        **rates,
        "model FLOPs per second": ("model_tflops_per_second", "{:,.3f} · 10¹²"),
        "model FLOP utilisation": ("mfu", "{:.1%}"),
        "padding, share of tokens": ("padding_share", "{:.1%}"),
        "tokens of conversations per computed token": ("sharing_ratio", "{:.2f}"),
    }
    pairs = [(name, form.format(last[column])) for name, (column, form) in facts.items() if column in last]
    seconds = math.fsum(row["seconds"] for row in record.rows if "seconds" in row)
    whole = [("time in training steps", duration(seconds))] if seconds else []
    for name, (column, form) in rates.items():
        timed = [(row["seconds"], row[column]) for row in record.rows if "seconds" in row and column in row]
        if took := math.fsum(time for time, _ in timed):
            whole.append((name, form.format(math.fsum(time * rate for time, rate in timed) / took)))
    # A run that was resumed began to measure anew, so the last row may not have the most.
    if memory := [row["peak_memory_gib"] for row in record.rows if "peak_memory_gib" in row]:
        whole.append(("most memory", f"{max(memory):,.2f} GiB"))
    peak = record.manifest.get("peak")
    if isinstance(peak, dict) and isinstance(peak.get("flops_per_second"), (int, float)):
        most = peak["flops_per_second"] / 1e12
        pairs.append(("peak of the device", f"{most:.3g} · 10¹² FLOP/s ({peak.get('source')})"))
    if isinstance(record.probe.get("seconds"), (int, float)):
        pairs.append(("whole probe", duration(record.probe["seconds"])))
    caption = "In its last stretch" if record.kind == "train" else "Time"
    named = (("Over the whole run", whole), (caption, pairs))
    return Section(title="Speed", blocks=tuple(Facts(caption=name, pairs=tuple(own)) for name, own in named if own))


def settings_section(record: Record) -> Section:
    """Return the resolved settings and the provenance: model, hashes, commit, packages."""
    provenance = record.manifest.get("provenance")
    known = provenance if isinstance(provenance, dict) else {}
    installed = known.get("packages")
    packages = installed if isinstance(installed, dict) else {}
    command, commit = known.get("command"), known.get("git_commit")
    facts: dict[str, Any] = {
        "folder": record.folder,
        "model folder": record.model_folder or "none",
        "hash of the settings": record.manifest.get("config_hash"),
        "template hash": record.manifest.get("template_hash"),
        "git commit": commit and f"{commit}{' with changes' if known.get('git_dirty') else ''}",
        "Python": known.get("python"),
        "platform": known.get("platform"),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "command": " ".join(_typed(str(word)) for word in command) if isinstance(command, list) else None,
        "processes": record.manifest.get("ranks"),
    }
    pairs = tuple((name, str(value)) for name, value in facts.items() if value not in (None, ""))
    file = "manifest.json" if record.kind == "eval" else "config.json"
    settings = tuple((name, _setting(value, file)) for name, value in record.config.items())
    blocks: list[Block] = [Facts(caption="Provenance", pairs=pairs)]
    if settings:
        blocks.append(Facts(caption=f"All {len(settings)} settings", pairs=settings, folded=True))
    return Section(title="Configuration and provenance", blocks=tuple(blocks))


def _typed(word: str) -> str:
    """Return a word of a command quoted for a shell; a word that a shell cannot have passed on is shown as it is."""
    try:
        return quoted(word)
    except UnicodeEncodeError:
        return visible(word)


def _setting(value: object, file: str) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    text = "none" if value in (None, "") else str(value)
    digest = sha256_text(encodable(text))[:HASH_DIGITS]
    brief = f"{short(text)} ({len(text):,} characters, SHA-256 {digest}; whole in {file})"
    return text if len(text) <= LONG else brief
