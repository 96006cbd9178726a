"""How attend divides a batch over blocks: host code, and so the same everywhere."""

import pytest
from locks_kernels.attend_buffers import MAX_BLOCKS, split
from locks_kernels.cuda_attend import CLUSTERS

# Clusters of so many blocks that an H200 holds at a time, two blocks of attend a multiprocessor.
H200 = {2: 132, 4: 66, 8: 29, 16: 13}


@pytest.mark.parametrize("lists", [1, 2, 4, 13, 14, 16, 32, 64, 66, 67, 128, 132, 133, 160, 1024])
def test_every_list_has_a_cluster(lists: int) -> None:
    splits, cluster = split(lists, H200)
    assert cluster in CLUSTERS and splits % cluster == 0
    if lists <= max(H200.values()):
        assert lists * splits // cluster <= H200[cluster], "one wave"
    if splits > cluster:
        assert lists * splits <= MAX_BLOCKS, "their parts have room in the buffers"


def test_the_largest_clusters_that_suffice() -> None:
    assert [split(lists, H200) for lists in (4, 16, 32, 128)] == [(48, 16), (8, 8), (8, 4), (2, 2)]


def test_more_lists_than_run_at_a_time() -> None:
    """Several waves of the smallest cluster, never a launch without one."""
    assert split(133, H200) == split(4096, H200) == (2, 2)
    # Triton's kernel knows no clusters.
    assert split(1000, {1: 264}) == (1, 1) and split(100, {1: 264}) == (2, 1)
