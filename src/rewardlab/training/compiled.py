"""How many programs torch.compile has made: a few at the start are its price, one more with every step is a fault."""

from __future__ import annotations

from torch._dynamo.utils import counters


def compiled_programs() -> int:
    """Programs made in this process so far."""
    return int(counters["stats"]["unique_graphs"])


def growth_line(before: int, since: int) -> str:
    """What a log says if programs were made after the count was `before`, at step `since`; empty if none were."""
    now = compiled_programs()
    if now == before:
        return ""
    return f"{now} programs so far, {now - before} of them after step {since}"
