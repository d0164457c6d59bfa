"""Verification that a live endpoint gives the scores with which its model was saved, and a name for what it does wrong.

The canaries of the model are sent in every form that the endpoint takes, one conversation per request, and once all
together. Their reference scores come from a folder or, for our own server, from what it says about its model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rewardlab.analysis.endpoint_faults import (
    DESCRIPTIONS,
    FORM_OF,
    PRECISIONS,
    Finding,
    Heard,
    compare_forms,
    explain,
    find,
    of_one_arithmetic,
)
from rewardlab.analysis.faults import name_fault
from rewardlab.client.canaries import canary_of
from rewardlab.client.offers import chosen
from rewardlab.client.protocol import ServedModel
from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.core.spec import SCORE_TOLERANCE, Canary
from rewardlab.core.terminal import number_of, plural
from rewardlab.serve.verifying.endpoints import NAMED_BY, Answer, Dialect, Refusal, Rewardlab, Wire, engine_of, spec_of
from rewardlab.serve.verifying.reference import Reference, reference_of

DIGEST_SHOWN: Final = 12
"""Characters of a digest that messages show."""
UNWANTED: Final = (400, 404, 405, 413, 415, 422)
"""Status codes by which an endpoint says that it does not take such a request; others mean that it failed."""


@dataclass(frozen=True, kw_only=True)
class LiveVerification:
    """What a live endpoint gave, form by form, and the verdict."""

    url: str
    engine: str
    model: str
    """Name of the model at the endpoint; empty where it has none."""
    digest: str = ""
    """Digest of the endpoint's model, where it says one."""
    compared_with: str
    """Where the reference scores come from."""
    findings: tuple[Finding, ...]
    faults: tuple[str, ...] = ()
    """Names of what is wrong, the first of them in the verdict; empty if the scores are right."""
    notes: tuple[str, ...] = ()
    """What else the reader has to know."""
    verdict: str = ""
    """One message on what is wrong and what to do; or that nothing is."""
    num_canaries: int = 0

    @property
    def is_right(self) -> bool:
        """Return whether every form gives the scores of the model."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        forms = [
            {
                "form": one.heard.form,
                "route": one.heard.route,
                "right": one.is_right,
                "faults": list(one.faults),
                "precision": one.precision or None,
                "largest_distance": one.distance if one.distance < float("inf") else None,
                "said": one.heard.said or None,
                "scores": [score if abs(score) < float("inf") else None for score in one.heard.scores],
                "num_tokens": list(one.heard.num_tokens),
            }
            for one in self.findings
        ]
        return {
            "url": self.url,
            "engine": self.engine,
            "model": self.model or None,
            "digest": self.digest or None,
            "compared_with": self.compared_with,
            "canaries": self.num_canaries,
            "right": self.is_right,
            "faults": list(self.faults),
            "verdict": self.verdict,
            "notes": list(self.notes),
            "forms": forms,
        }

    def lines(self) -> list[str]:
        """Return what is printed: who answered, one line for each form, and what else there is to know."""
        who = self.engine + (f", model {self.model}" if self.model else "")
        who += f", digest {self.digest[:DIGEST_SHOWN]}" if self.digest else ""
        head = f"{self.url}: {who}; {self.num_canaries} canaries of {self.compared_with}"
        return [head, *(f"  {one.line()}" for one in self.findings), *(f"  {note}" for note in self.notes)]


def verify_live(
    wire: Wire, *, folder: Path | None = None, name: str | None = None, precision: str = "auto"
) -> LiveVerification:
    """Send the canaries to a live endpoint, compare its scores with the references, and return the verdict.

    `folder` is the model that it should serve; None compares our own server with what it says about itself. `name`
    chooses among several models of a server. `precision` is what it should compute in (`fp32`, `bf16`, `fp16`); `auto`
    takes the precision that our own server names, and finds out that of other engines from the references.

    Raises EndpointError if the endpoint cannot be reached or understood; ConfigError if a folder is needed and not
    given, or no model there has the name; ArtifactError if the folder is damaged.
    """
    said = spec_of(wire)
    reference = None if folder is None else reference_of(folder)
    expected = PRECISIONS.get(precision)
    cut: list[str] = []
    if said is None:
        if reference is None:
            raise ConfigError(
                f"{wire.base}: it is not a rewardlab server, so it does not say what its scores should be. Give the "
                f"folder that it serves: --model FOLDER."
            )
        dialect, served = engine_of(wire, name=name), None
        cut, reference = left_out(reference), reference.of_whole_canaries()
        canaries = reference.spec.canaries
    else:
        served = chosen(said, name, url=wire.base, setting=NAMED_BY)
        dialect = Rewardlab(model=served.name)
        expected = expected or served.dtype
        canaries = reference.spec.canaries if reference else _canaries_of(served)
    findings = [find(canaries, heard, expected=expected) for heard in _hear_all(wire, dialect, canaries, reference)]
    findings = look_again(of_one_arithmetic(canaries, findings), reference, expected)
    findings = compare_forms(findings)
    digest = "" if served is None else served.digest
    if reference is not None:
        findings = also_stale(findings, digest, reference.digest)
    faults, verdict = _verdict(findings)
    where = f"{wire.base}: "
    return LiveVerification(
        url=wire.base,
        engine=dialect.name,
        model=getattr(dialect, "model", ""),
        digest=digest,
        compared_with="the server itself" if reference is None else str(folder),
        findings=tuple(findings),
        faults=faults,
        notes=(*_notes(findings, dialect, reference, served), *cut),
        verdict=where + verdict,
        num_canaries=len(canaries),
    )


def left_out(reference: Reference) -> list[str]:
    """Return the note on canaries above the model's length limit: they are not sent, unless there are no others."""
    if not reference.num_cut:
        return []
    if reference.num_cut == len(reference.spec.canaries):
        return ["every canary is above the model's length limit, so nothing whole could be sent, and all were sent"]
    are = plural(reference.num_cut, "is", "are")
    count = number_of(reference.num_cut, "canary")
    return [f"{count} {are} above the model's length limit, and {are} left out"]


