"""Offloading of blocks in an engine on a CPU, by vLLM's `OffloadingConnector`.

vLLM's own `CPUOffloadingSpec` decides which blocks are kept on the host, and copies them between it
and a GPU. It does not start on a CPU, as it copies on streams of a GPU; here the copies are plain.
Blocks are then in the same kind of memory before and after, so nothing is saved: this is for tests
and measurements of what a GPU restores.
"""

import time
from collections.abc import Iterator

import torch
from jaxtyping import Int, Int8
from torch import Tensor
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kv_serve.vllm.adapters import chunks_on_host


class HostWorker(OffloadingWorker):
    """Copies blocks between an engine's cache and chunks of blocks, when it is asked to."""

    def __init__(self, caches: CanonicalKVCaches, chunks: int, blocks: int) -> None:
        """Allocate `chunks` chunks of `blocks` blocks each."""
        self.caches, self.blocks = caches, blocks
        self.held: list[Int8[Tensor, "chunks blocks nbytes"]] = [
            torch.zeros(chunks, blocks, each.page_size_bytes, dtype=torch.int8)
            for each in caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy blocks of the engine into chunks."""
        start, nbytes = time.perf_counter(), 0
        for tensor, block, chunk, place in self._pairs(src_spec, dst_spec):
            found = self.caches.tensors[tensor].tensor[block]
            self.held[tensor][chunk, place] = found
            nbytes += found.numel()
        return self._end(job_id, start, nbytes)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy blocks of chunks into those of the engine."""
        start, nbytes = time.perf_counter(), 0
        for tensor, block, chunk, place in self._pairs(dst_spec, src_spec):
            found = self.held[tensor][chunk, place]
            self.caches.tensors[tensor].tensor[block] = found
            nbytes += found.numel()
        return self._end(job_id, start, nbytes)

    def get_finished(self) -> list[TransferResult]:
        """Return the copies made since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: copies end before they are announced."""

    def _pairs(
        self, own: GPULoadStoreSpec, held: LoadStoreSpec
    ) -> Iterator[tuple[int, Int[Tensor, " n"], Int[Tensor, " n"], Int[Tensor, " n"]]]:
        """Yield by tensor which blocks belong to which chunks and places in them."""
        assert isinstance(held, BlockIDsLoadStoreSpec), "vLLM numbers chunks on the host"
        block, chunk = (torch.from_numpy(each.block_ids).long() for each in (own, held))
        groups = zip(self.caches.group_data_refs, own.group_sizes, own.block_indices, strict=True)
        for refs, count, first in groups:
            if not count:
                continue
            at = torch.arange(count) + first % self.blocks  # the first may be inside a chunk
            used = -(-(int(at[-1]) + 1) // self.blocks)
            mine, block = block[:count], block[count:]
            its, chunk = chunk[:used], chunk[used:]
            for ref in refs:
                yield ref.tensor_idx, mine, its[at // self.blocks], at % self.blocks

    def _end(self, job_id: int, start: float, nbytes: int) -> bool:
        seconds = time.perf_counter() - start
        self._done.append(
            TransferResult(job_id=job_id, success=True, transfer_size=nbytes, transfer_time=seconds)
        )
        return True


class HostSpec(CPUOffloadingSpec):
    """vLLM's offloading to the host, of an engine that is on the host itself.

    Its options are those of `CPUOffloadingSpec`, such as `cpu_bytes_to_use`.
    """

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return what copies blocks, for each call a new one."""
        return HostWorker(kv_caches, chunks_on_host(self), self.blocks_per_chunk)
