"""Tables and a plot of what was measured so far.

python -m quality.report      writes benchmarks/results/quality.{json,md,png}
"""

import json
import os
import platform
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .jobs import AFTER, AGNOSTIC_KEEPS, AGNOSTIC_METHODS, INSIDE, PROSE
from .methods import DENSE, KEEPS, METHODS
from .run import ROOT, finished, results_file
from .scoring import Share

RESULTS = ROOT / "benchmarks" / "results"
COMMAND = "make bench-quality"
SHOWN_DIGITS = 5  # of shares and divergences in the rows
LEAST_SAMPLES = 20  # per column; below that an interval is wider than any difference here
Row = dict[str, Any]


def shares(rows: Iterable[Row]) -> dict[tuple[str, float], Share]:
    """(method, keep) -> exact matches."""
    hits: dict[tuple[str, float], list[bool]] = defaultdict(list)
    for row in rows:
        hits[row["method"], row["keep"]].append(row["hit"])
    return {how: Share(sum(each), len(each)) for how, each in hits.items()}


def grid_table(rows: list[Row], keep: float, mode: str) -> list[str]:
    """One line a method, one column a task, its lengths and depths pooled; nothing before n is telling."""
    chosen = [row for row in rows if row["suite"] == "grid" and row["mode"] == mode]
    tasks = sorted({row["task"] for row in chosen})
    columns = [shares(row for row in chosen if row["task"] == task) for task in tasks]
    counts = [column[DENSE, 1.0].trials for column in columns]
    if not counts or min(counts) < LEAST_SAMPLES:
        return []
    lines = [f"Exact match, {mode}, {keep:.0%} kept, 1k to 4k tokens pooled (95 % Wilson interval):", ""]
    lines += ["| method | " + " | ".join(tasks) + " |", "|---|" + "---|" * len(tasks)]
    for method in (DENSE, *METHODS):
        found = [column.get((method, 1.0 if method == DENSE else keep)) for column in columns]
        if not any(found):
            continue
        lines.append(f"| {method} | " + " | ".join(_cell(share) for share in found) + " |")
    return [*lines, "| n | " + " | ".join(map(str, counts)) + " |", ""]


def _cell(share: Share | None) -> str:
    if share is None:
        return "-"
    low, high = share.interval
    return f"{share.value:.2f} [{low:.2f}, {high:.2f}]"


def span_lines(rows: list[Row]) -> list[str]:
    """What Span lost of the samples that dense gets right."""
    by_key: dict[str, dict[str, bool]] = defaultdict(dict)
    tasks: dict[str, str] = {}
    for row in rows:
        if row["suite"] == "span":
            by_key[row["key"]][row["method"]] = row["hit"]
            tasks[row["key"]] = row["task"]
    if not by_key:
        return []
    right_keys = [key for key, hits in by_key.items() if hits[DENSE]]
    right = [by_key[key] for key in right_keys]
    lines = [
        f"Span at 0.16 on {len(by_key)} samples of 1k tokens, of which dense gets {len(right)} right:",
        "",
    ]
    names = sorted(set(tasks.values()))
    head = [
        "method",
        "exact matches in all",
        "gained",
        "lost of dense's",
        *(f"lost: {name}" for name in names),
    ]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for method in (name for name in METHODS if name in right[0]):
        lost = [key for key in right_keys if not by_key[key][method]]
        gained = sum(hits[method] for hits in by_key.values() if not hits[DENSE])
        whole = Share(sum(hits[method] for hits in by_key.values()), len(by_key))
        counts = [
            f"{sum(tasks[key] == name for key in lost)} of {sum(tasks[key] == name for key in right_keys)}"
            for name in names
        ]
        cells = [method, str(whole), str(gained), f"{len(lost)} of {len(right)}", *counts]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def agnostic_lines(rows: list[Row]) -> list[str]:
    """Exact matches where the question came after the compression, by task and share kept."""
    chosen = [row for row in rows if row["suite"] == "agnostic"]
    tasks = sorted({row["task"] for row in chosen})
    places = [(task, keep) for keep in AGNOSTIC_KEEPS for task in tasks]
    columns = {task: shares(row for row in chosen if row["task"] == task) for task in tasks}
    if not chosen:
        return []
    lines = ["Exact match at 1k tokens, the question unknown when the document was compressed:", ""]
    lines += ["| method | " + " | ".join(f"{task}, {keep:.0%} kept" for task, keep in places) + " |"]
    lines += ["|---|" + "---|" * len(places)]
    for method in (DENSE, *AGNOSTIC_METHODS):
        cells = [columns[task].get((method, 1.0 if method == DENSE else keep)) for task, keep in places]
        lines.append(f"| {method} | " + " | ".join(map(_cell, cells)) + " |")
    counts = [str(columns[task][DENSE, 1.0].trials) for task, _ in places]
    return [*lines, "| n | " + " | ".join(counts) + " |", ""]


