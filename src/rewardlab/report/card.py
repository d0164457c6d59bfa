"""The model card: `README.md` in a reward-model folder, with the numbers of the report and metadata for the hub.

The folder's seal does not list the card, so `rewardlab verify` passes with it. A card begins with the checksum of its
text: a card that somebody has edited is not replaced without `overwrite`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from rewardlab.analysis.ceiling import Ceiling
from rewardlab.analysis.judgement import Judgement
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import sha256_file, write_text
from rewardlab.core.folders import remove_left_over
from rewardlab.core.run_folder import CARD, SPEC_SUM, is_own_card, sealed_card
from rewardlab.core.spec import SPEC_FILE
from rewardlab.core.terminal import visible
from rewardlab.core.types import Estimate
from rewardlab.report.checklist import checklist_section
from rewardlab.report.document import Block, Document, Facts, Paragraph, Part, Section
from rewardlab.report.extras import controls_section, served_section, suites_section
from rewardlab.report.folder import Record
from rewardlab.report.from_scores import calibration_section, length_section
from rewardlab.report.markdown import markdown_page
from rewardlab.report.paired import AgainstBaselines
from rewardlab.report.sections import data_section, headline, problems_section, signs_section

METRICS: Final = {
    "eval_accuracy": ("accuracy", "Accuracy on pairs"),
    "eval_loss": ("nll", "Negative log-likelihood"),
    "eval_brier": ("brier_score", "Brier score"),
    "eval_ece": ("expected_calibration_error", "Expected calibration error"),
    "eval_roc_auc": ("roc_auc", "Area under the ROC curve"),
}
"""Estimate -> (type, name) of a metric in the metadata."""
SETTINGS: Final = (
    "steps", "epochs", "batch_size", "lr", "lr_scheduler", "optimizer", "weight_decay", "lora", "lora_rank",
    "lora_alpha", "quantization", "train_head_only", "freeze_layers", "precision", "max_seq_len", "beta",
    "label_smoothing", "regularization_lambda", "regularization_type", "score_regularization_lambda", "center_lambda",
    "kwise_loss", "kwise_weight", "seed",
)  # fmt: skip
"""Settings that the card shows, among them all of the loss. Paths and machines are left out: cards are published."""


def write_card(
    record: Record,
    judgement: Judgement | None,
    *,
    ceiling: Estimate | Ceiling | None,
    overwrite: bool,
    against: AgainstBaselines | None = None,
    problems: Sequence[str] = (),
) -> Path:
    """Write `README.md` into the folder of the model, and return its path.

    Raises ConfigError if there is no model, if its run is not finished or was not judged, or if another model was
    judged; and, unless `overwrite`, for a README.md that rewardlab did not write or that was edited since.
    """
    if record.model_folder is None or record.model is None:
        why = "".join(f" {problem}" for problem in record.problems if SPEC_FILE in problem)
        raise ConfigError(f"--card: {record.folder} has no reward model that a card could describe.{why}")
    if not record.finished or record.judged is None:
        raise ConfigError(
            f"--card: {record.folder} is not finished or was not judged, so there are no numbers for a card. Finish "
            f"the run (--resume), or judge the model with rewardlab eval and give the folder of that."
        )
    if record.kind == "eval" and record.manifest.get(SPEC_SUM) != sha256_file(record.model_folder / SPEC_FILE):
        raise ConfigError(
            f"--card: {record.folder} does not hold the numbers of the model that is now in {record.model_folder}: its "
            f"{SPEC_FILE} is another than the one that was judged. Judge it again with rewardlab eval --overwrite."
        )
    path = record.model_folder / CARD
    if path.exists() and not overwrite and not is_own_card(path):
        raise ConfigError(
            f"--card: {path} is there and is not a card that rewardlab wrote, or was changed since. Move it away, or "
            f"replace it with --overwrite."
        )
    remove_left_over(path)
    write_text(path, card_text(record, judgement, ceiling=ceiling, against=against, problems=problems))
    return path


def card_text(
    record: Record,
    judgement: Judgement | None,
    *,
    ceiling: Estimate | Ceiling | None,
    against: AgainstBaselines | None = None,
    problems: Sequence[str] = (),
) -> str:
    """Return the card: metadata as YAML between two lines of dashes, the checksum of the rest, and Markdown."""
    metadata = yaml.safe_dump(
        _plain(_metadata(record, judgement)), sort_keys=False, allow_unicode=False, default_flow_style=False
    )
    return sealed_card(metadata, markdown_page(_document(record, judgement, ceiling, against, problems)))


def _document(
    record: Record,
    judgement: Judgement | None,
    ceiling: Estimate | Ceiling | None,
    against: AgainstBaselines | None,
    problems: Sequence[str],
) -> Document:
    spec = record.model
    assert spec is not None
    use: list[Block] = [
        Paragraph(
            text="A reward model: it gives a conversation one number, higher for replies that people like those behind "
            "its training data would prefer. Differences of scores within one prompt mean something; scores of "
            "different prompts, and the zero, do not."
        ),
        Paragraph(
            text="It loads in transformers as a sequence-classification model with one output, whose raw logit is the "
            "score. reward_spec.json in this folder says exactly how messages become tokens, and holds "
            f"{len(spec.canaries)} conversations with their scores, by which rewardlab verify proves a copy."
        ),
        Facts(
            caption="What decides a score",
            pairs=(
                ("beta", f"{spec.beta:g}: σ(beta · score difference) is the probability of a preference"),
                *_calibrated(record),
                ("chat template", f"{spec.renderer.template_source}, SHA-256 {spec.renderer.template_hash[:16]}…"),
                ("longest conversation", f"{spec.renderer.max_length:,} tokens, the oldest turns are cut first"),
                ("weights stored as", f"{spec.save_dtype}, rounding: {spec.rounding}"),
            ),
        ),
    ]
    given = ((name, record.config.get(name)) for name in SETTINGS)
    settings = tuple((name, str(value)) for name, value in given if value is not None)
    trained: list[Block] = [Facts(caption="Settings", pairs=settings)] if settings and record.kind != "eval" else []
    sections = [
        Section(title="What it is", blocks=tuple(use)),
        headline(record, ceiling=ceiling),
        suites_section(record),
        served_section(record),
        *([] if judgement is None else [calibration_section(judgement), length_section(judgement)]),
        signs_section(record),
        problems_section(record, problems),
        controls_section(record),
        checklist_section(record, judgement, against),
        Section(title="Training", blocks=tuple(trained)),
        data_section(record),
    ]
    made = [section for section in sections if section.blocks]
    name = _name(record)
    return Document(
        title=f"Reward model {name}",
        made_by="This card was written by rewardlab report --card; every number is that of the report.",
        parts=(Part(title=name, sections=tuple(made)),),
    )


def _calibrated(record: Record) -> tuple[tuple[str, str], ...]:
    """Return the fact that the numbers of the card are those of calibrated probabilities; nothing if they are not."""
    if record.judged is None or not record.judged.calibrated:
        return ()
    return (("judged as calibrated", f"σ({record.beta:.4g} · score difference), β divided by the stored temperature"),)


def _metadata(record: Record, judgement: Judgement | None) -> dict[str, Any]:
    """Return the metadata that the Hugging Face hub reads, with one result for each source."""
    assert record.judged is not None
    parts = record.judged.estimates
    sources = [name for name in parts if name != "all"] or ["all"]
    split = str(record.config.get("hf_split") or "test") if record.kind == "eval" else record.judged.name
    more = dict(judgement.estimates) if judgement is not None else {}
    results = [
        {
            "task": {"type": "text-classification", "name": "Preference of one reply over another"},
            "dataset": {"type": source, "name": source, "split": split},
            "metrics": _metrics({**(more if len(sources) == 1 else {}), **parts[source]}),
        }
        for source in sources
    ]
    base = str(record.config.get("model") or "")  # of an evaluation the model itself
    base = base if Path(base).exists() else base.partition("@")[0]
    # The hub refuses a base model that is not the name of a repository, such as a folder.
    known = {"base_model": base} if record.kind != "eval" and re.fullmatch(r"[\w.-]+/[\w.-]+", base) else {}
    return {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["reward-model", "preference", "rlhf", "rewardlab"],
        **known,
        "model-index": [{"name": _name(record), "results": results}],
    }


def _name(record: Record) -> str:
    """Return the name of the model: that of its run; for an evaluation, of the folder around `best` or `step_N`."""
    if record.kind != "eval" or record.model_folder is None:
        return record.name
    folder = record.model_folder.resolve()
    return folder.parent.name if re.fullmatch(r"best|step_\d+", folder.name) else folder.name


def _metrics(estimates: Mapping[str, Estimate]) -> list[dict[str, Any]]:
    return [
        {
            "type": kind,
            "value": round(estimate.value, 6),
            "name": name,
            "args": {
                "low": round(estimate.low, 6) if estimate.low == estimate.low else None,
                "high": round(estimate.high, 6) if estimate.high == estimate.high else None,
                "level": estimate.level,
                "n": estimate.n,
                "method": estimate.method,
            },
        }
        for metric, (kind, name) in METRICS.items()
        if (estimate := estimates.get(metric)) is not None and estimate.value == estimate.value
    ]


def _plain(value: Any) -> Any:
    """Return the value with control characters in its texts made visible, so that none gets into the card."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return visible(value) if isinstance(value, str) else value
