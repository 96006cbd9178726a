"""The sums that score leaves for select: every tile is in one that is read, none is written twice.

The index arithmetic of csrc/partial_sums.cuh, compiled for the host; about 4 s where nvcc is present.
"""

import subprocess

import pytest
from locks_kernels import build

has_compiler = pytest.mark.skipif(build.missing() is not None, reason=f"cannot compile: {build.missing()}")

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <vector>

#include "partial_sums.cuh"

using namespace locks;

// As the teams of score go through the tiles of a block (score_units): slot -> tiles in it.
std::map<int64_t, std::vector<int>> written(const std::vector<int>& first, int blocks, int parts) {
  std::map<int64_t, std::vector<int>> slots;
  const int rows = static_cast<int>(first.size()) - 1;
  for (int block = 0; block < blocks; ++block) {
    const Range range(first[rows], block, blocks);
    for (int team = 0; team < parts; ++team) {
      int row = 0;
      for (int tile = range.begin + team; tile < range.end;) {
        while (tile >= first[row + 1]) ++row;
        std::vector<int>& slot = slots[partial_slot(block, row, 1, 0, parts) + team];
        if (!slot.empty()) std::printf("slot written twice\n"), std::exit(1);
        for (; tile < range.end && tile < first[row + 1]; tile += parts) slot.push_back(tile);
      }
    }
  }
  return slots;
}

int main() {
  std::mt19937 random(1);
  for (int trial = 0; trial < 3000; ++trial) {
    const int rows = 1 + random() % 40, blocks = 1 + random() % 150, parts = 1 << random() % 3;
    const int longest = 1 << random() % 12;
    std::vector<int> first{0};
    for (int row = 0; row < rows; ++row) {
      first.push_back(first.back() + (random() % 4 ? random() % longest : 0));
    }
    const auto slots = written(first, blocks, parts);
    for (int row = 0; row < rows; ++row) {
      const int begin = first[row], end = first[row + 1];
      if (begin == end) continue;
      const RowBlocks found{static_cast<unsigned>(first[rows]), static_cast<unsigned>(blocks), begin, end};
      std::vector<int> times(end - begin);
      for (int block = found.block_of(begin); block <= found.block_of(end - 1); ++block) {
        for (int part = 0; part < parts; ++part) {
          if (!found.has(block, part, parts)) continue;
          const auto slot = slots.find(partial_slot(block, row, 1, 0, parts) + part);
          if (slot == slots.end()) std::printf("slot read that was not written\n"), std::exit(1);
          for (int tile : slot->second) {
            if (tile < begin || tile >= end) std::printf("another row's slot\n"), std::exit(1);
            ++times[tile - begin];
          }
        }
      }
      for (int count : times) {
        if (count != 1) std::printf("a tile is in %d slots\n", count), std::exit(1);
      }
    }
  }
  std::printf("all tiles once\n");
}
"""


@has_compiler
def test_every_tile_is_in_one_slot_that_is_read(tmp_path):
    source, program = tmp_path / "check.cu", tmp_path / "check"
    source.write_text(PROGRAM)
    command, _ = build._target("select", (), build.CI_ARCH)
    flags = [flag for flag in command[1:] if flag not in ("-shared", "-ltvm_ffi")]
    run = subprocess.run(
        [command[0], *flags, f"-I{build.CSRC}", "-o", str(program), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    run = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert run.stdout == "all tiles once\n"
