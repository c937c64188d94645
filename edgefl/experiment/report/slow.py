"""Why was it slow: how each node used its time, and what held the run up, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgefl.experiment.report.curves import thinned
from edgefl.experiment.report.html import Markup, element, figure, join, legend, table
from edgefl.experiment.report.intervals import Use
from edgefl.experiment.report.links import LinkUse, mbit_per_s
from edgefl.experiment.report.read import Floats, RunFiles
from edgefl.experiment.report.svg import COMPUTE, SEND, row_chart
from edgefl.experiment.report.units import number, scaled, seconds, share

MOST_ROWS = 40


def why_slow(run: RunFiles, used: Mapping[int, Use], links: Sequence[LinkUse]) -> Markup:
    """Words first, then the bars that they rest on, then who ended the rounds."""
    if not used or run.time_s <= 0:
        return Markup("")
    reports = last_reports(run)
    words = element("ul", join(element("li", line) for line in findings(run, used, links, reports)))
    return join(
        (Markup(f'<div class="panel">{words}</div>'), _use_bars(run, used), _round_table(run, reports))
    )


def findings(
    run: RunFiles, used: Mapping[int, Use], links: Sequence[LinkUse], reports: Sequence[LastReport]
) -> list[str]:
    """What the figures say, one sentence each."""
    total, n = run.time_s, len(used)
    computing = sum(u.computing_s for u in used.values()) / n
    sending = sum(u.only_sending_s for u in used.values()) / n
    busiest = max(used, key=lambda i: (used[i].computing_s, -i))
    lines = [
        f"Over the whole fleet and run, {share(computing, total)} of the time went into computing,"
        f" {share(sending, total)} into sending while the processor rested, and"
        f" {share(total - computing - sending, total)} into neither: waiting for others or for what they"
        " send, or being down.",
        f"Busiest processor: {run.names[busiest]}, at work for"
        f" {share(used[busiest].computing_s, total)} of the run.",
    ]
    if links:
        full = links[0]
        rate = full.access.up_bytes_per_s if full.direction == "uplink" else full.access.down_bytes_per_s
        lines += [
            f"Fullest link: the {full.direction} of {run.names[full.node]} ({mbit_per_s(rate)}), which"
            f" carried {share(full.share, 1.0)} of what it can in that time.",
            _verdict(used[busiest].computing_s / total, full.share),
        ]
    return lines + _mean_round(reports) + _slowest_device(run) + _most_bytes(run)


def _mean_round(reports: Sequence[LastReport]) -> list[str]:
    """What the slowest chain of each round was made of, on average."""
    whole = sum(r.round_s for r in reports)
    if whole <= 0:
        return []
    computing, sending = sum(r.computing_s for r in reports), sum(r.sending_s for r in reports)
    return [
        f"A round took {seconds(whole / len(reports))} on average. Of that, the node that reported last spent"
        f" {share(computing, whole)} computing and {share(sending, whole)} uploading;"
        f" {share(max(0.0, whole - computing - sending), whole)} was the model's way to it and waiting."
    ]


def _verdict(computing: float, carrying: float) -> str:
    """What the busiest processor and the fullest link point to; both are shares of the run."""
    if max(computing, carrying) < 0.5:
        return (
            "No processor and no link was in use for half of the run: a chain of computing and transfers,"
            " one waiting for the other, set the pace, rather than any single resource."
        )
    if computing >= carrying:
        return "Computing set the pace: a faster device or less local work there would help most."
    return "A link set the pace: a faster one, or fewer bytes over it, would help most."


def _most_bytes(run: RunFiles) -> list[str]:
    pairs: Counter[tuple[int, int]] = Counter()
    for (sender, receiver, _), counts in run.traffic.items():
        pairs[sender, receiver] += int(counts[2])
    if not pairs:
        return []
    (sender, receiver), most = max(pairs.items(), key=lambda item: (item[1], item[0]))
    part = share(most, sum(pairs.values()))
    return [
        f"Most bytes between two nodes: {run.names[sender]} to {run.names[receiver]},"
        f" {scaled(most, 'B')} encoded, {part} of all traffic over {len(pairs):,} pairs."
    ]


def _slowest_device(run: RunFiles) -> list[str]:
    """How far apart the devices' usual work items are."""
    groups = item_seconds(run, "compute")
    typical = {device: item for (role, device), item in groups.items() if item > 0 and role != "server"}
    if len(typical) < 2:
        return []
    slow, fast = max(typical, key=lambda d: typical[d]), min(typical, key=lambda d: typical[d])
    return [
        f"One work item took {seconds(typical[slow])} on a {slow} and {seconds(typical[fast])} on a {fast}"
        f" (medians), a factor of {number(typical[slow] / typical[fast])}."
    ]