def _canaries_of(served: ServedModel) -> list[Canary]:
    """Return the canaries that a server shows. Raises EndpointError if it shows none."""
    if not served.canaries:
        raise EndpointError(f"the model {served.name!r} shows no canaries. Give its folder: --model FOLDER.")
    return [canary_of(canary) for canary in served.canaries]


def _hear_all(wire: Wire, dialect: Dialect, canaries: Sequence[Canary], reference: Reference | None) -> list[Heard]:
    """Send the canaries in every form that the endpoint takes and can be rendered here."""
    sent: dict[str, list[Any]] = {"token_ids": [canary.token_ids for canary in canaries]}
    if reference is not None:
        sent["texts"] = reference.texts()
    sent["messages"] = [canary.messages for canary in canaries]
    return [hear(wire, dialect, form, conversations) for form, conversations in sent.items() if form in dialect.forms]


def hear(wire: Wire, dialect: Dialect, form: str, conversations: Sequence[Any]) -> Heard:
    """Return the endpoint's scores in one form: each conversation by itself, and token ids also all in one request."""
    scores: list[float] = []
    counts: list[int | None] = []
    refused: list[str] = []
    route = f"POST {dialect.ask(form, conversations[:1]).path}"
    silent = Heard(form=form, route=route)
    for number, conversation in enumerate(conversations):
        try:
            answer = _ask(wire, dialect, form, [conversation])
        except Refusal as refusal:
            refused.append(f"conversation {number}: {refusal}")
            if refusal.status not in UNWANTED:
                return replace(silent, fault="failed", said=refused[-1])
            continue
        if len(answer.scores) != 1:
            return replace(silent, fault="wrong_count", said=f"{len(answer.scores)} scores for one conversation")
        scores += answer.scores
        counts += answer.num_tokens
    # An endpoint that refuses all does not take this form; one that refuses some takes it and fails for these.
    if refused:
        return replace(silent, fault="refuses" if scores else "not_taken", said=refused[0])
    heard = replace(silent, scores=tuple(scores), num_tokens=tuple(counts))
    return _with_all_together(heard, wire, dialect, conversations) if form == "token_ids" else heard


def _with_all_together(heard: Heard, wire: Wire, dialect: Dialect, conversations: Sequence[Any]) -> Heard:
    """Send all conversations in one request, and return what was heard with what is wrong with that answer."""
    unheard = replace(heard, scores=(), num_tokens=())
    try:
        together = _ask(wire, dialect, heard.form, conversations).scores
    except Refusal as refusal:
        return replace(unheard, fault="failed", said=f"all in one request: {refusal}")
    if len(together) != len(conversations):
        said = f"{len(together)} scores for {len(conversations)} conversations in one request"
        return replace(unheard, fault="wrong_count", said=said)
    return replace(heard, together=tuple(together))


