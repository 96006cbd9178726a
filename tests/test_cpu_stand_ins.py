"""The stand-ins reach spawned processes, replace nothing of torchvision, and raise where they stand in."""

import os
import subprocess
import sys

import pytest
import torch
from locks_sglang import cpu_stand_ins

pytest.importorskip("torchvision")

IN_A_SPAWNED_PROCESS = """
import multiprocessing

def report():
    import torch, torchvision
    from sgl_kernel import assign_req_to_token_pool_cpu
    from torchvision.io import decode_jpeg
    from torchvision.transforms.functional import hflip
    print(torchvision.__file__)
    print(hflip(torch.tensor([[1, 2, 3]])).tolist())
    try:
        assign_req_to_token_pool_cpu(1, 2)
    except NotImplementedError as error:
        print(error)

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    child = multiprocessing.Process(target=report)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for machines without a GPU")
def test_a_spawned_process_has_the_real_torchvision_and_a_raising_sgl_kernel(tmp_path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(IN_A_SPAWNED_PROCESS)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=cpu_stand_ins.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    where, flipped, error = done.stdout.splitlines()
    assert str(cpu_stand_ins.FOLDER) not in where
    assert flipped == "[[3, 2, 1]]"
    assert "assign_req_to_token_pool_cpu" in error


def test_environment_keeps_what_the_user_set() -> None:
    env = cpu_stand_ins.environment({"OMP_NUM_THREADS": "7", "PYTHONPATH": "/a", "OTHER": "x"})
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["OTHER"] == "x"
    assert env["PYTHONPATH"] == os.pathsep.join([str(cpu_stand_ins.FOLDER), "/a"])


def test_environment_twice_is_environment_once() -> None:
    once = cpu_stand_ins.environment({"PYTHONPATH": "/a"})
    assert cpu_stand_ins.environment(once) == once


def test_sgl_kernel_does_not_pretend_to_have_gpu_functions() -> None:
    if torch.cuda.is_available():
        pytest.skip("the stand-ins are for machines without a GPU")
    import sgl_kernel

    assert not hasattr(sgl_kernel, "merge_state_v2")
    assert hasattr(sgl_kernel, "copy_all_layer_kv_cache_cpu")
