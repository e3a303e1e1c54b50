"""`kvctl pool status` for people: one block of lines per device, readable without colour."""

from collections.abc import Iterable, Sequence

from kvd_client.cli.screen import Record, Screen, labelled, wrap
from kvd_client.cli.sizes import show_bytes, show_percent, show_seconds

PAGE_WIDTH = 100  # columns; wider lines are harder to read
INDENT = "  "
LEGEND_GAP = "   "
LABEL_WIDTH = 10  # columns of a pool's left-hand words
HEALTH_STYLE = {"serving": "green", "starting": "yellow", "draining": "yellow"}

# What a block can be, in the bar's order: field, word, mark, ASCII mark, colour.
BLOCK_STATES = (
    ("blocks_leased", "leased", "█", "#", "blue"),
    ("blocks_sealed", "sealed", "▓", "=", "cyan"),
    ("blocks_cached", "cached", "▒", "-", "green"),
    ("blocks_quarantined", "quarantined", "!", "!", "red"),
    ("blocks_free", "free", "·", ".", "dim"),
)


def page(devices: Iterable[Record], pools: Sequence[Record], screen: Screen) -> list[str]:
    """The whole page. `devices` and `pools` are the records of `-o json`."""
    lines = list[str]()
    for device in devices:
        lines += [*_device_lines(device, screen), ""]
        own = [pool for pool in pools if pool["device"] == device["device"]]
        for pool in own:
            lines += [*_pool_lines(pool, screen), ""]
        if not own and device["memory_bytes"] is not None:
            hint = "no pool yet; a worker creates one, or: kvctl pool create NAME ..."
            lines += [*_small(hint, screen), ""]
    return lines[:-1]


def _width(screen: Screen) -> int:
    return min(screen.width or PAGE_WIDTH, PAGE_WIDTH)


def _small(text: str, screen: Screen, *styles: str) -> list[str]:
    """Indented, as many lines as it takes."""
    return [screen.paint(line, *styles) for line in wrap(text, _width(screen), INDENT)]


def _device_lines(device: Record, screen: Screen) -> list[str]:
    health = screen.paint(device["health"], "bold", HEALTH_STYLE.get(device["health"], "red"))
    # Never broken into lines: it may end in a command to copy.
    detail = [INDENT + device["health_detail"]] if device["health_detail"] else []
    head = f"{screen.paint(device['device'], 'bold')}  {health}"
    if device["memory_bytes"] is None:
        return [head, *detail]
    used, total = device["memory_used_bytes"], device["memory_bytes"]
    facts = (
        f"{show_bytes(used)} of {show_bytes(total)} in pools ({show_percent(used, total)}), "
        f"{device['sessions']} session{'s' * (device['sessions'] != 1)}, "
        f"up {show_seconds(device['uptime_seconds'] or 0)}"
    )
    fits = len(f"{device['device']}  {device['health']}  {facts}") <= _width(screen)
    first = [f"{head}  {facts}"] if fits else [head, *_small(facts, screen)]
    identity = f"{device['kind']}, pid {device['pid']}, kvd {device['version']}, epoch {device['epoch']}"
    small_print = [
        line for text in (*_tiers(device), identity, *_probes(device)) for line in _small(text, screen, "dim")
    ]
    return [*first, *detail, *_recovery_lines(device, screen), *small_print]


def _tiers(device: Record) -> list[str]:
    """Where leases and prefixes go that leave the pools, if there is such a place."""
    words = []
    for tier in ("host", "disk"):
        used, total = device[f"{tier}_tier_used_bytes"], device[f"{tier}_tier_bytes"]
        if total:
            words.append(f"{show_bytes(used)} of {show_bytes(total)} in the {tier} tier")
    return [", ".join(words)] if words else []