def prose_lines(rows: list[Row]) -> list[str]:
    """Mean KL to dense on plain continuation."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["task"] == PROSE and row["method"] != DENSE:
            found[row["method"]].append(row["kl"])
    if not found:
        return []
    count = len(next(iter(found.values())))
    lines = [f"KL to dense (nats per token) over 64 tokens of prose after 2k, 16 % kept, n = {count}:", ""]
    lines += ["| method | KL |", "|---|---|"]
    return [*lines, *(f"| {name} | {sum(each) / len(each):.3f} |" for name, each in found.items()), ""]


def streaming_lines(path: Path) -> list[str]:
    """Perplexity of streaming leases."""
    if not path.exists():
        return []
    measured = json.loads(path.read_text())
    rows = measured["rows"]
    lines = [f"Perplexity of {measured['tokens']} tokens of prose, window {measured['window']}:", ""]
    lines += ["| mode | perplexity | x dense | blocks |", "|---|---|---|---|"]
    for row in rows:
        ratio = row["perplexity"] / rows[0]["perplexity"]
        lines.append(f"| {row['mode']} | {row['perplexity']:.2f} | {ratio:.2f} | {row['blocks']} |")
    return [*lines, ""]


def plot(rows: list[Row], path: Path) -> None:
    """Exact match over the kept share, one line a method, all tasks and lengths pooled."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    chosen = shares(row for row in rows if row["suite"] == "grid" and row["mode"] == INSIDE)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, method in enumerate(METHODS):
        found = [(keep, chosen[method, keep]) for keep in KEEPS if (method, keep) in chosen]
        if not found:
            continue
        style = "-" if method.startswith("Span") else "--"
        axes.plot(
            [keep for keep, _ in found],
            [share.value for _, share in found],
            style,
            color=f"C{number}",
            marker="o",
            label=method,
        )
    if (DENSE, 1.0) in chosen:
        axes.axhline(chosen[DENSE, 1.0].value, color="black", linewidth=1, label="dense")
    axes.set(xlabel="share of tokens kept", ylabel="exact match", ylim=(-0.02, 1.02), xticks=KEEPS)
    figure.suptitle("Retrieval with the question in the window, SmolLM2-135M, all tasks and lengths")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)


def _compact(rows: list[Row]) -> str:
    """Every row as a list, its fields' names once: thousands of rows in a file that a repository can hold."""
    columns = sorted({name for row in rows for name in row})
    lines = [json.dumps([_short(row.get(name)) for name in columns], separators=(",", ":")) for row in rows]
    return f'{{"columns": {json.dumps(columns)}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"


def _short(value: Any) -> Any:
    return round(value, SHOWN_DIGITS) if isinstance(value, float) else value


def main() -> None:
    """Write the tables, the plot and the rows behind them."""
    rows = [row for entry in finished(results_file()) for row in entry["results"]]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, float32, 1 thread a worker"
    head = f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine}, with"
    lines = ["# Compression quality, SmolLM2-135M-Instruct", "", f"{head} `{COMMAND}`.", ""]
    lines += span_lines(rows)
    for mode in (INSIDE, AFTER):
        for keep in KEEPS:
            lines += grid_table(rows, keep, mode)
    lines += agnostic_lines(rows)
    lines += prose_lines(rows) + streaming_lines(results_file().with_name("streaming.json"))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quality.md").write_text("\n".join(lines))
    (RESULTS / "quality.json").write_text(_compact(rows))
    if grid_table(rows, KEEPS[0], INSIDE):
        plot(rows, RESULTS / "quality.png")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
