#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/transformers_table.py: the lines that bench/transformers_models.py prints as tables, and whether "moe" is the fastest at every point
# with logits no further from a float32 eager run than those of grouped_mm.
"""python3 bench/transformers_table.py FILE...
Each file has the JSON lines of runs of bench/transformers_models.py; other lines are ignored."""
import json
import statistics
import sys

OURS, YARDSTICK = "moe", "grouped_mm"


def read(lines):
    """The records of a run, in order."""
    records = []
    for line in lines:
        if line.startswith("{"):
            records.append(json.loads(line))
    return records


def by_model(records):
    models = {}
    for record in records:
        models.setdefault(record["model"], []).append(record)
    return models


def cells(records):
    """{point: {implementation: (milliseconds, tokens a second) or the reason why there are none}}: the median of the turns' medians."""
    times, found = {}, {}
    for record in records:
        if "point" not in record:
            continue
        row = found.setdefault(record["point"], {})
        if "failed" in record:
            row[record["implementation"]] = record["failed"]
            continue
        times.setdefault((record["point"], record["implementation"]), []).append((record["ms"], record["tokens_per_s"]))
        turns = times[record["point"], record["implementation"]]
        row[record["implementation"]] = statistics.median(t[0] for t in turns), statistics.median(t[1] for t in turns)
    return found


def implementations(records):
    names = []
    for record in records:
        name = record.get("implementation", record.get("check"))
        if name is not None and name not in names:
            names.append(name)
    return names


def table(records):
    """One table in Markdown: milliseconds, and tokens a second in brackets."""
    names = implementations(records)
    lines = ["| call | " + " | ".join(f"`{name}`" for name in names) + " |", "|---|" + "---:|" * len(names)]
    reasons = []
    for point, row in cells(records).items():
        shown = []
        for name in names:
            cell = row.get(name, "-")
            if isinstance(cell, tuple):
                cell = f"{cell[0]:.3f} ({cell[1]:.0f})"
            elif cell != "-":
                if cell not in reasons:
                    reasons.append(cell)
                cell = f"[{reasons.index(cell) + 1}]"
            shown.append(cell)
        lines.append(f"| {point} | " + " | ".join(shown) + " |")
    return "\n".join(lines + [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)])


def attentions(records):
    """A line for each prefill whose attention is not the model's own."""
    used = {record["point"]: record["attention"] for record in records if record.get("attention", "eager") != "eager" and "point" in record}
    why = {f"prefill {record['prefill']}": f"; {record['instead_of']}: {record['why']}" for record in records if "instead_of" in record}
    return [f"{point}: attention by {way} under every implementation{why.get(point, '')}" for point, way in used.items()]


def speeds(records):
    """Whether "moe" is the fastest beside each other implementation: sentences, each with whether it holds."""
    found, rows = [], cells(records)
    for other in (name for name in implementations(records) if name != OURS):
        slower, compared = [], 0
        for point, row in rows.items():
            ours, theirs = row.get(OURS), row.get(other)
            if not isinstance(theirs, tuple):
                continue  # it does not run there
            compared += 1
            if not isinstance(ours, tuple):
                slower.append(f"{point}: {OURS} did not run")
            elif not ours[0] < theirs[0]:
                slower.append(f"{point}: {ours[0]:.3f} and {theirs[0]:.3f} ms")
        if compared == 0:
            found.append((False, f"{OURS} beside {other}: no point has both"))
        elif slower:
            found.append((False, f"{OURS} is not faster than {other} at {len(slower)} of {compared} points: " + "; ".join(slower)))
        else:
            found.append((True, f"{OURS} is faster than {other} at all {compared} points where it runs"))
    return found


def verdicts(records):
    """Sentences, each with whether it holds: (True or False, text)."""
    found = speeds(records)
    distance = {record["check"]: record["distance"] for record in records if "check" in record}
    if OURS in distance and YARDSTICK in distance:
        near = distance[OURS] <= distance[YARDSTICK]
        found.append((near, f"logits from a float32 eager run: {OURS} {distance[OURS]:.4g}, {YARDSTICK} {distance[YARDSTICK]:.4g}"))
    else:
        found.append((False, f"logits: not checked for both {OURS} and {YARDSTICK}"))
    fallbacks = [reason for record in records for reason in record.get("fallbacks", ()) if reason != "None"]
    if fallbacks:
        found.append((False, f"{OURS} fell back: " + "; ".join(fallbacks)))
    return found


def report(records):
    """Everything as text, and whether all verdicts hold."""
    parts, good = [], True
    for model, of_model in by_model(records).items():
        layers = {record["layers"] for record in of_model if "layers" in record}
        parts += [f"### {model}, {', '.join(map(str, sorted(layers)))} layers: milliseconds (tokens a second)", "", table(of_model), ""]
        parts += [line + "\n" for line in attentions(of_model)]
        for holds, text in verdicts(of_model):
            parts.append(f"* {'yes' if holds else 'NO'}: {text}")
            good = good and holds
        parts.append("")
    return "\n".join(parts), good


def main():
    records = []
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            records += read(file)
    if not records:
        sys.exit(__doc__)
    text, good = report(records)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
