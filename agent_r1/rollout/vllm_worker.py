"""What runs inside of vLLM's workers, in processes of our own and in stock servers: `--worker-extension-cls`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from agent_r1.rollout.engine_wire import read_shape
from agent_r1.weight_sums import Slice, tensor_sum, wrapped

_PROBED = 1 << 22  # elements of a layer's weight that are read back at a time


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a layer's weight that is a slice of one tensor in a Hugging Face folder."""

    name: str  # of the layer there
    rows: slice  # of the layer's weight here
    row: int = 0  # where the slice begins there
    column: int = 0


class WorkerExtension:
    """An extension of vLLM's worker, called by name through `collective_rpc`."""

    model_runner: Any

    def take_weights(self, path: str) -> None:
        """Loads the weights of a Hugging Face folder, and derives the output layers anew.

        On a CPU a tied one would go on using the old embeddings.
        """
        self.model_runner.reload_weights(weights_path=path)
        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def describe(self) -> dict[str, Any]:
        """The fields of a `Description`."""
        config = self.model_runner.model_config
        dtype = str(config.dtype).removeprefix("torch.")
        return {**read_shape(config.hf_text_config), "max_tokens": config.max_model_len, "dtype": dtype}

    def weight_sums(self) -> list[Slice]:
        """The sums of the tensors that this worker computes with; of a model with adapters, theirs alone.

        On a CPU a layer computes with a copy in the order of its kernel, and keeps no other. There its matrix product
        with the unit vectors gives the weight, bit for bit.
        """
        model = self.model_runner.get_model()
        layers = dict(model.named_modules())
        fused = getattr(model, "packed_modules_mapping", {})  # some models fuse nothing
        adapted = [(name, layer) for name, layer in layers.items() if isinstance(layer, BaseLinearLayerWithLoRA)]
        if adapted:
            return [entry for name, layer in adapted for entry in _adapter_sums(name, layer, fused)]
        if not any(isinstance(layer, ParallelLMHead) for layer in layers.values()):
            # then the embedding is the output layer too
            layers["lm_head"] = next(layer for layer in layers.values() if isinstance(layer, VocabParallelEmbedding))
        return [entry for name, layer in layers.items() for entry in _layer_sums(name, layer, fused)]


def _layer_sums(name: str, layer: nn.Module, fused: dict[str, list[str]]) -> Iterator[Slice]:
    """The sums of a layer's own parameters."""
    pieces = _pieces(name, layer, fused)
    for leaf, parameter in layer.named_parameters(recurse=False):
        packed = (
            parameter.device.type == "cpu" and leaf == "weight" and (not parameter.numel() or name.endswith("lm_head"))
        )
        totals = [0] * len(pieces)
        for start, block in _read_back(layer, parameter.dtype) if packed else [(0, parameter)]:
            for index, piece in enumerate(pieces):
                column = piece.column + start if block.dim() > 1 else 0
                totals[index] += tensor_sum(block[piece.rows], piece.row, column)
        for piece, total in zip(pieces, totals, strict=True):
            yield f"{piece.name}.{leaf}", piece.row, piece.column, wrapped(total)


def _read_back(layer: Any, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """The weight with which a layer computes, whatever it has made of it: some columns at a time, with their first."""
    if isinstance(layer, VocabParallelEmbedding):
        width = layer.embedding_dim
        height = layer.num_embeddings_per_partition
    else:
        width = layer.input_size_per_partition if isinstance(layer, RowParallelLinear) else layer.input_size
        height = sum(layer.output_partition_sizes)
    step = max(1, _PROBED // height)
    for start in range(0, width, step):
        units = torch.eye(min(step, width - start), width, dtype=dtype).roll(start, 1)
        yield start, layer.quant_method.apply(layer, units, None).t().contiguous()


def _adapter_sums(name: str, layer: Any, fused: dict[str, list[str]]) -> Iterator[Slice]:
    """The sums of a layer's only adapters, by peft's names; the second matrix is scaled. Without any they are 0."""
    pieces = _pieces(name, layer.base_layer, fused)[: layer.n_slices]
    for piece, first, second in zip(pieces, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
        prefix = f"base_model.model.{piece.name}"
        yield f"{prefix}.lora_A.weight", 0, piece.column, tensor_sum(first[0, 0], 0, piece.column)
        yield f"{prefix}.lora_B.weight", piece.row, 0, tensor_sum(second[0, 0], piece.row)


def _pieces(name: str, layer: nn.Module, fused: dict[str, list[str]]) -> list[_Piece]:
    """The slices of a folder's tensors that make up a layer's weight, in their order there."""
    if isinstance(layer, VocabParallelEmbedding):
        size = layer.shard_indices.num_org_elements  # the rest is padding
        return [_Piece(name, slice(size), layer.shard_indices.org_vocab_start_index)]
    if isinstance(layer, RowParallelLinear):
        return [_Piece(name, slice(None), column=layer.tp_rank * layer.input_size_per_partition)]
    if not isinstance(layer, ColumnParallelLinear):
        return [_Piece(name, slice(None))]
    prefix, _, leaf = name.rpartition(".")
    names = fused.get(leaf, [leaf])
    pieces = list[_Piece]()
    start = offset = 0
    for index, size in enumerate(layer.output_partition_sizes):
        replicas = layer.num_kv_head_replicas if isinstance(layer, QKVParallelLinear) and index else 1
        row = layer.tp_rank // replicas * size
        if len(names) == len(layer.output_partition_sizes):
            pieces.append(_Piece(f"{prefix}.{names[index]}", slice(start, start + size), row))
        else:
            pieces.append(_Piece(name, slice(start, start + size), offset + row))
        start += size
        offset += size * (layer.tp_size // replicas)
    return pieces
