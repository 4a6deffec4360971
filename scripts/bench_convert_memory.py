"""Peak memory of a conversion: a synthetic sharded checkpoint, one child process.

The bound is 1.15 times the largest parameter family plus 1 GiB. Prints a table and,
with --json, the same as JSON. Needs about three times the checkpoint's size on disk.
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

import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 8192,
    "vocab_size": 65536,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
SHARD_BYTES = 512 * 2**20
PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy")


def shapes(layers):
    h, v = CONFIG["hidden_size"], CONFIG["vocab_size"]
    inner = CONFIG["intermediate_size"]
    kv = h // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    yield "model.embed_tokens.weight", (v, h)
    for i in range(layers):
        base = f"model.layers.{i}"
        yield f"{base}.input_layernorm.weight", (h,)
        yield f"{base}.self_attn.q_proj.weight", (h, h)
        yield f"{base}.self_attn.k_proj.weight", (kv, h)
        yield f"{base}.self_attn.v_proj.weight", (kv, h)
        yield f"{base}.self_attn.o_proj.weight", (h, h)
        yield f"{base}.post_attention_layernorm.weight", (h,)
        yield f"{base}.mlp.gate_proj.weight", (inner, h)
        yield f"{base}.mlp.up_proj.weight", (inner, h)
        yield f"{base}.mlp.down_proj.weight", (h, inner)
    yield "model.norm.weight", (h,)
    yield "lm_head.weight", (v, h)


def write_checkpoint(folder, gigabytes):
    """Layers are added until the size is reached; tensors are written one by one."""
    layers = 1
    while 2 * sum(int(np.prod(s)) for _, s in shapes(layers)) < gigabytes * 1e9:
        layers += 1
    shards, used = [[]], 0
    for name, shape in shapes(layers):
        nbytes = 2 * int(np.prod(shape))
        if used and used + nbytes > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append((name, shape, nbytes))
        used += nbytes
    rng = np.random.default_rng(0)
    weight_map = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        weight_map |= {name: file for name, _, _ in shard}
        write_shard(folder / file, shard, rng)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {**CONFIG, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return layers


def write_shard(path, shard, rng):
    header, end = {}, 0
    for name, shape, nbytes in shard:
        span = [end, end + nbytes]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": span}
        end += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for _, _, nbytes in shard:
            left = nbytes
            while left:
                # Exponents stay small, so that every value is finite.
                piece = rng.integers(0, 2**14, min(left, 2**24) // 2, np.uint16)
                handle.write(piece.tobytes())
                left -= piece.nbytes


def child(src, dst, dtype, verify):
    """Converts and reports; the peak counts this process alone, imports included."""
    from dspark_jax.checkpoint.convert import convert
    from dspark_jax.checkpoint.source import open_source
    from dspark_jax.checkpoint.store import leaf_bytes

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before, start = peak(), time.perf_counter()
    made = convert(src, dst, dtype=dtype, verify=verify)
    seconds = time.perf_counter() - start
    source = open_source(src, dtype=dtype)
    family = max(leaf_bytes(leaf) for leaf in source.shapes.values())
    report = {
        "bytes": made.nbytes,
        "largest_family": family,
        "peak_before": before,
        "peak": peak(),
        "bound": int(1.15 * family + 2**30),
        "seconds": seconds,
        "verified": made.verified,
    }
    print(json.dumps(report))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; default: stored")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--work", type=Path, help="where to put the files")
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--child", nargs=2, metavar=("SRC", "DST"), help="internal")
    args = parser.parse_args()
    if args.child:
        src, dst = args.child
        child(src, dst, args.dtype, not args.no_verify)
        return
    work = Path(tempfile.mkdtemp(prefix="bench-convert-", dir=args.work))
    try:
        src = work / "published"
        src.mkdir()
        layers = write_checkpoint(src, args.gigabytes)
        command = [sys.executable, __file__, "--child", str(src), str(work / "out")]
        command += ["--dtype", args.dtype] if args.dtype else []
        command += ["--no-verify"] if args.no_verify else []
        out = subprocess.run(command, check=True, capture_output=True, text=True)
        report = json.loads(out.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(work)
    report["layers"], report["dtype"] = layers, args.dtype or "bfloat16 (stored)"
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