def _ask(wire: Wire, dialect: Dialect, form: str, conversations: Sequence[Any]) -> Answer:
    """Return what is answered. Raises Refusal."""
    question = dialect.ask(form, conversations)
    answer = wire.post(question.path, question.body)
    try:
        return dialect.hear(answer)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Refusal(f"an answer of another shape ({type(error).__name__}: {error})") from error


def look_again(findings: Sequence[Finding], reference: Reference | None, expected: str | None) -> list[Finding]:
    """Compare scores that fit no known fault with further decoys, which are computed with the model of the folder.

    This is done only when needed, since it loads the model.
    """
    if reference is None or all(one.faults != ("unknown",) for one in findings):
        return list(findings)
    canaries = reference.more_decoys()
    looked = []
    for one in findings:
        if one.faults == ("unknown",):
            for dtype in sorted(SCORE_TOLERANCE, key=lambda dtype: dtype != (expected or "float32")):
                said = name_fault(canaries, one.heard.scores, precision=dtype, known=DESCRIPTIONS) or ""
                if names := tuple(name for name in DESCRIPTIONS if f"({name})" in said):
                    one = replace(one, faults=names, precision=dtype)
                    break
        looked.append(one)
    return looked


def also_stale(findings: Sequence[Finding], theirs: str, ours: str | None) -> list[Finding]:
    """Return the findings, with the fault `stale_weights` where the digests say that another model is served.

    If one of the digests is not known, nothing is changed.
    """
    if not (theirs and ours) or theirs == ours:
        return list(findings)
    return [_also_stale(one, theirs, ours) for one in findings]


def _also_stale(one: Finding, theirs: str, ours: str) -> Finding:
    said = f"its digest is {theirs[:DIGEST_SHOWN]}, the folder's is {ours[:DIGEST_SHOWN]}"
    # Another model explains right scores (the two may be too close to tell apart) and these faults; others stay named.
    if one.is_right or set(one.faults) & {"unknown", "stale_weights", "other_template", "other_tokens", "truncates"}:
        return replace(one, faults=("stale_weights",), heard=replace(one.heard, said=said))
    return one


def _verdict(findings: Sequence[Finding]) -> tuple[tuple[str, ...], str]:
    """Return (the names of what is wrong, the message about it)."""
    wrong = [one for one in findings if not one.is_right]
    heard = [one for one in findings if one.is_right and one.faults != ("not_taken",)]
    if not wrong and not heard:
        return ("failed",), explain(("failed",), forms=_called(findings), said=findings[0].heard.said)
    if not wrong:
        dtypes = " and ".join(dict.fromkeys(one.precision for one in heard))
        return (), f"verified: the scores are those of the model, in {dtypes}."
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for one in wrong:
        groups.setdefault(one.faults, []).append(one)
    messages = []
    for faults, several in groups.items():
        messages.append(explain(faults, forms=_called(several), said=several[0].heard.said))
    return tuple(dict.fromkeys(name for one in wrong for name in one.faults)), " Also ".join(messages)


def _called(findings: Sequence[Finding]) -> list[str]:
    return [FORM_OF[one.heard.form] for one in findings]


def _notes(
    findings: Sequence[Finding], dialect: Dialect, reference: Reference | None, served: ServedModel | None
) -> list[str]:
    """Return what else the reader has to know."""
    notes = []
    if reference is None:
        notes.append("compared with what the server says of itself; --model FOLDER also finds stale weights")
    elif "texts" not in dialect.forms:
        notes.append(f"{dialect.name} takes no rendered texts, so none were sent")
    if served is not None and reference is not None and served.template_hash != reference.spec.renderer.template_hash:
        notes.append("the server's chat template has another hash than the folder's")
    dtypes = {one.precision for one in findings if one.is_right and one.precision}
    if len(dtypes) == 1 and served is None:
        notes.append(f"computed in {min(dtypes)}, as far as the references of each precision tell")
    if dtypes & {"bfloat16", "float16"} and not (served is not None and reference is not None):
        notes.append(
            f"in half precision another model passes whose canaries score within "
            f"{max(SCORE_TOLERANCE[dtype] for dtype in dtypes):g} of this one's"
        )
    return notes
