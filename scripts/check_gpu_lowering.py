"""Compiles every GPU kernel for real architectures on a machine without a GPU.

XLA, LLVM and ptxas need neither a driver nor a device. What is checked: tracing,
lowering, code generation and the resources of the machine code; registers above the
ceiling and spills are failures. Then the whole of `generate_tokens`, greedy and
sampled, is compiled for one of them: loops, branches and our kernels in one program.
What is not checked: results (interpret mode compares those) and speed
(`scripts/gpu_check.py`, on a GPU).

Needs jax-cuda13-plugin and jax-cuda13-pjrt of jax's version and nvidia-cuda-nvcc:
`make gpu-lowering` installs them. Without them nothing is checked and the exit
status is 2.

    python scripts/check_gpu_lowering.py --max-registers 128 --markdown table.md
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pallas_kernels.kernel_cases import Case

# Compiled for by whole programs, which take longer than kernels.
PROGRAM_ARCH = "sm_90"
OURS = re.compile(r"\.entry\s+(\w+)_mosaic_gpu_kernel")


class Device(NamedTuple):
    """What XLA has to know of a GPU that is not there."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: int
    gigahertz: float


DEVICES = {
    "sm_80": Device(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912, 40 << 20, 80 << 30,
        2_039 * 10**9, 1.41,
    ),
    "sm_90": Device(
        "NVIDIA H200", (9, 0), 132, 232_448, 60 << 20, 140 << 30, 4_800 * 10**9, 1.98
    ),
    "sm_100": Device(
        "NVIDIA B200", (10, 0), 148, 232_448, 126 << 20, 178 << 30, 7_672 * 10**9, 1.965
    ),
}  # fmt: skip


def target_config(device: Device) -> str:
    """The text proto that stands for a device."""
    major, minor = device.capability
    return f"""
    platform_name: "CUDA"
    device_description_str: "{device.name}"
    dnn_version_info {{ major: 9 minor: 10 }}
    runtime_version {{ major: 13 }}
    gpu_device_info {{
      cuda_compute_capability {{ major: {major} minor: {minor} }}
      core_count: {device.multiprocessors}
      fpus_per_core: 128
      threads_per_warp: 32
      threads_per_block_limit: 1024
      threads_per_core_limit: 2048
      block_dim_limit_x: 2147483647
      block_dim_limit_y: 65535
      block_dim_limit_z: 65535
      registers_per_core_limit: 65536
      registers_per_block_limit: 65536
      shared_memory_per_block: 49152
      shared_memory_per_block_optin: {device.shared_bytes}
      shared_memory_per_core: {device.shared_bytes + 1024}
      l2_cache_size: {device.l2_bytes}
      device_memory_size: {device.memory_bytes}
      memory_bandwidth: {device.bandwidth}
      clock_rate_ghz: {device.gigahertz}
    }}
    """


def wheel_ptxas() -> str | None:
    """The ptxas of the nvidia-cuda-nvcc wheel.

    XLA writes PTX for the version of the wheel; a toolkit's older ptxas refuses it.
    """
    found = [p for base in sys.path for p in glob.glob(f"{base}/nvidia/*/bin/ptxas")]
    return found[0] if found else None


def resources(ptx: Path, ptxas: str) -> dict[str, Any]:
    """What ptxas says of a file that holds one kernel."""
    text = ptx.read_text(errors="replace")
    target = re.search(r"^\.target\s+(sm_\w+)", text, re.M)
    if target is None:
        raise RuntimeError(f"{ptx.name} names no target")
    out = subprocess.run(
        [ptxas, "-v", f"-arch={target[1]}", str(ptx), "-o", os.devnull],
        capture_output=True,
        text=True,
    )
    if out.returncode:
        raise RuntimeError(f"ptxas: {out.stderr[-2000:]}")

    def number(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, out.stderr)), default=0)

    loads = re.findall(r"\bld\.(?:\w+\.)*global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s", text)
    name = OURS.search(text)
    return {
        "kernel": name[1] if name else ptx.stem,
        "registers": number(r"Used (\d+) registers"),
        "spills": number(r"(\d+) bytes spill stores")
        + number(r"(\d+) bytes spill loads"),
        "widest_load": max((int(v or 1) * int(b) for v, b in loads), default=0),
    }


def launches(program: str) -> int:
    """Kernels that a compiled program starts: ours, and those XLA adds around them."""
    entry = program[program.index("ENTRY ") :]
    return len(re.findall(r" (?:fusion|custom-call|copy|convert|reduce)\(", entry))


def programs() -> list[Case]:
    """The serving program of a tiny model, greedy and sampled, the kernels in it."""
    import jax.numpy as jnp

    import dspark_jax as dspark
    from pallas_kernels.kernel_cases import Case

    model = dspark.testing.tiny_model()

    def case(name: str, temperature: float) -> Case:
        def run(params: Any, tokens: Any, lengths: Any, seeds: Any) -> Any:
            return dspark.generate_tokens(
                model.spec, params, tokens, lengths, seeds=seeds, max_new_tokens=8,
                sampling=dspark.SamplingParams(temperature=temperature),
            )  # fmt: skip

        ids, lengths = jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32)
        args = model.params, ids, lengths, jnp.zeros((2, 2), jnp.uint32)
        return Case(f"program generate_tokens {name}", run, args)

    return [case("greedy", 0.0), case("sampled", 1.0)]