def _recovery_lines(device: Record, screen: Screen) -> list[str]:
    """What became of the daemon before this one, if there was one."""
    losses = [
        _plural(device[f"recovery_lost_{what}s"], what)
        for what in ("lease", "pool")
        if device[f"recovery_lost_{what}s"]
    ]
    match device["recovery"]:
        case "quarantined":
            return [INDENT + screen.paint(f"began empty: {device['recovery_detail']}", "red")]
        case "volatile":
            return [f"{INDENT}runs without the supervisor kvd: nothing outlives this daemon"]
        case "recovered":
            back = f"{_plural(device['recovery_sessions'], 'session')} and " + _plural(
                device["recovery_leases"], "lease"
            )
            lost = screen.paint(f", {' and '.join(losses)} lost", "red") if losses else ""
            return [f"{INDENT}went on after another daemon with {back}{lost}"]
    return []


def _probes(device: Record) -> list[str]:
    """What health follows from, as far as there is anything."""
    kernel_pid, restarts = device["kernel_pid"], device["kernel_restarts"]
    heard_s, leased_s = device["kernel_probe_age_seconds"], device["lease_probe_age_seconds"]
    words = []
    if kernel_pid is not None:
        before = f" ({restarts} before it)" if restarts else ""
        heard = "" if heard_s is None else f", heard {heard_s:.1f} s ago"
        words.append(f"kernel worker {kernel_pid}{before}{heard}")
    if leased_s is not None:
        words.append(f"lease probed {leased_s:.1f} s ago")
    return ["; ".join(words)] if words else []


def _pool_lines(pool: Record, screen: Screen) -> list[str]:
    leasable = pool["blocks_total"] - pool["blocks_null"]
    return [
        *_title(pool, screen),
        f"{INDENT}{_bar(pool, screen)}",
        *_legend(pool, leasable, screen),
        *(
            line
            for label, text in _facts(pool)
            for line in labelled(label.ljust(LABEL_WIDTH), text, screen, _width(screen), INDENT)
        ),
    ]


def _title(pool: Record, screen: Screen) -> list[str]:
    name, geometry = screen.paint(pool["name"], "bold"), _geometry(pool)
    if len(INDENT) + len(pool["name"]) + 2 + len(geometry) <= _width(screen):
        return [f"{INDENT}{name}  {geometry}"]
    return [INDENT + name, *wrap(geometry, _width(screen), INDENT)]


def _geometry(pool: Record) -> str:
    keys, values = pool["head_dim_k"], pool["head_dim_v"]
    dims = f"{keys}" if keys == values else f"{keys}/{values}"
    return (
        f"{pool['layers']} layers x {pool['kv_heads']} KV heads x {dims} {pool['dtype']}, "
        f"{pool['block_size']}-token blocks of {show_bytes(pool['block_bytes'])}"
    )


def _bar(pool: Record, screen: Screen) -> str:
    width = max(_width(screen) - len(INDENT) - 2, len(BLOCK_STATES))
    counts = [pool[field] for field, *_ in BLOCK_STATES]
    parts = []
    for (_, _, mark, ascii_mark, colour), cells in zip(BLOCK_STATES, share(counts, width), strict=True):
        parts.append(screen.paint((mark if screen.unicode else ascii_mark) * cells, colour) if cells else "")
    return f"[{''.join(parts)}]"


def share(counts: Sequence[int], width: int) -> list[int]:
    """`width` cells among `counts` by largest remainder; whatever is not zero gets a cell at least."""
    total = sum(counts)
    if total == 0:
        return [0] * (len(counts) - 1) + [width]
    least = [int(count > 0) for count in counts]
    exact = [count * width / total for count in counts]
    cells = [max(low, int(value)) for low, value in zip(least, exact, strict=True)]
    while sum(cells) != width:
        step = 1 if sum(cells) < width else -1
        movable = [i for i, count in enumerate(counts) if count and cells[i] + step >= least[i]]
        cells[max(movable, key=lambda i: step * (exact[i] - cells[i]))] += step
    return cells


