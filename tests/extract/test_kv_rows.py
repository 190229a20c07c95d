#!/usr/bin/env python3
"""Protects: what vllm_connector.py does with numbers and tensors, without vLLM: heads of tensor-parallel ranks, slots of a paged
cache, chunks of a prompt, masks and names of requests, and which engine settings are refused.
"""
from types import SimpleNamespace

import torch

from support import check, run_test

import kv_rows
from samples import ExtractError


def fails(says, function, *args):
    try:
        function(*args)
    except ExtractError as error:
        for text in says:
            check(text in str(error), f"message without \"{text}\": {error}")
        return
    raise AssertionError(f"{function.__name__}{args}: accepted, should be refused ({says})")


def heads():
    """Shards as vLLM lays them out, for every number of heads and ranks that it takes, are the whole again."""
    for num_heads in (1, 2, 4, 8, 16):
        for ranks in (1, 2, 4, 8, 16):
            whole = torch.arange(5 * num_heads * 3).reshape(5, num_heads, 3)
            if num_heads >= ranks:
                shards = whole.chunk(ranks, dim=1)
            else:                                      # each head on ranks / heads ranks next to each other
                shards = [whole[:, rank // (ranks // num_heads)][:, None] for rank in range(ranks)]
            check(torch.equal(kv_rows.join_heads(shards, num_heads), whole), f"{num_heads} heads on {ranks} ranks")
    fails(["hold 3 K/V heads, the verifier has 2"], kv_rows.join_heads, [torch.zeros(1, 1, 1)] * 3, 2)
    fails(["hold 1 K/V heads, the verifier has 2"], kv_rows.join_heads, [torch.zeros(1, 1, 1)], 2)


def paging():
    """A prompt in blocks out of order, computed in chunks among other requests and padding, comes back in order."""
    generator = torch.Generator().manual_seed(0)
    size, num_tokens = 4, 23
    blocks = [7, 2, 9, 4, 0, 11]
    places = kv_rows.slots(blocks, size, 0, num_tokens)
    check(places.tolist() == [blocks[t // size] * size + t % size for t in range(num_tokens)], "slots")
    check(kv_rows.slots(blocks, size, 5, 9).tolist() == places[5:14].tolist(), "slots of a chunk")
    truth, parts = torch.randn(num_tokens, 2, 3, generator=generator), []
    for start, count in ((0, 6), (6, 1), (7, 16)):
        mine = kv_rows.slots(blocks, size, start, count)
        others = torch.cat([torch.arange(48, 60), torch.full((5,), -1)])
        order = torch.randperm(count + len(others), generator=generator)
        batch = torch.cat([mine, others])[order]
        rows = torch.cat([truth[start: start + count], torch.randn(len(others), 2, 3, generator=generator)])[order]
        parts.append((start, rows[kv_rows.rows_of_slots(batch, mine)]))
    check(torch.equal(kv_rows.assemble(parts, num_tokens), truth), "chunks in order")
    check(torch.equal(kv_rows.assemble([(0, truth + 1), (0, truth[:9]), (9, truth[9:])], num_tokens), truth), "pre-empted: the last")
    fails(["no row for cache slot 3"], kv_rows.rows_of_slots, torch.tensor([5, 1, -1, 2]), torch.tensor([1, 3]))
    fails(["no row for cache slot 9"], kv_rows.rows_of_slots, torch.tensor([5, 1, -1, 2]), torch.tensor([9]))
    fails(["no row"], kv_rows.rows_of_slots, torch.tensor([5, -1]), torch.tensor([-1]))
    fails(["no rows for token 6 of 23"], kv_rows.assemble, [parts[0], parts[2]], num_tokens)
    fails(["rows 7 to 23 of a prompt of 22"], kv_rows.assemble, parts, 22)


def requests():
    check(kv_rows.file_of({}, "cmpl-1", "/data") == "/data/cmpl-1.safetensors", "name of a request")
    check(kv_rows.file_of({"file": "a.safetensors"}, "x", "/data") == "/data/a.safetensors", "name that is given")
    for name in ("../a.safetensors", "/a.safetensors", "a.bin", ".a.safetensors", 3):
        fails(["file is"], kv_rows.file_of, {"file": name}, "x", "/data")
    check(kv_rows.mask_of({}, 3) is None, "no mask")
    check(kv_rows.mask_of({"prompt_len": 2}, 5).tolist() == [0, 0, 1, 1, 1], "mask of a prompt length")
    check(kv_rows.mask_of({"loss_mask": [1, 0, 1]}, 3).tolist() == [1, 0, 1], "mask that is given")
    fails(["both"], kv_rows.mask_of, {"loss_mask": [1], "prompt_len": 0}, 1)
    for params in ({"prompt_len": 6}, {"prompt_len": -1}, {"prompt_len": "2"}, {"prompt_len": True}):
        fails(["prompt_len is"], kv_rows.mask_of, params, 5)
    for params in ({"loss_mask": [1, 0]}, {"loss_mask": [1, 0, 2]}, {"loss_mask": "101"}):
        fails(["3 values"], kv_rows.mask_of, params, 3)


def engines():
    def attempt(says, layer_ids=(6,), cache=(), parallel=()):
        settings = (SimpleNamespace(**({"enable_prefix_caching": False, "cache_dtype": "auto"} | dict(cache))),
                    SimpleNamespace(**({"pipeline_parallel_size": 1, "tensor_parallel_size": 8} | dict(parallel))), layer_ids, 6)
        if says:
            fails(says, kv_rows.check_engine, *settings)
        else:
            kv_rows.check_engine(*settings)
            check(True, "accepted")
    attempt([])
    attempt([], layer_ids=[4, 6])
    attempt(["prefix caching", "--no-enable-prefix-caching"], cache={"enable_prefix_caching": True})
    for dtype in ("fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "nvfp4"):
        attempt(["quantised", dtype, "--kv-cache-dtype auto"], cache={"cache_dtype": dtype})
    attempt(["fast_prefill"], cache={"kv_sharing_fast_prefill": True})
    attempt(["pipeline_parallel_size is 2", "--pipeline-parallel-size 1"], parallel={"pipeline_parallel_size": 2})
    attempt(["decode_context_parallel_size"], parallel={"decode_context_parallel_size": 4})
    for layer_ids in ([], [5], [6, 4]):
        attempt(["eagle_aux_hidden_state_layer_ids", "must be 6"], layer_ids=layer_ids)


def body(folder):
    heads()
    paging()
    requests()
    engines()


if __name__ == "__main__":
    run_test("kv_rows", body)
