"""The parts of vllm_connector.py that know nothing of vLLM: pure functions on tensors and numbers, tested without it."""
import os

import torch

from samples import ExtractError

PLAIN_CACHE = ("auto", "bfloat16", "float16", "float32")


def check_engine(cache, parallel, layer_ids, num_layers):
    """Refuses every setting of the engine under which rows would be missing or not those that the verifier computes.

    cache, parallel: vLLM's CacheConfig and ParallelConfig; layer_ids: eagle_aux_hidden_state_layer_ids."""
    if cache.enable_prefix_caching:
        raise ExtractError("prefix caching is on: tokens found in the cache are not computed again, so their hidden states and K/V "
                           "would be missing. Start vLLM with --no-enable-prefix-caching")
    if cache.cache_dtype not in PLAIN_CACHE:
        raise ExtractError(f"the K/V cache is quantised (kv_cache_dtype {cache.cache_dtype}): hidden states would be those of a "
                           "verifier that reads rounded K/V. Start vLLM with --kv-cache-dtype auto")
    if getattr(cache, "kv_sharing_fast_prefill", False):
        raise ExtractError("kv_sharing_fast_prefill is on: layers that share K/V skip the prompt, so its hidden states would be "
                           "missing. Start vLLM without --kv-sharing-fast-prefill")
    for name, flag in (("pipeline_parallel_size", "--pipeline-parallel-size"),
                       ("decode_context_parallel_size", "--decode-context-parallel-size"),
                       ("prefill_context_parallel_size", "--prefill-context-parallel-size")):
        if getattr(parallel, name, 1) > 1:
            raise ExtractError(f"{name} is {getattr(parallel, name)}: no process has all layers and tokens. Start vLLM with "
                               f"{flag} 1; --tensor-parallel-size may be larger")
    if not layer_ids or layer_ids[-1] != num_layers:
        raise ExtractError(f"eagle_aux_hidden_state_layer_ids is {list(layer_ids)}: the last must be {num_layers}, the number of "
                           "layers, which gives the rows before the final norm")


def join_heads(shards, num_heads):
    """[S, NKV, D] from what the tensor-parallel ranks hold, in the order of ranks, each [S, heads of the rank, D].

    vLLM splits the heads when there are as many as ranks or more; else each head lies on ranks / heads ranks next to each
    other, and one copy of each is taken."""
    whole = torch.cat(list(shards), dim=1)
    held = whole.shape[1]
    if held < num_heads or held % num_heads:
        raise ExtractError(f"{len(shards)} tensor-parallel ranks hold {held} K/V heads, the verifier has {num_heads}")
    return whole[:, :: held // num_heads]


def slots(blocks, block_size, start, count):
    """Places in a paged cache of tokens start to start + count of a request whose blocks are `blocks`."""
    places = torch.arange(start, start + count)
    return torch.tensor(blocks, dtype=torch.int64)[places // block_size] * block_size + places % block_size


def rows_of_slots(batch_slots, wanted):
    """Rows of a batch whose slots are `wanted`. Padding of the batch has negative slots."""
    ordered, order = batch_slots.sort()
    found = torch.searchsorted(ordered, wanted).clamp(max=len(ordered) - 1)
    if (wanted < 0).any() or not torch.equal(ordered[found], wanted):
        missing = int((ordered[found] != wanted).nonzero()[0]) if not torch.equal(ordered[found], wanted) else 0
        raise ExtractError(f"the batch has no row for cache slot {int(wanted[missing])}")
    return order[found]


def assemble(parts, num_tokens):
    """[num_tokens, …] from (start, rows) pieces of a prompt. A request that was pre-empted repeats rows: the last are kept."""
    out = parts[0][1].new_empty((num_tokens, *parts[0][1].shape[1:]))
    there = torch.zeros(num_tokens, dtype=torch.bool)
    for start, rows in parts:
        if start + len(rows) > num_tokens:
            raise ExtractError(f"rows {start} to {start + len(rows)} of a prompt of {num_tokens} tokens")
        out[start: start + len(rows)] = rows
        there[start: start + len(rows)] = True
    if not there.all():
        raise ExtractError(f"no rows for token {int((~there).nonzero()[0])} of {num_tokens}")
    return out


def file_of(params, request, folder):
    """Path of a request's sample: kv_transfer_params["file"], a name without a folder, or the request's own."""
    name = params.get("file", f"{request}.safetensors")
    if not isinstance(name, str) or os.path.basename(name) != name or name.startswith(".") or not name.endswith(".safetensors"):
        raise ExtractError(f"kv_transfer_params: file is {name!r}; expected NAME.safetensors, without a folder")
    return os.path.join(folder, name)


def mask_of(params, num_tokens):
    """u8 [S] of kv_transfer_params: "prompt_len" or "loss_mask"; None when there is neither."""
    if "loss_mask" in params and "prompt_len" in params:
        raise ExtractError("kv_transfer_params: has both prompt_len and loss_mask")
    if "loss_mask" in params:
        mask = params["loss_mask"]
        if not isinstance(mask, list) or len(mask) != num_tokens or any(value not in (0, 1) for value in mask):
            raise ExtractError(f"kv_transfer_params: loss_mask must be {num_tokens} values 0 and 1, one a token")
        return torch.tensor(mask, dtype=torch.uint8)
    if "prompt_len" in params:
        length = params["prompt_len"]
        if type(length) is not int or not 0 <= length <= num_tokens:
            raise ExtractError(f"kv_transfer_params: prompt_len is {length!r}; expected 0 to {num_tokens}")
        return (torch.arange(num_tokens) >= length).to(torch.uint8)
    return None
