"""Company changes nothing: requests that come, go, are aborted or retracted select as they would alone."""

from greedy import assert_same_tokens
from traced import BUDGET, LONG, PAGE, Traced, assert_same, assert_same_pages, assert_selects


def test_requests_join_and_leave(locks: Traced, words: list[int]) -> None:
    asked = [(words[160:640], LONG), (words[740:940], 4), (words[600:911], 8)]
    cold = [locks.alone(prompt, new) for prompt, new in asked]
    locks.server.flush_cache()
    first = locks.start(*asked[0])
    first.wait_for_rows(2)
    second, third = locks.start(*asked[1]), locks.start(*asked[2])
    runs = [request.result() for request in (first, second, third)]
    assert locks.overlap(first, second)
    assert locks.overlap(first, third)
    for run, reference in zip(runs, cold, strict=True):
        assert_selects(run, BUDGET // PAGE)
        assert_same(run, reference)


def test_abort_while_decoding(locks: Traced, words: list[int]) -> None:
    asked = [(words[160:640], LONG), (words[600:911], 8)]
    cold = [locks.alone(prompt, new) for prompt, new in asked]
    locks.server.flush_cache()
    bystander = locks.start(*asked[0])
    bystander.wait_for_rows(1)
    aborted = locks.start(words[500:700], 200)
    aborted.wait_for_rows(2)
    locks.server.abort(aborted.rid)
    successor = locks.start(*asked[1])  # may get the pages that the aborted one gave back
    assert aborted.result().meta["finish_reason"]["type"] == "abort"
    assert len(aborted.result().tokens) < 200
    assert locks.overlap(bystander, aborted)
    assert_same(bystander.result(), cold[0])
    assert_same(successor.result(), cold[1])


def test_retracted_and_resumed(locks: Traced, words: list[int]) -> None:
    """Six requests of 12 pages fit into the 80 pages of the pool, but not with the 14 that each grows to.

    SGLang then takes one of them out, and resumes it later by a prefill over its prompt and its tokens so
    far. That prefill is dense, so from there on the request equals one that came with all these tokens.
    """
    prompts = [words[start : start + 190] for start in (50, 350, 450, 700, 750, 900)]
    new = 24
    for _ in range(5):  # on a busy machine one may come too late to meet the others
        locks.server.flush_cache()
        before = retractions(locks)
        # From 0.5.23 on SGLang keeps room for the whole answer of a request that cannot end sooner.
        runs = locks.together(prompts, new, may_end=True)
        if retracted := [run for run in runs if run.meta["num_retractions"]]:
            break
    counted = {what: count - before[what] for what, count in retractions(locks).items()}
    assert len(retracted) == counted["requests"] > 0
    assert all(len(run.tokens) == new for run in runs)
    assert "KV cache pool is full. Retract requests" in locks.server.log
    undisturbed = next(run for run in runs if not run.meta["num_retractions"])
    assert_same(undisturbed, locks.alone(undisturbed.prompt, new))

    for run in retracted:  # a dense prefill and sparse steps leave other keys, which may turn a near tie
        assert_same_tokens(run.greedy, locks.alone(run.prompt, new).greedy, near_tie=0.3)
    if len(retracted) > 1:
        return  # how far each had come is not known
    (run,) = retracted
    generated = counted["output_tokens"]
    assert 0 < generated < new - 1
    known = [*run.prompt, *run.tokens[:generated]]
    alone, resumed = locks.alone(run.prompt, new), locks.alone(known, new - generated)
    same = assert_same_tokens(run.greedy.until(generated), alone.greedy.until(generated))
    until = min(len(run.prompt) + same, len(known) - 1)
    assert_same_pages(run.rows_until(until), alone.rows_until(until))
    same = len(known) + assert_same_tokens(run.greedy.since(generated), resumed.greedy, enough=0)
    rows = {row: pages for row, pages in run.rows_after(len(known)).items() if row[0] <= same}
    assert_same_pages(rows, resumed.rows_until(same))


def retractions(locks: Traced) -> dict[str, int]:
    """What the server has taken out of batches since its start: requests, and tokens they had generated."""
    metrics = locks.server.metrics()  # a counter is there once it is above zero
    names = {what: f"sglang:num_retracted_{what}_total" for what in ("requests", "output_tokens")}
    return {what: int(metrics.get(name, 0)) for what, name in names.items()}
