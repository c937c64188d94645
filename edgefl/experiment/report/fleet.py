"""The fleet and what data it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgefl.devices.catalog import catalog
from edgefl.experiment.report.curves import thinned
from edgefl.experiment.report.html import Markup, element, figure, join, legend, paragraph, table
from edgefl.experiment.report.intervals import Use
from edgefl.experiment.report.links import mbit_per_s
from edgefl.experiment.report.read import NodeRow, RunFiles
from edgefl.experiment.report.slow import item_seconds
from edgefl.experiment.report.svg import colour, row_chart
from edgefl.experiment.report.units import NONE, number, scaled, seconds, share
from edgefl.network.link import Access

MOST_ROWS = 40


def fleet(run: RunFiles, used: Mapping[int, Use], access: Mapping[int, Access]) -> Markup:
    """One row per role and device, and every node folded below."""
    groups: dict[tuple[str, str], list[NodeRow]] = {}
    for node in run.nodes:
        groups.setdefault((node.role, node.device), []).append(node)
    if not groups:
        return Markup("")
    work, sends = item_seconds(run, "compute"), item_seconds(run, "send")
    rows = [
        (
            _device(device), role, len(group), _link(group, access),
            number(_mean([n.num_examples for n in group])),
            seconds(work.get((role, device))), seconds(sends.get((role, device))),
            share(sum(used[n.id].computing_s for n in group), len(group) * run.time_s),
            share(sum(n.idle_s for n in group), sum(n.busy_s + n.idle_s for n in group)),
            scaled(_sum([n.sent_bytes for n in group]), "B"),
            _energy(group, Markup("<br>")),
        )
        for (role, device), group in groups.items()
    ]  # fmt: skip
    headers = (
        "device", "role", "nodes", "link down / up", "examples per node", "work item (median)",
        "transfer (median)", "computing", "idle", "sent in all (encoded)", "energy in all",
    )  # fmt: skip
    note = paragraph(
        f"{_network(run)}Computing: share of the run in which at least one work item is under way."
        " Idle: share of the processor time that is left over. Modelled energy follows from the device's"
        " power at rest and at work, and its radio; where a machine measures its energy, that is shown.",
        "note",
    )
    return join(
        (Markup('<div class="panel">'), table(headers, rows, 2), note, Markup("</div>"), _all_nodes(run))
    )


def _energy(group: Sequence[NodeRow], between: str = " ") -> object:
    """Joules of some nodes, and whether they are measured or modelled."""
    joules = _sum([n.joules for n in group])
    kinds = " and ".join(sorted({n.energy for n in group if n.joules is not None}))
    return NONE if joules is None else join((scaled(joules, "J"), between, element("small", kinds)))


def _network(run: RunFiles) -> str:
    """Topology and link model of the run, as run.json has them."""
    network = run.info.get("network")
    if not isinstance(network, dict) or not network.get("topology"):
        return ""
    return f"Topology: {network['topology']}; link model: {network.get('link_model')}. "


def _device(name: str) -> Markup:
    profile = catalog().get(name)
    if profile is None:
        return element("b", name or NONE)
    words = f"{profile.title}, {scaled(profile.compute_flops, 'FLOP/s')}"
    return join((element("b", name), Markup("<br>"), element("small", words)))


def _link(group: Sequence[NodeRow], access: Mapping[int, Access]) -> object:
    link = access.get(group[0].id)
    if link is None:
        return NONE
    rates = f"{mbit_per_s(link.down_bytes_per_s)} / {mbit_per_s(link.up_bytes_per_s)}"
    words = f"{link.name}, {seconds(link.latency_s)}" if link.name else seconds(link.latency_s)
    return join((rates, Markup("<br>"), element("small", words)))


def _all_nodes(run: RunFiles) -> Markup:
    headers = (
        "node", "examples", "busy", "idle", "sent (encoded)", "received (encoded)", "energy",
        "final metric", "final loss",
    )  # fmt: skip
    rows = [
        (
            n.name, number(n.num_examples), seconds(n.busy_s), seconds(n.idle_s), scaled(n.sent_bytes, "B"),
            scaled(n.received_bytes, "B"), _energy([n]), number(n.metric, 4), number(n.loss),
        )
        for n in run.nodes[:1000]
    ]  # fmt: skip
    shown = (
        f"All {len(rows)} nodes"
        if len(rows) == len(run.nodes)
        else f"The first {len(rows)} of {len(run.nodes)} nodes"
    )
    return join((Markup(f"<details><summary>{shown}</summary>"), table(headers, rows), Markup("</details>")))


def partition(run: RunFiles) -> Markup:
    """The labels that each node holds, as stacked bars."""
    if not run.partition:
        return Markup("")
    classes = sorted({c for held in run.partition.values() for c in held}, key=_numbers_first)
    nodes = thinned(sorted(run.partition), MOST_ROWS)
    most = max(sum(run.partition[i].values()) for i in nodes)
    chart = row_chart(
        "Examples of each class on each node", [run.names[i] for i in nodes], (0.0, most), x_title="examples"
    )
    for row, node in enumerate(nodes):
        start = 0.0
        for k, name in enumerate(classes):
            count = run.partition[node].get(name, 0.0)
            if count:
                tip = f"{run.names[node]}: {number(count)} examples of class {name}"
                chart.box((start, start + count), (-row - 0.88, -row - 0.12), colour(k, len(classes)), tip)
                start += count
    keys = legend((colour(k, len(classes)), f"class {name}") for k, name in enumerate(classes[:24]))
    few = "" if len(nodes) == len(run.partition) else (
        f" {len(nodes)} of {len(run.partition)} nodes are shown, evenly spaced by id."
    )  # fmt: skip
    return figure(join((keys, chart.svg())), "What each node holds", f"{_spread_words(run)}{few}")


def _spread_words(run: RunFiles) -> str:
    sizes = sorted(sum(held.values()) for held in run.partition.values())
    kinds = sorted(len(held) for held in run.partition.values())
    return (
        f"{number(sum(sizes))} examples on {len(sizes)} nodes: from {number(sizes[0])} to {number(sizes[-1])}"
        f" per node, of {kinds[0]} to {kinds[-1]} classes."
    )


def _numbers_first(name: str) -> tuple[bool, int, str]:
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