def _legend(pool: Record, leasable: int, screen: Screen) -> list[str]:
    """Under the bar, a column per state: mark and word, count, percentage of what can be leased. A line per
    state where the columns do not fit."""
    columns = list[tuple[str, ...]]()
    for field, word, mark, ascii_mark, colour in BLOCK_STATES:
        count, percent = f"{pool[field]:,}", show_percent(pool[field], leasable)
        width = max(len(word) + 2, len(count), len(percent))
        painted = f"{screen.paint(mark if screen.unicode else ascii_mark, colour)} {word}"
        space = " " * (width - len(word) - 2)
        columns.append((space + painted, count.rjust(width), percent.rjust(width), painted + space))
    widths = [len(count) for _, count, _, _ in columns]
    if len(INDENT) + sum(widths) + len(LEGEND_GAP) * (len(widths) - 1) <= _width(screen):
        return [INDENT + LEGEND_GAP.join(column[row] for column in columns) for row in range(3)]
    room = max(len(count.strip()) for _, count, _, _ in columns)
    return [
        f"{INDENT}{word}{' ' * (max(widths) - width)} {count.strip():>{room}} {percent.strip():>7}"
        for (_, count, percent, word), width in zip(columns, widths, strict=True)
    ]


def _facts(pool: Record) -> list[tuple[str, str]]:
    blocks = f"{pool['blocks_total'] - pool['blocks_null']:,} leasable, {show_bytes(pool['total_bytes'])}"
    if pool["blocks_reserved"]:
        blocks += f"; {pool['blocks_reserved']} of the free are kept for scratch"
    facts = [
        ("blocks", blocks),
        ("leases", f"{pool['leases']:,}, {_plural(pool['sink_blocks_locked'], 'sink block')} locked"),
        ("saved", _savings(pool)),
    ]
    if pool["match_blocks_asked"]:
        asked, found = pool["match_blocks_asked"], pool["match_blocks_found"]
        facts.append(
            ("found", f"{show_percent(found, asked)} of {_plural(asked, 'block')} that were asked for")
        )
    if pool["leases_shelved"]:
        shelved = _plural(pool["leases_shelved"], "lease")
        facts.append(("shelved", f"{shelved} published and not adopted yet: kvctl lease list"))
    if pool["blocks_pinned"]:
        facts.append(("pinned", f"{_plural(pool['blocks_pinned'], 'block')}: kvctl pin list"))
    if pool["waiting_calls"]:
        calls, wanted = _plural(pool["waiting_calls"], "call"), _plural(pool["wanted_blocks"], "block")
        facts.append(("waiting", f"{calls} for {wanted}: kvctl tenant list"))
    if pool["parked_bytes"] or pool["spilled_bytes"]:
        facts.append(("parked", _parked(pool)))
    if pool["blocks_quarantined"]:
        waiting = _plural(pool["blocks_quarantined"], "block")
        facts.append(("quarantine", f"{waiting} until their writers' processes end: kvctl session list"))
    if pool["populated_bytes"] < pool["total_bytes"]:
        done = show_percent(pool["populated_bytes"], pool["total_bytes"])
        facts.append(("populated", f"{done}: {show_bytes(pool['populated_bytes'])} backed by memory so far"))
    return facts


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _parked(pool: Record) -> str:
    parts = [f"{show_bytes(pool['parked_bytes'])} in host memory"]
    if pool["spilled_bytes"]:
        parts.append(f"{show_bytes(pool['spilled_bytes'])} on disk")
    parts.append(f"{_plural(pool['leases_suspended'], 'lease')} suspended")
    if pool["blocks_copied"]:
        on_disk = f" ({pool['blocks_copied_on_disk']:,} on disk)" if pool["blocks_copied_on_disk"] else ""
        parts.append(f"{_plural(pool['blocks_copied'], 'cached block')} copied{on_disk}")
    return ", ".join(parts)


def _savings(pool: Record) -> str:
    if not pool["compressions"]:
        return "nothing compressed yet"
    return (
        f"{show_bytes(pool['saved_bytes'])} in {_plural(pool['compressions'], 'compression')} "
        f"({pool['blocks_saved']:,} blocks, {pool['tokens_dropped']:,} tokens dropped)"
    )
