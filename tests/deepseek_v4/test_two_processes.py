"""One mesh over two real processes: the tokens of one device."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dspark_jax as dspark
from dspark_jax.testing.tiny_v4 import write_tiny_v4

ROOT = Path(__file__).parents[2]
EXPERTS, LIMIT_S = 16, 1200
# Compiling takes nearly all the time.
FLAGS = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count"


def start(folder, report, devices, *split):
    """A process of the worker, writing to a log beside its report."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment["XLA_FLAGS"] = f"{FLAGS}={devices}"
    worker = [sys.executable, "-m", "tests.deepseek_v4.worker"]
    with report.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [*worker, str(folder), str(report), *map(str, split)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def finish(children, reports):
    """What the processes report; when one fails, all are ended and logs are shown."""
    until = time.monotonic() + LIMIT_S
    try:
        while any(child.poll() is None for child in children):
            failed = any(child.poll() for child in children)
            if failed or time.monotonic() > until:
                break
            time.sleep(0.2)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
    logs = [report.with_suffix(".log").read_text()[-3000:] for report in reports]
    assert [child.returncode for child in children] == [0] * len(children), logs
    return [json.loads(report.read_text()) for report in reports]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Reports of one process by itself, and of two with a device each."""
    base = tmp_path_factory.mktemp("two")
    published = write_tiny_v4(
        base / "tiny",
        compress_ratios=[4, 0, 0, 0],
        num_hidden_layers=1,
        num_hash_layers=0,
        dspark_target_layer_ids=[0],
        dspark_block_size=2,
        index_topk=4,
        sliding_window=8,
        hc_mult=2,
        hc_sinkhorn_iters=2,
        n_routed_experts=EXPERTS,
    )
    dspark.convert(published, base / "converted")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    paths = [base / f"{name}.json" for name in ("alone", "first", "second")]
    split = [(2, 1, 2), (1, 1, 2, 2, 0, address), (1, 1, 2, 2, 1, address)]
    children = [
        start(base / "converted", path, *one)
        for path, one in zip(paths, split, strict=True)
    ]
    return finish(children, paths)


@pytest.mark.slow
def test_two_processes_write_what_one_device_does(reports):
    alone, first, second = reports
    assert first["greedy"] == second["greedy"] == alone["greedy"]
    # With weights of the other process's experts they would not.
    assert first["moved"] == second["moved"]
    assert first["moved"] != alone["greedy"]


@pytest.mark.slow
def test_each_holds_its_experts(reports):
    half = EXPERTS // 2
    for report, own in zip(reports[1:], ([0, half], [half, EXPERTS]), strict=True):
        assert report["experts"]
        assert all(held == [own] for held in report["experts"].values())


@pytest.mark.slow
def test_text_through_both_hosts(reports):
    alone, first, second = reports
    # The last request has no seed: the processes agree on one.
    assert first["text"] == second["text"]
    # With two simulated devices: a drawn token may hang on how a sum was rounded.
    assert first["text"][:2] == alone["text"][:2]
    assert first["text"][2] != alone["text"][2]
    # Otherwise no accepted draft would have been looked at.
    assert first["kept"] > 0


@pytest.mark.slow
def test_policies_that_weigh_times_are_refused(reports):
    for report in reports[1:]:
        assert "weighs times, and `mesh` has devices of several" in report["refusal"]
    assert "give `costs`" in reports[0]["refusal"]