def compile_cases(arch: str, folder: Path, only: str) -> list[dict[str, Any]]:
    """Compiles every case for one architecture; run in a process of its own.

    LLVM ends the process when it meets an instruction that it cannot select, so that
    what is through is written down case by case.
    """
    import jax
    from jax.experimental import topologies

    from pallas_kernels.kernel_cases import cases

    ptxas = wheel_ptxas()
    assert ptxas is not None  # The parent process looked.
    device = topologies.get_topology_desc(
        topology_name="",
        platform="cuda",
        topology="1x1x1",
        target_config=target_config(DEVICES[arch]),
    ).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    results: list[dict[str, Any]] = []
    chosen = [*cases(), *(programs() if arch == PROGRAM_ARCH else [])]
    for case in (case for case in chosen if re.search(only, case.name)):
        args = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), case.args
        )
        result: dict[str, Any] = {
            "arch": arch,
            "case": case.name,
            "kernels": [],
            "launches": 0,
        }
        for ptx in folder.glob("*.ptx"):
            ptx.unlink()
        start = time.perf_counter()
        try:
            # Mosaic reads here what it compiles for.
            with jax.default_device(device):
                traced = jax.jit(case.op).trace(*args)
                lowered = traced.lower(lowering_platforms=("cuda",))
            result["launches"] = launches(lowered.compile().as_text() or "")
            for ptx in sorted(folder.glob("*.ptx")):
                # XLA's own are none of ours to judge.
                if OURS.search(ptx.read_text(errors="replace")):
                    kernel = resources(ptx, ptxas)
                    # A program may hold a kernel once for every branch.
                    if kernel not in result["kernels"]:
                        result["kernels"].append(kernel)
        except Exception as error:  # Every case is reported, whatever broke.
            result["error"] = f"{type(error).__name__}: {error}"
        result["seconds"] = time.perf_counter() - start
        results.append(result)
        (folder / "results.json").write_text(json.dumps(results))
    return results


def in_a_process(arch: str, ptxas: str, only: str) -> list[dict[str, Any]]:
    """The results of `compile_cases`, and one more if its process died."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx"
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_TO": folder,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
            "PATH": f"{Path(ptxas).parent}{os.pathsep}{os.environ['PATH']}",
        }
        command = [sys.executable, __file__, "--compile", arch, folder]
        command += ["--only", only]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace"
        )
        file = Path(folder) / "results.json"
        results = json.loads(file.read_text()) if file.exists() else []
    if done.returncode:
        last = (done.stdout + done.stderr)[-1500:]
        results.append(
            {
                "arch": arch,
                "case": "(process)",
                "kernels": [],
                "launches": 0,
                "seconds": 0.0,
                "error": f"exit status {done.returncode}: {last}",
            }
        )
    return results


def problems(result: dict[str, Any], max_registers: int) -> list[str]:
    """What is wrong with a case."""
    found = [result["error"]] if "error" in result else []
    if not found and not result["launches"]:
        found.append("nothing was compiled")
    if not found and result["case"].startswith("program") and not result["kernels"]:
        found.append("none of our kernels is in it")
    for kernel in result["kernels"]:
        if kernel["registers"] > max_registers:
            found.append(
                f"{kernel['kernel']}: {kernel['registers']} registers, above "
                f"{max_registers}"
            )
        if kernel["spills"]:
            found.append(f"{kernel['kernel']}: spills {kernel['spills']} bytes")
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: one line a case, kernels under the first case that has them."""
    lines = [
        "| architecture | case | launches | registers, widest load in bits | seconds |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        kernels = ", ".join(
            f"{k['kernel']} {k['registers']} / {k['widest_load']}"
            for k in result["kernels"]
        )
        lines.append(
            f"| {result['arch']} | {result['case']} | {result['launches']} "
            f"| {kernels} | {result['seconds']:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", choices=sorted(DEVICES))
    parser.add_argument("--max-registers", type=int, default=128)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument(
        "--only", default="", help="cases whose name this expression finds"
    )
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_cases(options.compile[0], Path(options.compile[1]), options.only)
        return 0
    ptxas = wheel_ptxas()
    if ptxas is None:
        print(
            "no nvidia-cuda-nvcc wheel here; `make gpu-lowering` installs what it takes"
        )
        return 2
    import jax

    results, failed = [], 0
    for arch in options.arch or list(DEVICES):
        for result in in_a_process(arch, ptxas, options.only):
            results.append(result)
            wrong = problems(result, options.max_registers)
            failed += bool(wrong)
            for line in wrong:
                print(f"FAILED {arch} {result['case']}: {line}", file=sys.stderr)
    text = f"jax {jax.__version__}, no spills\n\n{table(results)}\n"
    print(text)
    if options.markdown and not failed:
        options.markdown.write_text(text)
    print(f"{len(results)} cases, {failed} failed")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
