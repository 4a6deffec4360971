"""Peak memory of a conversion: a synthetic sharded checkpoint, one child process.

The bound is 1.15 times the largest parameter family plus 1 GiB. Prints a table and,
with --json, the same as JSON. Needs about three times the checkpoint's size on disk.

    python scripts/bench_convert_memory.py --gigabytes 4
    python scripts/bench_convert_memory.py --family deepseek-v4 --layers 4 --experts 16
    python scripts/bench_convert_memory.py --family deepseek-v4 --open-only

The second one has DeepSeek-V4-Flash's dimensions, short floats and draft with fewer
layers and experts. The third opens a checkpoint of the published size, all of its
tensors but no data, which takes no space on disk.
"""

import argparse
import importlib.metadata
import json
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import synthetic_checkpoint as synthetic

from dspark_jax.checkpoint.convert import convert
from dspark_jax.checkpoint.load import has_own_draft
from dspark_jax.checkpoint.names import declared_shapes
from dspark_jax.checkpoint.source import open_source
from dspark_jax.checkpoint.store import leaf_bytes

PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy")


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def opened(src, dtype):
    """The models in a folder, as `convert` opens them."""
    parts = [open_source(src, dtype=dtype)]
    if has_own_draft(Path(src)):
        parts.append(open_source(src, dtype=dtype, part="draft"))
    return parts


def largest(shapes):
    return max(leaf_bytes(leaf) for part in shapes for leaf in part.values())


def bound(family):
    return int(1.15 * family + 2**30)


def child(src, dst, dtype, verify, open_only):
    """Converts and reports; the peak counts this process alone, imports included."""
    before, start = peak(), time.perf_counter()
    report = {}
    if not open_only:
        made = convert(src, dst, dtype=dtype, verify=verify)
        report = {"bytes": made.nbytes, "verified": made.verified}
        report["seconds"] = time.perf_counter() - start
    parts = opened(src, dtype)
    if open_only:
        report["seconds"] = time.perf_counter() - start
        report["bytes"] = sum(info.nbytes for info in parts[0].tensors.info.values())
    family = largest(part.shapes for part in parts)
    report |= {
        "tensors": len(parts[0].tensors.info),
        "largest_family": family,
        "peak_before": before,
        "peak": peak(),
        "bound": bound(family),
    }
    print(json.dumps(report))


def write(src, args):
    """Writes the checkpoint; returns what the report says about it."""
    if args.family == "dense":
        config, tensors = synthetic.dense(args.gigabytes)
        synthetic.write(src, config, tensors, args.open_only)
        return {"layers": config["num_hidden_layers"]}
    data = synthetic.v4_settings(args.layers, args.stages, args.experts)
    tensors = synthetic.v4(data, args.fused)
    synthetic.write(src, data, tensors, args.open_only)
    whole = synthetic.v4_settings()
    short = args.dtype is None and not args.fused
    parts = synthetic.v4_parts(
        whole, "fp8_fp4" if short else "float", args.dtype or "bfloat16"
    )
    family = largest(declared_shapes(part) for part in parts)
    return {
        "layers": data["num_hidden_layers"],
        "stages": args.stages,
        "experts": data["n_routed_experts"],
        "published_family": family,
        "published_bound": bound(family),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=("dense", "deepseek-v4"), default="dense")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="dense: its size")
    parser.add_argument("--layers", type=int, help="DeepSeek-V4; default: published")
    parser.add_argument("--experts", type=int, help="DeepSeek-V4; default: published")
    parser.add_argument("--stages", type=int, default=3, help="of the draft")
    parser.add_argument("--fused", action="store_true", help="as transformers stores")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; default: stored")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--open-only", action="store_true", help="headers, no data")
    parser.add_argument("--work", type=Path, help="where to put the files")
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--child", nargs=2, metavar=("SRC", "DST"), help="internal")
    args = parser.parse_args()
    if args.child:
        src, dst = args.child
        child(src, dst, args.dtype, not args.no_verify, args.open_only)
        return
    work = Path(tempfile.mkdtemp(prefix="bench-convert-", dir=args.work))
    try:
        src = work / "published"
        src.mkdir()
        about = write(src, args)
        command = [sys.executable, __file__, "--child", str(src), str(work / "out")]
        command += ["--dtype", args.dtype] if args.dtype else []
        command += ["--no-verify"] if args.no_verify else []
        command += ["--open-only"] if args.open_only else []
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        report = {"family": args.family} | json.loads(out.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(work)
    report |= about | {"dtype": args.dtype or "stored"}
    report["within_bound"] = report["peak"] <= report["bound"]
    report["versions"] = {"python": platform.python_version()}
    report["versions"] |= {name: importlib.metadata.version(name) for name in PACKAGES}
    for name, value in report.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        shown = f"{value / 2**20:,.0f} MiB" if number and value > 2**20 else value
        print(f"{name:16} {shown}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(0 if report["within_bound"] else 1)


if __name__ == "__main__":
    main()