def item_seconds(run: RunFiles, kind: str) -> dict[tuple[str, str], float]:
    """Median seconds of one span of a kind, by (role, device)."""
    found: dict[tuple[str, str], list[Floats]] = {}
    for node in run.nodes:
        if node.id in run.spans.by_node:
            spans = run.spans.by_node[node.id].of_kind(kind)
            found.setdefault((node.role, node.device), []).append(spans.end_s - spans.start_s)
    joined = {group: np.concatenate(parts) for group, parts in found.items()}
    return {group: float(np.median(items)) for group, items in joined.items() if len(items)}


def _use_bars(run: RunFiles, used: Mapping[int, Use]) -> Markup:
    by_use = sorted(used, key=lambda i: (-used[i].computing_s, -used[i].only_sending_s, i))
    rows, total = thinned(by_use, MOST_ROWS), run.time_s
    chart = row_chart(
        "How each node used its time", [run.names[i] for i in rows], (0.0, 100.0),
        x_title="share of the run (%)",
    )  # fmt: skip
    for row, node in enumerate(rows):
        u, y = used[node], (-row - 0.88, -row - 0.12)
        a, b = 100 * u.computing_s / total, 100 * (u.computing_s + u.only_sending_s) / total
        rest = total - u.computing_s - u.only_sending_s
        chart.box(
            (b, 100.0), y, "#8883", f"{run.names[node]}: neither for {seconds(rest)}, {number(100 - b)} %"
        )
        chart.box(
            (0.0, a), y, COMPUTE, f"{run.names[node]}: computing for {seconds(u.computing_s)}, {number(a)} %"
        )
        chart.box(
            (a, b),
            y,
            SEND,
            f"{run.names[node]}: only sending for {seconds(u.only_sending_s)}, {number(b - a)} %",
        )
    keys = legend([(COMPUTE, "computing"), (SEND, "sending, not computing"), ("#8885", "neither")])
    few = "" if len(rows) == len(used) else f"{len(rows)} of {len(used)} nodes, evenly spaced in this order."
    return figure(join((keys, chart.svg())), "How each node used its time", few)


@dataclass(frozen=True)
class LastReport:
    """Who completed a round: the node whose transfer ended last, and its seconds in that round."""

    node: int
    round_s: float
    computing_s: float
    sending_s: float


def last_reports(run: RunFiles) -> list[LastReport]:
    """The last reporter of each round that a server recorded, of equal ones the last in spans.csv.

    Empty for methods without a server that records `round`.
    """
    servers = {node.id for node in run.nodes if node.role == "server"}
    if len(servers) != 1 or "round" not in run.metrics:
        return []
    series = run.metrics["round"]
    ends = np.unique(series.time_s[np.isin(series.node, list(servers))])
    if not len(ends):
        return []
    sends = run.spans.where(~np.isin(run.spans.node, list(servers))).of_kind("send")
    sends = sends.where(np.argsort(sends.end_s, kind="stable"))
    found = []
    for start, end in zip([0.0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        last = int(np.searchsorted(sends.end_s, end, side="right")) - 1
        if last >= 0 and sends.end_s[last] > start:
            node = int(sends.node[last])
            work = run.spans.by_node[node].of_kind("compute")
            inside = np.minimum(work.end_s, end) - np.maximum(work.start_s, start)
            sending = float(sends.end_s[last] - max(sends.start_s[last], start))
            found.append(LastReport(node, end - start, float(inside.clip(min=0).sum()), sending))
    return found


def _round_table(run: RunFiles, reports: Sequence[LastReport]) -> Markup:
    if not reports:
        return Markup("")
    nodes = Counter(r.node for r in reports)
    rows = [_round_row(run, [r for r in reports if r.node == node]) for node, _ in nodes.most_common(8)]
    headers = ("last to report", "rounds", "mean round", "of it computing", "uploading", "the rest")
    note = (
        f"Of {len(reports)} rounds, by the node whose report arrived last; the rest is the model's way to it,"
        " waiting, and the server's own work."
    )
    return join(
        (
            Markup('<div class="panel"><h3>Who completed the rounds</h3>'),
            table(headers, rows),
            element("p", note, "note"),
            Markup("</div>"),
        )
    )


def _round_row(run: RunFiles, mine: Sequence[LastReport]) -> tuple[object, ...]:
    n = len(mine)
    whole = sum(r.round_s for r in mine) / n
    computing, sending = sum(r.computing_s for r in mine) / n, sum(r.sending_s for r in mine) / n
    rest = max(0.0, whole - computing - sending)
    return run.names[mine[0].node], n, *(seconds(s) for s in (whole, computing, sending, rest))
