"""score_select and attend that overlap with their neighbours give the same bits as one after another."""

import pytest
import torch
from gpu_cases import cuda, make_pair
from locks_kernels import ATTEND_ALL, attend, score_select
from locks_kernels.workspace import Workspace

pytestmark = [pytest.mark.gpu, cuda]

LENGTHS = [3000, 70, 40_000, 16, 17, 20_000]
BUDGETS = [20, 30, 30, 4, ATTEND_ALL, ATTEND_ALL]
WIDTH, LAYERS, REPLAYS = 30, 6, 40


class Step:
    """A decode step of several layers: each gets its queries and its current token's K and V only
    just before, from the kernels before."""

    def __init__(self, name: str) -> None:
        _, _, self.cache, self.records = make_pair(LENGTHS, name, group=8, head_dim=128)
        cache = self.cache
        rows, heads, head_dim = cache.queries.shape
        self.budgets = torch.tensor(BUDGETS, dtype=torch.int32, device="cuda")
        self.workspace = Workspace.allocate(
            max_rows=rows,
            q_heads=heads,
            kv_heads=cache.kv_heads,
            max_pages=cache.page_table.shape[1],
            width=WIDTH,
            head_dim=head_dim,
            device="cuda",
        )
        last = cache.seq_lens - 1
        self.page = cache.page_table.gather(1, (last // 16).long()[:, None])[:, 0].long()
        self.slot = last % 16
        self.queries = torch.empty(LAYERS, rows, heads, head_dim, dtype=torch.bfloat16, device="cuda")
        self.fresh = torch.empty(
            LAYERS, 2, rows, cache.kv_heads, head_dim, dtype=torch.bfloat16, device="cuda"
        )
        self.outputs = torch.empty_like(self.queries)

    def new_inputs(self, seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.queries.normal_(generator=generator)
        self.fresh.normal_(generator=generator)

    def run(self, overlap: bool) -> None:
        cache = self.cache
        queries = torch.zeros_like(self.queries[0])
        for layer in range(LAYERS):
            queries.copy_(self.queries[layer])
            cache.keys[self.page, self.slot] = self.fresh[layer, 0]
            cache.values[self.page, self.slot] = self.fresh[layer, 1]
            tables = cache.page_table, cache.seq_lens
            selection = score_select(
                queries,
                cache.keys,
                self.records,
                *tables,
                self.budgets,
                cache.sm_scale,
                width=WIDTH,
                workspace=self.workspace,
                settled=overlap,
            )
            if not overlap:
                torch.cuda.synchronize()
            self.outputs[layer] = attend(
                queries,
                cache.keys,
                cache.values,
                selection,
                *tables,
                cache.sm_scale,
                budgets=self.budgets if overlap else None,
                workspace=self.workspace,
            )[0]
            if not overlap:
                torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["r4i4", "r6h"])
def test_overlapping_steps_in_a_graph_equal_separate_ones(name):
    step = Step(name)
    step.new_inputs(0)
    step.run(overlap=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(overlap=True)
    for seed in range(1, REPLAYS):
        step.new_inputs(seed)
        graph.replay()
        got = step.outputs.clone()
        step.run(overlap=False)
        assert torch.equal(got, step.outputs)
    assert got.isfinite().all() and got.std() > 0
