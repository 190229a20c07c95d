"""KV connector for vLLM: for each request one sample file with everything a Gemma-4 drafter's trainer reads.

DIR/REQUEST.safetensors, written when the last token of the prompt has been computed (the text to extract is the prompt):
  token_ids i64 [S], hidden_states [S, layers, Hb] (the last is before the final norm: metadata hidden_norm = pre),
  kv_last_local_k/v and kv_last_global_k/v [S, NKV, D] of the last layer of each type that owns K/V, in the model's type,
  loss_mask u8 [S] when the request says so.
A request's kv_transfer_params may have "file" (NAME.safetensors), and "prompt_len" N or "loss_mask" [0, 1, …].
NAME.safetensors.lock is held with flock until the file is whole, as vLLM's own extraction does, so readers that wait for
that (speculators) can be used with it.

Launch (NUM_LAYERS: num_hidden_layers of the verifier; vllm_extract.py does all this, end to end):
  PYTHONPATH=trainers/extract vllm serve VERIFIER --no-enable-prefix-caching \\
    --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [NUM_LAYERS]}}}' \\
    --kv-transfer-config '{"kv_connector": "SampleConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "vllm_connector", "kv_connector_extra_config": {"shared_storage_path": "DIR"}}'
  then completions with max_tokens = 1 and the whole text as prompt.
  kv_connector_extra_config: shared_storage_path (required), num_writer_threads (8), use_synchronization_lock (true).

Refused: prefix caching, pipeline and context parallelism, a quantised K/V cache, fast prefill with shared K/V. A request
with pictures, sound, embeddings or a LoRA is served and not extracted; the log says so.

Run with vLLM 0.32.0 on a CPU (bench/results/extraction.md): chunked prefill, several prompts at once, prompts longer than
the window, equal to extract_hf.py. NOT run, for want of machines: a GPU (so the copies to pinned memory and the piecewise
CUDA graphs are untested), tensor parallelism above 1 (the joining of heads is tested by itself), vLLM 0.33; and the launch
line above: the command `vllm serve` of the CPU build does not start, the same settings ran through vllm.LLM.

How: the K and V that enter attention of the two layers are copied while the layer runs, before they go to the cache: freed
blocks of the sliding layers and the cache's layout do not matter. Hidden states are read from vLLM's own cache group for
them at the end of the same step. Nothing is held back when a request ends.
"""
import fcntl
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import extract_from_kv_cache
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from kv_rows import assemble, check_engine, file_of, join_heads, mask_of, rows_of_slots, slots
from samples import ExtractError, check_config, check_sample, kv_layers, kv_shape, metadata, write_sample

logger = init_logger("vllm.mtp_extract")


@dataclass
class Request:
    """A request that is extracted, at the scheduler. `blocks`: for each cache group the blocks it has."""
    path: str
    tokens: list
    mask: torch.Tensor | None
    blocks: list
    announced: bool = False


@dataclass
class Chunk:
    """Tokens of a request's prompt that this step computes, for the worker. `begin`: set in the first chunk only."""
    request: str
    start: int
    slots: dict                           # layer -> their slots in its cache
    begin: tuple | None = None            # (path, tokens, mask)


@dataclass
class Step(KVConnectorMetadata):
    chunks: list = field(default_factory=list)
    ended: list = field(default_factory=list)


@dataclass
class Job:
    """A sample that grows at the worker. `parts`: key -> [(start, rows on the host, event or None)]."""
    path: str
    tokens: list
    mask: torch.Tensor | None
    lock: int | None
    parts: dict = field(default_factory=dict)


class SampleConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._folder = extra("shared_storage_path", None)
        if not self._folder:
            raise ExtractError("kv_connector_extra_config: shared_storage_path is missing; it is the folder of the samples")
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.method != "extract_hidden_states":
            raise ExtractError("the speculative method must be extract_hidden_states; see the launch line in vllm_connector.py")
        config = vllm_config.model_config.hf_config
        self._text = check_config(config, f"{vllm_config.model_config.model}/config.json")
        check_engine(vllm_config.cache_config, vllm_config.parallel_config,
                     speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids, self._text.num_hidden_layers)
        self._find_layers(kv_cache_config)
        self._requests, self._ended = {}, []           # scheduler
        self._jobs, self._seen = {}, {}                # worker
        self._use_lock = extra("use_synchronization_lock", True)
        self._pool = ThreadPoolExecutor(extra("num_writer_threads", 8), thread_name_prefix="mtp-extract")
        self._header = metadata(
            self._text, pathlib.Path(vllm_config.model_config.model).name, "pre", vllm_config.model_config.dtype,
            made_by=f"vllm_connector.py, vLLM {vllm.__version__}",
            **{f"{kind}_layer": layer for kind, layer in kv_layers(self._text).items()})

    def _find_layers(self, kv_cache_config):
        """Names and cache groups of the layers that are read."""
        groups = {name: (index, group.kv_cache_spec) for index, group in enumerate(kv_cache_config.kv_cache_groups)
                  for name in group.layer_names}
        hidden = [name for name, (_, spec) in groups.items() if isinstance(spec, HiddenStateCacheSpec)]
        if len(hidden) != 1:
            raise ExtractError(f"{len(hidden)} cache layers of hidden states, expected 1; vLLM {vllm.__version__} is not known "
                               "to this connector")
        self._hidden, self._kv = hidden[0], {}
        for kind, layer in kv_layers(self._text).items():
            found = [name for name in groups if name.endswith(f".layers.{layer}.self_attn.attn")]
            if len(found) != 1:
                raise ExtractError(f"verifier layer {layer} is not among the attention layers with a cache")
            self._kv[kind] = found[0]
        self._group = {name: groups[name][0] for name in (self._hidden, *self._kv.values())}
        self._block_size = {name: groups[name][1].block_size for name in self._group}

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        return True                                    # what hooks a layer must run as Python in every step

    # scheduler side

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def _admit(self, new):
        """Takes up a request, or says why it is only served."""
        arguments = (new.sampling_params.extra_args or {}) if new.sampling_params else {}
        params = arguments.get("kv_transfer_params") or {}
        reason = None
        if not new.prompt_token_ids:
            reason = "it has no token ids"
        elif getattr(new, "mm_features", None):
            reason = "it has pictures or sound"
        elif getattr(new, "lora_request", None):
            reason = "it uses a LoRA"
        try:
            if reason is None:
                tokens = list(new.prompt_token_ids)
                self._requests[new.req_id] = Request(file_of(params, new.req_id, self._folder), tokens,
                                                     mask_of(params, len(tokens)), [list(ids) for ids in new.block_ids])
        except ExtractError as error:
            reason = str(error)
        if reason is not None:
            logger.error("request %s is not extracted: %s", new.req_id, reason)

    def build_connector_meta(self, scheduler_output):
        step, computed = Step(ended=self._ended), []
        self._ended = []
        for new in scheduler_output.scheduled_new_reqs:
            self._admit(new)
            computed.append((new.req_id, new.num_computed_tokens))
        cached = scheduler_output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            request, more = self._requests.get(name), cached.new_block_ids[index]
            if request is not None and more is not None:
                if name in cached.resumed_req_ids:     # pre-empted before: it has new blocks and begins anew
                    request.blocks = [list(ids) for ids in more]
                else:
                    for blocks, ids in zip(request.blocks, more):
                        blocks.extend(ids)
            computed.append((name, cached.num_computed_tokens[index]))
        for name, start in computed:
            request = self._requests.get(name)
            count = min(scheduler_output.num_scheduled_tokens.get(name, 0), len(request.tokens) - start) if request else 0
            if count <= 0:
                continue
            places = {layer: slots(request.blocks[self._group[layer]], self._block_size[layer], start, count)
                      for layer in self._group}
            begin = None if request.announced else (request.path, request.tokens, request.mask)
            request.announced = True
            step.chunks.append(Chunk(name, start, places, begin))
        return step

    def request_finished(self, request, block_ids):
        ours = self._requests.pop(request.request_id, None)
        self._ended.append(request.request_id)
        return False, {"hidden_states_path": ours.path} if ours else None

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, [])

    # worker side

    def register_kv_caches(self, kv_caches):
        self._hidden_cache = kv_caches[self._hidden]
        if self._hidden_cache.shape[2] != self._block_size[self._hidden]:
            raise ExtractError(f"the cache of hidden states has blocks of {self._hidden_cache.shape[2]} tokens, its description "
                               f"says {self._block_size[self._hidden]}; vLLM {vllm.__version__} is not known to this connector")
        self._rank = get_tensor_model_parallel_rank()
        layers = get_layers_from_vllm_config(self._vllm_config, Attention, list(self._kv.values()))
        for kind, name in self._kv.items():
            self._hook(kind, name, layers[name])

    def _hook(self, kind, name, layer):
        attend = layer.impl.forward

        def forward(module, query, key, value, *args, **kwargs):
            if self.has_connector_metadata() and self._get_connector_metadata().chunks:
                batch = get_forward_context().slot_mapping
                batch = batch[name] if isinstance(batch, dict) else batch
                shape = (-1, layer.num_kv_heads, key.shape[-1] if key.dim() == 3 else key.shape[-1] // layer.num_kv_heads)
                self._seen[kind] = (key.reshape(shape).clone(), value.reshape(shape).clone(), batch.clone())
            return attend(module, query, key, value, *args, **kwargs)
        layer.impl.forward = forward

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def _gather(self, rows, num_heads):
        """[rows, NKV, D] of all ranks, on every rank."""
        if get_tensor_model_parallel_world_size() == 1:
            return join_heads([rows], num_heads)
        whole = tensor_model_parallel_all_gather(rows.contiguous(), dim=1)
        return join_heads(whole.split(rows.shape[1], dim=1), num_heads)

    def _to_host(self, rows):
        if rows.device.type == "cpu":
            return rows.clone(), None
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event

    def _rows(self, chunks):
        """{key: rows of all the chunks, one after the other}."""
        rows = {}
        for kind, name in self._kv.items():
            if kind not in self._seen:
                raise ExtractError(f"attention of {name} did not run as Python in this step (a full CUDA graph?); start vLLM "
                                   "with --enforce-eager")
            key, value, batch = self._seen.pop(kind)
            wanted = torch.cat([chunk.slots[name] for chunk in chunks]).to(batch.device)
            index = rows_of_slots(batch.to(torch.int64), wanted)
            heads = kv_shape(self._text, kind)[0]
            rows[f"kv_last_{kind}_k"] = self._gather(key[index], heads)
            rows[f"kv_last_{kind}_v"] = self._gather(value[index], heads)
        places = torch.cat([chunk.slots[self._hidden] for chunk in chunks]).to(self._hidden_cache.device)
        rows["hidden_states"] = extract_from_kv_cache(self._hidden_cache, places, len(places))
        return rows

    def wait_for_save(self):
        if not self.has_connector_metadata():
            return
        step = self._get_connector_metadata()
        for name in step.ended:                        # aborted before its prompt was through; others are not here any more
            self._release(self._jobs.pop(name, None))
        if not step.chunks:
            return
        rows, done = self._rows(step.chunks), 0        # every rank takes part in gathering, rank 0 writes
        if self._rank != 0:
            return
        for chunk in step.chunks:
            count = len(chunk.slots[self._hidden])
            if chunk.begin is not None:
                self._jobs[chunk.request] = self._begin(*chunk.begin)
            job = self._jobs.get(chunk.request)
            if job is not None:                        # None: written already, and pre-empted while it wrote on
                for key, tensor in rows.items():
                    job.parts.setdefault(key, []).append((chunk.start, *self._to_host(tensor[done: done + count])))
                if chunk.start + count == len(job.tokens):
                    self._pool.submit(self._write, self._jobs.pop(chunk.request))
            done += count

    def _begin(self, path, tokens, mask):
        os.makedirs(self._folder, exist_ok=True)
        lock = None
        if self._use_lock:
            lock = os.open(path + ".lock", os.O_CREAT | os.O_RDWR, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return Job(path, tokens, mask, lock)

    def _release(self, job):
        if job is not None and job.lock is not None:
            os.close(job.lock)

    def _write(self, job):
        """In a thread of the pool. A failure leaves no file, which the driver notices, and a line in the log."""
        try:
            tensors = {"token_ids": torch.tensor(job.tokens, dtype=torch.int64)}
            if job.mask is not None:
                tensors["loss_mask"] = job.mask
            for key, parts in job.parts.items():
                for _, _, event in parts:
                    if event is not None:
                        event.synchronize()
                tensors[key] = assemble([(start, rows) for start, rows, _ in parts], len(job.tokens))
            check_sample(tensors | {"hidden_states": tensors["hidden_states"][:, -1]}, self._text, job.path)
            write_sample(job.path, tensors, self._header)
        except Exception as error:  # whatever it is, it must not vanish in a thread
            logger.exception("sample %s is not written: %s", job.path, error)
        finally:
            self._release(job)

    def shutdown(self):
        self._pool.shutdown(wait=True)
        for job in self._jobs.values():
            self._release(job)
        self._jobs.clear()
